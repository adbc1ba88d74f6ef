"""Arrival times of the requests of a JSON Lines trace: at timestamps, or some time after the session's previous answer."""

from typing import NamedTuple

from kvsim.trace.records import Record


class Place(NamedTuple):
    """The position of a line in time and in its session; the fields are those of Request."""

    arrival_s: float
    after: int
    delay_s: float
    session: int
    turn: int


class Timetable:
    """Places the lines of a file, one after another, by these fields:

    timestamp     milliseconds; must not decrease; the first one in the file is time 0
    session_id    a string or an integer; lines with the same value are the turns of one session
    delay         milliseconds, from a session's second turn on: the request waits for the answer to the previous turn, and
                  then for this time. Its timestamp, if any, only determines its place among the other requests.

    A line needs a timestamp or, from the second turn on, a delay. With ``timestamps_optional``, if the first line of the file
    has no timestamp, no line may have one: a line then arrives at time 0, or its delay after the previous turn.
    """

    def __init__(self, rate: float, *, timestamps_optional: bool = False) -> None:
        self._rate = rate
        self._timestamps_optional = timestamps_optional
        self._timed = True
        self._lines = 0
        self._first_ms = 0.0
        self._last_ms = 0.0
        self._sessions: dict[str | int, int] = {}
        self._turns: list[tuple[int, int, float]] = []  # per session: number of turns, line and arrival of the last turn

    def place(self, record: Record) -> Place:
        """Return the place of the next line; its ``after`` is a line number, from 0. Raises TraceError for bad fields."""
        if self._lines == 0:
            self._look_for_timestamps(record)
        session, turn, previous, previous_s = self._previous(record)
        timestamp_s = self.timestamp_s(record)
        if turn and record.has("delay"):
            delay_s = record.number("delay") / 1000
            arrival_s = previous_s + delay_s if timestamp_s is None else timestamp_s
            place = Place(arrival_s, previous, delay_s, session, turn)
        elif timestamp_s is not None or not self._timed:
            place = Place(timestamp_s or 0.0, -1, 0.0, session, turn)
        else:
            raise record.error("timestamp is missing; only a later turn of a session may have a delay instead")
        if session >= 0:
            self._turns[session] = turn + 1, self._lines, place.arrival_s
        self._lines += 1
        return place

    def _look_for_timestamps(self, record: Record) -> None:
        """Decide from the first line whether the file has timestamps."""
        self._timed = record.has("timestamp") or not self._timestamps_optional
        if not self._timed and self._rate != 1:
            raise record.error(f"rate={self._rate} has no effect on a file without timestamps; leave it at 1")

    def _previous(self, record: Record) -> tuple[int, int, int, float]:
        """Return the line's session and turn, and the line number and arrival of the previous turn."""
        if not record.has("session_id"):
            return -1, 0, -1, 0.0
        session = self._sessions.setdefault(record.name("session_id"), len(self._sessions))
        if session == len(self._turns):
            self._turns.append((0, -1, 0.0))
        return session, *self._turns[session]

    def timestamp_s(self, record: Record) -> float | None:
        """Return the seconds from the first timestamp to this line's at the requested rate; None if the line has none.

        Raises TraceError for a bad timestamp, and for one before that of an earlier line.
        """
        if not record.has("timestamp"):
            return None
        if not self._timed:
            raise record.error("this line has a timestamp but the first line has none: give all lines a timestamp, or no line")
        timestamp = record.number("timestamp")
        if self._lines == 0:
            self._first_ms = timestamp
        elif timestamp < self._last_ms:
            raise record.error(f"timestamps must not decrease: {timestamp:g} ms after {self._last_ms:g} ms; sort the file")
        self._last_ms = timestamp
        return (timestamp - self._first_ms) / 1000 / self._rate
