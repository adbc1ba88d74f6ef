"""MyPolicy: name the source of the rule."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.numbers import Whole, check_settings
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy, Refusal


@dataclass(kw_only=True, eq=False)
class MyPolicy(PrefetchPolicy):
    """State the purpose of the policy in one sentence, then the rule.

    stored < min_tokens          nothing (threshold)
    no room for all in the CPU   as many pages as fit, if any (memory)
    otherwise                    all stored pages
    at admission                 all pages in the CPU tier; nothing from disk
    """

    min_tokens: int = 256

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "min_tokens")

    def fetch(self, offer: Offer) -> int | Refusal:
        if offer.stored_pages * self.page_tokens < self.min_tokens:
            return Refusal.THRESHOLD
        return min(offer.stored_pages, offer.available_pages) or Refusal.MEMORY

    def load(self, request: Request, gpu_pages: int, cpu_pages: int, disk_pages: int) -> int:
        return cpu_pages
