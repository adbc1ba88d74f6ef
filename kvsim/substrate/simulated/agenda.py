"""What is to happen in a simulation, in order, and the loop that lets it happen."""

import heapq
from collections.abc import Callable
from math import inf, nan
from typing import Any, Final

from simpy import events

from kvsim.engine.waiter import Waiter

_pop: Final = heapq.heappop
_push: Final = heapq.heappush
_PENDING: Final = events.PENDING
"""Names of this module's own: compiled, they are found at once, where imported ones are looked up each time."""
NORMAL: Final = 1
"""SimPy's priority of what happens at the same time as other things, in the order in which it was entered."""
MANY: Final = 512
"""Entries in the heap from which on those that are due later are put off."""
AT_ONCE: Final = 64
"""Entries that are taken out of what is put off at a time, about."""
FAR: Final = 1 << 52
"""The last stretch of time, which never ends."""


class Moment:
    """Something that happens at a time."""

    __slots__ = ()

    def happen(self) -> None:
        """Do what is due."""
        raise NotImplementedError


class Happening(Moment):
    """An event of SimPy's in all that kvsim and SimPy's processes use of one; it cannot fail."""

    __slots__ = ("agenda", "callbacks", "_ok", "_value")

    def __init__(self, agenda: "Agenda") -> None:
        self.agenda = agenda
        self.callbacks: list[Callable[[Any], object]] | None = []
        """What is called when it happens; None once it has."""
        self._ok = True
        self._value: Any = _PENDING

    @property
    def env(self) -> Any:
        return self.agenda.clock

    @property
    def triggered(self) -> bool:
        """Whether the time at which it happens is known."""
        return self._value is not _PENDING

    @property
    def processed(self) -> bool:
        """Whether it has happened."""
        return self.callbacks is None

    @property
    def ok(self) -> bool:
        return self._ok

    @property
    def value(self) -> Any:
        """What whoever waits for it is told. Raises AttributeError before that is known."""
        if self._value is _PENDING:
            raise AttributeError(f"Value of {self} is not yet available")
        return self._value

    def then(self, callback: Callable[[Any], object]) -> None:
        """Let something be called when it happens; it must not have happened yet."""
        assert self.callbacks is not None
        self.callbacks.append(callback)

    def succeed(self, value: object = None) -> "Happening":
        """Let it happen now, after all that happens now already. Raises RuntimeError the second time."""
        self.succeed_after(0.0, value)
        return self

    def succeed_after(self, delay_s: float, value: object) -> None:
        """Let it happen after some seconds. Raises RuntimeError the second time."""
        if self._value is not _PENDING:
            raise RuntimeError(f"{self} has already been triggered")
        self._value = value
        self.agenda.schedule(self, NORMAL, delay_s)

    def happen(self) -> None:
        """Call what is to be called. Its value must be known."""
        callbacks = self.callbacks
        self.callbacks = None
        if callbacks is not None:
            for callback in callbacks:
                if isinstance(callback, Waiter):
                    callback.happened(self)
                else:
                    callback(self)


