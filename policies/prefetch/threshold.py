"""Prefetch above a threshold, as in SGLang's hierarchical cache, with thresholds for prompts as in LightLLM."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Real, Whole, check_settings
from kvsim.policies.prefetch.base import Offer, Refusal, StoppedPrefetch


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class ThresholdPrefetch(StoppedPrefetch):
    """Fetches long continuations only: short ones are recomputed faster than they are looked up and read.

    The rate limit and the room are SGLang's: a fetch starts whenever those before it leave it under the limit, whatever its own
    size, and has the room that remains beside the request's own prefix in the CPU tier.

    stored < min_tokens, or prompt < min_prompt_tokens             nothing (threshold)
    in flight already >= in_flight_fraction of the CPU tier        nothing (rate limit)
    no room in the CPU tier                                        nothing (memory)
    otherwise                                                      all stored pages
    at admission                                                   what the CPU has, if that is at least load_min_tokens and
                                                                   the prompt at least load_min_prompt_tokens; nothing from disk
    """

    min_tokens: int = 256
    min_prompt_tokens: int = 0
    in_flight_fraction: float = 0.5
    load_min_tokens: int = 10
    load_min_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Whole(1), "min_tokens")
        check_settings(self, Real(above=0, most=1), "in_flight_fraction")
        check_settings(self, Whole(), "min_prompt_tokens", "load_min_tokens", "load_min_prompt_tokens")

    def fetch(self, offer: Offer) -> int | Refusal:
        if offer.stored_pages * self.page_tokens < self.min_tokens or offer.request.prompt_tokens < self.min_prompt_tokens:
            return Refusal.THRESHOLD
        if offer.in_flight_pages >= self.in_flight_fraction * self.cpu_pages:
            return Refusal.RATE_LIMIT
        return self.fit(offer)

    def fit(self, offer: Offer) -> int | Refusal:
        """Return all stored pages or, without room for all of them, a refusal."""
        return offer.stored_pages if offer.stored_pages <= offer.available_pages else Refusal.MEMORY

    def load(self, request: Request, gpu_pages: int, cpu_pages: int, disk_pages: int) -> int:
        if request.prompt_tokens < self.load_min_prompt_tokens:
            return 0
        return cpu_pages if cpu_pages * self.page_tokens >= self.load_min_tokens else 0
