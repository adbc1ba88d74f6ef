"""The rules of LightLLM's radix cache and of its CPU cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.edge import Edge
from kvsim.core.rules import Rules
from kvsim.core.tier import Tier
from kvsim.engines.lightllm.cache import LightLLMCache

OWN = "or set rules=default for kvsim's own rules with the same policies"


@dataclass(frozen=True, kw_only=True)
class LightLLMRules(Rules):
    """The rules of LightLLM (August 2026), request by request, as ``LightLLMCache``.

    They apply to ``kvsim replay`` without a disk tier only. Other commands, and a replay with a disk tier, use kvsim's own rules
    with the same settings.
    """

    engine: ClassVar[str] = "LightLLM"
    has_own_cache: ClassVar[bool] = True
    has_coarse_pages: ClassVar[bool] = True

    def for_command(self, command: str, tiers: Sequence[str]) -> Rules:
        if command not in ("simulate", "validate") and "disk" not in tiers:
            return self
        return Rules(recompute_last_token=self.recompute_last_token, cache_output=self.cache_output)

    def serving_cache(self, tiers: list[Tier], edges: list[Edge], page_tokens: int) -> LightLLMCache:
        for edge in edges:
            if not edge.copies_prompts:
                kind = type(edge.placement).__name__
                raise ValueError(
                    f"LightLLM stores whole prompts when they finish, but {kind} decides node by node: "
                    f"set placement=by_length, {OWN}"
                )
            if not edge.lower.eviction.orders_by_last_use():
                kind = type(edge.lower.eviction).__name__
                raise ValueError(
                    f"LightLLM's CPU cache evicts the page used least recently, not by {kind}: "
                    f"set eviction@tiers.cpu.eviction=lru, {OWN}"
                )
        return LightLLMCache(tiers, edges, self, page_tokens)
