"""``@mypyc_attr(allow_interpreted_subclasses=True)``: ordinary Python classes may derive from a class although it is compiled.

In pure Python it does nothing, so that nothing has to be installed for it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:
    Class = TypeVar("Class", bound=type)

    def mypyc_attr(**_attributes: object) -> Callable[[Class], Class]:
        return lambda cls: cls
