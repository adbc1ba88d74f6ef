"""Placement by prompt length, as in LightLLM's multi-level cache."""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.hardware.tier_kinds import TIER_KINDS
from kvsim.numbers import Whole, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.placement.base import PlacementPolicy

LEARNED_PROMPTS = 512
"""Number of most recent prompts that the boundary is learned from."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class ByLength(PlacementPolicy):
    """Keeps short prompts on the GPU only, since they are quickly recomputed, and copies long ones to the tiers below.

    prompt >= boundary   copy down its pages, all or none; prompt pages only, without the page of the last token
    shorter prompts      nothing
    after eviction       nothing: pages that were not copied are dropped

    The boundary is ``min_tokens`` for the CPU tier and ``disk_min_tokens`` for the disk. With ``adaptive``, these apply until
    512 prompts have been seen. From then on the boundary is such that, of the last 512 prompts, those below it have the same
    share of all tokens as the tiers above have of the capacity down to this tier.
    """

    min_tokens: int = 256
    disk_min_tokens: int = 2_048
    adaptive: bool = False

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "min_tokens", "disk_min_tokens")
        self._prompts: deque[int] = deque()
        self._sorted: list[int] = []

    def bind(self, context: PolicyContext) -> None:
        self.boundary = float(self.disk_min_tokens if TIER_KINDS[context.level].is_far else self.min_tokens)
        self._page_tokens = context.page_tokens
        self._share_above = _share_above([inf if pages is None else pages for pages in context.capacities], context.position)

    def on_request(self, request: Request, now: float) -> None:
        if not self.adaptive:
            return
        prompts, ordered = self._prompts, self._sorted
        prompts.append(request.prompt_tokens)
        insort(ordered, request.prompt_tokens)
        if len(prompts) > LEARNED_PROMPTS:
            del ordered[bisect_right(ordered, prompts.popleft()) - 1]
        if len(prompts) == LEARNED_PROMPTS:
            tokens = list(accumulate(ordered))
            short = bisect_right(tokens, self._share_above * tokens[-1])
            self.boundary = float(ordered[short]) if short < len(ordered) else inf

    def wanted_pages(self, request: Request, path: Sequence[Node], now: float) -> int:
        if request.prompt_tokens < self.boundary:
            return 0
        return min(request.prompt_pages, (request.prompt_tokens - 1) // self._page_tokens)

    def after_eviction(self, node: Node, now: float) -> bool:
        return False


def _share_above(capacities: Sequence[float], tier: int) -> float:
    """Return the share that the tiers above ``tier`` have of the capacity down to it; 0 if it is unlimited, 1 if they are."""
    above = sum(capacities[:tier])
    if above == inf:
        return 1.0
    return above / (above + capacities[tier]) if tier < len(capacities) else 1.0
