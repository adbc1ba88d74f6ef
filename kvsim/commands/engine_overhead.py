"""What a step of the serving engine takes on this machine beside its products and its attention."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kvsim.core.cache import TieredCache
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.tier import Tier
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.recorder import Batch, Recorder
from kvsim.engine.substrate import Work
from kvsim.hardware import HardwareSpec
from kvsim.model import ModelSpec
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.substrate.hardware.machine import Demand, open_machine
from kvsim.substrate.simulated.compute import step_times

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Course:
    """Requests that come together and decode, then short ones, each to an engine that has nothing else to do."""

    together: int = 8
    output_tokens: int = 400
    single: int = 16
    single_output_tokens: int = 40
    begin_s: float = 5.0
    """When the first single one comes, after those that come together."""
    pause_s: float = 0.5
    """Between two of them: enough for its answer and some idle time."""

    def requests(self, page_tokens: int) -> list[Request]:
        """Prompts have no page in common."""
        together = [(0.0, TOGETHER_PAGES, self.output_tokens)] * self.together
        single = [(self.begin_s + index * self.pause_s, SINGLE_PAGES, self.single_output_tokens) for index in range(self.single)]
        return [
            Request(
                index=index,
                arrival_s=arrival_s,
                prompt_tokens=pages * page_tokens,
                output_tokens=output_tokens,
                runs=((index * TOGETHER_PAGES, pages),),
                prompt_pages=pages,
            )
            for index, (arrival_s, pages, output_tokens) in enumerate(together + single)
        ]


INTERPRETED = Course(together=2, output_tokens=8, single=2, single_output_tokens=2, begin_s=0.0, pause_s=0.0)
"""For Triton's interpreter."""
TOGETHER_PAGES, SINGLE_PAGES = 16, 2


def engine_overheads_s(model: ModelSpec, hardware: HardwareSpec, page_tokens: int, device: "torch.device") -> tuple[float, float]:
    """Of a short run on this machine: what a decode step takes longer than its parts, and what a short prefill step takes.

    The parts are those of ``hardware.compute_curves``. What is left is Python, launches, and the news of the end; the median over
    decode leaps, at least 0. A short chunk takes as long as its kernels take to launch: the median of the shortest. Raises
    UsageError if model and pages do not fit the machine.
    """
    course = Course() if device.type == "cuda" else INTERPRETED
    requests = course.requests(page_tokens)
    pages = sum(request.prompt_pages + 1 + request.output_tokens // page_tokens for request in requests)
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
        seed=0,
        page_ids=len(requests) * TOGETHER_PAGES,
        key=lambda _: b"",
        disk_folder=Path(),
        keeps_disk=False,
        disk_threads=1,
    )
    tiers = [Tier("gpu", 0, SlotPool(pages), LRU())]
    cache = TieredCache(tiers, Rules(), page_tokens)
    substrate = open_machine(demand, device)
    try:
        recorder = Recorder(substrate, tiers)
        Engine(recorder, cache, Prefetching(cache, NoPrefetch(), Offer), settings).run(requests)
    finally:
        substrate.close()
    decodes = [batch for batch in recorder.batches if not batch.prefill_requests]
    prefills = [batch for batch in recorder.batches if batch.prefill_requests]
    shortest = min(batch.prefill_tokens for batch in prefills)
    prefill_s = median(batch.end_s - batch.start_s for batch in prefills if batch.prefill_tokens == shortest)
    overhead_s = max(0.0, median(left_s(batch, model, hardware) for batch in decodes))
    return overhead_s, max(0.0, prefill_s - overhead_s)


def left_s(batch: Batch, model: ModelSpec, hardware: HardwareSpec) -> float:
    """What each step of a decode leap took longer than its parts."""
    work = Work(decode_requests=batch.decode_requests, decode_context_tokens=batch.decode_context_tokens)
    known_s = step_times(model, hardware).leap_s(work, batch.steps) / batch.steps - hardware.step_overhead_s
    return (batch.end_s - batch.start_s) / batch.steps - known_s
