"""SimPy's environment on a virtual clock, with a faster queue."""

from typing import Any

from simpy import Environment
from simpy.core import EmptySchedule
from simpy.events import URGENT

from kvsim.substrate.simulated.agenda import Agenda


class VirtualClock(Environment):
    """An ``Environment`` whose events and queue are those of an ``Agenda``. SimPy's processes and resources run in it.

    Not compiled, since SimPy's class is not.
    """

    now = 0.0
    """In place of SimPy's property: the time in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.agenda = Agenda(self)
        fast: Any = self
        fast._queue = self.agenda.queue
        fast.event, fast.timeout, fast.schedule = self.agenda.event, self.agenda.timeout, self.agenda.schedule

    def step(self) -> None:
        """Let the next event happen. Raises EmptySchedule if there is none."""
        if not self.agenda.queue:
            raise EmptySchedule
        self.agenda.step()

    def run(self, until: Any = None) -> Any:
        """Let time pass until an event has happened, whose value is returned, or a time is reached, or nothing is left to happen.

        Raises RuntimeError if nothing is left to happen before that event.
        """
        if until is None:
            self.agenda.play()
            return None
        if not hasattr(until, "callbacks"):
            until = self._at(float(until))
        if until.callbacks is None:
            return until.value
        until.callbacks.append(self.agenda.stop)
        if not self.agenda.play():
            raise RuntimeError(f'No scheduled events left but "until" event was not triggered: {until}')
        return until.value

    def _at(self, time_s: float) -> Any:
        """Return an event before all others of a time. Raises ValueError if that is not in the future."""
        if time_s <= self.now:
            raise ValueError(f"until ({time_s}) must be greater than the current simulation time")
        event: Any = self.event()
        event._value = None
        self.schedule(event, URGENT, time_s - self.now)
        return event
