"""The virtual clock does what SimPy's environment does, in the same order."""

from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Environment, Interrupt, Resource
from simpy.core import EmptySchedule

from kvsim.substrate.simulated.agenda import MANY
from kvsim.substrate.simulated.clock import VirtualClock
from kvsim.substrate.simulated.ends import End

Log = list[tuple[float, Any]]
Steps = list[list[tuple[str, int, int]]]
"""What each process does, one after another: (what, number of an event or a delay, value)."""

STEP = st.tuples(st.sampled_from(["wait", "await", "tell", "hold", "stop", "both"]), st.integers(0, 3), st.integers(0, 3))


def play(env: Environment, programs: Steps) -> Log:
    """Let processes follow their programs, which wait for times, for each other's events and for a resource of one slot."""
    log: Log = []
    events = [env.event() for _ in range(4)]
    resource = Resource(env)
    processes: list[Any] = []

    def run(number: int, program: list[tuple[str, int, int]]) -> Any:
        for what, first, second in program:
            try:
                if what == "wait":
                    log.append((env.now, (number, (yield env.timeout(first / 2, second)))))
                elif what == "await" and events[first].triggered:
                    log.append((env.now, (number, (yield events[first]), events[first].processed)))
                elif what == "tell" and not events[first].triggered:
                    events[first].callbacks.append(lambda event, first=first: log.append((env.now, (first, event.value))))
                    events[first].succeed(second)
                elif what == "hold":
                    with resource.request() as slot:
                        yield slot
                        yield env.timeout(first / 4)
                elif what == "stop" and first < number and processes[first].is_alive:
                    processes[first].interrupt(second)
                elif what == "both":
                    yield env.all_of([env.timeout(first), env.timeout(second / 2)])
                log.append((env.now, (number, what)))
            except Interrupt as interrupt:
                log.append((env.now, (number, interrupt.cause)))

    processes.extend(env.process(run(number, program)) for number, program in enumerate(programs))
    env.run()
    return log


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(STEP, max_size=6), min_size=1, max_size=4))
def test_processes_run_as_in_simpys_environment(programs: Steps) -> None:
    assert play(VirtualClock(), programs) == play(Environment(), programs)


@pytest.mark.parametrize("make", [Environment, VirtualClock])
def test_a_run_ends_at_a_time_or_with_an_event(make: Callable[[], Environment]) -> None:
    env = make()
    seen: list[float] = []
    for at in (1.0, 2.0, 3.0):
        env.timeout(at).callbacks.append(lambda _: seen.append(env.now))
    env.run(2.0)
    assert (env.now, seen, env.peek()) == (2.0, [1.0], 2.0), "before what happens at that time"
    assert env.run(env.timeout(0.5, "value")) == "value" and (env.now, seen) == (2.5, [1.0, 2.0])
    while env.peek() <= 3.0:
        env.step()
    assert (env.now, seen, env.peek()) == (3.0, [1.0, 2.0, 3.0], float("inf"))
    with pytest.raises(EmptySchedule):
        env.step()
    with pytest.raises(ValueError, match="must be greater"):
        env.run(3.0)
    with pytest.raises(ValueError, match="Negative delay"):
        env.timeout(-1.0)
    never = env.event()
    with pytest.raises(RuntimeError, match="was not triggered"):
        env.run(never)
    with pytest.raises(AttributeError, match="not yet available"):
        _ = never.value
    assert never.succeed(1).value == 1
    with pytest.raises(RuntimeError, match="already been triggered"):
        never.succeed(2)


@pytest.mark.parametrize("make", [Environment, VirtualClock])
def test_an_error_of_a_process_ends_the_run(make: Callable[[], Environment]) -> None:
    env = make()

    def fail() -> Any:
        yield env.timeout(1.0)
        raise KeyError("lost")

    env.process(fail())
    with pytest.raises(KeyError, match="lost"):
        env.run()


def test_a_step_ends_after_all_that_happens_at_the_same_time() -> None:
    """At once if that is nothing; otherwise after what is there already, and before what that enters."""
    for others in (False, True):
        clock = VirtualClock()
        agenda, log = clock.agenda, list[str]()
        done = agenda.event()
        done.then(lambda event, log=log: log.append(f"done {event.value}"))
        agenda.after(1.0, End(done, 3))
        if others:
            later = agenda.event()
            later.then(lambda _, log=log: log.append("later"))
            agenda.timeout(1.0).then(lambda _, log=log, later=later: (log.append("other"), later.succeed()))
        clock.run()
        assert log == (["other", "done 3", "later"] if others else ["done 3"])
        assert done.processed and clock.now == 1.0


DELAYS: dict[str, Callable[[Random], float]] = {
    "alike": lambda drawn: drawn.expovariate(1.0),
    "near and far": lambda drawn: drawn.choice([0.0, 1e-6 * drawn.random(), drawn.random(), 1e4 * drawn.random()]),
    "at a few times": lambda drawn: drawn.choice([0.0, 1.0, 2.0]),
    "at one time": lambda drawn: 5.0 - drawn.choice([0.0, 1e-15]),
    "of all sizes": lambda drawn: 10.0 ** drawn.randint(-12, 18),
    "some never": lambda drawn: drawn.choice([drawn.random(), inf]),
}


@pytest.mark.parametrize("kind", DELAYS)
def test_thousands_of_entries_happen_in_the_order_of_a_heap(kind: str) -> None:
    """The number of entries grows to thousands, stays there, and falls to none, twice; each entry enters others."""

    def play(env: Environment) -> list[tuple[float, int]]:
        drawn, log, entered = Random(kind), [], 0

        def enter() -> None:
            nonlocal entered
            number, entered = entered, entered + 1
            priority = 0 if drawn.random() < 0.01 else 1
            event = env.event()
            event._ok, event._value = True, None
            event.callbacks.append(lambda _: happen(number))
            env.schedule(event, priority, DELAYS[kind](drawn))

        def happen(number: int) -> None:
            log.append((env.now, number))
            is_growing = number % 8_000 < 3_000
            for _ in range((2 if drawn.random() < 0.6 else 1) if is_growing else drawn.random() < 0.97):
                if entered < 16_000:
                    enter()

        for again in range(2):
            entered = max(entered, 8_000 * again)
            for _ in range(600):
                enter()
            env.run()
        assert len(log) == len({number for _, number in log})
        return log

    found = play(VirtualClock())
    assert len(found) > 4_000 and found == play(Environment())


def test_entries_that_are_put_off_leave_the_heap() -> None:
    """All but those of the first stretch; once they have happened, none is put off."""
    clock = VirtualClock()
    happened: list[float] = []
    for at in range(5_000):
        clock.timeout(float(at * 7919 % 5_000)).callbacks.append(lambda _: happened.append(clock.now))
    assert 0 < len(clock.agenda.queue) <= 2 * MANY
    clock.run()
    assert happened == sorted(happened) == [float(at) for at in range(5_000)]
    clock.timeout(9.0)
    clock.timeout(1e9)
    assert len(clock.agenda.queue) == 2
