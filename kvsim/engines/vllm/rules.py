"""vLLM's rules: a GPU block pool and the CPU offloading tier below it, or one pool of pages and recurrent states."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.edge import Edge
from kvsim.core.rules import HybridSettings, Rules
from kvsim.core.tier import Tier
from kvsim.engines.vllm.cache import VLLMCache
from kvsim.engines.vllm.hybrid_cache import VLLMHybridCache
from kvsim.engines.vllm.stepped import SteppedCache
from kvsim.numbers import Whole, check_settings

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
    schedules_by_priority: ClassVar[bool] = True

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


@dataclass(frozen=True, kw_only=True)
class VLLMHybridRules(Rules):
    """The rules of vLLM 0.33 for models with Mamba groups, request by request, as ``VLLMHybridCache``.

    They apply to ``kvsim replay`` with a GPU only. Other commands, and a replay with more tiers, use kvsim's own rules with the
    same settings.
    """

    engine: ClassVar[str] = "vLLM"
    has_own_cache: ClassVar[bool] = True
    serves_hybrid_models: ClassVar[bool] = True
    prefills_in_chunks: ClassVar[bool] = True

    state_pages: int | None = None
    """Blocks of a state: one for each Mamba group. None: as many as the bytes of the model's state take."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "state_pages", or_null=True, hint="null derives it from the model")

    def for_command(self, command: str, tiers: Sequence[str]) -> Rules:
        if command not in ("simulate", "validate") and len(tiers) == 1:
            return self
        if self.state_pages is not None:
            raise ValueError("state_pages has no effect but on kvsim replay with a GPU only: leave it out")
        return Rules(recompute_last_token=self.recompute_last_token, cache_output=self.cache_output)

    def check(self, command: str, tiers: Sequence[str]) -> None:
        if self.cache_output:
            raise ValueError(f"cache_output is not supported by vLLM's rules, which cache prompts only: set it to false, {OWN}")
        if not self.recompute_last_token:
            raise ValueError(f"recompute_last_token=false is not possible by vLLM's rules: leave it out, {OWN}")

    def hybrid_cache(self, tiers: list[Tier], edges: list[Edge], page_tokens: int, hybrid: HybridSettings) -> VLLMHybridCache:
        gpu = tiers[0]
        if hybrid.state_tiers is not None:
            raise ValueError(f"vLLM keeps states and pages in one pool: set tiers.gpu.states=shared, {OWN}")
        if not gpu.eviction.orders_by_last_use():
            kind = type(gpu.eviction).__name__
            raise ValueError(f"vLLM evicts the block used least recently, not by {kind}: set eviction=lru, {OWN}")
        tokens = hybrid.checkpoint.retention_interval_tokens()
        if tokens > page_tokens and tokens % page_tokens:
            raise ValueError(f"checkpoint.interval_tokens={tokens} must be a multiple of page_tokens={page_tokens}, {OWN}")
        interval_pages = max(tokens // page_tokens, min(tokens, 1))
        return VLLMHybridCache(gpu, page_tokens, self.state_pages or hybrid.state_pages, interval_pages, hybrid)
