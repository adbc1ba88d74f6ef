"""What an engine reports to, and asks."""

from abc import ABCMeta, abstractmethod

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.engine.book import Book
from kvsim.engine.job import Job


@mypyc_attr(allow_interpreted_subclasses=True)
class Frontend(metaclass=ABCMeta):
    """What an engine reports to: the cluster that it belongs to."""

    book: Book
    is_done: bool
    """Whether all requests have ended."""

    @abstractmethod
    def ended(self, request: Request, engine: int) -> None:
        """A request, or one of its samples, is finished or rejected."""

    @abstractmethod
    def first_token(self, job: Job, engine: int) -> None:
        """The prompt of a request has been computed."""

    @abstractmethod
    def prepares(self, job: Job, engine: int) -> bool:
        """Whether a request may wait for its turn at once; if not, the engine's ``start`` is called later."""

    @abstractmethod
    def continues(self, job: Job, engine: int) -> bool:
        """Whether the engine itself decodes a request whose prompt it has just computed; if not, it has been taken from it."""

    @abstractmethod
    def retracted(self, job: Job, engine: int) -> bool:
        """Whether the engine itself queues a request that it has retracted; if not, it has been taken from it."""

    @abstractmethod
    def drained(self) -> None:
        """An engine that admits no request because of a reset has become idle."""

    @abstractmethod
    def stepped(self, engine: int) -> None:
        """An engine has made a step, or has nothing to do."""
