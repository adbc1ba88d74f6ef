"""The rules of SGLang's radix cache and of its hierarchical cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from kvsim.core.fan_out import AFTER_WARM_UP, FanOut
from kvsim.core.rules import IN_TIME, OWN, CacheSetup, Rules
from kvsim.core.serving import Server
from kvsim.core.tier import CPU, DISK, Edge, Tier
from kvsim.engine.schedule import LOOPS, Parts
from kvsim.engines.sglang.budget import PassSettings
from kvsim.engines.sglang.hosted_nodes import HostedNodeCache
from kvsim.engines.sglang.hosted_steps import HostedSteps
from kvsim.engines.sglang.observed_nodes import ObservedNodes
from kvsim.engines.sglang.queue import check_policy
from kvsim.engines.sglang.schedule import NodeSchedule
from kvsim.engines.sglang.stateful_nodes import StatefulNodeCache
from kvsim.engines.sglang.stepped import SteppedNodes
from kvsim.engines.sglang.stored_steps import StoredSteps
from kvsim.engines.sglang.unified_nodes import UnifiedNodeCache
from kvsim.engines.sglang.versions import LATEST, VERSIONS
from kvsim.engines.sglang.whole_nodes import WholeNodeCache
from kvsim.errors import IdleSetting, UsageError
from kvsim.hardware.tier_kinds import kind_of
from kvsim.numbers import Real, Whole, check_settings

OF_SCHEDULE = (
    "loop",
    "mixed_chunk",
    "chunked_prefill",
    "max_prefill_tokens",
    "schedule_conservativeness",
    "ignore_eos",
    "declared_output_tokens",
)
OTHER = "choose write_through, write_through_selective or write_back, or set rules=default"
_IN_TIME = (["gpu"], ["gpu", "cpu"], ["gpu", "cpu", "disk"])
"""Tiers that a simulation covers."""
PREFETCH_COUNTS = ("stored", "unmatched")


@dataclass(frozen=True, kw_only=True)
class SGLangRules(Rules):
    """Nodes are evicted and moved as a whole, and a look-up alone refreshes them. Policies decide everything else.

    GPU only            RadixCache (SGLang 0.5.23), as ``WholeNodeCache``; with answers or prefill chunks, ``UnifiedNodeCache``;
                        in ``kvsim simulate`` also its scheduler (``NodeSchedule``)
    GPU, CPU and disk   UnifiedRadixCache (0.5.23), as ``UnifiedNodeCache``; the disk tier stands for SGLang's storage. In
                        ``kvsim simulate`` with its scheduler, as ``HostedSteps`` and, with a disk tier, ``StoredSteps``
    version=0.5.15      GPU and CPU: HiRadixCache, as ``HostedNodeCache``; GPU only, in ``kvsim simulate``: see ``versions.py``

    Simulations by version 0.5.15 with a CPU tier use kvsim's own rules with the same settings, as does ``kvsim validate``.
    """

    engine: ClassVar[str] = "SGLang"
    samples: ClassVar[FanOut | None] = AFTER_WARM_UP
    covered_tiers: ClassVar[Sequence[str]] = ("gpu", "cpu", "disk")
    refuses_other_tiers: ClassVar[bool] = True
    fixed_settings: ClassVar[Sequence[str]] = ("cache_chunks",)
    settings_in_time: ClassVar[Sequence[str]] = OF_SCHEDULE
    prefills_in_chunks: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = True
    asks_prefetch: ClassVar[bool] = True
    has_bigram_keys: ClassVar[bool] = True

    version: str = LATEST
    """The version of SGLang whose hierarchical cache is played or, with memory on the GPU alone, whose schedule."""

    load_min_tokens: int = 10
    """Shortest hit in the CPU tier that is loaded to the GPU; a shorter one is recomputed."""

    prefetch_counts: str = PREFETCH_COUNTS[0]
    """The pages that the host makes room for before a prefetch, and that the prefetch policy is asked about: those that storage
    has (since SGLang's pull request 19320), or all pages of the prompt that a look-up has not found (before)."""

    cache_output: bool | None = None

    loop: str = "overlap"
    """overlap: a step is scheduled while the one before it runs; plain: after it (``--disable-overlap-schedule``)."""

    mixed_chunk: bool = False
    """Whether running requests decode in the steps of prompts, too (``--enable-mixed-chunk``)."""

    chunked_prefill: bool = True
    """Whether prompts are computed in chunks of ``engine.max_batch_tokens``; otherwise as a whole
    (``--chunked-prefill-size -1``)."""

    max_prefill_tokens: int = 16384
    """Prompt tokens of a step after which it takes no further request (``--max-prefill-tokens``)."""

    schedule_conservativeness: float = 1.0
    """Above 1: more memory is kept for answers, and fewer requests are retracted (``--schedule-conservativeness``)."""

    ignore_eos: bool = False
    """Whether requests are known to generate all that they declare, so that memory is kept for all of it."""

    declared_output_tokens: int | None = None
    """Longest answer that each request declares (``max_new_tokens``), at least its own. None: the length of its answer."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(), "load_min_tokens")
        check_settings(self, Whole(1), "max_prefill_tokens")
        check_settings(self, Whole(1), "declared_output_tokens", or_null=True, hint="null declares the length of each answer")
        check_settings(self, Real(above=0), "schedule_conservativeness")
        for name, known in (("version", tuple(VERSIONS)), ("prefetch_counts", PREFETCH_COUNTS), ("loop", LOOPS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, not {value}")
        if self.mixed_chunk and not self.chunked_prefill:
            raise ValueError("mixed_chunk has no effect with chunked_prefill=false: leave one of them out")
        if self.ignore_eos and self.declared_output_tokens is not None:
            raise ValueError("ignore_eos makes answers as long as declared: leave declared_output_tokens out")

    @property
    def is_unified(self) -> bool:
        """Whether the cache is that of SGLang 0.5.23."""
        return self.version == LATEST

    @property
    def whose(self) -> str:
        return self.engine if self.is_unified else f"{self.engine} {self.version}"

    def can_cache_answers(self, command: str, tiers: Sequence[str]) -> bool:
        return self.is_unified or "cpu" not in tiers

    def for_command(self, command: str, tiers: Sequence[str]) -> Rules:
        return self if self.covers(command, tiers) else replace(self, version=LATEST)._own(command, tiers)

    def covers(self, command: str, tiers: Sequence[str]) -> bool:
        if command not in IN_TIME:
            return True
        return command == "simulate" and list(tiers) in (_IN_TIME if self.is_unified else _IN_TIME[:1])

    def check(self, command: str, tiers: Sequence[str]) -> None:
        super().check(command, tiers)
        for name, tier in (("load_min_tokens", "cpu"), ("prefetch_counts", "disk")):
            if tier not in tiers and getattr(self, name) != getattr(SGLangRules, name):
                raise IdleSetting(name, f"without a {kind_of(tier).label} tier", f"set tiers.{tier}.capacity")
        if "disk" in tiers and "cpu" not in tiers:
            raise ValueError("SGLang's storage is read into host memory: set tiers.cpu.capacity")
        if not self.is_unified and "disk" in tiers:
            raise ValueError(f"version={self.version} has no disk tier: set tiers.disk.capacity=0, or version={LATEST}")
        if not self.is_unified and self.cache_output and "cpu" in tiers:
            raise ValueError(f"version={self.version} does not cache answers: set cache_output=false, or version={LATEST}")
        if command != "simulate":
            self._check_replay(command, tiers)
        elif not self.recompute_last_token:
            raise ValueError(f"recompute_last_token=false is not supported by SGLang's schedule: set it to true, {OWN}")

    def _check_replay(self, command: str, tiers: Sequence[str]) -> None:
        """Raise ValueError for settings that only a simulation has."""
        if not self.is_unified and "cpu" not in tiers:
            raise IdleSetting("version", f"on kvsim {command} without a {kind_of('cpu').label} tier", "set tiers.cpu.capacity")
        for field in fields(self):
            if field.name in OF_SCHEDULE and getattr(self, field.name) != field.default:
                raise IdleSetting(field.name, f"on kvsim {command}, which has no schedule")

    def check_schedule(self, scheduling: Any, page_tokens: int, max_batch_tokens: int) -> None:
        check_policy(scheduling)
        if self.chunked_prefill and max_batch_tokens % page_tokens:
            raise ValueError(
                f"engine.max_batch_tokens={max_batch_tokens} must be a multiple of page_tokens={page_tokens}, as in SGLang"
            )

    def cache(self, setup: CacheSetup) -> SteppedNodes:
        tiers, answers = setup.tiers, bool(self.cache_output)
        if not setup.edges:
            return SteppedNodes(tiers[0], setup.page_tokens, caches_answers=answers, version=VERSIONS[self.version])
        if tiers[CPU].level != CPU:
            raise ValueError(f"an engine of SGLang has {_own_tiers(tiers)}, {OWN}")
        _check_placement(setup.edges[0])
        _check_below(setup.edges)
        if len(tiers) == CPU + 1:
            return HostedSteps(setup, caches_answers=answers, load_min_tokens=self.load_min_tokens)
        return StoredSteps(
            setup,
            caches_answers=answers,
            load_min_tokens=self.load_min_tokens,
            counts_unmatched=self.prefetch_counts == "unmatched",
        )

    def scheduler(self) -> Callable[[Parts], NodeSchedule]:
        return self._schedule

    def _schedule(self, parts: Parts) -> NodeSchedule:
        if not parts.is_layerwise and parts.cache.lower is not None:
            raise UsageError("engine.overlap=none: SGLang computes a layer as soon as its pages have arrived: leave it out")
        settings = PassSettings(
            looks_ahead=self.loop == "overlap",
            mixed_chunk=self.mixed_chunk,
            conservativeness=self.schedule_conservativeness,
            ignore_eos=self.ignore_eos,
            declared_tokens=self.declared_output_tokens,
            chunk_tokens=parts.max_batch_tokens if self.chunked_prefill else None,
            prefill_tokens=self.max_prefill_tokens,
        )
        return NodeSchedule(parts, settings)

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
            cache_output=bool(self.cache_output),
            load_min_tokens=self.load_min_tokens,
            counts_unmatched=self.prefetch_counts == "unmatched",
        )

    def observed(self, setup: CacheSetup) -> Server:
        if setup.edges:
            return self.server(setup)
        return ObservedNodes(self.cache(setup), looks_ahead=self.loop == "overlap", mixed_chunk=self.mixed_chunk)

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
    samples: ClassVar[FanOut | None] = None
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
            cache_output=bool(self.cache_output),
            recompute_last_token=self.recompute_last_token,
        )


def _own_tiers(tiers: Sequence[Tier]) -> str:
    """Say which tiers below the GPU no engine shares, and how to set that."""
    if tiers[-1].level == DISK:
        return "its own CPU memory and storage: set cluster.engines_per_host=1"
    return "its own CPU memory: set tiers.cpu.scope=engine"


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
