"""Draws the noise of a simulated run: a factor for each step, launch and transfer."""

from statistics import NormalDist

import numpy as np

from kvsim.hardware.noise import Noise, Variation

STREAM = 2**33
"""Second word of the seed: a random stream that nothing else draws from."""
AT_ONCE = 1024
OF_LINKS = {
    "cpu-gpu": "loads",
    "gpu-cpu": "stores",
    "disk-cpu": "disk_reads",
    "disk-gpu": "disk_reads",
    "cpu-disk": "disk_writes",
    "gpu-disk": "disk_writes",
}
KINDS = ("decode_steps", "prefill_steps", "launches", "loads", "stores", "disk_reads", "disk_writes")


class Factors:
    """The factors of successive durations of one kind in one run, numbered from 0; all 1 without a variation.

    They are drawn in order, a block at a time, so a factor does not depend on when, or how often, it is asked for.
    """

    def __init__(self, variation: Variation | None, random: np.random.Generator) -> None:
        self._variation = variation
        self._random = random
        self._run = 1.0
        self._correlation = 0.0
        self._score = 0.0
        self._probabilities: list[float] = []
        self._values: list[float] = []
        self._sums = [0.0]
        """Sums of the first 0, 1, ... factors, each less 1."""
        self._next = 0
        if variation is not None:
            self._run = float(np.exp(variation.run * random.standard_normal()))
            self._correlation = variation.correlation
            self._score = float(random.standard_normal())
            self._probabilities = [float(row[0]) for row in variation.each]
            self._values = [float(row[1]) for row in variation.each]

    def draw(self) -> float:
        """Return the next factor."""
        number = self._next
        self._next += 1
        return 1.0 + self.excess(number, 1)

    def excess(self, first: int, count: int) -> float:
        """Return the sum of ``count`` factors from number ``first`` on, less ``count``."""
        if self._variation is None:
            return 0.0
        while len(self._sums) <= first + count:
            self._extend()
        return self._sums[first + count] - self._sums[first]

    def _extend(self) -> None:
        """Draw the next block."""
        fresh = float(np.sqrt(1.0 - self._correlation**2))
        score, cdf, shares = self._score, NormalDist().cdf, list[float]()
        for drawn in self._random.standard_normal(AT_ONCE).tolist():
            score = self._correlation * score + fresh * drawn
            shares.append(cdf(score))
        self._score = score
        more = self._run * np.interp(shares, self._probabilities, self._values) - 1.0
        self._sums += (self._sums[-1] + np.cumsum(more)).tolist()


class NoiseSource:
    """Makes the factors of a run. Each kind and engine has a stream of its own, so that none shifts another."""

    def __init__(self, noise: Noise, seed: int) -> None:
        self.noise = noise
        self._seed = seed

    def factors(self, kind: str, owner: int) -> Factors:
        """Return new factors of a kind, an attribute of ``Noise``, for an engine, or for a disk."""
        words = [self._seed, STREAM, self.noise.seed, KINDS.index(kind), owner]
        return Factors(getattr(self.noise, kind), np.random.default_rng(words))


class LinkFactors:
    """The factors of transfers, by link and by the engine or disk to which the link belongs."""

    def __init__(self, source: NoiseSource) -> None:
        self._source = source
        self._factors: dict[tuple[str, int], Factors] = {}

    def draw(self, link: str, owner: int) -> float:
        """Return the factor of the next transfer over a link, such as ``disk-cpu``."""
        factors = self._factors.get((link, owner))
        if factors is None:
            factors = self._factors[link, owner] = self._source.factors(OF_LINKS[link], owner)
        return factors.draw()
