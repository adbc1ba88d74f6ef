"""The rules of LightLLM's radix cache and of its CPU cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.edge import Edge
from kvsim.core.rules import Rules
from kvsim.core.tier import DISK, Tier
from kvsim.engines.lightllm.cache import LightLLMCache


@dataclass(frozen=True, kw_only=True)
class LightLLMRules(Rules):
    """The rules of LightLLM (August 2026), request by request, in a replay without a disk tier (``LightLLMCache``).

    ``simulate``, and a replay with a disk tier, use kvsim's own rules with the same policies instead.
    """

    has_own_cache: ClassVar[bool] = True

    def uses_own_cache(self, command: str, tiers: Sequence[str]) -> bool:
        return command == "replay" and "disk" not in tiers

    def has_coarse_pages(self, command: str, tiers: Sequence[str]) -> bool:
        return self.uses_own_cache(command, tiers)

    def serving_cache(self, tiers: list[Tier], edges: list[Edge], page_tokens: int) -> LightLLMCache | None:
        if any(tier.level == DISK for tier in tiers):
            return None
        for edge in edges:
            if not edge.copies_prompts:
                kind = type(edge.placement).__name__
                raise ValueError(
                    f"LightLLM's rules store whole prompts when they finish, but {kind} decides node by node: "
                    "set placement=by_length, or rules=default"
                )
        return LightLLMCache(tiers, edges, self, page_tokens)
