"""The rules of SGLang's radix cache and of its hierarchical cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.edge import Edge
from kvsim.core.rules import Rules
from kvsim.core.serving import ServingCache
from kvsim.core.tier import Tier
from kvsim.engines.sglang.hosted_nodes import HostedNodeCache
from kvsim.engines.sglang.whole_nodes import WholeNodeCache

OTHER = "choose write_through, write_through_selective or write_back, or set rules=default"
OWN = "or set rules=default for kvsim's own rules with the same policies"


@dataclass(frozen=True, kw_only=True)
class SGLangRules(Rules):
    """Nodes are evicted and moved as a whole, and a look-up alone refreshes them. Policies decide everything else.

    GPU only       RadixCache (SGLang 0.5.23), as ``WholeNodeCache``
    GPU and CPU    HiRadixCache (SGLang 0.5.15), as ``HostedNodeCache``
    """

    has_own_cache: ClassVar[bool] = True
    has_bigram_keys: ClassVar[bool] = True

    load_min_tokens: int = 10
    """Shortest hit in the CPU tier that is loaded to the GPU; a shorter one is recomputed."""

    def __post_init__(self) -> None:
        if self.load_min_tokens < 0:
            raise ValueError(f"load_min_tokens must be 0 or more, not {self.load_min_tokens}")

    def check(self, command: str, tiers: Sequence[str]) -> None:
        if command != "replay":
            raise ValueError(f"SGLang's rules have no clock: run kvsim replay instead of kvsim {command}, {OWN}")
        if self.cache_output:
            raise ValueError(f"cache_output is not supported by SGLang's rules: set it to false, {OWN}")
        if "disk" in tiers:
            raise ValueError(f"SGLang's rules have no disk tier: set tiers.disk.capacity=0, {OWN}")
        if "cpu" not in tiers and self.load_min_tokens != SGLangRules.load_min_tokens:
            raise ValueError("load_min_tokens has no effect without a CPU tier: set tiers.cpu.capacity")

    def serving_cache(self, tiers: list[Tier], edges: list[Edge], page_tokens: int) -> ServingCache:
        if len(tiers) == 1:
            return WholeNodeCache(tiers, page_tokens, recompute_last_token=self.recompute_last_token)
        _check_placement(edges[0])
        return HostedNodeCache(
            tiers, edges[0], page_tokens, recompute_last_token=self.recompute_last_token, load_min_tokens=self.load_min_tokens
        )


def _check_placement(edge: Edge) -> None:
    """Raise ValueError unless the policy decides node by node, after a use or at eviction."""
    if edge.copies_prompts:
        kind = type(edge.placement).__name__
        raise ValueError(f"SGLang's rules copy node by node, but {kind} decides about whole prompts: {OTHER}")
    if edge.watermark():
        raise ValueError(f"SGLang's rules never write pages back before they are evicted: set the watermark to 0, {OWN}")
