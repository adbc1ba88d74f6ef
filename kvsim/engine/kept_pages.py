"""Pages that an engine keeps for requests that have not arrived."""

from abc import ABCMeta, abstractmethod

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class KeptPages(metaclass=ABCMeta):
    """Pages of one GPU tier that are pinned for requests to come, as those that schedule the others see them."""

    @abstractmethod
    def admitted(self, request: Request, gpu_pages: int) -> None:
        """A request has been admitted, and has found so many pages on the GPU, or on their way to it."""

    @abstractmethod
    def give_way(self) -> bool:
        """Let go of some of them, since requests that are here need their room. Returns whether there were any."""
