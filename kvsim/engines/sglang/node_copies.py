"""What a pass of SGLang's scheduler does about copies between GPU, host and storage."""

from typing import Any

from simpy import Event

from kvsim.core.lease import Lease
from kvsim.core.pool import UNLIMITED
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.engine.job import Job
from kvsim.engine.substrate import Work


@mypyc_attr(allow_interpreted_subclasses=True)
class NodeCopies:
    """An engine's copies: without a host there are none, and every method does nothing. ``HostCopies`` makes them, and
    ``StoredCopies`` those to and from storage, too.

    ``is_computing``: whether a step is under way, which copies follow.
    """

    @property
    def is_moving(self) -> bool:
        """Whether copies or loads are under way."""
        return False

    @property
    def has_work(self) -> bool:
        """Whether the next pass has something to do about storage even if no transfer ends before it. If nothing runs, it follows
        at once."""
        return False

    @property
    def quiet_passes(self) -> int:
        """For how many passes from the next one on there is nothing to do about storage, if nothing happens before."""
        return UNLIMITED

    def left_out(self, passes: int) -> None:
        """A leap has left out so many quiet passes."""

    def is_awaited(self, transfer: Transfer) -> bool:
        """Whether a pass has something to do now that this transfer has ended."""
        return True

    def begin_pass(self, new: list[Job], *, is_computing: bool) -> None:
        """Take note of requests that wait since the last pass, begin the copies decided on since the last step, then acknowledge
        those that have ended."""

    # --- requests that wait --------------------------------------------------------------------------------------------------

    def waits(self, job: Job) -> None:
        """A request has joined the queue: ask storage for what GPU and host lack of it."""

    def is_ready(self, job: Job) -> bool:
        """Whether a request may be admitted, at its turn; if it need not wait for what is read for it, the read ends."""
        return True

    def has_lost(self, job: Job, pages: int) -> bool:
        """Whether a request that has found ``pages`` pages found more before, so that storage is asked again."""
        return False

    def admitted(self, job: Job, lease: Lease) -> None:
        """A request has been admitted: note in its lease what storage has brought of what it loads."""

    def dropped(self, job: Job) -> None:
        """A request has left the queue without being admitted."""

    # --- a pass --------------------------------------------------------------------------------------------------------------

    def loads(self) -> list[Transfer]:
        """Return the loads of the requests that this pass has admitted, which its step follows layer by layer."""
        return NO_TRANSFERS

    def carry_out(self, *, is_idle: bool) -> Any:
        """Begin what the pass has decided, and wait for what it has written back. Generates events to wait for.

        ``is_idle``: whether no step runs or has been formed.
        """
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
