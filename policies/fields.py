"""Types of settings."""

from typing import Any


def keep_types(cls: type[Any], **types: Any) -> None:
    """Say of which types the fields of a settings class are that may hold several: once compiled, the class does not know itself.

    OmegaConf reads them.
    """
    cls.__annotations__.update(types)
