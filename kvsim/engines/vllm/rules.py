"""vLLM's rules: its GPU block pool, and its CPU offloading tier below it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.edge import Edge
from kvsim.core.rules import Rules
from kvsim.core.tier import Tier
from kvsim.engines.vllm.cache import VLLMCache

OWN = "or say rules=default, kvsim's own rules for the same policies"


@dataclass(frozen=True, kw_only=True)
class VLLMRules(Rules):
    """As vLLM 0.33 plays a sequence of requests, request by request.

    gpu   pages are found from admission on; recency is that of the request that finished last; a page computed twice is
          there twice; pages without a key (partial tail, answer) are reused first
    cpu   pages are offered by every request and stored one by one, whatever the GPU has of them (``OffloadTier``)
    """

    has_own_cache: ClassVar[bool] = True

    def check(self, command: str, tiers: Sequence[str]) -> None:
        if command != "replay":
            raise ValueError(f"vLLM's rules have no clock: say kvsim replay instead of kvsim {command}, {OWN}")
        if "disk" in tiers:
            raise ValueError(f"vLLM's rules have no disk tier: set tiers.disk.capacity=0, {OWN}")
        if self.cache_output:
            raise ValueError(f"cache_output is not for vLLM's rules, which cache prompts: say rules.cache_output=false, {OWN}")

    def serving_cache(self, tiers: list[Tier], edges: list[Edge], page_tokens: int) -> VLLMCache:
        return VLLMCache(tiers, edges, self, page_tokens)
