"""What is known of each request of a run: the one table of the columns of ``requests.csv.gz``.

The engine records by this table, files are written and read by it, and comparisons, Weights & Biases, ``kvsim help`` and the
reference read it. A new column is a row here and the line that fills it: a formula (``of``), or an assignment to
``Book.columns`` where the engine knows the value.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.core.request import Request
from kvsim.core.requests import values_of
from kvsim.engine.outcome import FINISHED, REJECTED, SHED
from kvsim.engine.tier_rows import TierRows

if TYPE_CHECKING:
    from kvsim.engine.outcome import Outcome

TIER = "{tier}"
"""Stands for the name of a tier in the heading of a column that there is one of for each tier."""
SAME, COMPARED = "same", "compared"
"""Who compares a column: runs of the same requests are equal in it, or a validation compares what two such runs have in it."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column, or one for each tier of the run. Values are one per request; of a column by tier, one row per request."""

    name: str
    """Its key in ``Outcome.columns``; also its heading, unless that differs."""
    heading: str = ""
    kind: type = float
    """What its cells are read as: int, float or str. Of numbers, a missing one is nan."""
    unit: str = ""
    missing: Any = nan
    """What is recorded where nothing is known; its cell is empty, unless ``has_gaps`` is False."""
    code: str = ""
    """The type of the array in which the values are recorded, of one per request (as for ``array.array``); by default, floats and
    whole numbers take eight bytes."""
    has_gaps: bool = True
    """Whether the missing value is written as an empty cell."""
    meaning: str
    of: "Callable[[Outcome], Any] | None" = None
    """What is written; without it, what was recorded."""
    is_recorded: bool = True
    """Whether the engine records it. Otherwise it follows from other columns or from the trace."""
    is_kept_if_rejected: bool = False
    """Whether it is known of a rejected or shed request, too."""
    is_of_trace: bool = False
    """Whether all runs over the same trace are equal in it."""
    is_below_gpu: bool = False
    """Whether the GPU has no column of its own, of a column by tier."""
    exists: "Callable[[Outcome], bool] | None" = None
    """Whether a run has the column; without it, every run has."""
    compared: str = ""
    """``SAME``, ``COMPARED``, or empty: nobody compares it."""
    is_logged: bool = True
    """Whether Weights & Biases gets it."""

    @property
    def is_by_tier(self) -> bool:
        """Whether there is one for each tier."""
        return TIER in self.heading

    @property
    def kind_name(self) -> str:
        """Its type and unit, for readers."""
        name = {int: "whole number", float: "number", str: "text"}[self.kind]
        return f"{name}, {self.unit}" if self.unit else name

    def headings(self, tiers: Sequence[str]) -> list[str]:
        """Return its headings in a run with these tiers, from the top down."""
        if not self.is_by_tier:
            return [self.heading or self.name]
        return [self.heading.replace(TIER, tier) for tier in (tiers[1:] if self.is_below_gpu else tiers)]

    def blank(self, requests: int) -> Any:
        """Return what values are recorded in, one by one, by position, where nothing is known yet."""
        if self.is_by_tier:
            return TierRows(requests, self.missing)
        return array(self._code, [self.missing]) * requests

    @property
    def _code(self) -> str:
        return self.code or ("d" if isinstance(self.missing, float) else "q")

    def array(self, values: Sequence[Any] | TierRows | np.ndarray | None, requests: int, tiers: int) -> np.ndarray:
        """Return recorded values as an array; without values, and for tiers that a row leaves out, what is missing.

        It shares the memory of what is recorded one by one (``blank``).
        """
        width = tiers - self.is_below_gpu
        shape = (requests, width) if self.is_by_tier else (requests,)
        if values is None:
            return np.full(shape, self.missing, dtype=self._code)
        if isinstance(values, TierRows):
            return values.array(width)
        if isinstance(values, array):
            return np.asarray(values)
        return np.array(values, dtype=self._code).reshape(shape)


