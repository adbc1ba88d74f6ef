"""vLLM's rules: a GPU block pool and the CPU offloading tier below it, or one pool of pages and recurrent states."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvsim.core.rules import OWN, CacheSetup, Rules
from kvsim.engines.vllm.cache import VLLMCache
from kvsim.engines.vllm.hybrid_cache import VLLMHybridCache
from kvsim.engines.vllm.stepped import SteppedCache
from kvsim.numbers import Whole, check_settings


@dataclass(frozen=True, kw_only=True)
class VLLMRules(Rules):
    """The rules of vLLM 0.33, request by request.

    gpu   pages can be found from admission on and become recent when their request finishes; a page computed twice is stored
          twice; slots of pages without a key (partial tail, answer) are reused first
    cpu   every request offers its pages, which are stored one by one, whatever the GPU has of them (``OffloadTier``)
    """

    engine: ClassVar[str] = "vLLM"
    covered_tiers: ClassVar[Sequence[str]] = ("gpu", "cpu")
    refuses_other_tiers: ClassVar[bool] = True

    cache_output: bool | None = None

    def can_cache_answers(self, command: str, tiers: Sequence[str]) -> bool:
        return "cpu" not in tiers

    def check(self, command: str, tiers: Sequence[str]) -> None:
        if command not in ("replay", "simulate"):
            raise ValueError(
                f"vLLM's rules are for kvsim replay and kvsim simulate, not for kvsim {command}: choose one of them, {OWN}"
            )
        super().check(command, tiers)
        if command == "simulate" and "cpu" in tiers:
            raise ValueError(f"vLLM's CPU offloading has no clock here: set tiers.cpu.capacity=0 for the GPU's schedule, {OWN}")
        if self.cache_output and not self.can_cache_answers(command, tiers):
            raise ValueError(f"cache_output is not supported by vLLM's rules with a CPU tier: set it to false, {OWN}")

    def check_schedule(self, scheduling: Any, page_tokens: int, max_batch_tokens: int) -> None:
        if not scheduling.orders_by_priority():
            raise ValueError(
                f"scheduling: {type(scheduling).__name__}: vLLM's schedule is by arrival or by priority, without a bound: set "
                "scheduling=fcfs, scheduling=priority with scheduling.max_wait_s=null, or rules=default"
            )

    def server(self, setup: CacheSetup) -> VLLMCache:
        return VLLMCache(setup.tiers, setup.edges, self, setup.page_tokens)

    def cache(self, setup: CacheSetup) -> SteppedCache:
        return SteppedCache(setup.tiers[0], self, setup.page_tokens)


@dataclass(frozen=True, kw_only=True)
class VLLMHybridRules(Rules):
    """The rules of vLLM 0.33 for models with Mamba groups, request by request, as ``VLLMHybridCache``.

    They apply to ``kvsim replay`` with a GPU only. Other commands, and a replay with more tiers, use kvsim's own rules with the
    same settings.
    """

    engine: ClassVar[str] = "vLLM"
    covers_time: ClassVar[bool] = False
    covered_tiers: ClassVar[Sequence[str]] = ("gpu",)
    fixed_settings: ClassVar[Sequence[str]] = ("recompute_last_token", "cache_output")
    serves_hybrid_models: ClassVar[bool] = True

    state_pages: int | None = None
    """Blocks of a state: one for each Mamba group. None: as many as the bytes of the model's state take."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "state_pages", or_null=True, hint="null derives it from the model")

    def server(self, setup: CacheSetup) -> VLLMHybridCache:
        gpu, hybrid, page_tokens = setup.tiers[0], setup.hybrid, setup.page_tokens
        assert hybrid is not None
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
