"""Arrival times for files that have none: sessions begin as a Poisson process, and their turns pause in between."""

import numpy as np

from kvsim.numbers import SECONDS, Real, Whole, check_number


class Arrivals:
    """Draws when the sessions of a file begin, and how long users pause before their later turns."""

    def __init__(self, sessions_per_s: float, pause_s: float, seed: int, rate: float) -> None:
        self._gap_s = 1 / sessions_per_s / rate
        self._pause_s = pause_s
        self._starts, self._pauses = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
        self._now_s = 0.0

    def start_s(self) -> float:
        """Return when the next session begins: gaps are exponential, as those of a Poisson process."""
        self._now_s += float(self._starts.exponential(self._gap_s))
        return self._now_s

    def pause_s(self) -> float:
        """Return the seconds between an answer and the next turn, drawn from an exponential distribution."""
        return float(self._pauses.exponential(self._pause_s))


def check_arrivals(sessions_per_s: float | None, pause_s: float, seed: int) -> None:
    """Raise ValueError for settings that cannot be."""
    check_number("sessions_per_s", Real(above=0), sessions_per_s, or_null=True, hint="null lets all sessions begin at once")
    check_number("pause_s", SECONDS, pause_s)
    check_number("seed", Whole(), seed)
    if pause_s and sessions_per_s is None:
        raise ValueError("pause_s has no effect without sessions_per_s: set both, or neither")
