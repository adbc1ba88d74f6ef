"""What a log of lengths is: how it is recognised, and how its lines are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvsim.trace.dates import date_s, stamp
from kvsim.trace.records import Record


class Asked(NamedTuple):
    """A request as logged."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    session: str | int | None
    kind: str


@dataclass(frozen=True)
class LengthLog:
    """A kind of log that tells how long prompts and answers are, but nothing of what they share."""

    name: str
    """What it is called."""
    fields: tuple[str, ...]
    """Fields that its first record has; ``a.b`` is the field b of the object in a."""
    read: Callable[[Record, int], Iterator[Asked]]
    """Yields the requests of a line, given the most tokens of each. Raises TraceError."""


class Columns(NamedTuple):
    """Where a log of one request a line has what."""

    time: str
    seconds: float
    """Unit of the time in seconds; 0 for dates."""
    prompt: str
    output: str
    session: str = ""
    kind: str = ""

    def read(self, record: Record, max_tokens: int) -> Iterator[Asked]:
        """Yield the request of a line, none if it has no prompt tokens."""
        if prompt_tokens := record.tokens(self.prompt, max_tokens):
            yield Asked(
                arrival_s=stamp(record, self.time, self.seconds) * self.seconds if self.seconds else date_s(record, self.time),
                prompt_tokens=prompt_tokens,
                output_tokens=record.tokens(self.output, max_tokens) if record.has(self.output) else 1,
                session=record.name(self.session) if self.session and record.has(self.session) else None,
                kind=str(record.name(self.kind)) if self.kind and record.has(self.kind) else "",
            )


def log_of_columns(name: str, columns: Columns, *others: str) -> LengthLog:
    """Return a log of one request a line; its first line also has the fields ``others``."""
    return LengthLog(name, (columns.time, columns.prompt, *others), partial(Columns.read, columns))


def count(record: Record, name: str, value: object, max_tokens: int) -> int:
    """Return a number of tokens from inside a record, which an error calls ``name``. Raises TraceError."""
    return Record(record.path, record.line, {name: value}).tokens(name, max_tokens)
