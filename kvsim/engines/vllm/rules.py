"""vLLM's rules: a GPU block pool and the CPU offloading tier below it, or one pool of pages and recurrent states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from kvsim.core.fan_out import AT_ONCE, FanOut
from kvsim.core.rules import OWN, CacheSetup, Rules
from kvsim.core.serving import ServedCache
from kvsim.core.tier import GPU
from kvsim.engine.continuous import ContinuousBatching
from kvsim.engine.schedule import LOOPS, Parts, Schedule
from kvsim.engines.vllm.cache import VLLMCache
from kvsim.engines.vllm.hybrid_cache import VLLMHybridCache
from kvsim.engines.vllm.offloading import OffloadingCache
from kvsim.engines.vllm.offloads import CpuOffloads, Offloads
from kvsim.engines.vllm.schedule import BlockSchedule
from kvsim.engines.vllm.stepped import SteppedCache
from kvsim.engines.vllm.versions import LATEST, VERSIONS, Version
from kvsim.engines.vllm.window_cache import VLLMWindowCache
from kvsim.engines.vllm.window_groups import WindowGroups, group_sizes
from kvsim.engines.vllm.window_stepped import WindowSteppedCache
from kvsim.errors import IdleSetting, UsageError
from kvsim.model.spec import ModelSpec
from kvsim.numbers import Whole, check_settings
from kvsim.policies.scheduling.base import ARRIVAL, PRIORITY, SchedulingPolicy


@dataclass(frozen=True, kw_only=True)
class VLLMRules(Rules):
    """The rules of vLLM 0.33, request by request.

    gpu   pages can be found from admission on and become recent when their request finishes; a page computed twice is stored
          twice; slots of pages without a key (partial tail, answer) are reused first
    cpu   every request offers its pages, which are stored one by one, whatever the GPU has of them (``OffloadTier``)
    time  step by step as its scheduler V1, with the copies of its offloading connector (``BlockSchedule``)
    """

    engine: ClassVar[str] = "vLLM"
    with_stages: ClassVar[str] = "rules.loop=plain without a CPU tier"
    samples: ClassVar[FanOut | None] = AT_ONCE
    covered_tiers: ClassVar[Sequence[str]] = ("gpu", "cpu")
    refuses_other_tiers: ClassVar[bool] = True
    fixed_settings: ClassVar[Sequence[str]] = ("cache_chunks",)
    settings_in_time: ClassVar[Sequence[str]] = ("loop", "blocks_per_chunk", "offload_prompt_only", "version")

    cache_output: bool | None = None
    loop: str = "plain"
    """In time: overlap: a step is scheduled while the one before it runs (async scheduling, vLLM's default); plain: after it."""
    blocks_per_chunk: int = 1
    """In time: pages that the CPU tier looks up, stores and evicts as one."""
    offload_prompt_only: bool = True
    """In time: whether only pages of prompts are stored in the CPU tier."""
    version: str = LATEST
    """In time: the version of vLLM, a row of ``VERSIONS``."""

    def __post_init__(self) -> None:
        if self.loop not in LOOPS:
            raise ValueError(f"loop must be {' or '.join(LOOPS)}, not {self.loop}")
        if self.version not in VERSIONS:
            raise ValueError(f"version must be {' or '.join(VERSIONS)}, not {self.version}")
        check_settings(self, Whole(1), "blocks_per_chunk")

    def check(self, command: str, tiers: Sequence[str]) -> None:
        if command not in ("replay", "simulate"):
            raise ValueError(
                f"vLLM's rules are for kvsim replay and kvsim simulate, not for kvsim {command}: choose one of them, {OWN}"
            )
        super().check(command, tiers)
        self._check_effects(command, tiers)

    def _check_effects(self, command: str, tiers: Sequence[str]) -> None:
        """Raise ValueError for settings without effect."""
        if command == "replay" and self.loop != VLLMRules.loop:
            raise IdleSetting("loop", "on kvsim replay, which has no clock", subject=f"loop={self.loop}")
        if command == "replay" and self.version != LATEST:
            raise IdleSetting("version", "on kvsim replay of a trace", subject=f"version={self.version}")
        for name, value, default in (
            ("blocks_per_chunk", self.blocks_per_chunk, 1),
            ("offload_prompt_only", self.offload_prompt_only, True),
        ):
            if value != default and (command == "replay" or "cpu" not in tiers):
                where = "kvsim replay" if command == "replay" else "a run without a CPU tier"
                raise IdleSetting(name, f"on {where}", subject=f"{name}={str(value).lower()}")
        if not (self.offload_prompt_only or self.cache_output):
            raise ValueError("offload_prompt_only=false needs cache_output=true, since pages of answers have no names otherwise")

    def has_stages(self, tiers: Sequence[str]) -> bool:
        """As with its asynchronous scheduler off: ``step_with_batch_queue``, for which ``ContinuousBatching`` stands."""
        return self.loop == "plain" and list(tiers) == ["gpu"]

    def check_schedule(self, scheduling: Any, page_tokens: int, max_batch_tokens: int) -> None:
        if self.loop == "overlap":
            _check_by_arrival(scheduling)
        _check_priority(scheduling)

    def server(self, setup: CacheSetup) -> VLLMCache:
        is_ahead = self.loop == "overlap"
        return VLLMCache(setup.tiers, setup.edges, self, setup.page_tokens, version=self.row, is_ahead=is_ahead)

    @property
    def row(self) -> Version:
        """What its version does."""
        return VERSIONS[self.version]

    def cache(self, setup: CacheSetup) -> SteppedCache:
        tiers, page_tokens = setup.tiers, setup.page_tokens
        if not setup.edges:
            return SteppedCache(tiers[0], self, page_tokens, counts_last_admission=self.row.counts_last_admission)
        if tiers[1].level == GPU:
            raise ValueError(f"an engine of vLLM has its own CPU memory: set tiers.cpu.scope=engine, {OWN}")
        return OffloadingCache(
            tiers, setup.edges[0], self, page_tokens, chunk_pages=self.blocks_per_chunk, prompt_only=self.offload_prompt_only,
            version=self.row,
        )  # fmt: skip

    def scheduler(self) -> Callable[[Parts], Schedule]:
        return partial(_schedule, looks_ahead=self.loop == "overlap")


def _check_priority(scheduling: SchedulingPolicy) -> None:
    """Raise ValueError for a scheduling policy other than by arrival or priority."""
    if scheduling.goes_by() not in (ARRIVAL, PRIORITY):
        raise ValueError(
            f"scheduling: {type(scheduling).__name__}: vLLM's schedule is by arrival or, without CPU offloading, by priority "
            "without a bound: set scheduling=fcfs, scheduling=priority with scheduling.max_wait_s=null, or rules=default"
        )


def _check_by_arrival(scheduling: SchedulingPolicy) -> None:
    """Raise ValueError for a scheduling policy other than by arrival."""
    if scheduling.goes_by() != ARRIVAL:
        raise ValueError(
            f"scheduling: {type(scheduling).__name__}: with the overlap loop or CPU offloading, vLLM's schedule is by arrival "
            "here: set scheduling=fcfs, rules.loop=plain without a CPU tier, or rules=default"
        )


def _schedule(parts: Parts, *, looks_ahead: bool) -> Schedule:
    """Make the schedule of an engine. Without copies and without looking ahead, kvsim's own is vLLM's, and takes leaps."""
    cache: ServedCache = parts.cache
    if isinstance(cache, OffloadingCache):
        try:
            _check_by_arrival(parts.scheduling)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return BlockSchedule(parts, CpuOffloads(cache, parts.mover), looks_ahead=looks_ahead)
    return BlockSchedule(parts, Offloads(), looks_ahead=True) if looks_ahead else ContinuousBatching(parts)


@dataclass(frozen=True, kw_only=True)
class VLLMHybridRules(Rules):
    """The rules of vLLM 0.33 for models with Mamba groups, request by request, as ``VLLMHybridCache``.

    They apply to ``kvsim replay`` with a GPU only. Other commands, and a replay with more tiers, use kvsim's own rules with the
    same settings.
    """

    engine: ClassVar[str] = "vLLM"
    covers_time: ClassVar[bool] = False
    samples: ClassVar[FanOut | None] = None
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


@dataclass(frozen=True, kw_only=True)
class VLLMWindowRules(Rules):
    """The rules of vLLM 0.33 for models of which some layers have a sliding window: groups of equally many layers share one pool
    of blocks, and free what is behind the window (``WindowBlockPool``).

    A slot of the GPU tier is a block: ``page_tokens`` tokens of the layers of one group.
    """

    engine: ClassVar[str] = "vLLM"
    samples: ClassVar[FanOut | None] = None
    covered_tiers: ClassVar[Sequence[str]] = ("gpu",)
    refuses_other_tiers: ClassVar[bool] = True
    fixed_settings: ClassVar[Sequence[str]] = ("recompute_last_token", "cache_chunks")
    serves_windows: ClassVar[bool] = True

    cache_output: bool | None = None
    retention_tokens: int | None = 0
    """Tokens between places from which any prompt can begin again, besides those where prompts end or part, as vLLM's
    ``prefix_cache_retention_interval``; 0: no others, None: after every page."""
    full_first: bool = False
    """Whether the model's first layer has full attention, so that the full-attention group is vLLM's first."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(), "retention_tokens", or_null=True, hint="null keeps a place after every page")

    def check(self, command: str, tiers: Sequence[str]) -> None:
        if command not in ("replay", "simulate"):
            raise ValueError(
                f"vLLM's rules for sliding windows are for kvsim replay and kvsim simulate, not for kvsim {command}: choose one "
                f"of them, {OWN}"
            )
        super().check(command, tiers)

    def page_bytes(self, model: ModelSpec, page_tokens: int) -> int:
        full, local = model.attention_layers - model.sliding_window_layers, model.sliding_window_layers
        n_bytes = model.page_bytes(page_tokens)
        return n_bytes // model.attention_layers * group_sizes(full, local)[0] if full and local else n_bytes

    def taken_tokens(self, model: ModelSpec, tokens: float) -> float:
        """All of them in the group of full attention, and the last ones in each group with a window."""
        full, local = model.attention_layers - model.sliding_window_layers, model.sliding_window_layers
        return tokens + group_sizes(full, local)[2] * min(tokens, float(model.sliding_window_tokens))

    def check_model(self, model: ModelSpec) -> None:
        full, local = model.attention_layers - model.sliding_window_layers, model.sliding_window_layers
        if not local:
            raise ValueError("these rules of vLLM need a model with sliding windows: set model=gemma3_27b or rules=vllm")
        if not full or model.is_hybrid:
            others = "recurrent ones" if model.is_hybrid else "none with full attention"
            raise ValueError(f"vLLM's groups of layers with a window and {others} are not modelled: set rules=default")
        if group_sizes(full, local)[1] > 1:
            raise ValueError(
                f"vLLM has several groups of full attention for {full} layers beside {local} with a window, which is not "
                "modelled: set rules=default"
            )

    def check_schedule(self, scheduling: Any, page_tokens: int, max_batch_tokens: int) -> None:
        _check_priority(scheduling)

    def server(self, setup: CacheSetup) -> VLLMWindowCache:
        assert setup.windows is not None
        windows = self._groups(setup, setup.windows.chunk_tokens)
        return VLLMWindowCache(
            setup.tiers[0],
            windows,
            setup.page_tokens,
            chunk_tokens=setup.windows.chunk_tokens,
            cache_output=bool(self.cache_output),
        )

    def cache(self, setup: CacheSetup) -> WindowSteppedCache:
        assert setup.windows is not None
        return WindowSteppedCache(setup.tiers[0], self, setup.page_tokens, self._groups(setup, setup.windows.batch_tokens))

    def _groups(self, setup: CacheSetup, in_flight_tokens: int) -> WindowGroups:
        """Return the groups with a window. Raises ValueError for a setting that does not fit."""
        gpu, model, page_tokens = setup.tiers[0], setup.windows, setup.page_tokens
        assert model is not None
        if not gpu.eviction.orders_by_last_use():
            kind = type(gpu.eviction).__name__
            raise ValueError(f"vLLM evicts the block used least recently, not by {kind}: set eviction=lru, {OWN}")
        if self.retention_tokens is not None and self.retention_tokens % page_tokens:
            raise ValueError(f"retention_tokens={self.retention_tokens} must be a multiple of page_tokens={page_tokens}, {OWN}")
        return WindowGroups(
            group_sizes(model.full_layers, model.window_layers)[2],
            model.window_tokens,
            page_tokens,
            retention_tokens=self.retention_tokens,
            in_flight_tokens=in_flight_tokens,
            full_first=self.full_first,
        )
