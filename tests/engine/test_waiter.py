"""A waiter is an entry of an event's callbacks like any other."""

from typing import Any

import pytest
from simpy import Environment

from kvsim.engine.waiter import Waiter
from kvsim.substrate.simulated.clock import VirtualClock


class Noting(Waiter):
    """Notes when it is called, and with which value."""

    __slots__ = ("env", "seen")

    def __init__(self, env: Environment, seen: list[tuple[str, float, Any]]) -> None:
        self.env = env
        self.seen = seen

    def happened(self, event: Any) -> None:
        self.seen.append(("waiter", float(self.env.now), event.value))


@pytest.mark.parametrize("clock", [Environment, VirtualClock])
def test_it_is_called_in_its_turn_among_callbacks(clock: Any) -> None:
    env, seen = clock(), list[tuple[str, float, Any]]()
    event = env.timeout(2.5, "value")
    event.callbacks.append(lambda event: seen.append(("before", float(env.now), event.value)))
    event.callbacks.append(Noting(env, seen))
    event.callbacks.append(lambda event: seen.append(("after", float(env.now), event.value)))
    env.run()
    assert seen == [("before", 2.5, "value"), ("waiter", 2.5, "value"), ("after", 2.5, "value")]


def test_it_may_wait_again_and_begin_what_is_due_at_once() -> None:
    env = VirtualClock()
    seen: list[float] = []

    class Twice(Waiter):
        __slots__ = ()

        def happened(self, event: Any) -> None:
            seen.append(float(env.now))
            if len(seen) < 3:
                env.timeout(1.0 if len(seen) == 1 else 0.0).callbacks.append(self)

    env.timeout(1.0).callbacks.append(Twice())
    env.run()
    assert seen == [1.0, 2.0, 2.0]


def test_one_that_does_nothing_is_none() -> None:
    env = VirtualClock()
    env.timeout(1.0).callbacks.append(Waiter())
    with pytest.raises(NotImplementedError):
        env.run()
