"""Prefetch of pages that are read faster than they are recomputed."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.hardware.tier_kinds import FIRST_FAR
from kvsim.numbers import Real, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.prefetch.base import Offer, Refusal, StoppedPrefetch


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class BreakEvenPrefetch(StoppedPrefetch):
    """Fetches what reaches the GPU sooner than it could be recomputed, judged by the model's FLOPs and the links' rates.

    The longer a continuation, the more of its compute time goes into attention, while reading takes a fixed time plus an equal
    time per page: if fetching a part of it pays, fetching all of it pays more.

    margin * (disk queue + disk + host link) > recompute    nothing (threshold)
    no room in the CPU tier                                 the first part, if that pays; otherwise nothing (memory)
    otherwise                                               all stored pages
    at admission                                            what the CPU has, with or without what the disk has, whichever
                                                            saves more time over recomputing; or nothing, if neither does
    """

    margin: float = 1.0

    @property
    def reads_hardware(self) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Real(above=0), "margin")

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._context = context

    def fetch(self, offer: Offer) -> int | Refusal:
        pages = min(offer.stored_pages, offer.available_pages)
        if pages and self._saved_s(offer.first_page, 0, pages, offer.tier, offer.queued_s) >= 0:
            return pages
        whole_s = self._saved_s(offer.first_page, 0, offer.stored_pages, offer.tier, offer.queued_s)
        return Refusal.MEMORY if whole_s >= 0 else Refusal.THRESHOLD

    def load(self, request: Request, gpu_pages: int, cpu_pages: int, disk_pages: int) -> int:
        tier = self._context.lower_tier_name or FIRST_FAR
        choices = {0: 0.0, cpu_pages: self._saved_s(gpu_pages, cpu_pages, 0, tier)} if cpu_pages else {0: 0.0}
        if disk_pages:
            choices[cpu_pages + disk_pages] = self._saved_s(gpu_pages, cpu_pages, disk_pages, tier)
        return max(choices, key=lambda pages: choices[pages])

    def _saved_s(self, first_page: int, cpu_pages: int, stored_pages: int, tier: str, queued_s: float = 0.0) -> float:
        """Return the seconds saved by loading pages from ``first_page`` on instead of recomputing them; negative for a loss.

        ``stored_pages`` of them are read from ``tier``.
        """
        context = self._context
        read_s = queued_s + context.read_s(tier, stored_pages) if stored_pages else 0.0
        read_s += context.host_load_s(cpu_pages + stored_pages)
        tokens, pages = context.page_tokens, cpu_pages + stored_pages
        return context.recompute_s(first_page * tokens, (first_page + pages) * tokens) - self.margin * read_s
