"""Sparse checkpoints (Shirokikh and Nikolenko: Sparse prefix caching for hybrid and recurrent LLM serving, 2026,
arXiv:2605.05219)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Final

import numpy as np

from kvsim.numbers import Whole, check_settings
from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill

SPACINGS = ("learned", "balanced", "sqrt", "log")
STATES: Final = 8
DECAY: Final = 0.99
SOLVED_EVERY: Final = 100
BINS: Final = 128
LEAST_WEIGHT: Final = 1e-6


@dataclass(kw_only=True, eq=False)
class Sparse(CheckpointPolicy):
    """Saves few states per prompt, placed so that little is computed again after a hit that ends between two of them.

    learned    ``states`` positions with the least expected distance from where a prompt departs from known ones back to the last
               position before it: the optimum for the departures of past prompts, the latest weighing most
    balanced   ``states`` positions at equal distances over the prompt; ``learned`` begins with these
    sqrt       as many pages apart as the square root of the prompt's pages
    log        after 1, 2, 4, 8 ... pages

    A departure weighs 0.99 times as much as the one after it, and positions are found anew every 100 of them. For that, depths
    are divided into at most 128 bins; the optimum over these costs O(states * bins^2). The authors also give an O(states * bins)
    method, and count tokens where pages are counted here. Answers get no states.
    """

    spacing: str = "learned"
    states: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spacing not in SPACINGS:
            raise ValueError(f"spacing must be one of {', '.join(SPACINGS)}, not {self.spacing}")
        check_settings(self, Whole(1), "states", or_null=True, hint=f"null is {STATES}")
        if self.states is not None and self.spacing in ("sqrt", "log"):
            raise ValueError(
                f"states={self.states} has no effect with spacing={self.spacing}, which follows from the prompt's length"
            )
        self._departures: dict[int, float] = {}
        """By depth in pages, the weight of prompts that departed from known ones there."""
        self._weight = 1.0
        self._observed = 0
        self._learned: list[int] | None = None

    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        if self.spacing == "learned":
            self._observe(prefill.known)
        return [page for page in self._positions(prefill.full) if prefill.start < page <= prefill.full]

    def _positions(self, pages: int) -> list[int]:
        if self.spacing == "log":
            return [1 << power for power in range(pages.bit_length())]
        if self.spacing == "sqrt":
            return list(range(isqrt(pages), pages + 1, isqrt(pages))) if pages else []
        if self._learned is not None:
            return self._learned
        count = self.states or STATES
        return sorted({pages * number // (count + 1) for number in range(1, count + 1)} - {0})

    def _observe(self, depth: int) -> None:
        if not depth:
            return
        self._departures[depth] = self._departures.get(depth, 0.0) + self._weight
        self._weight /= DECAY
        self._observed += 1
        if self._observed % SOLVED_EVERY == 0:
            self._learn()

    def _learn(self) -> None:
        """Forget what weighs too little, and place the states anew."""
        last = self._weight
        self._departures = {depth: weight / last for depth, weight in self._departures.items() if weight / last > LEAST_WEIGHT}
        self._weight = 1.0
        width = -(-max(self._departures) // BINS)
        weights = np.zeros(-(-max(self._departures) // width) + 1)
        for depth, weight in self._departures.items():
            weights[depth // width] += weight
        self._learned = [place * width for place in best_places(weights, self.states or STATES)]


def best_places(weights: np.ndarray, count: int) -> list[int]:
    """Return at most ``count`` depths, from 1 on, with the least sum of weight * (depth - the last of them up to that depth).

    ``weights`` (float64, by depth from 0) says how much each depth weighs; without a place up to it, a depth counts whole.
    """
    depths = np.arange(len(weights))
    weight, moment = np.cumsum(weights), np.cumsum(weights * depths)
    least = moment.copy()
    """Sum over the depths up to each one, with the places so far."""
    came_from: list[np.ndarray] = []
    for _ in range(min(count, len(weights) - 1)):
        following, choice = least.copy(), np.zeros(len(weights), dtype=np.int64)
        for end in range(1, len(weights)):
            place = depths[1 : end + 1]
            sums = least[place - 1] + moment[end] - moment[place - 1] - place * (weight[end] - weight[place - 1])
            best = int(np.argmin(sums))
            if sums[best] < following[end]:
                following[end], choice[end] = sums[best], best + 1
        least = following
        came_from.append(choice)
    places, end = list[int](), len(weights) - 1
    for choice in reversed(came_from):
        if choice[end]:
            places.append(int(choice[end]))
            end = int(choice[end]) - 1
    return places[::-1]
