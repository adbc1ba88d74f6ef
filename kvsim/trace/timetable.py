"""Arrival times of the requests of a JSON Lines trace: at timestamps, or some time after the session's previous answer."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kvsim.core.request import after_and_joins
from kvsim.trace.arrivals import Arrivals, check_arrivals
from kvsim.trace.base import TraceSource
from kvsim.trace.dates import is_date, stamp
from kvsim.trace.records import MILLISECONDS, Record, shown


class Place(NamedTuple):
    """The position of a line in time and in its session; the fields are those of Request."""

    arrival_s: float
    after: int
    delay_s: float
    session: int
    turn: int
    joins: tuple[int, ...] = ()


class Line(NamedTuple):
    """A line that others may wait for."""

    number: int
    """Counted from 0."""
    arrival_s: float


class Timetable:
    """Places the lines of a file, one after another, by these fields (Dynamo's names for them in parentheses):

    timestamp (created_time)   milliseconds, or a date (in UTC without an offset); must not decrease; the first one is time 0
    session_id                 a string or an integer; lines with the same value are the turns of one session
    delay (delay_ms)           milliseconds, from a session's second turn on: the request waits for the answer to the previous
                               turn, and then for this time. Its timestamp, if any, only determines its place among the others.
    request_id                 a string or an integer by which later lines name this one
    after                      a list of request_ids of earlier lines, instead of the previous turn: the request waits for the
                               answers to all of them, and then for ``delay``; [] waits for none. Several lines that wait for
                               the same one are sub-agents, and one that waits for several joins them

    A later turn without either field follows the answer before it at once. All other lines of a file have a timestamp, or none
    has: they then arrive at time 0, or when ``arrivals`` says, which also draws pauses before later turns. Sessions that begin
    before the first timestamp of the file need none: they begin at time 0.
    """

    def __init__(self, rate: float, arrivals: Arrivals | None = None, *, in_order: bool = True) -> None:
        """With ``in_order=False``, timestamps may decrease; arrivals before that of the first line are then negative."""
        self._rate = rate
        self._in_order = in_order
        self._arrivals = arrivals
        self._timed = False
        self._has_dates = False
        self._untimed = False
        self._lines = 0
        self._first_ms = 0.0
        self._last_ms = 0.0
        self._sessions: dict[str | int, int] = {}
        self._turns: list[tuple[int, int, float]] = []  # per session: number of turns, line and arrival of the last turn
        self._begins_s: list[float] = []
        """Arrivals of the sessions' first turns."""
        self._named: dict[str | int, Line] = {}
        """The latest line with each request_id."""

    def place(self, record: Record) -> Place:
        """Return the place of the next line; its ``after`` is a line number, from 0. Raises TraceError for bad fields."""
        session, turn, previous, previous_s = self._previous(record)
        timestamp_s = self.timestamp_s(record)
        delay = record.either("delay", "delay_ms")
        is_told = record.has("after")
        awaited = self._awaited(record) if is_told else [Line(previous, previous_s)] if turn else []
        if awaited and (is_told or record.has(delay) or timestamp_s is None):
            delay_s = self._delay_s(record, delay)
            latest_s = max(line.arrival_s for line in awaited)
            after, joins = after_and_joins(line.number for line in awaited)
            arrival_s = latest_s + delay_s if timestamp_s is None else max(timestamp_s, latest_s) if is_told else timestamp_s
            place = Place(arrival_s, after, delay_s, session, turn, joins)
        else:
            place = Place(self._start_s(record, session, turn) if timestamp_s is None else timestamp_s, -1, 0.0, session, turn)
        self._keep(record, place)
        return place

    def _keep(self, record: Record, place: Place) -> None:
        """Remember a line for those after it."""
        if record.has("request_id"):
            self._named[record.name("request_id")] = Line(self._lines, place.arrival_s)
        if place.session >= 0:
            if not place.turn:
                self._begins_s[place.session] = place.arrival_s
            self._turns[place.session] = place.turn + 1, self._lines, place.arrival_s
        self._lines += 1

    def _start_s(self, record: Record, session: int, turn: int) -> float:
        """Return when a line without a timestamp arrives that waits for no other: with its session, which may begin now."""
        self._check_untimed(record, session)
        if turn:
            return self._begins_s[session]
        return self._arrivals.start_s() if self._arrivals else 0.0

    def _awaited(self, record: Record) -> list[Line]:
        """Return the lines that a line names in ``after``."""
        found = []
        for name in record.items("after"):
            if isinstance(name, str | int) and not isinstance(name, bool) and name in self._named:
                found.append(self._named[name])
            else:
                raise record.error(f"after names {shown(name)}, but no earlier line has that request_id")
        return found

    def _delay_s(self, record: Record, name: str) -> float:
        """Return the pause before a later turn."""
        if record.has(name):
            return record.number(name, MILLISECONDS) / 1000
        return self._arrivals.pause_s() if self._arrivals else 0.0

    def _check_untimed(self, record: Record, session: int) -> None:
        """Raise TraceError if a line that waits for no other may not go without a timestamp."""
        if self._timed:
            raise record.error("timestamp is missing; only later turns of a session may go without")
        if self._rate != 1 and self._arrivals is None:
            raise record.error(f"rate={self._rate} has no effect on a file without timestamps; set sessions_per_s instead")
        self._untimed |= session < 0 or self._arrivals is not None

    def _previous(self, record: Record) -> tuple[int, int, int, float]:
        """Return the line's session and turn, and the line number and arrival of the previous turn."""
        if not record.has("session_id"):
            return -1, 0, -1, 0.0
        session = self._sessions.setdefault(record.name("session_id"), len(self._sessions))
        if session == len(self._turns):
            self._turns.append((0, -1, 0.0))
            self._begins_s.append(0.0)
        return session, *self._turns[session]

    def timestamp_s(self, record: Record) -> float | None:
        """Return the seconds from the first timestamp to this line's at the requested rate; None if the line has none.

        Raises TraceError for a bad timestamp, and for one before that of an earlier line.
        """
        name = record.either("timestamp", "created_time")
        if not record.has(name):
            return None
        if self._arrivals is not None:
            raise record.error("sessions_per_s has no effect on a file with timestamps: leave it out, and set rate")
        if self._untimed:
            raise record.error("this line has a timestamp but an earlier one has none: give all lines a timestamp, or no line")
        timestamp = stamp(record, name, 0.001)
        if not self._timed:
            self._timed, self._has_dates = True, is_date(record, name)
            self._first_ms = timestamp
        elif is_date(record, name) != self._has_dates:
            raise record.error(f"{name} is a date in some lines and a number in others: make them all one or the other")
        elif self._in_order and timestamp < self._last_ms:
            raise record.error(f"timestamps must not decrease: {timestamp:g} ms after {self._last_ms:g} ms; sort the file")
        self._last_ms = timestamp
        return (timestamp - self._first_ms) / 1000 / self._rate


@dataclass(kw_only=True)
class TimedTrace(TraceSource):
    """A trace whose lines a ``Timetable`` places in time.

    ``sessions_per_s``, ``pause_s`` and ``seed`` draw the arrivals of a file without timestamps (see ``Arrivals``).
    """

    IN_ORDER: ClassVar[bool] = True
    """Whether timestamps must not decrease."""
    OF_ARRIVALS: ClassVar[tuple[str, ...]] = ("sessions_per_s", "pause_s", "seed")

    sessions_per_s: float | None = None
    pause_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_arrivals(self.sessions_per_s, self.pause_s, self.seed)

    @property
    def draws_at_random(self) -> bool:
        return self.sessions_per_s is not None

    def timetable(self) -> Timetable:
        """Return a new timetable for the lines of the file."""
        if self.sessions_per_s is None:
            return Timetable(self.rate, in_order=self.IN_ORDER)
        return Timetable(self.rate, Arrivals(self.sessions_per_s, self.pause_s, self.seed, self.rate))
