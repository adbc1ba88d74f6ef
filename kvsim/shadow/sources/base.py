"""What a source is."""

from abc import ABC, abstractmethod
from typing import ClassVar

from kvsim.shadow.sources.feed import Feed


class Source(ABC):
    """Where requests or events come from. Its methods run in the loop of the main thread; jobs that it feeds do not."""

    carries_clients: ClassVar[bool] = False
    """Whether clients depend on it, so that it goes on if the shadow fails."""

    @abstractmethod
    async def start(self, feed: Feed) -> str:
        """Begin, and say in a few words with what. Raises UsageError if that is impossible."""

    @abstractmethod
    async def run(self) -> None:
        """Deliver until there is nothing more, or until cancelled."""

    def hurry(self) -> None:
        """Let ``close`` wait no longer."""

    async def close(self) -> None:
        """Finish what is under way, and deliver it."""
