"""When steps end: a leap that may be stopped, and a step that follows loads."""

from collections.abc import Callable
from typing import Any

from kvsim.engine.substrate import Work
from kvsim.engine.waiter import Waiter
from kvsim.substrate.simulated.agenda import Agenda, Happening, Moment
from kvsim.substrate.simulated.compute import Steps
from kvsim.substrate.simulated.links import Flow

Computed = Callable[[Work, float, float], None]
"""Is told of a step, and when its first layer and its last are computed."""


class End(Moment):
    """Triggers an event with a number of steps, unless it has been triggered before."""

    __slots__ = ("done", "steps")

    def __init__(self, done: Happening, steps: int) -> None:
        self.done = done
        self.steps = steps

    def happen(self) -> None:
        if not self.done.triggered:
            self.done.agenda.succeed_last(self.done, self.steps)


class Leap(Waiter):
    """Several decode steps in one event, ``done``, whose value is their number. Ends when what it waits for happens."""

    __slots__ = ("agenda", "began_s", "done", "steps", "work")

    def __init__(self, agenda: Agenda, steps: Steps, work: Work) -> None:
        self.agenda = agenda
        self.steps = steps
        self.work = work
        self.began_s = agenda.now
        self.done = Happening(agenda)
        agenda.after(max(0.0, steps.leap_s(work, work.max_steps)), End(self.done, work.max_steps))

    def happened(self, event: Any) -> None:
        """End the leap at the next boundary between two steps."""
        if not self.done.triggered:
            now = self.agenda.now
            steps, seconds = self.steps.steps_by(self.work, now - self.began_s, self.work.max_steps)
            self.agenda.after(max(0.0, self.began_s + seconds - now), End(self.done, steps))


class Followed(Waiter):
    """One step, whose end is ``done``, while its loads land. Layers land evenly, so it ends at the latest of three times.

    start + all compute; first layer landed + all compute; last layer landed + one layer's compute
    """

    __slots__ = ("agenda", "began_s", "compute_s", "computed", "done", "flows", "layers", "waiting", "work")

    def __init__(
        self, agenda: Agenda, work: Work, flows: list[Flow], compute_s: float, layers: int, computed: Computed | None
    ) -> None:
        self.agenda = agenda
        self.work = work
        self.flows = flows
        self.compute_s = compute_s
        self.layers = layers
        self.computed = computed
        self.began_s = agenda.now
        self.waiting = len(flows)
        self.done = Happening(agenda)
        for flow in flows:
            flow.event.then(self)

    def happened(self, event: Any) -> None:
        """One of the loads has landed."""
        self.waiting -= 1
        if self.waiting:
            return
        work, compute_s, layers, now = self.work, self.compute_s, self.layers, self.agenda.now
        end = self.began_s + compute_s
        for flow in self.flows:
            first = flow.started_s + (flow.ended_s - flow.started_s) / layers
            end = max(end, first + compute_s, flow.ended_s + compute_s / layers)
        if self.computed is not None:
            self.computed(work, end - compute_s + compute_s / layers, max(end, now))
        work.stalled_s = end - (self.began_s + compute_s)
        self.agenda.after(max(0.0, end - now), End(self.done, 1))
