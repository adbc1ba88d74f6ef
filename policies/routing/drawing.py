"""How routers choose by cost."""

from math import exp

import numpy as np


def lowest(costs: np.ndarray, rng: np.random.Generator) -> int:
    """Return the position of the lowest cost; of several, any with equal probability."""
    best = np.flatnonzero(costs == costs.min())
    return int(best[0] if len(best) == 1 else best[int(rng.random() * len(best))])


def softmax(costs: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """Return a position drawn with probability in proportion to exp(-cost / (range of costs) / temperature).

    At a temperature of 0, that of the lowest cost.
    """
    if not temperature:
        return lowest(costs, rng)
    least = float(costs.min())
    scale = (float(costs.max()) - least) * temperature
    if not scale:
        return lowest(costs, rng)
    return weighted([exp((least - cost) / scale) for cost in costs.tolist()], rng)


def weighted(weights: list[float], rng: np.random.Generator) -> int:
    """Return a position drawn with probability in proportion to its weight; not all may be 0."""
    left = rng.random() * sum(weights)
    for at, weight in enumerate(weights):
        left -= weight
        if left <= 0:
            return at
    return len(weights) - 1
