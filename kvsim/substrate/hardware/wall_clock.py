"""SimPy's environment on real time."""

from queue import Empty, SimpleQueue
from sys import getswitchinterval, setswitchinterval
from time import perf_counter
from typing import Any

from simpy import Environment, Event
from simpy.core import EmptySchedule
from simpy.events import NORMAL

SWITCH_INTERVAL_S = 5e-5
"""How long a thread that has Python lets others wait: by default 5 ms, in which a link carries 250 MB."""


class WallClock(Environment):
    """Sleeps until the next event is due, or until another thread completes one.

    ``now`` is the moment of the event that is being handled, in seconds of real time since ``run`` was first called: when a
    timer was due, or when the other thread reported. So times do not grow with the time that handling takes, and a timer
    that follows another one does not drift. ``run`` ends when nothing is scheduled and no event is expected.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most_behind_s = 0.0
        """The longest that an event had to wait for its handling."""
        self._reports: SimpleQueue[tuple[float, Event | None, Any]] = SimpleQueue()
        """(when, what happened, its value), or an error in the place of a value."""
        self._expected = 0
        self._began_s: float | None = None

    def elapsed_s(self) -> float:
        """Seconds of real time since the run began, 0 before. Any thread may ask."""
        return 0.0 if self._began_s is None else perf_counter() - self._began_s

    def expect(self) -> Event:
        """An event that another thread will complete, once."""
        self._expected += 1
        return self.event()

    def complete(self, event: Event, value: Any = None) -> None:
        """Let an expected event happen now. Any thread may call this."""
        self._reports.put((self.elapsed_s(), event, value))

    def fail(self, error: BaseException) -> None:
        """End the run with an error. Any thread may call this."""
        self._reports.put((self.elapsed_s(), None, error))

    def run(self, until: Any = None) -> Any:
        if self._began_s is None:
            self._began_s = perf_counter()
        before_s = getswitchinterval()
        setswitchinterval(SWITCH_INTERVAL_S)
        try:
            return super().run(until)
        finally:
            setswitchinterval(before_s)

    def step(self) -> None:
        """Handle the next event when it is due. Raises EmptySchedule if there is none and none is expected."""
        while True:
            while not self._reports.empty():
                self._schedule_report(*self._reports.get_nowait())
            if not self._queue and not self._expected:
                raise EmptySchedule
            early_s = self._queue[0][0] - self.elapsed_s() if self._queue else None
            if early_s is not None and early_s <= 0:
                break
            try:
                self._schedule_report(*self._reports.get(timeout=early_s))
            except Empty:
                continue
        self.most_behind_s = max(self.most_behind_s, -early_s)
        super().step()

    def _schedule_report(self, at_s: float, event: Event | None, value: Any) -> None:
        if event is None:
            raise value
        self._expected -= 1
        event._ok, event._value = True, value
        self.schedule(event, NORMAL, max(0.0, at_s - self._now))
