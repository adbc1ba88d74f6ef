"""Copies only pages that are loaded faster than they are recomputed."""

from bisect import bisect_left
from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import GPU
from kvsim.core.tree import Node
from kvsim.hardware.tier_kinds import TIER_KINDS
from kvsim.numbers import Real, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.placement.base import PlacementPolicy

LONGEST_PROMPT_PAGES = 1 << 24
"""More pages than any prompt has."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class CostAware(PlacementPolicy):
    """Saves link time and room below by not copying pages that take longer to load than to recompute.

    Matrix products cost the same for every page, attention costs more for later ones: from some depth on, loading wins.

    after use        nothing
    after eviction   copy down if the node's last page is loaded ``margin`` times faster than it is recomputed, or if the lower
                     tier has children of the node, which would be lost with it; otherwise drop

    Pages on disk come over the disk's link and the host's or, straight to the GPU, over one as slow as the slower of the two.
    Latencies, paid once per transfer, are left out.
    """

    margin: float = 1.0

    @property
    def reads_hardware(self) -> bool:
        return True

    def __post_init__(self) -> None:
        check_settings(self, Real(above=0), "margin")

    def bind(self, context: PolicyContext) -> None:
        self._tier = context.tier
        load_s = context.host_load_s(1) - context.host_load_s(0)
        kind = TIER_KINDS[context.level]
        if kind.is_far:
            read_s = context.read_s(kind.name, 1) - context.read_s(kind.name, 0)
            load_s = max(load_s, read_s) if context.upper_level == GPU else load_s + read_s
        pages, tokens = range(LONGEST_PROMPT_PAGES), context.page_tokens
        self.first_page = bisect_left(
            pages, True, key=lambda page: context.recompute_s(page * tokens, (page + 1) * tokens) >= self.margin * load_s
        )
        """Position in a prompt from which on pages are worth a copy."""

    def after_eviction(self, node: Node, now: float) -> bool:
        return node.depth + node.pages > self.first_page or node.children_in[self._tier] > 0
