"""The common part of traces that are read from a file."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.request import Request
from kvsim.numbers import Whole, check_settings
from kvsim.trace.base import TraceSource, check_times, in_order_of_arrival
from kvsim.trace.columns import check_columns, renamed
from kvsim.trace.records import MAX_LINE_BYTES, Record, read_records
from kvsim.trace.spreading import spread_arrivals
from kvsim.trace.stored import StoredRequests, gathered


@dataclass(kw_only=True)
class FileTrace(TraceSource):
    """A trace that is one file."""

    STAMP_S: ClassVar[float] = 0.001
    """The unit of the timestamps of its lines, in seconds."""
    IS_LINE: ClassVar[bool] = False
    """Whether a line is one request with its whole prompt, whatever the lines around it are."""
    OF_ARRIVALS: ClassVar[tuple[str, ...]] = ("path", "max_line_bytes", "spread")

    path: str
    max_line_bytes: int = MAX_LINE_BYTES
    """The longest line, or element of a JSON array, and the longest stretch of blank lines; it bounds the memory that is used."""
    spread: bool = False
    """Whether requests with equal arrivals are spread over the time to the next one; see spreading.py."""

    columns: dict[str, str] | None = None
    """What the file calls fields of its format; see columns.py."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_columns(self.columns or {})
        check_settings(self, Whole(1), "max_line_bytes")
        if "\0" in self.path:
            raise ValueError(f"path must be the name of a file, which has no NUL character: {self.path!r}")
        try:
            self.path.encode()
        except UnicodeEncodeError:
            raise ValueError(f"path must be UTF-8 text, not {self.path!r}: rename the file") from None

    def files(self) -> list[str]:
        return [self.path]

    def in_order(self, requests: Iterable[Request]) -> list[Request] | StoredRequests:
        """Return the requests as ``in_order_of_arrival`` does, spread if that is asked for. Raises TraceError and UsageError.

        More of them than memory should have are kept in a file, as they come; to spread them takes all in memory.
        """
        if not self.spread:
            return in_order_of_arrival(gathered(requests))
        known = list(requests)
        check_times(known)
        spread_arrivals(known, self.path)
        return in_order_of_arrival(known)

    def read(self, limit: int | None = None) -> Iterator[Record]:
        """Yield the records of the file, only the first ``limit`` if given. Raises TraceError."""
        records = read_records(self.path, limit, self.max_line_bytes)
        return renamed(records, self.columns) if self.columns else records
