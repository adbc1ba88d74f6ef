"""Failures of engines that a run plans."""

from dataclasses import dataclass
from math import inf

from kvsim.numbers import MOST_SECONDS, SECONDS, Real, Whole, check_settings


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An engine fails: the pages on its GPU are lost, and its requests go back to the router. What was written down stays."""

    engine: int
    at_s: float
    back_after_s: float = inf
    """Seconds until it serves again, with an empty GPU tier; infinite: never."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(), "engine")
        check_settings(self, SECONDS, "at_s")
        if self.back_after_s != inf:
            check_settings(self, Real(above=0, most=MOST_SECONDS), "back_after_s", hint="without it, the engine never comes back")
