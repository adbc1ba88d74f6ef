"""Prefetch above a threshold, shortened to the memory available, as in SGLang since pull request 16370 (January 2026)."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.prefetch.base import Offer, Refusal
from kvsim.policies.prefetch.threshold import ThresholdPrefetch


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class AdaptivePrefetch(ThresholdPrefetch):
    """Like ``threshold``, but fetches the first part of a continuation that does not fit into the CPU tier.

    no room for all of it    as many whole pages as fit, if these have min_tokens; otherwise nothing (memory)
    """

    def fit(self, offer: Offer) -> int | Refusal:
        pages = min(offer.stored_pages, offer.available_pages)
        return pages if pages * self.page_tokens >= self.min_tokens else Refusal.MEMORY
