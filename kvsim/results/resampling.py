"""The noise of a run's numbers, from its own requests: a paired block bootstrap, without further runs.

Requests of a session, and requests that follow each other, are not independent, so whole blocks are drawn again with replacement:
the sessions of the trace or, where it has none, stretches of consecutive requests (Künsch, 1989). Runs of the same requests are
resampled with the same draws, so that what makes both better or worse cancels out in their difference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvsim.results.statistics import CONFIDENCE

DRAWS = 1000
SEED = 20_240_229
"""Fixed, so that the same runs give the same page."""
STRETCHES = 50
"""Stretches of a trace without sessions."""
FEWEST_BLOCKS, MOST_BLOCKS = 20, 1000
"""Of fewer blocks nothing is said; more sessions are drawn in groups."""
TAIL = 0.1
"""Share of the requests, the slowest ones, among which the 99th percentile is looked for first."""
CELLS = 4_000_000
"""The most numbers of draws times requests at once, 32 MB."""
Columns = Mapping[str, np.ndarray]
"""The columns of ``requests.csv.gz``."""
NEEDED = ("prompt_tokens", "prompt_pages", "ttft_s", "tpot_s", "status", "session")
"""Columns that are read, besides the hits of each tier."""


class Difference(NamedTuple):
    """A difference of two runs in a measure, and the ends of its 95 % interval."""

    of: float
    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        """Whether the difference may be chance."""
        return self.low <= 0 <= self.high


@dataclass(frozen=True, kw_only=True, eq=False)
class Resampled:
    """The measures of a run in each draw."""

    name: str
    """Equal for runs of the same requests, which have the same draws."""
    has_sessions: bool
    """Whether blocks are sessions; stretches of the trace otherwise."""
    draws: dict[str, np.ndarray]
    """By the key of the measure; those that are not known by request are missing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """The requests of a run that count."""

    columns: Columns
    block: np.ndarray
    """The block of each request."""
    blocks: int
    slo: Mapping[str, Any] | None

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of a value of each request over each draw."""
        return weights(self.blocks) @ np.bincount(self.block, values, self.blocks)


def resampled(record: Mapping[str, Any], columns: Columns) -> Resampled | None:
    """Draw the requests of a run with this record; None if there are too few to be divided into blocks."""
    first = int(record["warmup_requests"])
    counted = {name: column[first:] for name, column in columns.items()}
    block, has_sessions = blocks_of(counted["session"]) if "session" in counted else stretches(len(counted["status"]))
    blocks = int(block.max()) + 1 if len(block) else 0
    if blocks < FEWEST_BLOCKS:
        return None
    requests = Requests(columns=counted, block=block, blocks=blocks, slo=record.get("slo"))
    draws = {measure: values for measure, of in MEASURES.items() if (values := of(requests)) is not None}
    prompts = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(counted["prompt_tokens"]).tobytes())
    return Resampled(name=f"{first} {blocks} {prompts}", has_sessions=has_sessions, draws=draws)


def blocks_of(session: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return the block of each request, and whether blocks are sessions; a request without a session is one of its own."""
    alone = np.isnan(session)
    if len(np.unique(session[~alone])) + np.count_nonzero(alone) < FEWEST_BLOCKS or alone.all():
        return stretches(len(session))
    own = np.where(alone, -1.0 - np.arange(len(session)), session)
    _, first, block = np.unique(own, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    numbered = order[block]
    return (numbered if len(first) <= MOST_BLOCKS else numbered % MOST_BLOCKS), True


def stretches(requests: int) -> tuple[np.ndarray, bool]:
    """Return the stretch of each request. A stretch has at least two requests."""
    return np.arange(requests) * min(STRETCHES, requests // 2) // max(requests, 1), False


@cache
def weights(blocks: int) -> np.ndarray:
    """Return how often each draw (row) has each block (column)."""
    drawn = np.random.default_rng(SEED).multinomial(blocks, np.full(blocks, 1 / blocks), size=DRAWS)
    return drawn.astype(np.float64)


def difference(measure: str, values: tuple[float, float], one: Resampled | None, other: Resampled | None) -> Difference | None:
    """Return ``one - other`` in a measure, whose values are given; None unless the runs served the same requests."""
    if one is None or other is None or one.name != other.name:
        return None
    left, right = one.draws.get(measure), other.draws.get(measure)
    if left is None or right is None:
        return None
    low, high = np.nanpercentile(left - right, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Difference(values[0] - values[1], float(low), float(high))


# --- the measures ----------------------------------------------------------------------------------------------------


def _ratio(part: Callable[[Requests], np.ndarray], whole: Callable[[Requests], np.ndarray]) -> Callable[[Requests], Any]:
    """Return a measure that is a sum over the requests divided by another one."""

    def draws(requests: Requests) -> np.ndarray | None:
        below = requests.sums(whole(requests))
        return requests.sums(part(requests)) / below if (below > 0).all() else None

    return draws


def _served(requests: Requests) -> np.ndarray:
    served: np.ndarray = requests.columns["status"] == "finished"
    return served


def _hits(unit: str) -> Callable[[Requests], np.ndarray]:
    def hits(requests: Requests) -> np.ndarray:
        tiers = [column for name, column in requests.columns.items() if name.startswith(f"hit_{unit}_")]
        total: np.ndarray = np.sum(tiers, axis=0) * _served(requests)
        return total

    return hits


def _prompts(unit: str) -> Callable[[Requests], np.ndarray]:
    return lambda requests: requests.columns[f"prompt_{unit}"] * _served(requests)


def _times(name: str) -> Callable[[Requests], np.ndarray]:
    return lambda requests: np.nan_to_num(requests.columns[name])


def _timed(name: str) -> Callable[[Requests], np.ndarray]:
    return lambda requests: ~np.isnan(requests.columns[name])


def _met(requests: Requests) -> np.ndarray:
    """Return whether each request met the objectives of its run."""
    met = _served(requests)
    for name in ("ttft_s", "tpot_s"):
        if requests.slo and (limit := requests.slo[name]) is not None:
            late = requests.columns[name] > limit
            met = met & ~late
    return met


def _attainment(requests: Requests) -> np.ndarray | None:
    if requests.slo is None or requests.slo.get("by_class"):  # files of requests do not tell all classes
        return None
    shares: np.ndarray = requests.sums(_met(requests)) / requests.sums(np.ones(len(requests.block)))
    return shares


def _goodput(requests: Requests) -> np.ndarray | None:
    """Return goodputs: the run served all its requests in a time that resampling does not change."""
    shares = _attainment(requests)
    if shares is None or requests.slo is None or not requests.slo["attainment"]:
        return None
    per_s: float = requests.slo["goodput_requests_per_s"] / requests.slo["attainment"]
    return shares * per_s


def _slowest(name: str, quantile: float) -> Callable[[Requests], np.ndarray | None]:
    """Return a percentile of a time: the longest that is exceeded by no more than ``1 - quantile`` of the requests of a draw."""

    def draws(requests: Requests) -> np.ndarray | None:
        times = requests.columns[name]
        known = np.flatnonzero(~np.isnan(times))
        if not known.size:
            return None
        order = known[np.argsort(-times[known])]
        drawn = weights(requests.blocks)
        most = (1 - quantile) * requests.sums(_timed(name)(requests))
        found, open_draws = np.empty(len(drawn)), np.arange(len(drawn))
        for share in (TAIL, 1.0):
            part = order[: max(1, int(share * len(order)))]
            found[open_draws], is_known = _first_above(drawn[open_draws], requests.block[part], times[part], most[open_draws])
            open_draws = open_draws[~is_known]
        return found

    return draws


def _first_above(drawn: np.ndarray, block: np.ndarray, times: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each draw the first time with which more than ``most`` requests have been drawn, and whether there is one.

    ``block`` is the block of each time. Slices of the draws keep memory small.
    """
    found, is_known = np.empty(len(drawn)), np.empty(len(drawn), dtype=bool)
    step = max(1, CELLS // len(block))
    for begin in range(0, len(drawn), step):
        some = slice(begin, begin + step)
        counts = drawn[some][:, block]
        np.cumsum(counts, axis=1, out=counts)
        is_known[some] = counts[:, -1] > most[some]
        found[some] = times[np.argmax(counts > most[some, None], axis=1)]
    return found, is_known


MEASURES: dict[str, Callable[[Requests], np.ndarray | None]] = {
    "hit_rate": _ratio(_hits("tokens"), _prompts("tokens")),
    "page_hit_rate": _ratio(_hits("pages"), _prompts("pages")),
    "ttft_s_mean": _ratio(_times("ttft_s"), _timed("ttft_s")),
    "ttft_s_p99": _slowest("ttft_s", 0.99),
    "tpot_s_mean": _ratio(_times("tpot_s"), _timed("tpot_s")),
    "slo_attainment": _attainment,
    "goodput_requests_per_s": _goodput,
}
"""How a measure of each draw is computed, by the measure's key."""
