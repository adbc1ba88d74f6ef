"""A waiter is an entry of an event's callbacks like any other."""

from typing import Any

import pytest

from kvsim.engine.substrate import Work
from kvsim.engine.waiter import Waiter
from kvsim.hardware.spec import HardwareSpec
from kvsim.substrate.simulated.clock import VirtualClock
from kvsim.substrate.simulated.compute import step_times
from kvsim.substrate.simulated.ends import Leap
from tests.engine.small import HARDWARE, MODEL, STEP_READS, seconds


def leap_of(clock: VirtualClock, steps: int) -> Leap:
    """Steps of a second each, which may be cut short."""
    work = Work(decode_requests=1, max_steps=steps)
    return Leap(clock.agenda, step_times(MODEL, HardwareSpec(**(HARDWARE | STEP_READS))), work)


def test_it_is_called_in_its_turn_among_callbacks() -> None:
    """A leap of ten seconds waits for an event at 2.5 s: it is told between the callbacks around it, and ends at 3 s."""
    clock = VirtualClock()
    leap, seen = leap_of(clock, 10), list[tuple[str, float, int]]()

    def note(name: str) -> Any:
        return lambda _: seen.append((name, float(clock.now), len(clock.agenda.queue)))

    event: Any = clock.timeout(2.5)
    event.callbacks += [note("before"), leap, note("after")]
    leap.done.callbacks.append(note("done"))
    clock.run(until=leap.done)
    (before, before_s, queued), (after, after_s, queued_after), (done, done_s, _) = seen
    assert (before, after, done) == ("before", "after", "done")
    assert [before_s, after_s, done_s] == seconds([2.5, 2.5, 3])
    assert queued_after == queued + 1, "the end of the leap became due between the two"
    assert leap.done.value == 3


def test_it_may_be_told_more_than_once() -> None:
    """The second event comes in the same step, the third after the end."""
    clock = VirtualClock()
    leap = leap_of(clock, 10)
    for at_s in (1.25, 1.75, 5.0):
        event: Any = clock.timeout(at_s)
        event.callbacks.append(leap)
    clock.run()
    assert leap.done.value == 2


def test_one_that_does_nothing_is_none() -> None:
    clock = VirtualClock()
    event: Any = clock.timeout(1.0)
    event.callbacks.append(Waiter())
    with pytest.raises(NotImplementedError):
        clock.run()
