"""What the fields of a result are computed from, and the formulas that are longer than a line."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvsim.core.requests import values_of
from kvsim.engine.columns import hit_tokens, of_requests, prompt_tokens
from kvsim.engine.outcome import FINISHED, Outcome
from kvsim.results.rates import ratio, span_s, spread
from kvsim.results.slo import Slo
from kvsim.results.warnings import warnings

THROUGHPUT = ("offered_requests_per_s", "requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s")


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What the fields of a result are computed from."""

    outcome: Outcome
    given: Mapping[str, Any]
    """What the caller knows: the command, its configuration, and notes."""
    skipped: int
    """Number of leading requests that the warm-up leaves out."""
    slo: Slo

    @cached_property
    def counted(self) -> np.ndarray:
        """Whether each request counts."""
        counted: np.ndarray = np.arange(len(self.outcome.requests)) >= self.skipped
        return counted

    @cached_property
    def served(self) -> np.ndarray:
        """Whether each request counts and was served: it was neither rejected nor shed."""
        served: np.ndarray = self.counted & (self.outcome.status == FINISHED)
        return served

    @cached_property
    def prompts(self) -> np.ndarray:
        """Prompt tokens of each request."""
        return prompt_tokens(self.outcome)

    @cached_property
    def hits(self) -> np.ndarray:
        """Hit tokens of each request, one column per tier."""
        return hit_tokens(self.outcome, self.prompts)

    @cached_property
    def prompt_pages(self) -> np.ndarray:
        """Prompt pages of each request."""
        return of_requests(self.outcome, "prompt_pages")

    @cached_property
    def session_s(self) -> np.ndarray | None:
        """Seconds of each session that has finished, from its first arrival to its last token; None without sessions or a clock.

        A session has finished if all of its requests count and were served.
        """
        numbers = np.array([request.session for request in self.outcome.requests], dtype=np.int64)
        in_session, e2e_s = numbers >= 0, self.outcome.e2e_s
        if not in_session.any() or np.isnan(e2e_s).all():
            return None
        names, session = np.unique(numbers[in_session], return_inverse=True)
        begin_s, end_s = np.full(len(names), np.inf), np.full(len(names), -np.inf)
        np.fmin.at(begin_s, session, self.outcome.arrival_s[in_session])
        np.fmax.at(end_s, session, (self.outcome.arrival_s + e2e_s)[in_session])
        is_whole = np.bincount(session, ~self.served[in_session], len(names)) == 0
        seconds: np.ndarray = (end_s - begin_s)[is_whole]
        return seconds

    def by_tier(self, values: np.ndarray) -> dict[str, int]:
        """Return the sums over the requests that count, by tier."""
        return dict(zip(self.outcome.tier_names, values[self.served].sum(axis=0).tolist(), strict=True))

    def rate(self, hits: np.ndarray, prompts: np.ndarray) -> float | None:
        """Return the share of prompts that was hit, over the requests that count."""
        return ratio(int(hits[self.served].sum()), int(prompts[self.served].sum()))

    def hit_requests(self) -> int:
        """Return the number of requests that count and hit a page."""
        return int(np.count_nonzero(self.outcome.hit_pages[self.served].any(axis=1)))


def given(name: str) -> Callable[[Basis], Any]:
    """Return the formula of a field that the caller knows."""
    return lambda run: run.given.get(name)


def spread_of(name: str) -> Callable[[Basis], Any]:
    """Return the formula of the spread of a column over the requests that count."""
    return lambda run: spread(run.outcome.columns[name][run.served])


def sessions(run: Basis) -> int | None:
    """Return how many sessions have finished; None without sessions or a clock."""
    return None if run.session_s is None else len(run.session_s)


def session_s(run: Basis) -> dict[str, float | None] | None:
    """Return the spread of their times; None without sessions or a clock."""
    return None if run.session_s is None else spread(run.session_s)


def throughput(run: Basis) -> dict[str, float | None]:
    """Return requests and tokens finished per second, from the first counted arrival to the last finish.

    Requests are offered from the first counted arrival to the last one.
    """
    outcome = run.outcome
    timed, seconds = run.served & ~np.isnan(outcome.e2e_s), span_s(outcome, run.counted)
    output = int((of_requests(outcome, "output_tokens") * of_requests(outcome, "samples"))[timed].sum())
    arrived = outcome.arrival_s[run.counted]
    between = arrived.max() - arrived.min() if arrived.size and not np.isnan(outcome.ttft_s).all() else 0.0
    rates = (
        ratio(arrived.size - 1, float(between)),
        ratio(int(np.count_nonzero(timed)), seconds),
        ratio(int(run.prompts[timed].sum()), seconds),
        ratio(output, seconds),
    )
    return dict(zip(THROUGHPUT, rates, strict=True))


def lost_to_disagreement(run: Basis) -> dict[str, int] | None:
    """Return the pages that only some ranks had at the end of a transfer; None if there was only one rank, or no transfer."""
    hardware = run.given["config"].get("hardware")
    ranks = hardware.get("gpus") if isinstance(hardware, Mapping) else None
    return asdict(run.outcome.lost_to_disagreement) if run.given["command"] == "simulate" and (ranks or 1) > 1 else None


def all_warnings(run: Basis) -> list[str]:
    """Return what to know before trusting the result."""
    note = run.given.get("trace_note")
    return [*([note] if note else []), *run.given.get("run_warnings", ()), *warnings(run.outcome)]


def quantiles(run: Basis) -> list[float]:
    """Return the percentiles 0, 1, ..., 100 of the times to first token; empty if there are none."""
    times = run.outcome.ttft_s[run.served]
    known = times[~np.isnan(times)]
    return np.percentile(known, np.arange(101)).round(9).tolist() if known.size else []


def drafts(counts: dict[str, int]) -> dict[str, float] | None:
    """Return what drafts have come to, with their rates; None without any, or if no answer had a step."""
    if not counts or not counts["steps"]:
        return None
    rates = {
        "acceptance_rate": counts["accepted_tokens"] / counts["draft_tokens"],
        "tokens_per_step": counts["tokens"] / counts["steps"],
    }
    return {**counts, **rates}


def tool_calls(run: Basis) -> dict[str, Any] | None:
    """Return what pages have done during tool calls, and the times to first token of requests after them; None if no policy
    decides about it."""
    counts = run.outcome.tool_calls
    if not counts:
        return None
    after = np.fromiter(values_of(run.outcome.requests, "after"), np.int64, len(run.outcome.requests))
    return {**counts, "ttft_s": spread(run.outcome.ttft_s[run.served & (after >= 0)])}


def adapter_use(counts: dict[str, int]) -> dict[str, float] | None:
    """Return what LoRA adapters have come to, with their hit rate; None if no step had any.

    An adapter may leave between two chunks of its request, and is copied again: then there can be more copies than uses.
    """
    if not counts or not counts["uses"]:
        return None
    return {**counts, "hit_rate": max(0.0, 1 - counts["loads"] / counts["uses"])}