class Agenda:
    """Everything that is to happen, by time, priority and the order in which it was entered, as in SimPy's ``Environment``.

    Entries are ``Moment``s or SimPy's own events, of which processes are made. A thousand engines and their sessions have so
    many that every look at a heap of them would miss the processor's caches. What is due later than the next few entries is
    therefore put off: it is in a list for each stretch of time, without order, until that stretch begins.
    """

    def __init__(self, clock: Any) -> None:
        """``clock`` is the environment whose ``now`` follows this."""
        self.clock = clock
        self.now = 0.0
        self.queue: list[Any] = []
        """A heap of entries (time, priority, number, what): all that are not put off. Empty only if nothing is to happen."""
        self._entries = 0
        self._is_over = False
        self._stretches_per_s = 0.0
        """0: nothing is put off."""
        self._put_off: dict[int, list[Any]] = {}
        """Entries by the number of their stretch, which is ``_begun`` or larger."""
        self._numbers: list[int] = []
        """A heap of those numbers."""
        self._begun = 1.0
        """Number of stretches that have begun, whose entries are in the heap; nan: all have."""
        self._most = MANY
        """Entries in the heap from which on stretches are made, or made anew."""
        self._made_at = 0
        """Number of entries when stretches were made last."""

    def event(self) -> Happening:
        """Return an event that happens when ``succeed`` is called."""
        return Happening(self)

    def timeout(self, delay: float = 0.0, value: object = None) -> Happening:
        """Return an event that happens after some seconds. Raises ValueError if these are negative."""
        if delay < 0:
            raise ValueError(f"Negative delay {delay}")
        event = Happening(self)
        event._value = value
        self._enter(self.now + delay, NORMAL, event)
        return event

    def after(self, delay_s: float, moment: Moment) -> None:
        """Enter something that happens after some seconds."""
        self._enter(self.now + delay_s, NORMAL, moment)

    def schedule(self, event: Any, priority: int = NORMAL, delay: float = 0.0) -> None:
        """Enter an event that happens after some seconds."""
        self._enter(self.now + delay, priority, event)

    def succeed_last(self, event: Happening, value: object) -> None:
        """Let an event that has not been triggered happen now, after all that happens now already; last in a ``Moment``."""
        queue = self.queue
        if queue and queue[0][0] <= self.now:
            event.succeed(value)
        else:
            event._value = value
            event.happen()

    def step(self) -> None:
        """Let the first entry happen; there must be one."""
        queue = self.queue
        first: tuple[float, int, int, Any] = _pop(queue)
        now, event = first[0], first[3]
        if not queue and self._stretches_per_s > 0.0:
            self._begin_stretch()
        if now != self.now:
            self.now = now
            self.clock.now = now
        if isinstance(event, Moment):
            event.happen()
        else:
            _happen(event)

    def play(self) -> bool:
        """Let everything happen until ``stop`` is called. Returns whether it was."""
        self._is_over = False
        while self.queue:
            self.step()
            if self._is_over:
                return True
        return False

    def stop(self, _: object = None) -> None:
        """End ``play`` after what happens at the moment."""
        self._is_over = True

    def _enter(self, time_s: float, priority: int, what: Any) -> None:
        self._entries += 1
        place = time_s * self._stretches_per_s
        if place >= self._begun:
            self._wait(place, (time_s, priority, self._entries, what))
            return
        queue = self.queue
        _push(queue, (time_s, priority, self._entries, what))
        if len(queue) > self._most:
            self._make_stretches()

    def _wait(self, place: float, entry: Any) -> None:
        """Put off an entry. A later time never has an earlier stretch, so that stretches are in order."""
        number = int(place) if place < FAR else FAR
        waiting = self._put_off.get(number)
        if waiting is None:
            self._put_off[number] = [entry]
            _push(self._numbers, number)
        else:
            waiting.append(entry)

    def _begin_stretch(self) -> None:
        """Fill the heap, which is empty, with the entries of the next stretch. After the last one, nothing is put off."""
        if not self._numbers:
            self._end_stretches()
            return
        number = _pop(self._numbers)
        self._begun = number + 1.0 if number < FAR else nan
        self.queue.extend(self._put_off.pop(number))
        heapq.heapify(self.queue)

    def _end_stretches(self) -> None:
        self._stretches_per_s, self._begun, self._most = 0.0, 1.0, MANY

    def _make_stretches(self) -> None:
        """Divide the time so that stretches have about ``AT_ONCE`` entries, and put off those of all but the first.

        That takes a look at every entry, so as many must have been entered since the last time. Entries that are all due at
        the same time stay in the heap.
        """
        queue = self.queue
        if self._entries - self._made_at < len(queue) + sum([len(waiting) for waiting in self._put_off.values()]):
            self._most = 2 * len(queue)
            return
        self._made_at = self._entries
        for waiting in self._put_off.values():
            queue.extend(waiting)
        self._put_off.clear()
        self._numbers.clear()
        self._end_stretches()
        self._most = 2 * len(queue)
        queue.sort()
        first_s: float = queue[0][0]
        some = len(queue) // 4
        lasts_s: float = (queue[some][0] - first_s) * AT_ONCE / some
        if not 0.0 < lasts_s < inf or max(first_s, 1.0) / lasts_s >= FAR:
            return
        self._stretches_per_s = 1.0 / lasts_s
        self._begun = float(int(first_s * self._stretches_per_s) + 1)
        begun = 0
        for entry in queue:
            time_s: float = entry[0]
            place = time_s * self._stretches_per_s
            if place >= self._begun:
                self._wait(place, entry)
            else:
                begun += 1
        del queue[begun:]
        self._most = max(4 * AT_ONCE, 2 * len(queue))


def _happen(event: Any) -> None:
    """Let an event of SimPy's own happen. Raises the error of one that has failed, of which nobody has taken care."""
    callbacks, event.callbacks = event.callbacks, None
    for callback in callbacks:
        callback(event)
    if not event._ok and not hasattr(event, "_defused"):
        raise event._value
