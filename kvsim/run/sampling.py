"""Replays samples of a trace in scaled tiers, and estimates from them what a replay of all its requests would hit.

A sample is made of whole subtrees below the prefixes that many requests share (``Subtrees``). Its tiers have room for all of
these prefixes, and for the sample's share of all other pages.

``Estimator`` says what they tell of the whole trace.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np

from kvsim.bounds.limits import not_bounded
from kvsim.bounds.lru_curve import LruCurve
from kvsim.core.fan_out import TOGETHER
from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.engine.outcome import REJECTED, Outcome, TierUse, tiers_listed
from kvsim.errors import UsageError
from kvsim.plans.plan import Plan, TierPlan
from kvsim.plans.sampling import MOST_SHARE
from kvsim.results.rates import count, percent, ratio
from kvsim.results.result import warmup_requests
from kvsim.run import play
from kvsim.run.sample_estimates import PAGES, Estimate, Estimator, Part, cumulative
from kvsim.trace.subtrees import Subtrees

USED = ("peak_pages", "evicted_pages", "inserted_pages", "held_pages", "own_pages")
"""Counts of a tier."""
FEW_SUBTREES = 100
"""Of fewer subtrees in a sample, one alone can decide."""
SPARE = 1.5
"""How much larger a proposed share is than one that the largest request fills."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What is known of a replay from samples."""

    outcome: Outcome
    """Of all samples together, with the counts of tiers and policies scaled to the whole trace."""
    fields: dict[str, Any]
    """The fields of ``result.json`` that are known or estimated of the whole trace."""
    warnings: list[str]


def replay_sample(plan: Plan, requests: Sequence[Request], advance: Callable[[int], None] | None = None) -> Sampled:
    """Replay samples of a trace, as ``plan.sampling`` says, and estimate the hits of all its requests.

    Raises UsageError if the samples cannot tell.
    """
    began = perf_counter()
    samples = Samples(plan, requests)
    *parts, union = samples.play(advance)
    fields = samples.fields(parts, union)
    outcome = _scaled_counts(plan, union)
    outcome.wall_s = perf_counter() - began
    return Sampled(outcome=outcome, fields=fields, warnings=_warnings(fields["sample"], len(requests)))


