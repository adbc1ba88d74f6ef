"""Types of settings fields."""

from typing import Any


def keep_types(cls: type[Any], **types: Any) -> None:
    """Set the annotations of fields with a union type, which OmegaConf reads: a compiled settings class does not keep them."""
    cls.__annotations__.update(types)
