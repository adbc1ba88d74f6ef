"""RandomCompute (Liu, Yu and Yang: When fancy eviction fails: rethinking cache replacement for LLM prefix reuse,
arXiv:2609.28870, 2026)."""

from dataclasses import dataclass
from typing import Final

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.sampled import PageFlops, SampledEviction

LEAST_AGE_S: Final = 1e-9
"""Leaves used at this instant compare by their compute."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class RandomCompute(SampledEviction):
    """Keeps what is recent and expensive to compute again: where prompts are long, a late page costs several times an early one.

    score    FLOPs that the leaf's last page saves, at its depth / seconds since its last use
    victim   the lowest score among ``samples`` leaves drawn at random; all of it leaves before the next draw

    The authors' simulator (github.com/LauYeeYu/libCacheSim) counts a hit behind a hole, so a page may leave before the pages
    after it. Here pages leave from the end of their prompt, and each path has one candidate, as in their partial-node variant,
    whose 32 samples are the default. So it gains less than theirs: a path's candidate is its most expensive page.
    """

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._flops = PageFlops(context)

    def score(self, node: Node, now: float) -> float:
        age_s = now - node.last_used_in(self.tier)
        return self._flops.at(node.depth + node.pages) / (age_s if age_s > LEAST_AGE_S else LEAST_AGE_S)