class Samples:
    """The samples of a trace, and what is known of all of it."""

    def __init__(self, plan: Plan, requests: Sequence[Request]) -> None:
        """Raise UsageError for a trace of which LRU's hits are not known."""
        assert plan.sampling is not None
        if what := not_bounded(requests):
            raise UsageError(f"sample: the trace {what}, which no curve of LRU accounts for: replay all of it")
        self.plan, self.sampling = plan, plan.sampling
        self.first = warmup_requests(plan.warmup, len(requests))
        self.all_counted = len(requests) - self.first
        self.requests = self._fitting(requests)
        self.whole = self._curve(self.requests)
        self.subtrees = Subtrees(self.requests)
        self.estimator = Estimator(plan, self.whole)

    def _fitting(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests that the GPU tier can hold; others are rejected."""
        room = self.plan.tiers[0].capacity_pages
        fitting = [
            request for request, pages in zip(requests, self._taken(requests), strict=True) if room is None or pages <= room
        ]
        if not fitting:
            raise UsageError("sample: the GPU tier can hold no request of the trace: increase tiers.gpu.capacity")
        return fitting

    def _taken(self, requests: Sequence[Request]) -> list[int]:
        return self.plan.replay.pages_taken(requests, self.plan.page_tokens, self.plan.rules.samples or TOGETHER)

    def _curve(self, requests: Sequence[Request]) -> LruCurve:
        last = self.plan.rules.recompute_last_token
        return LruCurve(requests, self.plan.page_tokens, recompute_last_token=last, counted_from=self.first)

    def play(self, advance: Callable[[int], None] | None = None) -> Iterator[Part]:
        """Play the samples one by one, and last all together; of a single one that is the whole trace, only that.

        ``advance`` is told how many requests of the whole trace that is worth.
        """
        draws = list(self.subtrees.draws(self.sampling.share, self.sampling.draws, seed=self.plan.seed))
        together = np.sort(np.concatenate(draws))
        rounds = [*(draws if len(draws) > 1 else []), together]
        for number, drawn in enumerate(rounds, 1):
            yield self._play(drawn)
            if advance:
                advance(number * len(self.requests) // len(rounds))

    def _play(self, drawn: np.ndarray) -> Part:
        chosen = [self.requests[at] for at in self.subtrees.requests_in(drawn).tolist()]
        if not any(request.index >= self.first and request.prompt_pages for request in chosen):
            raise UsageError(f"sample={_text(self.sampling.share)} has no request in a sample: sample more")
        known = int(self.subtrees.pages.sum())
        share = int(self.subtrees.pages[drawn].sum()) / known if known else len(chosen) / len(self.requests)
        own = self.plan.with_own_policies()
        tiers = [_scaled(tier, share, self.subtrees.common_pages) for tier in own.tiers]
        self._check_room(tiers[0], chosen)
        outcome = play.replay(replace(own, tiers=tiers, sampling=None), chosen)
        if np.any(outcome.status == REJECTED):
            raise UsageError(f"sample={_text(self.sampling.share)}: a request does not fit into a sample's tiers: sample more")
        counted = np.array([request.index >= self.first for request in chosen])
        curve = self._curve(chosen)
        return Part(share, len(drawn), outcome, counted, curve, cumulative(tiers, curve))

    def _check_room(self, scaled: TierPlan, chosen: Sequence[Request]) -> None:
        """Raise UsageError if the GPU tier of a sample is too small for one of its requests."""
        room, whole, common = scaled.capacity_pages, self.plan.tiers[0].capacity_pages, self.subtrees.common_pages
        if room is None or whole is None:
            return
        if common >= whole:
            raise UsageError(
                f"sample: the prefixes that many requests share have {count(common)} pages, and tiers.gpu.capacity is "
                f"{count(whole)}: replay the whole trace"
            )
        largest = max(self._taken(chosen))
        if largest > room:
            needed = ceil(100 * SPARE * max(self._taken(self.requests)) / whole)
            remedy = f"try sample={needed}%" if needed <= 100 * MOST_SHARE else "replay the whole trace"
            raise UsageError(
                f"sample={_text(self.sampling.share)} of {count(whole)} pages of tiers.gpu.capacity is {count(room)} pages, and "
                f"a request of the sample takes {count(largest)}: {remedy}"
            )

    def fields(self, parts: Sequence[Part], union: Part) -> dict[str, Any]:
        """Return the fields of the result that hold for the whole trace. Hits are whole numbers, and rates follow from them."""
        tiers, in_pages = self.estimator.estimates(parts, union), self.estimator.estimates(parts, union, PAGES)
        tokens, pages = (self._hits(tiers, self.whole.prompt_tokens), self._hits(in_pages, self.whole.prompt_pages))
        served = sum([request.index >= self.first for request in self.requests])
        hit_requests = round(served * float(union.outcome.hit_pages[union.counted].any(axis=1).mean()))
        return {
            "sample": {
                "share": self.sampling.share,
                "draws": self.sampling.draws,
                "requests": len(union.outcome.requests),
                "subtrees": union.subtrees,
                "hit_rate": _ends(tiers[-1]),
                "tiers": {tier.name: _ends(one) for tier, one in zip(self.plan.tiers, tiers[:-1], strict=True)},
            },
            "requests": self.all_counted,
            "warmup_requests": self.first,
            "rejected": self.all_counted - served,
            "prompt_tokens": self.whole.prompt_tokens,
            "prompt_pages": self.whole.prompt_pages,
            "hit_tokens": tokens,
            "hit_pages": pages,
            "hit_rate": ratio(sum(tokens.values()), self.whole.prompt_tokens),
            "page_hit_rate": ratio(sum(pages.values()), self.whole.prompt_pages),
            "hit_requests": hit_requests,
            "request_hit_rate": ratio(hit_requests, served),
        }

    def _hits(self, estimated: Sequence[Estimate], total: int) -> dict[str, int]:
        """Return the hits by tier, whose sum is what all tiers together are estimated to hit."""
        names = [tier.name for tier in self.plan.tiers]
        known, left = dict.fromkeys(tiers_listed(names), 0), round(estimated[-1].rate * total)
        for name, one in zip(names[:-1], estimated, strict=False):
            known[name] = min(round(one.rate * total), left)
            left -= known[name]
        return known | {names[-1]: left}


def _scaled(tier: TierPlan, share: float, common_pages: int) -> TierPlan:
    """Return a tier of a sample: it has room for all common pages that fit, and for the share of all other pages."""
    if tier.capacity_pages is None or share == 1:
        return tier
    common = min(common_pages, tier.capacity_pages)
    pages = common + round(share * (tier.capacity_pages - common))
    return replace(tier, capacity_pages=max(pages // tier.unit_pages, 1) * tier.unit_pages)


def _ends(estimate: Estimate) -> dict[str, float]:
    return {"low": estimate.low, "high": estimate.high}


def _scaled_counts(plan: Plan, part: Part) -> Outcome:
    """Return the outcome with the counts of tiers and policies scaled to the whole trace."""

    def scaled(counts: Mapping[str, int]) -> dict[str, int]:
        return {name: round(number / part.share) for name, number in counts.items()}

    outcome, tiers = part.outcome, dict[str, TierUse]()
    for tier in plan.tiers:
        use = asdict(outcome.tiers[tier.name])
        known = scaled({name: use[name] for name in USED if use[name] is not None})
        room = UNLIMITED if tier.capacity_pages is None else tier.capacity_pages
        known["peak_pages"] = min(known["peak_pages"], room)
        tiers[tier.name] = TierUse(**use | known | {"capacity_pages": tier.capacity_pages})
    return replace(outcome, tiers=tiers, prefetch=scaled(outcome.prefetch), placement=scaled(outcome.placement))


def _text(share: float) -> str:
    return f"{100 * share:g}%"


def _warnings(sample: Mapping[str, Any], requests: int) -> list[str]:
    """Return what to know of the estimate: nothing of a sample that is the whole trace."""
    share, draws = sample["share"], sample["draws"]
    if share == 1:
        return []
    low, high = (percent(sample["hit_rate"][end]) for end in ("low", "high"))
    told = (
        f"hits are estimated from {draws} samples of {_text(share)} ({count(sample['requests'])} of {count(requests)} requests, "
        f"{count(sample['subtrees'])} subtrees): with 95% confidence the hit rate is between {low} and {high}; counts of tiers "
        "and policies are scaled"
    )
    each = sample["subtrees"] // draws
    few = f"a sample has about {each} subtrees, so that one of them can decide: sample more for an interval to rely on"
    return [told, few] if each < FEW_SUBTREES else [told]
