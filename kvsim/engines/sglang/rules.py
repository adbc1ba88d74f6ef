"""The rules of SGLang's radix cache and of its hierarchical cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.rules import OWN, CacheSetup, Rules
from kvsim.core.serving import Server
from kvsim.core.tier import CPU, DISK, Edge
from kvsim.engines.sglang.hosted_nodes import HostedNodeCache
from kvsim.engines.sglang.stateful_nodes import StatefulNodeCache
from kvsim.engines.sglang.unified_nodes import UnifiedNodeCache
from kvsim.engines.sglang.whole_nodes import WholeNodeCache
from kvsim.hardware.tier_kinds import kind_of
from kvsim.numbers import Whole, check_settings

OTHER = "choose write_through, write_through_selective or write_back, or set rules=default"
VERSIONS = ("0.5.23", "0.5.15")
PREFETCH_COUNTS = ("stored", "unmatched")


@dataclass(frozen=True, kw_only=True)
class SGLangRules(Rules):
    """Nodes are evicted and moved as a whole, and a look-up alone refreshes them. Policies decide everything else.

    They have no clock and apply to ``kvsim replay`` only. All other commands use kvsim's own rules with the same settings.

    GPU only            RadixCache (SGLang 0.5.23), as ``WholeNodeCache``; with answers or prefill chunks, ``UnifiedNodeCache``
    GPU, CPU and disk   UnifiedRadixCache (0.5.23), as ``UnifiedNodeCache``; the disk tier stands for SGLang's storage
    version=0.5.15      GPU and CPU: HiRadixCache, as ``HostedNodeCache``
    """

    engine: ClassVar[str] = "SGLang"
    covers_time: ClassVar[bool] = False
    covered_tiers: ClassVar[Sequence[str]] = ("gpu", "cpu", "disk")
    refuses_other_tiers: ClassVar[bool] = True
    prefills_in_chunks: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = True
    asks_prefetch: ClassVar[bool] = True
    caches_known_answers: ClassVar[bool] = True
    has_bigram_keys: ClassVar[bool] = True

    version: str = VERSIONS[0]
    """The version of SGLang whose hierarchical cache is replayed."""

    load_min_tokens: int = 10
    """Shortest hit in the CPU tier that is loaded to the GPU; a shorter one is recomputed."""

    prefetch_counts: str = PREFETCH_COUNTS[0]
    """The pages that the host makes room for before a prefetch, and that the prefetch policy is asked about: those that storage
    has (since SGLang's pull request 19320), or all pages of the prompt that a look-up has not found (before)."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(), "load_min_tokens")
        for name, known in (("version", VERSIONS), ("prefetch_counts", PREFETCH_COUNTS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, not {value}")

    @property
    def is_unified(self) -> bool:
        """Whether the cache is that of SGLang 0.5.23."""
        return self.version == VERSIONS[0]

    def can_cache_answers(self, command: str, tiers: Sequence[str]) -> bool:
        return self.is_unified

    def check(self, command: str, tiers: Sequence[str]) -> None:
        super().check(command, tiers)
        for name, tier in (("load_min_tokens", "cpu"), ("version", "cpu"), ("prefetch_counts", "disk")):
            if tier not in tiers and getattr(self, name) != getattr(SGLangRules, name):
                raise ValueError(f"{name} has no effect without a {kind_of(tier).label} tier: set tiers.{tier}.capacity")
        if "disk" in tiers and "cpu" not in tiers:
            raise ValueError("SGLang's storage is read into host memory: set tiers.cpu.capacity")
        if not self.is_unified and "disk" in tiers:
            raise ValueError(f"version={self.version} has no disk tier: set tiers.disk.capacity=0, or version={VERSIONS[0]}")
        if not self.is_unified and self.cache_output:
            raise ValueError(f"version={self.version} does not cache answers: set cache_output=false, or version={VERSIONS[0]}")

    def server(self, setup: CacheSetup) -> Server:
        chunk, has_host = setup.prefill_chunk_tokens, bool(setup.edges)
        _check_chunk(chunk, setup.page_tokens)
        if setup.copy_steps and not has_host:
            raise ValueError("replay.copy_steps has no effect without a CPU tier: set tiers.cpu.capacity")
        if has_host:
            _check_placement(setup.edges[0])
        if not self.is_unified:
            return self._classic(setup)
        if not (has_host or self.cache_output or chunk):
            return WholeNodeCache(setup.tiers, setup.page_tokens, recompute_last_token=self.recompute_last_token)
        _check_below(setup.edges)
        return UnifiedNodeCache(
            setup,
            recompute_last_token=self.recompute_last_token,
            cache_output=self.cache_output,
            load_min_tokens=self.load_min_tokens,
            counts_unmatched=self.prefetch_counts == "unmatched",
        )

    def _classic(self, setup: CacheSetup) -> HostedNodeCache:
        for name in ("prefill_chunk_tokens", "copy_steps"):
            if getattr(setup, name):
                raise ValueError(f"replay.{name} has no effect on version={self.version}: leave it out")
        return HostedNodeCache(
            setup.tiers,
            setup.edges[0],
            setup.page_tokens,
            recompute_last_token=self.recompute_last_token,
            load_min_tokens=self.load_min_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class SGLangMambaRules(Rules):
    """The rules of SGLang's UnifiedRadixCache with KV and states (SGLang 0.5.23), request by request, as ``StatefulNodeCache``.

    They have no clock and apply to ``kvsim replay`` only. All other commands use kvsim's own rules with the same settings.
    """

    engine: ClassVar[str] = "SGLang"
    covers_time: ClassVar[bool] = False
    covered_tiers: ClassVar[Sequence[str]] = ("gpu",)
    refuses_other_tiers: ClassVar[bool] = True
    serves_hybrid_models: ClassVar[bool] = True
    decides_checkpoints: ClassVar[bool] = True

    extra_buffer: bool = True
    """Whether a running request has two more slots for states (``--mamba-scheduler-strategy extra_buffer``), so that a state can
    be saved before the end of a chunk and while decoding."""

    def server(self, setup: CacheSetup) -> StatefulNodeCache:
        hybrid, page_tokens = setup.hybrid, setup.page_tokens
        assert hybrid is not None
        grid_tokens = hybrid.grid_pages * page_tokens
        if hybrid.state_tiers is None:
            raise ValueError(f"SGLang keeps states in a pool of their own: set tiers.gpu.states=64states or 10GiB, {OWN}")
        _check_chunk(hybrid.prefill_chunk_tokens, page_tokens)
        if self.extra_buffer and hybrid.grid_pages > 1:
            raise ValueError(
                f"SGLang may save a state after any page, but this model has one only after multiples of {grid_tokens} tokens: "
                f"set page_tokens={grid_tokens}"
            )
        return StatefulNodeCache(
            setup.tiers,
            page_tokens,
            hybrid,
            extra_buffer=self.extra_buffer,
            cache_output=self.cache_output,
            recompute_last_token=self.recompute_last_token,
        )


def _check_chunk(tokens: int, page_tokens: int) -> None:
    """Raise ValueError for chunks without a single page."""
    if 0 < tokens < page_tokens:
        raise ValueError(f"replay.prefill_chunk_tokens={tokens} is less than page_tokens={page_tokens}: increase it")


def _check_below(edges: Sequence[Edge]) -> None:
    """Raise ValueError unless the host keeps what it loads, and storage lies below it and has what it has."""
    for edge in edges:
        kind = type(edge.placement).__name__
        if not edge.keeps_loaded():
            raise ValueError(f"SGLang's host keeps what it loads, which {kind} does not: {OTHER}")
        if edge.lower.level != DISK:
            continue
        if edge.upper.level != CPU:
            raise ValueError("SGLang's storage is read into host memory: set tiers.disk.below=cpu")
        if not edge.copies_nodes or edge.wants_requests or edge.watermark():
            raise ValueError(
                f"SGLang's storage has whatever the host has, which {kind} does not give it: "
                f"set placement@tiers.disk.placement=write_through, {OWN}"
            )
        if not edge.lower.eviction.orders_by_last_use():
            policy = type(edge.lower.eviction).__name__
            raise ValueError(
                f"SGLang leaves evictions to its storage, where pages used least recently leave first here, not by {policy}: "
                f"set eviction@tiers.disk.eviction=lru, {OWN}"
            )


def _check_placement(edge: Edge) -> None:
    """Raise ValueError unless the policy decides node by node, after a use or at eviction."""
    if edge.copies_prompts:
        kind = type(edge.placement).__name__
        raise ValueError(f"SGLang's rules copy node by node, but {kind} decides about whole prompts: {OTHER}")
    if edge.watermark():
        raise ValueError(f"SGLang's rules never write pages back before they are evicted: set the watermark to 0, {OWN}")
