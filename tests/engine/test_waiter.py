"""Whoever waits for an event is told of it on every clock, in turn with other callbacks."""

from typing import Any

import pytest
from simpy import Environment

from kvsim.engine.waiter import Waiter
from kvsim.substrate.simulated.clock import VirtualClock


class Noting(Waiter):
    """Notes the values that it is told."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def happened(self, event: Any) -> None:
        self.log.append(event.value)


@pytest.mark.parametrize("clock", [VirtualClock, Environment])
def test_a_waiter_is_called_like_any_other_callback(clock: type[Environment]) -> None:
    env, log = clock(), list[Any]()
    event = env.timeout(2.0, "two")
    event.callbacks.extend([Noting(log), lambda event: log.append((env.now, event.value)), Noting(log)])
    env.run()
    assert log == ["two", (2.0, "two"), "two"]
