"""From samples of a trace, played in scaled tiers, to hit rates of the whole trace with intervals.

A hit rate is a difference estimate. What LRU hits is known exactly of the whole trace, in one pass (``LruCurve``), and of a
sample in its tiers, so the sample only has to tell how far the replay is from LRU::

    estimate = LRU of the whole trace + (replay - LRU) of the sample

SHARDS-adj (Waldspurger et al., FAST 2015) corrects the number of accesses of a sample by what is known of all of them; this
corrects its hits, too.

Several samples without a subtree in common are played one by one, and then all together. The estimate is that of all together.
Its interval has three parts: how far the samples are apart, by Student's t; how far their mean is from all of them together,
since scaled tiers hold fewer prompts, which distorts hits, and all together are distorted less than each; and how far all
together are from what LRU is known to hit, corrected with an unlimited cache only.
"""

from collections.abc import Callable, Sequence
from math import hypot
from typing import NamedTuple

import numpy as np

from kvsim.bounds.lru_curve import LruCurve
from kvsim.engine.columns import hit_tokens
from kvsim.engine.outcome import Outcome
from kvsim.plans.plan import Plan, TierPlan
from kvsim.results.statistics import mean_of

LEFT = 0.5
"""Distortion left in all samples together, of the difference between them and the mean of the samples. With 8 samples it is 0.14
if it falls with the number of prompts that a tier holds, and 0.55 if it falls with the root of that."""


class Part(NamedTuple):
    """Some subtrees, played."""

    share: float
    """Of the pages that are not common."""
    subtrees: int
    outcome: Outcome
    counted: np.ndarray
    """Which of its requests count: those after the warm-up."""
    curve: LruCurve
    capacities: np.ndarray
    """Pages of each scaled tier and those above it."""


class Unit(NamedTuple):
    """What is counted: tokens or pages."""

    of_outcome: Callable[[Outcome], np.ndarray]
    """Hits of each request, one column per tier."""
    of_curve: Callable[[LruCurve, np.ndarray], np.ndarray]
    """Hits of LRU at these capacities."""
    total: Callable[[LruCurve], int]
    """All that the prompts have."""


TOKENS = Unit(hit_tokens, LruCurve.hit_tokens, lambda curve: curve.prompt_tokens)
PAGES = Unit(lambda outcome: outcome.hit_pages, LruCurve.hit_pages, lambda curve: curve.prompt_pages)


class Estimate(NamedTuple):
    """A rate of the whole trace, and the ends of its 95 % interval."""

    rate: float
    low: float
    high: float


class Estimator:
    """What is known of the whole trace, and what parts of it tell beyond that."""

    def __init__(self, plan: Plan, whole: LruCurve) -> None:
        self.plan, self.whole = plan, whole

    def estimates(self, parts: Sequence[Part], union: Part, unit: Unit = TOKENS) -> list[Estimate]:
        """Return the estimated rate of each tier, from the top down, and last that of all tiers."""
        rates, told = [self._by_tier(part, unit) for part in parts], self._by_tier(union, unit)
        unlimited = float(self._lru(self.whole, np.array([self.whole.unique_pages]), unit)[0])
        errors = self._lru_errors(union, unlimited, unit)
        # Kvsim's own rules hit nothing that an unlimited cache does not, unless answers are cached.
        most = 1.0 if self.plan.rules.engine or self.plan.rules.cache_output else unlimited
        return [
            _estimate(float(rate), [float(one[place]) for one in rates], float(errors[place]), most)
            for place, rate in enumerate(told)
        ]

    def _by_tier(self, part: Part, unit: Unit) -> np.ndarray:
        """Return the rates of the whole trace that a part tells: of each tier, and last of all tiers."""
        columns = [part.outcome.tier_names.index(tier.name) for tier in self.plan.tiers]
        hits = np.cumsum(unit.of_outcome(part.outcome)[part.counted].sum(axis=0)[columns])
        of_whole = self._lru(self.whole, cumulative(self.plan.tiers, self.whole), unit)
        return _apart(hits / unit.total(part.curve) + (of_whole - self._lru(part.curve, part.capacities, unit)))

    def _lru_errors(self, part: Part, unlimited: float, unit: Unit) -> np.ndarray:
        """Return how far LRU's rates are from those that a part would tell of them if only an unlimited cache's were known."""
        of_whole = self._lru(self.whole, cumulative(self.plan.tiers, self.whole), unit)
        all_hits = self._lru(part.curve, np.array([part.curve.unique_pages]), unit)
        return _apart(self._lru(part.curve, part.capacities, unit) + (unlimited - all_hits) - of_whole)

    @staticmethod
    def _lru(curve: LruCurve, capacities: np.ndarray, unit: Unit) -> np.ndarray:
        rates: np.ndarray = unit.of_curve(curve, capacities) / max(unit.total(curve), 1)
        return rates


def cumulative(tiers: Sequence[TierPlan], curve: LruCurve) -> np.ndarray:
    """Return the pages of each tier and those above it, at most as many as there are."""
    most = curve.unique_pages
    sizes = [most if tier.capacity_pages is None else min(tier.capacity_pages, most) for tier in tiers]
    pages: np.ndarray = np.minimum(np.cumsum(sizes), most)
    return pages


def _apart(cumulative: np.ndarray) -> np.ndarray:
    """Return the rates of single tiers, of those of each tier and all above it, and last that of all."""
    return np.append(np.diff(cumulative, prepend=0.0), cumulative[-1])


def _estimate(rate: float, samples: Sequence[float], lru_error: float, most: float) -> Estimate:
    """Return the estimate of a rate that all samples together tell, given what each of them tells; ``most`` is a bound of it."""
    half, spread = 0.0, mean_of(samples)
    if spread is not None:
        half = hypot(spread.half_width or 0.0, LEFT * (spread.mean - rate), lru_error)
    return Estimate(*(min(max(value, 0.0), most) for value in (rate, rate - half, rate + half)))
