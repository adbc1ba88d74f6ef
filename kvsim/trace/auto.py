"""A trace file of whatever format its first record shows."""

from dataclasses import dataclass, fields

from kvsim.trace.base import Trace, TraceSource
from kvsim.trace.file_trace import FileTrace
from kvsim.trace.formats import recognise


@dataclass(kw_only=True)
class Auto(FileTrace):
    """Recognises the format of a file and reads it as ``trace=NAME`` of that format does, with the same settings.

    A setting that is null has the value that the first record shows (the size of blocks), or the format's own default. One that
    the format does not have must be null.
    """

    tail: str | None = None
    block_tokens: int | None = None
    turns: str | None = None
    answers: str | None = None
    arrivals: str | None = None
    concurrent_sessions: int | None = None
    output_tokens: int | None = None
    tokenizer: str | None = None
    prefixes: float | None = None
    seed: int = 0
    requests: str | None = None
    sessions_per_s: float | None = None
    pause_s: float | None = None

    def resolved(self) -> TraceSource:
        """Return the recognised format with these settings. Raises TraceError, and ValueError for a setting without effect."""
        known, shown = recognise(self.path, self.max_line_bytes, self.columns)
        own = {field.name for field in fields(known.reader)}
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        if "seed" not in own:  # follows that of the run
            given.pop("seed", None)
        for name in given:
            if name not in own:
                raise ValueError(f"{name} has no effect on {self.path}, a file of trace={known.name}: leave it out")
        return known.reader(**shown | given)

    def load(self, page_tokens: int) -> Trace:
        return self.resolved().load(page_tokens)
