"""What a step of the serving engine takes on this machine beside its products and its attention."""

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
from kvsim.engine.recorder import Recorder
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

REQUESTS, OUTPUT_TOKENS = 8, 400
INTERPRETED_OUTPUT_TOKENS = 8
PROMPT_PAGES = 16


def engine_overhead_s(model: ModelSpec, hardware: HardwareSpec, page_tokens: int, device: "torch.device") -> float:
    """The median, over decode leaps of a short run on this machine, of a step's time less that of its parts; at least 0.

    The parts are those of ``hardware.compute_curves``. What is left is Python, launches, and the news of the end. Raises
    UsageError if model and pages do not fit the machine.
    """
    output_tokens = OUTPUT_TOKENS if device.type == "cuda" else INTERPRETED_OUTPUT_TOKENS
    requests = [
        Request(
            index=index,
            arrival_s=0.0,
            prompt_tokens=PROMPT_PAGES * page_tokens,
            output_tokens=output_tokens,
            runs=((index * PROMPT_PAGES, PROMPT_PAGES),),
            prompt_pages=PROMPT_PAGES,
        )
        for index in range(REQUESTS)
    ]
    pages = REQUESTS * (PROMPT_PAGES + 1 + output_tokens // page_tokens)
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
        page_ids=REQUESTS * PROMPT_PAGES,
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
    parts = step_times(model, hardware)
    left = []
    for batch in recorder.batches:
        if not batch.prefill_requests:
            work = Work(decode_requests=batch.decode_requests, decode_context_tokens=batch.decode_context_tokens)
            known_s = parts.leap_s(work, batch.steps) - batch.steps * hardware.step_overhead_s
            left.append((batch.end_s - batch.start_s - known_s) / batch.steps)
    return max(0.0, median(left))
