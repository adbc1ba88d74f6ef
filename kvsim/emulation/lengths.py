"""How long the answers of an emulated server are."""

from math import exp

import numpy as np

from kvsim.trace.base import MAX_TOKENS


class AnswerLengths:
    """Draws the tokens of answers from a log-normal distribution with the mean ``tokens``, whose sigma is ``spread``.

    Without ``tokens``, answers are as long as they may be.
    """

    def __init__(self, tokens: float | None = None, spread: float = 0.0, seed: int = 0) -> None:
        self._tokens = tokens
        self._spread = spread
        self._rng = np.random.default_rng(seed)

    def draw(self, most: int | None, least: int, default: int) -> tuple[int, int]:
        """Return how many tokens an answer has, and may have.

        ``most`` is what the client allows, None for whatever the server thinks right: ``default``, unless lengths are drawn.
        """
        if self._tokens is None:
            tokens = default if most is None else most
            return tokens, tokens
        drawn = self._tokens * exp(self._spread * self._rng.standard_normal() - self._spread**2 / 2)
        limit = MAX_TOKENS if most is None else most
        return min(max(round(drawn), least, 1), limit), limit
