"""Lines of a log that grows, in any format that the readers of traces know or that SGLang exports, to live requests."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec

from kvsim.errors import TraceError
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.sources.blocks import Blocks
from kvsim.shadow.sources.prompts import Prompts, Told
from kvsim.shadow.sources.salt import Salt
from kvsim.shadow.sources.sglang_export import read_export
from kvsim.trace.dates import stamp
from kvsim.trace.hashed import HashedTrace
from kvsim.trace.lines import reader_of
from kvsim.trace.records import Record
from kvsim.trace.text import TextTrace

EXPORTED = "request_parameters"
"""The field that lines of SGLang's export have, and no trace."""
STAMPS = {"timestamp": None, "created_time": None, "request_received_ts": 1.0}
"""Fields that say when a request arrived, with the unit in seconds; None: that of the format. The last one is SGLang's."""
Read = Callable[[Record, Told], Iterator[LiveRequest]]


@dataclass(frozen=True)
class Line:
    """A line of a log."""

    path: str
    number: int
    text: bytes


class Lines:
    """Reads the lines of one log, whose first one that can be read shows the format of all."""

    def __init__(self, page_tokens: int, salt: Salt, prompts: Prompts) -> None:
        self._page_tokens = page_tokens
        self._salt = salt
        self._prompts = prompts
        self._read: Read | None = None
        self._unit_s = 0.001
        self._last_s = 0.0
        self._after_reset = False

    def read(self, line: Line, now_s: float) -> list[LiveRequest]:
        """Return the requests of a line, ``now_s`` being the time if it has none.

        Raises TraceError for a line that cannot be read, and UsageError for a log of a format that does not tell requests.
        """
        try:
            record = Record(line.path, line.number, msgspec.json.decode(line.text))
        except (ValueError, RecursionError):
            raise TraceError(line.path, line.number, "not JSON") from None
        if "reset" in record.fields:
            self._after_reset = True
            return []
        if self._read is None:
            self._read = self._reader(record)
        found = list(self._read(record, self._told(record, now_s)))
        if found and self._after_reset:
            found[0], self._after_reset = found[0]._replace(after_reset=True), False
        return found

    def _told(self, record: Record, now_s: float) -> Told:
        name = next((name for name in STAMPS if record.has(name)), None)
        unit_s = self._unit_s if name is None else STAMPS[name] or self._unit_s
        at_s = now_s if name is None else stamp(record, name, unit_s) * unit_s
        self._last_s = max(self._last_s, at_s)
        session = str(record.name("session_id")) if record.has("session_id") else None
        return Told(self._last_s, session)

    def _reader(self, record: Record) -> Read:
        """Return what reads lines like this one. Raises TraceError, and UsageError for a format that no log has."""
        if EXPORTED in record.fields:
            return partial(read_export, self._prompts)
        reader = reader_of(record)
        self._unit_s = reader.STAMP_S
        if isinstance(reader, HashedTrace):
            return Blocks(reader, self._page_tokens, self._salt).read
        if isinstance(reader, TextTrace):
            return partial(self._prompts.of_text, reader=reader)
        return self._prompts.of_tokens
