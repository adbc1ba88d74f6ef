"""Logs that contain only the lengths of prompts and answers. Shared prefixes can be synthesized; the trace then says so."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvsim.core.request import Request
from kvsim.errors import TraceError
from kvsim.numbers import Real, Whole, check_settings
from kvsim.pages.extents import Extent, append_extent, count_pages, split_extents
from kvsim.trace.base import Trace, check_page_tokens, refuse_bigram
from kvsim.trace.blocks import BlockPages
from kvsim.trace.file_trace import FileTrace
from kvsim.trace.records import Record, shown


class Columns(NamedTuple):
    """Where a kind of log has what."""

    log: str
    """What it is called."""
    time: str
    seconds: float
    """Unit of the time in seconds; 0 for dates."""
    prompt: str
    output: str
    session: str
    kind: str


LOGS = (
    Columns("Azure's LLM inference trace", "TIMESTAMP", 0, "ContextTokens", "GeneratedTokens", "", ""),
    Columns("BurstGPT", "Timestamp", 1, "Request tokens", "Response tokens", "Session ID", "Log Type"),
    Columns("a log of lengths", "timestamp", 0.001, "input_length", "output_length", "session_id", "type"),
)
"""Azure/AzurePublicDataset and HPMLL/BurstGPT as CSV; JSON Lines without ids of blocks, as AIPerf also has them."""
FRACTION = re.compile(r"(\.\d{6})\d+")


class Asked(NamedTuple):
    """A request as logged."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    session: str | int | None
    kind: str


@dataclass(kw_only=True)
class Lengths(FileTrace):
    """Reads logs of lengths: the CSV files of Azure's LLM inference trace and of BurstGPT, and lines without ids of blocks.

    Such a log does not say which prompts share a prefix. Without ``prefixes`` it is refused; with it, prefixes are synthetic:

        a later turn of a session     continues the prompt and the answer of the turn before it
        any other request             with probability ``prefixes``, continues those of an earlier request: the k-th last one,
                                      with k log-uniform, so that recent ones are likelier
        the rest of a prompt          is shared with no earlier request

    A prompt no longer than what it continues is a prefix of it. The result has a note (``Trace.note``). Rows need not be sorted;
    rows without prompt tokens are left out. ``limit`` keeps the requests that arrive first.
    """

    prefixes: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_bigram(self.bigram)
        check_settings(
            self, Real(least=0, most=1), "prefixes", or_null=True, hint="it is the probability that a prompt is continued"
        )
        check_settings(self, Whole(), "seed")

    def load(self, page_tokens: int) -> Trace:
        check_page_tokens(page_tokens)
        records = self.read()
        first = next(records)
        columns = _columns(first)
        if self.prefixes is None:
            raise TraceError(
                self.path,
                None,
                f"{columns.log} tells how long prompts are, but not what they share, so there is nothing to hit: use a log with "
                "token ids or hashes, or make prefixes up with trace.prefixes=0.5 (the probability that a prompt continues an "
                "earlier one); results are then marked",
            )
        asked = list(_rows(first, records, columns, self.max_tokens))
        if not asked:
            raise TraceError(self.path, None, "no row has prompt tokens")
        asked = sorted(asked, key=lambda row: row.arrival_s)[: self.limit]
        return Trace(
            name=Path(self.path).name,
            requests=self.in_order(self._requests(asked, page_tokens, self.prefixes)),
            page_tokens=page_tokens,
            block_tokens=None,
            note=f"prefixes are synthetic: a prompt continues an earlier one with probability {self.prefixes:g} (trace.prefixes)",
        )

    def _requests(self, asked: Sequence[Asked], page_tokens: int, prefixes: float) -> list[Request]:
        pages = BlockPages(1, page_tokens, partial_tail=False)
        sessions: dict[str | int, int] = {}
        turns: dict[int, list[int]] = {}
        texts: list[tuple[Extent, ...]] = []  # prompt and answer of each request, as extents of token numbers
        used = 0
        requests = []
        for number, (row, draw) in enumerate(zip(asked, np.random.default_rng(self.seed).random((len(asked), 2)), strict=True)):
            session = -1 if row.session is None else sessions.setdefault(row.session, len(sessions))
            before = turns.setdefault(session, []) if session >= 0 else []
            earlier = before[-1] if before else _earlier(number, draw, prefixes)
            text, used = _continued(texts[earlier] if earlier >= 0 else (), row, used)
            prompt, prompt_pages = pages.lookup(text, row.prompt_tokens)
            whole, _ = pages.lookup(text, row.prompt_tokens + max(row.output_tokens - 1, 0))
            requests.append(
                Request(
                    index=0,
                    arrival_s=(row.arrival_s - asked[0].arrival_s) / self.rate,
                    prompt_tokens=row.prompt_tokens,
                    output_tokens=row.output_tokens,
                    runs=prompt,
                    prompt_pages=prompt_pages,
                    session=session,
                    turn=len(before),
                    kind=row.kind,
                    output_runs=split_extents(whole, count_pages(prompt))[1],
                )
            )
            texts.append(text)
            before.append(number)
        return requests


def _earlier(number: int, draw: np.ndarray, prefixes: float) -> int:
    """Return the request that request ``number`` continues; -1 for none."""
    if not number or draw[0] >= prefixes:
        return -1
    return number - min(int((number + 1) ** draw[1]), number)


def _continued(before: tuple[Extent, ...], row: Asked, used: int) -> tuple[tuple[Extent, ...], int]:
    """Return prompt and answer as extents of token numbers, and how many numbers are used: one more for each token of its own."""
    text = list(split_extents(before, row.prompt_tokens)[0])
    own = row.prompt_tokens + row.output_tokens - count_pages(text)
    if own:
        append_extent(text, used, own)
    return tuple(text), used + own


def _columns(record: Record) -> Columns:
    """Return the kind of log that has the fields of this record. Raises TraceError."""
    for columns in LOGS:
        if record.has(columns.prompt) and record.has(columns.time):
            return columns
    raise record.error(f"needs the columns {' or '.join(f'{log.time}, {log.prompt}, {log.output}' for log in LOGS)}")


def _rows(first: Record, records: Iterator[Record], columns: Columns, max_tokens: int) -> Iterator[Asked]:
    for record in (first, *records):
        if not (prompt_tokens := record.tokens(columns.prompt, max_tokens)):
            continue
        yield Asked(
            arrival_s=record.number(columns.time) * columns.seconds if columns.seconds else _date_s(record, columns.time),
            prompt_tokens=prompt_tokens,
            output_tokens=record.tokens(columns.output, max_tokens) if record.has(columns.output) else 1,
            session=record.name(columns.session) if columns.session and record.has(columns.session) else None,
            kind=str(record.name(columns.kind)) if columns.kind and record.has(columns.kind) else "",
        )


def _date_s(record: Record, name: str) -> float:
    """Return a date as seconds; digits after the microseconds are left out."""
    try:
        return datetime.fromisoformat(FRACTION.sub(r"\1", str(record.name(name)))).timestamp()
    except (ValueError, OverflowError):
        raise record.error(f"{name} must be a date such as 2023-11-16 18:15:46.68, not {shown(record.fields[name])}") from None
