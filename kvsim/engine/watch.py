"""What others may be told of engines, besides what happens in their caches: every method does nothing here."""

from typing import TYPE_CHECKING

from simpy import Event

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.watch import Watch

if TYPE_CHECKING:
    from kvsim.engine.job import Send
    from kvsim.engine.substrate import Work


@mypyc_attr(allow_interpreted_subclasses=True)
class EngineWatch(Watch):
    """Is told what engines do, and changes nothing."""

    def computes(self, work: "Work", done: Event) -> None:
        """A step, or a leap of several, has begun; ``done`` happens at its end, with the number of decode steps done."""

    def worked(self, work: "Work") -> None:
        """A step, or a leap of several, has ended, and what it has done has taken effect in the cache."""

    def sends(self, send: "Send", done: Event) -> None:
        """A computed prompt leaves for another engine; ``done`` happens when it has landed."""

    def run_ended(self) -> None:
        """All requests have ended, and everything has come to rest."""
