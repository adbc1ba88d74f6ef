"""What is to happen in a simulation, in order, and the loop that lets it happen."""

import heapq
from collections.abc import Callable
from typing import Any, Final

from simpy import events

from kvsim.engine.waiter import Waiter

_pop: Final = heapq.heappop
_push: Final = heapq.heappush
_PENDING: Final = events.PENDING
"""Names of this module's own: compiled, they are found at once, where imported ones are looked up each time."""
NORMAL: Final = 1
"""SimPy's priority of what happens at the same time as other things, in the order in which it was entered."""


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

    Entries are ``Moment``s or SimPy's own events, of which processes are made.
    """

    def __init__(self, clock: Any) -> None:
        """``clock`` is the environment whose ``now`` follows this."""
        self.clock = clock
        self.now = 0.0
        self.queue: list[tuple[float, int, int, Any]] = []
        self._entries = 0
        self._is_over = False

    def event(self) -> Happening:
        """Return an event that happens when ``succeed`` is called."""
        return Happening(self)

    def timeout(self, delay: float = 0.0, value: object = None) -> Happening:
        """Return an event that happens after some seconds. Raises ValueError if these are negative."""
        if delay < 0:
            raise ValueError(f"Negative delay {delay}")
        event = Happening(self)
        event._value = value
        self._entries += 1
        _push(self.queue, (self.now + delay, NORMAL, self._entries, event))
        return event

    def after(self, delay_s: float, moment: Moment) -> None:
        """Enter something that happens after some seconds."""
        self._entries += 1
        _push(self.queue, (self.now + delay_s, NORMAL, self._entries, moment))

    def schedule(self, event: Any, priority: int = NORMAL, delay: float = 0.0) -> None:
        """Enter an event that happens after some seconds."""
        self._entries += 1
        _push(self.queue, (self.now + delay, priority, self._entries, event))

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
        now, _, _, event = _pop(self.queue)
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


def _happen(event: Any) -> None:
    """Let an event of SimPy's own happen. Raises the error of one that has failed, of which nobody has taken care."""
    callbacks, event.callbacks = event.callbacks, None
    for callback in callbacks:
        callback(event)
    if not event._ok and not hasattr(event, "_defused"):
        raise event._value
