"""Measures the overhead of a serving-engine step on this machine: its time beyond matrix products and attention."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kvsim.core.cache import Cache
from kvsim.core.hybrid import HybridCache
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.serving import ServedCache
from kvsim.core.tier import Tier
from kvsim.engine.cluster import Cluster
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.recorder import Batch, RecordedCache, Recorder
from kvsim.engine.substrate import Work
from kvsim.hardware import HardwareSpec
from kvsim.model import ModelSpec
from kvsim.policies.checkpoint.base import Prefill
from kvsim.policies.checkpoint.none import NoCheckpoint
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.substrate.hardware.machine import Demand, open_machine
from kvsim.substrate.simulated.compute import step_times
from kvsim.substrate.simulated.warmth import Warmth
from kvsim.substrates import watch_states

if TYPE_CHECKING:
    import torch


TOGETHER_TOKENS, SHORT_TOKENS, LONG_TOKENS = 256, 32, 1024


@dataclass(frozen=True, kw_only=True)
class Course:
    """The measured workload: requests that arrive and decode together, then short and long ones, each on an idle engine."""

    together: int = 8
    output_tokens: int = 400
    single: int = 20
    single_output_tokens: int = 40
    begin_s: float = 5.0
    """Arrival of the first single request, after those that arrive together."""
    pause_s: float = 0.5
    """Time between single requests: enough for the answer and some idle time."""
    in_turn: bool = False
    """Whether a single request waits for the answer to the one before, and then for ``pause_s``."""
    long_tokens: int = LONG_TOKENS
    """Prompt of every other single request."""

    def requests(self, page_tokens: int) -> list[Request]:
        """Build the requests. Their prompts share no pages; only full pages have ids."""
        together = [(0.0, TOGETHER_TOKENS, self.output_tokens)] * self.together
        arrivals = [self.begin_s + index * self.pause_s for index in range(self.single)]
        single = [
            (at_s, (SHORT_TOKENS, self.long_tokens)[index % 2], self.single_output_tokens) for index, at_s in enumerate(arrivals)
        ]
        return [
            Request(
                index=index,
                arrival_s=arrival_s,
                prompt_tokens=tokens,
                output_tokens=output_tokens,
                runs=((index * LONG_TOKENS, pages),) if (pages := tokens // page_tokens) else (),
                prompt_pages=pages,
                after=index - 1 if self.in_turn and index > self.together else -1,
                delay_s=self.pause_s,
            )
            for index, (arrival_s, tokens, output_tokens) in enumerate(together + single)
        ]


INTERPRETED = Course(together=2, output_tokens=8, single=2, single_output_tokens=2, begin_s=0.0, pause_s=0.0)
"""For Triton's interpreter."""


def with_overheads(model: ModelSpec, hardware: HardwareSpec, page_tokens: int, device: "torch.device") -> HardwareSpec:
    """Return ``hardware`` with the overheads measured in a short run of the serving engine.

    An overhead is the time of a step beyond its parts, as given by ``hardware.compute_curves``: Python, launches, and the
    notification that the step has ended. A short chunk takes as long as launching its kernels. All overheads are medians and at
    least 0. Raises UsageError if model and pages do not fit the machine.
    """
    batches = play(Course() if device.type == "cuda" else INTERPRETED, model, hardware, page_tokens, device)
    decodes = [batch for batch in batches if not batch.prefill_requests]
    prefills = [batch for batch in batches if batch.prefill_requests]
    lengths = [batch.prefill_tokens for batch in prefills]
    short = [batch for batch in prefills if batch.prefill_tokens == min(lengths)]
    long = [batch for batch in prefills if batch.prefill_tokens == LONG_TOKENS]
    known = replace(hardware, step_overhead_s=0.0, prefill_overhead_s=0.0, prefill_launch_s=0.0)
    known = replace(known, step_overhead_s=left_s(decodes, model, known))
    known = replace(known, prefill_overhead_s=left_s(long, model, known))
    launch_s = median(batch.end_s - batch.start_s for batch in short) - known.step_overhead_s - known.prefill_overhead_s
    return replace(known, prefill_launch_s=max(0.0, launch_s))


def play(
    course: Course, model: ModelSpec, hardware: HardwareSpec, page_tokens: int, device: "torch.device", seed: int = 0
) -> list[Batch]:
    """Serve the requests of a course with the serving engine, on this machine, and return its steps and leaps.

    ``seed`` is that of the weights. Raises UsageError if model and pages do not fit the machine.
    """
    requests = course.requests(page_tokens)
    pages = sum(-(-(request.prompt_tokens + request.output_tokens) // page_tokens) for request in requests)
    settings = EngineSettings()
    demand = Demand(
        model=model,
        hardware=hardware,
        page_tokens=page_tokens,
        gpu_pages=pages,
        cpu_pages=0,
        disk_pages=0,
        max_batch_tokens=settings.max_batch_tokens,
        max_running_requests=settings.max_running_requests,
        is_layerwise=True,
        caches_output=False,
        seed=seed,
        page_ids=len(requests) * LONG_TOKENS,
        key=lambda _: b"",
        disk_folder=Path(),
        keeps_disk=False,
        disk_threads=1,
    )
    eviction = LRU()
    eviction.bind(PolicyContext(capacity_pages=pages, page_tokens=page_tokens))
    tiers = [Tier("gpu", 0, SlotPool(pages), eviction)]
    cache = build_cache(model, tiers, page_tokens)
    substrate = open_machine(demand, device)
    try:
        watch_states(substrate, [cache], demand.max_running_requests, kept_states=0)
        recorder = Recorder(substrate, tiers)
        recorded = RecordedCache(cache, recorder)
        Cluster([Engine(recorder, recorded, Prefetching(recorded, NoPrefetch(), Offer), settings, FCFS())]).run(requests)
    finally:
        substrate.close()
    return recorder.batches


def build_cache(model: ModelSpec, tiers: list[Tier], page_tokens: int) -> ServedCache:
    """Build a cache of one tier that saves no recurrent states."""
    cache = Cache(tiers, [], Rules(), page_tokens)
    if not model.is_hybrid:
        return cache
    return HybridCache(
        cache,
        policy=NoCheckpoint(),
        prefill=Prefill,
        grid_pages=1,
        state_bytes=model.state_bytes,
        state_pages=-(-model.state_bytes // model.page_bytes(page_tokens)),
    )


def left_s(batches: list[Batch], model: ModelSpec, hardware: HardwareSpec) -> float:
    """Return the median time by which a step of these batches exceeded what ``hardware`` predicts; at least 0, 0 without batches.

    Each batch may have one chunk at most.
    """
    times, warmth, left = step_times(model, hardware), Warmth(hardware), [0.0]
    for batch in batches:
        work = Work(
            chunks=[(batch.prefill_tokens, 0)] * batch.prefill_requests,
            decode_requests=batch.decode_requests,
            decode_context_tokens=batch.decode_context_tokens,
            sampled_tokens=batch.prefill_requests,
        )
        known_s = times.leap_s(work, batch.steps)
        if batch.prefill_requests:
            known_s = warmth.prefill_s(batch.start_s, known_s)
        left.append((batch.end_s - batch.start_s - known_s) / batch.steps)
    return max(0.0, median(left[1:] or left))
