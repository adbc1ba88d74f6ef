"""Logs that contain only the lengths of prompts and answers. Shared prefixes can be synthesized; the trace then says so."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from kvsim.core.request import Request
from kvsim.errors import TraceError
from kvsim.numbers import Real, Whole, check_settings
from kvsim.pages.extents import Extent, append_extent, count_pages, split_extents
from kvsim.trace.aiperf_results import AIPERF_RESULTS
from kvsim.trace.base import Trace, check_page_tokens, refuse_bigram
from kvsim.trace.bench_results import BENCH_RESULTS
from kvsim.trace.blocks import BlockPages
from kvsim.trace.file_trace import FileTrace
from kvsim.trace.length_logs import Asked, Columns, LengthLog, log_of_columns
from kvsim.trace.records import Record
from kvsim.trace.spans import SPANS

LOGS = (
    log_of_columns("Azure's LLM inference trace", Columns("TIMESTAMP", 0, "ContextTokens", "GeneratedTokens"), "GeneratedTokens"),
    log_of_columns(
        "BurstGPT",
        Columns("Timestamp", 1, "Request tokens", "Response tokens", "Session ID", "Log Type"),
        "Response tokens",
    ),
    AIPERF_RESULTS,
    BENCH_RESULTS,
    *SPANS,
    log_of_columns("a log of lengths", Columns("timestamp", 0.001, "input_length", "output_length", "session_id", "type")),
)
"""Azure/AzurePublicDataset and HPMLL/BurstGPT as CSV, results of clients, spans; JSON Lines without ids of blocks, as AIPerf also
has them."""


@dataclass(kw_only=True)
class Lengths(FileTrace):
    """Reads logs of lengths: the CSV files of Azure's LLM inference trace and of BurstGPT, results of AIPerf, vLLM's and SGLang's
    benchmarks, OpenTelemetry's spans of requests to models, and lines without ids of blocks.

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
        log = _log(first)
        if self.prefixes is None:
            raise TraceError(
                self.path,
                None,
                f"{log.name} tells how long prompts are, but not what they share, so there is nothing to hit: use a log with "
                "token ids or hashes, or make prefixes up with trace.prefixes=0.5 (the probability that a prompt continues an "
                "earlier one); results are then marked",
            )
        asked = [row for record in chain([first], records) for row in log.read(record, self.max_tokens)]
        if not asked:
            raise TraceError(self.path, None, "no row has prompt tokens")
        if self.rate != 1 and len({row.arrival_s for row in asked}) == 1 < len(asked):
            raise TraceError(self.path, None, "rate has no effect: all requests have the same time; leave out trace.rate")
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


def _log(record: Record) -> LengthLog:
    """Return the kind of log that has the fields of this record. Raises TraceError."""
    names = record.names()
    log = next((log for log in LOGS if all(name in names for name in log.fields)), None)
    if log is None:
        raise record.error(f"needs the fields {' or '.join(', '.join(known.fields) for known in LOGS)}")
    return log
