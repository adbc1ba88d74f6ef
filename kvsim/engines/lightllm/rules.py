"""The rules of LightLLM's radix caches and of its CPU cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.fan_out import FORKED, FanOut
from kvsim.core.rules import OWN, CacheSetup, Rules
from kvsim.core.tier import GPU, Edge
from kvsim.engines.lightllm.cache import LightLLMCache
from kvsim.engines.lightllm.hybrid_cache import LightLLMHybridCache
from kvsim.engines.lightllm.stepped import SteppedRadix


@dataclass(frozen=True, kw_only=True)
class LightLLMRules(Rules):
    """The rules of LightLLM (August 2026), request by request, as ``LightLLMCache``; in time by kvsim's own schedule, as
    ``SteppedRadix``.

    They apply without a disk tier only. With one, kvsim's own rules apply with the same settings.
    """

    engine: ClassVar[str] = "LightLLM"
    samples: ClassVar[FanOut | None] = FORKED
    covered_tiers: ClassVar[Sequence[str]] = ("gpu", "cpu")
    fixed_settings: ClassVar[Sequence[str]] = ("cache_chunks",)
    has_coarse_pages: ClassVar[bool] = True
    knows_slots: ClassVar[bool] = True

    def server(self, setup: CacheSetup) -> LightLLMCache:
        _check_edges(setup.edges)
        return LightLLMCache(setup.tiers, setup.edges, self, setup.page_tokens)

    def cache(self, setup: CacheSetup) -> SteppedRadix:
        _check_edges(setup.edges)
        if setup.edges and setup.tiers[1].level == GPU:
            raise ValueError(f"an engine of LightLLM has its own CPU memory: set tiers.cpu.scope=engine, {OWN}")
        return SteppedRadix(setup.tiers, setup.edges, self, setup.page_tokens)


@dataclass(frozen=True, kw_only=True)
class LightLLMHybridRules(Rules):
    """The rules of LightLLM's cache for hybrid models, with detached states, request by request, as ``LightLLMHybridCache``.

    They apply to ``kvsim replay`` without a disk tier only. Other commands, and a replay with a disk tier, use kvsim's own rules
    with the same settings.
    """

    engine: ClassVar[str] = "LightLLM"
    covers_time: ClassVar[bool] = False
    samples: ClassVar[FanOut | None] = None
    covered_tiers: ClassVar[Sequence[str]] = ("gpu", "cpu")
    fixed_settings: ClassVar[Sequence[str]] = ("recompute_last_token", "cache_output")
    has_coarse_pages: ClassVar[bool] = True
    serves_hybrid_models: ClassVar[bool] = True
    decides_checkpoints: ClassVar[bool] = True

    def server(self, setup: CacheSetup) -> LightLLMHybridCache:
        hybrid, page_tokens = setup.hybrid, setup.page_tokens
        assert hybrid is not None
        _check_edges(setup.edges)
        if hybrid.state_tiers is None:
            raise ValueError(f"LightLLM keeps states in a pool of their own: set tiers.gpu.states=64states or 10GiB, {OWN}")
        if len(hybrid.state_tiers) > 1:
            raise ValueError(f"LightLLM keeps states on the GPU only: set tiers.cpu.states=0, {OWN}")
        chunk = hybrid.prefill_chunk_tokens
        if chunk % page_tokens:
            raise ValueError(f"replay.prefill_chunk_tokens={chunk} must be a multiple of page_tokens={page_tokens}, {OWN}")
        return LightLLMHybridCache(setup.tiers, setup.edges, self, page_tokens, hybrid)


def _check_edges(edges: list[Edge]) -> None:
    """Raise ValueError unless whole prompts are stored, and evicted page by page by LRU."""
    for edge in edges:
        if not edge.copies_prompts:
            kind = type(edge.placement).__name__
            raise ValueError(
                f"LightLLM stores whole prompts when they finish, but {kind} decides node by node: set placement=by_length, {OWN}"
            )
        if not edge.lower.eviction.orders_by_last_use():
            kind = type(edge.lower.eviction).__name__
            raise ValueError(
                f"LightLLM's CPU cache evicts the page used least recently, not by {kind}: "
                f"set eviction@tiers.cpu.eviction=lru, {OWN}"
            )
