"""``@mypyc_attr(allow_interpreted_subclasses=True)`` lets ordinary Python classes derive from a compiled class; ``@trait`` lets
compiled classes derive from this one and one other.

In pure Python the decorators do nothing, so mypy_extensions need not be installed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
    from mypy_extensions import trait as trait
else:
    Class = TypeVar("Class", bound=type)

    def mypyc_attr(**_attributes: object) -> Callable[[Class], Class]:
        return lambda cls: cls

    def trait(cls: Class) -> Class:
        return cls
