"""When the requests of a JSON-lines trace arrive: at their timestamps, or some time after their session's last answer."""

from typing import NamedTuple

from kvsim.trace.records import Record


class Place(NamedTuple):
    """Where a line stands in time and in its session; the fields are those of Request."""

    arrival_s: float
    after: int
    delay_s: float
    session: int
    turn: int


class Timetable:
    """Places the lines of a file, one after another, by these fields of theirs:

    timestamp     milliseconds; must not decrease; the first one of the file is time 0
    session_id    a string or an integer; lines with the same one are the turns of one session
    delay         milliseconds; from a session's second turn on: the request waits for the answer to the turn before it, then
                  so long. Its timestamp, if it has one, only says where it stands among the others.

    A line needs a timestamp or such a delay. If the first line of the file has no timestamp and ``timestamps_optional``, no
    line may have one: a line arrives at time 0, or its delay after the turn before it.
    """

    def __init__(self, rate: float, *, timestamps_optional: bool = False) -> None:
        self._rate = rate
        self._timestamps_optional = timestamps_optional
        self._timed = True
        self._lines = 0
        self._first_ms = 0.0
        self._last_ms = 0.0
        self._sessions: dict[str | int, int] = {}
        self._turns: list[tuple[int, int, float]] = []  # of each session: turns so far, the last one's line and arrival

    def place(self, record: Record) -> Place:
        """Where the next line stands; ``after`` counts the lines placed before it. Raises TraceError for bad fields."""
        if self._lines == 0:
            self._look_for_timestamps(record)
        session, turn, previous, previous_s = self._previous(record)
        timestamp_s = self._timestamp_s(record)
        if turn and record.has("delay"):
            delay_s = record.number("delay") / 1000
            arrival_s = previous_s + delay_s if timestamp_s is None else timestamp_s
            place = Place(arrival_s, previous, delay_s, session, turn)
        elif timestamp_s is not None or not self._timed:
            place = Place(timestamp_s or 0.0, -1, 0.0, session, turn)
        else:
            raise record.error("timestamp is missing; only a later turn of a session can do with a delay instead")
        if session >= 0:
            self._turns[session] = turn + 1, self._lines, place.arrival_s
        self._lines += 1
        return place

    def _look_for_timestamps(self, record: Record) -> None:
        """Decide by the first line whether the file has timestamps."""
        self._timed = record.has("timestamp") or not self._timestamps_optional
        if not self._timed and self._rate != 1:
            raise record.error(f"rate={self._rate} has no effect on a file without timestamps; leave it at 1")

    def _previous(self, record: Record) -> tuple[int, int, int, float]:
        """The line's session and turn, and the line and arrival of the turn before it."""
        if not record.has("session_id"):
            return -1, 0, -1, 0.0
        session = self._sessions.setdefault(record.name("session_id"), len(self._sessions))
        if session == len(self._turns):
            self._turns.append((0, -1, 0.0))
        return session, *self._turns[session]

    def _timestamp_s(self, record: Record) -> float | None:
        """Seconds from the first timestamp to this one at the requested rate; None if the line has none."""
        if not record.has("timestamp"):
            return None
        if not self._timed:
            raise record.error("this line has a timestamp, the first one has none: give all lines one, or none")
        timestamp = record.number("timestamp")
        if self._lines == 0:
            self._first_ms = timestamp
        elif timestamp < self._last_ms:
            raise record.error(f"timestamps must not decrease: {timestamp:g} ms after {self._last_ms:g} ms; sort the file")
        self._last_ms = timestamp
        return (timestamp - self._first_ms) / 1000 / self._rate
