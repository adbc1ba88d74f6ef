"""vLLM's rules: a GPU block pool, and the CPU offloading tier below it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.edge import Edge
from kvsim.core.rules import Rules
from kvsim.core.tier import Tier
from kvsim.engines.vllm.cache import VLLMCache
from kvsim.engines.vllm.stepped import SteppedCache

OWN = "or set rules=default for kvsim's own rules with the same policies"


@dataclass(frozen=True, kw_only=True)
class VLLMRules(Rules):
    """The rules of vLLM 0.33, request by request.

    gpu   pages can be found from admission on and become recent when their request finishes; a page computed twice is stored
          twice; slots of pages without a key (partial tail, answer) are reused first
    cpu   every request offers its pages, which are stored one by one, whatever the GPU has of them (``OffloadTier``)
    """

    engine: ClassVar[str] = "vLLM"
    has_own_cache: ClassVar[bool] = True
    pauses_after_retraction: ClassVar[bool] = False

    def check(self, command: str, tiers: Sequence[str]) -> None:
        if command not in ("replay", "simulate"):
            raise ValueError(
                f"vLLM's rules are for kvsim replay and kvsim simulate, not for kvsim {command}: choose one of them, {OWN}"
            )
        if "disk" in tiers:
            raise ValueError(f"vLLM's rules have no disk tier: set tiers.disk.capacity=0, {OWN}")
        if command == "simulate" and "cpu" in tiers:
            raise ValueError(f"vLLM's CPU offloading has no clock here: set tiers.cpu.capacity=0 for the GPU's schedule, {OWN}")
        if command == "replay" and self.cache_output:
            raise ValueError(f"cache_output is not supported by vLLM's rules in a replay: set it to false, {OWN}")

    def served_cache(self, tiers: list[Tier], edges: list[Edge], page_tokens: int) -> SteppedCache:
        return SteppedCache(tiers[0], self, page_tokens)

    def serving_cache(self, tiers: list[Tier], edges: list[Edge], page_tokens: int) -> VLLMCache:
        return VLLMCache(tiers, edges, self, page_tokens)
