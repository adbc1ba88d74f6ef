"""Prefetch above a threshold, as SGLang's hierarchical cache does."""

from dataclasses import dataclass
from math import inf

from kvsim.policies.prefetch.base import STOP_RULES, Offer, PrefetchPolicy, Refusal


@dataclass(kw_only=True, eq=False)
class ThresholdPrefetch(PrefetchPolicy):
    """Fetches long continuations only: short ones are recomputed sooner than they are looked up and read.

    stored < min_tokens                                  nothing (threshold)
    in flight > in_flight_fraction of the CPU tier       nothing (rate limit)
    no room in the CPU tier                              nothing (memory)
    otherwise                                            all that is stored
    at admission                                         what the CPU has, from load_min_tokens on; nothing from disk
    """

    min_tokens: int = 256
    in_flight_fraction: float = 0.5
    load_min_tokens: int = 10
    stop: str = "timeout"
    base_s: float = 1.0
    per_1024_tokens_s: float = 0.25

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens must be at least 1, not {self.min_tokens}")
        if not 0 < self.in_flight_fraction <= 1:
            raise ValueError(f"in_flight_fraction must be above 0 and at most 1, not {self.in_flight_fraction}")
        if self.load_min_tokens < 0:
            raise ValueError(f"load_min_tokens must be 0 or more, not {self.load_min_tokens}")
        if self.stop not in STOP_RULES:
            raise ValueError(f"stop must be one of {', '.join(STOP_RULES)}, not {self.stop}")
        if self.base_s < 0 or self.per_1024_tokens_s < 0:
            raise ValueError("base_s and per_1024_tokens_s must be 0 or more")

    def fetch(self, offer: Offer) -> int | Refusal:
        if offer.stored_pages * self.page_tokens < self.min_tokens:
            return Refusal.THRESHOLD
        if offer.in_flight_pages + offer.stored_pages > self.in_flight_fraction * self.cpu_pages:
            return Refusal.RATE_LIMIT
        return self.fit(offer)

    def fit(self, offer: Offer) -> int | Refusal:
        """All of the stored pages or, without room for them, none."""
        return offer.stored_pages if offer.stored_pages <= offer.available_pages else Refusal.MEMORY

    def load(self, cpu_pages: int, disk_pages: int) -> int:
        return cpu_pages if cpu_pages * self.page_tokens >= self.load_min_tokens else 0

    def wait_s(self, prompt_tokens: int) -> float:
        if self.stop == "timeout":
            return self.base_s + self.per_1024_tokens_s * prompt_tokens / 1024
        return inf if self.stop == "wait_complete" else 0.0
