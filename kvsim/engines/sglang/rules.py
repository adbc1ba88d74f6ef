"""The rules of SGLang's radix cache and of its hierarchical cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from kvsim.core.rules import IN_TIME, OWN, CacheSetup, Rules
from kvsim.core.serving import Server
from kvsim.core.tier import Edge
from kvsim.engine.schedule import Parts
from kvsim.engines.sglang.budget import PassSettings
from kvsim.engines.sglang.hosted_nodes import HostedNodeCache
from kvsim.engines.sglang.queue import check_policy
from kvsim.engines.sglang.schedule import NodeSchedule
from kvsim.engines.sglang.stateful_nodes import StatefulNodeCache
from kvsim.engines.sglang.stepped import SteppedNodes
from kvsim.engines.sglang.whole_nodes import WholeNodeCache
from kvsim.numbers import Real, Whole, check_settings

LOOPS = ("overlap", "plain")
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


@dataclass(frozen=True, kw_only=True)
class SGLangRules(Rules):
    """Nodes are evicted and moved as a whole, and a look-up alone refreshes them. Policies decide everything else.

    GPU only       RadixCache (SGLang 0.5.23), as ``WholeNodeCache``; in ``kvsim simulate`` also its scheduler (``NodeSchedule``)
    GPU and CPU    HiRadixCache (SGLang 0.5.15), as ``HostedNodeCache``. It has no clock: simulations use kvsim's own rules with
                   the same settings, as does ``kvsim validate``
    """

    engine: ClassVar[str] = "SGLang"
    covered_tiers: ClassVar[Sequence[str]] = ("gpu", "cpu")
    refuses_other_tiers: ClassVar[bool] = True
    has_bigram_keys: ClassVar[bool] = True

    load_min_tokens: int = 10
    """Shortest hit in the CPU tier that is loaded to the GPU; a shorter one is recomputed."""

    cache_output: bool | None = None  # type: ignore[assignment]
    """In a simulation, answers are cached: true needs a trace with the tokens of its answers, None caches those that it has."""

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
    """Whether requests are known to generate all that they declare, so that all of it is promised memory."""

    declared_output_tokens: int | None = None
    """Longest answer that each request declares (``max_new_tokens``), at least its own. None: the length of its answer."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(), "load_min_tokens")
        check_settings(self, Whole(1), "max_prefill_tokens")
        check_settings(self, Whole(1), "declared_output_tokens", or_null=True, hint="null declares the length of each answer")
        check_settings(self, Real(above=0), "schedule_conservativeness")
        if self.loop not in LOOPS:
            raise ValueError(f"loop must be one of {', '.join(LOOPS)}, not {self.loop}")
        if self.mixed_chunk and not self.chunked_prefill:
            raise ValueError("mixed_chunk has no effect with chunked_prefill=false: leave one of them out")
        if self.ignore_eos and self.declared_output_tokens is not None:
            raise ValueError("ignore_eos makes answers as long as declared: leave declared_output_tokens out")

    def covers(self, command: str, tiers: Sequence[str]) -> bool:
        return command not in IN_TIME or command == "simulate" and list(tiers) == ["gpu"]

    def check(self, command: str, tiers: Sequence[str]) -> None:
        super().check(command, tiers)
        if command == "simulate":
            if not self.recompute_last_token:
                raise ValueError(f"recompute_last_token=false is not supported by SGLang's schedule: set it to true, {OWN}")
        else:
            self._check_replay(command)
        if "cpu" not in tiers and self.load_min_tokens != SGLangRules.load_min_tokens:
            raise ValueError("load_min_tokens has no effect without a CPU tier: set tiers.cpu.capacity")

    def _check_replay(self, command: str) -> None:
        """Raise ValueError for settings that only a simulation has."""
        if self.cache_output:
            raise ValueError(f"cache_output=true is not supported by SGLang's rules in a replay: set it to false, {OWN}")
        for field in fields(self):
            if field.name in OF_SCHEDULE and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} has no effect on kvsim {command}, which has no schedule: leave it out")

    def check_schedule(self, scheduling: Any, page_tokens: int, max_batch_tokens: int) -> None:
        check_policy(scheduling)
        if self.chunked_prefill and max_batch_tokens % page_tokens:
            raise ValueError(
                f"engine.max_batch_tokens={max_batch_tokens} must be a multiple of page_tokens={page_tokens}, as in SGLang"
            )

    def cache(self, setup: CacheSetup) -> SteppedNodes:
        return SteppedNodes(setup.tiers[0], setup.page_tokens, caches_answers=self.cache_output)

    def scheduler(self) -> Callable[[Parts], NodeSchedule]:
        return self._schedule

    def _schedule(self, parts: Parts) -> NodeSchedule:
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
