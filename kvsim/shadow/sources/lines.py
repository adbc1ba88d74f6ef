"""Lines of a log that grows, in any format that the readers of traces know or that SGLang exports, to live requests."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import msgspec

from kvsim.errors import TraceError, UsageError
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.sources.blocks import Blocks
from kvsim.shadow.sources.prompts import Prompts, Told, with_requests_of_a_log
from kvsim.shadow.sources.salt import Salt
from kvsim.shadow.sources.sglang_export import read_export
from kvsim.trace.bailian import Bailian
from kvsim.trace.formats import FORMATS, Format
from kvsim.trace.hashed import HashedTrace
from kvsim.trace.lmcache import LMCache
from kvsim.trace.records import AT_LEAST_ONE, MILLISECONDS, Record
from kvsim.trace.text import TextTrace
from kvsim.trace.tokens import Tokens

EXPORTED = "request_parameters"
"""The field that lines of SGLang's export have, and no trace."""
IN_SECONDS = (Bailian, LMCache)
"""Formats whose timestamps are seconds; those of the others are milliseconds."""
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
        self.format = ""
        """The name of the format; empty as long as it is not known."""
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
        at_s = now_s if name is None else record.number(name, MILLISECONDS) * (STAMPS[name] or self._unit_s)
        self._last_s = max(self._last_s, at_s)
        session = str(record.name("session_id")) if record.has("session_id") else None
        return Told(self._last_s, session)

    def _reader(self, record: Record) -> Read:
        """Return what reads lines like this one. Raises TraceError, and UsageError for a format that no log has."""
        if EXPORTED in record.fields:
            self.format = "sglang"
            return partial(read_export, self._prompts)
        known = next((one for one in FORMATS if not one.missing(record.fields)), None)
        if known is None:
            raise record.error(f"unknown format: it has neither {EXPORTED} nor the fields of a trace with prompts")
        self.format = known.name
        if known.reader in IN_SECONDS:
            self._unit_s = 1.0
        if issubclass(known.reader, HashedTrace):
            return Blocks(_built(known, record), self._page_tokens, self._salt).read
        if issubclass(known.reader, TextTrace):
            return partial(self._prompts.of_text, reader=with_requests_of_a_log(known.reader(path=record.path)))
        if issubclass(known.reader, Tokens):
            return self._prompts.of_tokens
        raise UsageError(f"log: {record.path} is a trace={known.name}, whose lines are no single requests: replay it")


def _built(known: Format, record: Record) -> HashedTrace:
    """Return a reader of block ids with the size of blocks that the first line shows. Raises TraceError."""
    size = known.block_size
    shown: dict[str, Any] = {"block_tokens": record.integer(size, AT_LEAST_ONE)} if size and record.has(size) else {}
    reader = known.reader(path=record.path, **shown)  # type: ignore[call-arg]
    assert isinstance(reader, HashedTrace) and "block_tokens" in {one.name for one in fields(reader)}
    return reader
