"""What SAECache learns as it goes: the worth of types of pages and of queues, times between turns, and where prompts part.

The rules are those of the paper (arXiv:2605.18825) as far as its summaries tell them; sae_cache.py says what is chosen here.
"""

from math import erfc, exp, log, sqrt
from typing import Final

RATE: Final = 0.1
"""Weight of what is new in each running mean."""
FADE: Final = 0.99
"""What is left of all counts after each update."""
EVERY: Final = 100
"""Pages evicted between two updates, at least."""
LEAST_WEIGHT: Final = 0.1
MOST_OF_TYPE: Final = 5.0
MOST_OF_QUEUE: Final = 3.0
FIRST_MU: Final = 4.15
FIRST_SIGMA: Final = 0.97
"""Log-seconds between turns: the authors' fixed parameters."""
LEAST_S: Final = 1e-3
"""Shorter times count as this long."""


def blend(old: float, new: float) -> float:
    """Return a running mean."""
    return (1 - RATE) * old + RATE * new


def between(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


class TypeWorth:
    """The weight of a type of pages, by what happens to those that leave and to those that are looked for."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.evicted_pages = self.missed_pages = self.hit_pages = self.computed_pages = 0.0

    def update(self) -> None:
        """Move the weight towards 1 + 5 * misses after eviction + 2 * hit rate."""
        looked = self.hit_pages + self.computed_pages
        misses = min(1.0, self.missed_pages / self.evicted_pages) if self.evicted_pages else 0.0
        hits = self.hit_pages / looked if looked else 0.0
        self.weight = between(blend(self.weight, 1 + 5 * misses + 2 * hits), LEAST_WEIGHT, MOST_OF_TYPE)
        self.evicted_pages, self.missed_pages = FADE * self.evicted_pages, FADE * self.missed_pages
        self.hit_pages, self.computed_pages = FADE * self.hit_pages, FADE * self.computed_pages


class QueueWorth:
    """The weight of a queue, by its hits for the room that it takes."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.held_pages = 0
        self.hit_pages = 0.0

    def update(self, mean: float) -> None:
        """Move the weight towards the queue's hits per page held, in units of ``mean``, that of all queues."""
        if self.held_pages and mean:
            self.weight = between(blend(self.weight, self.hit_pages / self.held_pages / mean), LEAST_WEIGHT, MOST_OF_QUEUE)
        self.hit_pages *= FADE


class Gaps:
    """Times between turns, whose logarithms have a normal distribution."""

    def __init__(self) -> None:
        self.mu, self.variance = FIRST_MU, FIRST_SIGMA**2

    def observe(self, gap_s: float) -> None:
        value = log(max(gap_s, LEAST_S))
        self.variance = blend(self.variance, (value - self.mu) ** 2)
        self.mu = blend(self.mu, value)

    def survival(self, age_s: float) -> float:
        """Return the chance that a time is longer than ``age_s``."""
        return 0.5 * erfc((log(max(age_s, LEAST_S)) - self.mu) / sqrt(2 * self.variance + 1e-12))


class Parting:
    """How deep prompts of one template go together, as shares of the longest: P(deeper than x) = 1 - x^gamma."""

    def __init__(self) -> None:
        self.mean = 0.5

    @property
    def gamma(self) -> float:
        """The power whose distribution has the mean share observed: mean = gamma / (gamma + 1)."""
        return self.mean / (1 - self.mean)

    def observe(self, share: float) -> None:
        self.mean = between(blend(self.mean, share), 0.01, 0.99)

    def survival(self, share: float) -> float:
        return 1 - exp(self.gamma * log(share))
