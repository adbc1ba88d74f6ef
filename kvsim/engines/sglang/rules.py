"""The rules of SGLang's radix cache and of its hierarchical cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.rules import OWN, CacheSetup, Rules
from kvsim.core.serving import Server
from kvsim.core.tier import Edge
from kvsim.engines.sglang.hosted_nodes import HostedNodeCache
from kvsim.engines.sglang.stateful_nodes import StatefulNodeCache
from kvsim.engines.sglang.whole_nodes import WholeNodeCache
from kvsim.numbers import Whole, check_settings

OTHER = "choose write_through, write_through_selective or write_back, or set rules=default"


@dataclass(frozen=True, kw_only=True)
class SGLangRules(Rules):
    """Nodes are evicted and moved as a whole, and a look-up alone refreshes them. Policies decide everything else.

    They have no clock and apply to ``kvsim replay`` only. All other commands use kvsim's own rules with the same settings.

    GPU only       RadixCache (SGLang 0.5.23), as ``WholeNodeCache``
    GPU and CPU    HiRadixCache (SGLang 0.5.15), as ``HostedNodeCache``
    """

    engine: ClassVar[str] = "SGLang"
    covers_time: ClassVar[bool] = False
    covered_tiers: ClassVar[Sequence[str]] = ("gpu", "cpu")
    refuses_other_tiers: ClassVar[bool] = True
    fixed_settings: ClassVar[Sequence[str]] = ("cache_output",)
    has_bigram_keys: ClassVar[bool] = True

    load_min_tokens: int = 10
    """Shortest hit in the CPU tier that is loaded to the GPU; a shorter one is recomputed."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(), "load_min_tokens")

    def check(self, command: str, tiers: Sequence[str]) -> None:
        super().check(command, tiers)
        if "cpu" not in tiers and self.load_min_tokens != SGLangRules.load_min_tokens:
            raise ValueError("load_min_tokens has no effect without a CPU tier: set tiers.cpu.capacity")

    def server(self, setup: CacheSetup) -> Server:
        if not setup.edges:
            return WholeNodeCache(setup.tiers, setup.page_tokens, recompute_last_token=self.recompute_last_token)
        _check_placement(setup.edges[0])
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
        chunk_tokens, grid_tokens = hybrid.prefill_chunk_tokens, hybrid.grid_pages * page_tokens
        if hybrid.state_tiers is None:
            raise ValueError(f"SGLang keeps states in a pool of their own: set tiers.gpu.states=64states or 10GiB, {OWN}")
        if 0 < chunk_tokens < page_tokens:
            raise ValueError(f"replay.prefill_chunk_tokens={chunk_tokens} is less than page_tokens={page_tokens}: increase it")
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


def _check_placement(edge: Edge) -> None:
    """Raise ValueError unless the policy decides node by node, after a use or at eviction."""
    if edge.copies_prompts:
        kind = type(edge.placement).__name__
        raise ValueError(f"SGLang's rules copy node by node, but {kind} decides about whole prompts: {OTHER}")
    if edge.watermark():
        raise ValueError(f"SGLang's rules never write pages back before they are evicted: set the watermark to 0, {OWN}")
