"""What a pass of SGLang's scheduler does about copies between GPU and host."""

from typing import Any

from simpy import Event

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.engine.substrate import Work


@mypyc_attr(allow_interpreted_subclasses=True)
class NodeCopies:
    """An engine's copies: without a host there are none, and every method does nothing. ``HostCopies`` makes them.

    ``is_computing``: whether a step is under way, which copies follow.
    """

    @property
    def is_moving(self) -> bool:
        """Whether copies or loads are under way."""
        return False

    def begin_pass(self, *, is_computing: bool) -> None:
        """Begin the copies decided on since the last step, then acknowledge those that have ended."""

    def loads(self) -> list[Transfer]:
        """Return the loads of the requests that this pass has admitted, which its step follows layer by layer."""
        return NO_TRANSFERS

    def carry_out(self) -> Any:
        """Begin what the pass has decided, and wait for what it has written back. Generates events to wait for."""
        yield from ()

    def mark(self, work: Work) -> None:
        """Note in a step that is about to begin whether copies begin with it."""

    def began(self, done: Event) -> None:
        """A step has begun; ``done`` is its end."""

    def step_ended(self) -> None:
        """Begin the copies that follow the step that has ended."""

    def decided(self, *, is_computing: bool) -> None:
        """Begin the copies that the results of a step have led to."""

    def stop(self) -> None:
        """Forget what has not begun, since the engine has failed."""