def recorded(requests: Sequence[Request], tiers: int, known: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return what a run has recorded of its requests, by column; ``known`` has the columns that the run knows anything of.

    What is known of a rejected request that had begun, since persistent prompts left it no room only then, is removed; of one
    that was shed, nothing more is known either.
    """
    rows = [column for column in COLUMNS if column.is_recorded]
    columns = {column.name: column.array(known.get(column.name), len(requests), tiers) for column in rows}
    rejected = columns["status"] != FINISHED
    for column in rows:
        if not column.is_kept_if_rejected:
            columns[column.name][rejected] = column.missing
    return columns


def prompt_tokens(outcome: "Outcome") -> np.ndarray:
    """Return the prompt tokens of each request."""
    return of_requests(outcome, "prompt_tokens")


def of_requests(outcome: "Outcome", name: str) -> np.ndarray:
    """Return a field of all requests of a run that is a whole number."""
    return np.fromiter(values_of(outcome.requests, name), np.int64, len(outcome.requests))


def hit_tokens(outcome: "Outcome", prompts: np.ndarray | None = None) -> np.ndarray:
    """Return the prompt tokens each request reused: one row per request, one column per tier, from the top down.

    ``prompts`` is ``prompt_tokens(outcome)``, if already computed. A full page counts ``page_tokens``, a trailing partial page
    only its own tokens, so hits never exceed the prompt; hits in the tiers follow one another along the prompt.
    """
    prompts = prompt_tokens(outcome) if prompts is None else prompts
    so_far = np.cumsum(outcome.hit_pages, axis=1, dtype=np.int64) * outcome.page_tokens
    return np.diff(np.minimum(so_far, prompts[:, None]), axis=1, prepend=0)


def _written_pages(outcome: "Outcome") -> np.ndarray:
    pages = outcome.hit_pages.copy()
    pages[outcome.status != FINISHED, 0] = -1
    return pages


COLUMNS: list[Column] = [
    Column(
        name="request", kind=int, missing=-1, is_recorded=False, is_of_trace=True,
        meaning="its number in order of arrival, from 0",
        of=lambda outcome: np.arange(len(outcome.requests)),
    ),
    Column(
        name="prompt_pages", kind=int, unit="pages", missing=-1, is_recorded=False, is_of_trace=True, compared=SAME,
        is_logged=False, meaning="pages of its prompt",
        of=lambda outcome: of_requests(outcome, "prompt_pages"),
    ),
    Column(
        name="hit_pages", heading="hit_pages_{tier}", kind=int, unit="pages", missing=0, has_gaps=False, compared=COMPARED,
        is_logged=False, meaning="pages reused, by tier; `hit_pages_gpu` is -1 for a rejected or shed request", of=_written_pages,
    ),
    Column(
        name="prompt_tokens", kind=int, unit="tokens", missing=-1, is_recorded=False, is_of_trace=True, compared=SAME,
        meaning="tokens of its prompt", of=prompt_tokens,
    ),
    Column(
        name="output_tokens", kind=int, unit="tokens", missing=-1, is_recorded=False, is_of_trace=True, compared=SAME,
        meaning="tokens of its answer; with several samples, of each",
        of=lambda outcome: of_requests(outcome, "output_tokens"),
    ),
    Column(
        name="hit_tokens", heading="hit_tokens_{tier}", kind=int, unit="tokens", missing=0, has_gaps=False, is_recorded=False,
        meaning="tokens reused, by tier; 0 for a rejected or shed request",
        of=hit_tokens,
    ),
    Column(
        name="arrival_s", unit="s", is_kept_if_rejected=True, meaning="when it arrived, counted from the start of the trace",
    ),
    Column(
        name="ttft_s", unit="s", compared=COMPARED,
        meaning="time from its arrival to its first token; with several samples, that of the first one",
    ),
    Column(
        name="tpot_s", unit="s", compared=COMPARED,
        meaning="mean time per output token after the first; none for an answer of one token. With several samples, that of "
        "the last one to end",
    ),
    Column(
        name="e2e_s", unit="s", meaning="time from its arrival to its last token; with several samples, until all have ended",
    ),
    Column(
        name="first_token_s", unit="s", is_recorded=False, is_logged=False,
        meaning="when its first token was generated, counted from the start of the trace",
        of=lambda outcome: outcome.arrival_s + outcome.ttft_s,
    ),
    Column(
        name="last_token_s", unit="s", is_recorded=False, is_logged=False,
        meaning="when its last token was generated, counted from the start of the trace",
        of=lambda outcome: outcome.arrival_s + outcome.e2e_s,
    ),
    Column(
        name="read_s", heading="{tier}_load_s", unit="s", is_below_gpu=True, is_logged=False,
        meaning="time in which its own reads from the tier were under way; 0 if there were none",
    ),
    Column(
        name="retractions", kind=int, missing=-1, code="i", is_kept_if_rejected=True, is_logged=False,
        meaning="how often it was retracted; none in a replay",
    ),
    Column(
        name="status", kind=str, missing=FINISHED, code="b", has_gaps=False, is_kept_if_rejected=True, compared=SAME,
        meaning="`finished`, `rejected` or, refused by the [admission policy](admission.md), `shed`",
        of=lambda outcome: np.select([outcome.status == REJECTED, outcome.status == SHED], ["rejected", "shed"], "finished"),
    ),
    Column(
        name="engine", kind=int, missing=-1, code="i", is_logged=False, meaning="number of the engine that computed its prompt",
    ),
    Column(
        name="decoder", kind=int, missing=-1, code="i", is_logged=False,
        meaning="number of the engine that completed its answer; only where prefill and decode are apart",
        exists=lambda outcome: outcome.is_disaggregated,
    ),
    Column(
        name="session", kind=int, missing=-1, is_recorded=False, is_of_trace=True,
        meaning="number of its conversation, if the trace has any",
        of=lambda outcome: of_requests(outcome, "session"),
    ),
    Column(
        name="turn", kind=int, missing=-1, is_recorded=False, is_of_trace=True,
        meaning="its position in the conversation, from 0",
        of=lambda outcome: np.where(of_requests(outcome, "session") >= 0, of_requests(outcome, "turn"), -1),
    ),
    Column(
        name="type", kind=str, missing="", is_recorded=False, is_of_trace=True, meaning="its type, if the trace names one",
        of=lambda outcome: list(values_of(outcome.requests, "kind")),
    ),
    Column(name="queue_s", unit="s", meaning="the [phases](#phases) that `ttft_s` consists of: in the queue"),
    Column(name="load_s", unit="s", meaning="then with pages still being loaded"),
    Column(
        name="prefill_s", unit="s", is_recorded=False, meaning="then until the first token",
        of=lambda outcome: outcome.phases_s[:, -1],
    ),
]  # fmt: skip
"""All columns, in the order of the file."""
