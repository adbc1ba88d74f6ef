"""A SimPy environment that runs in real time."""

from queue import Empty, SimpleQueue
from sys import getswitchinterval, setswitchinterval
from time import perf_counter
from typing import Any

from simpy import Environment, Event
from simpy.core import EmptySchedule
from simpy.events import NORMAL

SWITCH_INTERVAL_S = 5e-5
"""Time after which a thread that holds the interpreter lock lets others run. Python's default is 5 ms, in which a link moves
250 MB."""


class WallClock(Environment):
    """Sleeps until the next event is due, or until another thread completes one.

    ``now`` is the time of the event being handled, in seconds of real time since the first call of ``run``: when a timer was
    due, or when the other thread reported. Times therefore exclude the time that handling takes, and chained timers do not
    drift. ``run`` ends when no event is scheduled or expected.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most_behind_s = 0.0
        """Longest time that an event waited to be handled, in seconds."""
        self._reports: SimpleQueue[tuple[float, Event | None, Any, int]] = SimpleQueue()
        """Entries (time, event, value, number of expected events that this is); without an event, the value is an error."""
        self._expected = 0
        self._began_s: float | None = None

    @property
    def began_s(self) -> float:
        """Time of ``perf_counter`` at which the run began; now, if it has not begun."""
        return perf_counter() if self._began_s is None else self._began_s

    def elapsed_s(self) -> float:
        """Return the seconds of real time since the run began; 0 before. Any thread may call this."""
        return 0.0 if self._began_s is None else perf_counter() - self._began_s

    def expect(self) -> Event:
        """Return an event that another thread will complete, once."""
        self._expected += 1
        return self.event()

    def complete(self, event: Event, value: Any = None) -> None:
        """Trigger an expected event now. Any thread may call this."""
        self._reports.put((self.elapsed_s(), event, value, 1))

    def notify(self, event: Event, value: Any = None) -> None:
        """Trigger an event now that the run does not wait for. Any thread may call this."""
        self._reports.put((self.elapsed_s(), event, value, 0))

    def fail(self, error: BaseException) -> None:
        """End the run with an error. Any thread may call this."""
        self._reports.put((self.elapsed_s(), None, error, 0))

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
        """Handle the next event when it is due. Raises EmptySchedule if no event is scheduled or expected."""
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

    def _schedule_report(self, at_s: float, event: Event | None, value: Any, expected: int) -> None:
        if event is None:
            raise value
        self._expected -= expected
        event._ok, event._value = True, value
        self.schedule(event, NORMAL, max(0.0, at_s - self._now))
