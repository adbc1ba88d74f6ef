"""Measures the overhead of a serving-engine step on this machine: its time beyond matrix products and attention."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol

from kvsim.cluster.cluster import Cluster
from kvsim.core.cache import Cache
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.serving import ServedCache
from kvsim.core.tier import Tier, chain
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.link_use import LinkUse
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.recorder import Batch, Recorder
from kvsim.engine.substrate import Substrate, Work
from kvsim.hardware.spec import HardwareSpec
from kvsim.hardware.tier_kinds import LEVELS
from kvsim.model.spec import ModelSpec
from kvsim.plans.substrate_choice import watch_states
from kvsim.policies.checkpoint.base import Prefill
from kvsim.policies.checkpoint.none import NoCheckpoint
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.states.cache import HybridCache
from kvsim.substrate.hardware.machine import Demand, open_machine
from kvsim.substrate.simulated.compute import step_times
from kvsim.substrate.simulated.wiring import host_link

if TYPE_CHECKING:
    import torch


TOGETHER_TOKENS, SHORT_TOKENS, LONG_TOKENS = 256, 32, 1024
JOINING_OUTPUT_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class Course:
    """The measured workload: requests that arrive and decode together, short ones that join while they decode, some at once, and
    share all but their last tokens with the first, then short and long ones, each on an idle engine, after the answer before."""

    together: int = 8
    together_tokens: int = TOGETHER_TOKENS
    output_tokens: int = 1200
    joining: tuple[int, ...] = (1, 3) * 16
    """How many join at once."""
    joining_pause_s: float = 0.15
    """Time from one joining to the next, and before the first: a host launches kernels faster and slower for seconds on end."""
    single: int = 32
    single_output_tokens: tuple[int, ...] = (40, 2)
    """Lengths of the answers, each for a short and a long prompt before the next."""
    pause_s: float = 0.25
    """Idle time before each single request."""
    long_tokens: int = LONG_TOKENS
    """Prompt of every other single request."""
    batch_tokens: int = EngineSettings().max_batch_tokens
    """Prompt tokens of a step at most."""
    is_written_through: bool = False
    """Whether pages are copied to the host's memory as soon as they are computed."""

    def requests(self, page_tokens: int, *, shares_prefix: bool = True) -> list[Request]:
        """Build the requests. Only those that join may share pages (``shares_prefix``); only full pages have ids."""
        together = [(0.0, self.together_tokens, self.output_tokens)] * self.together
        common = self.together_tokens // page_tokens if shares_prefix else 0
        joining = [
            ((1 + at) * self.joining_pause_s, common * page_tokens + SHORT_TOKENS, JOINING_OUTPUT_TOKENS)
            for at, count in enumerate(self.joining)
            for _ in range(count)
        ]
        answers, begin_s = self.single_output_tokens, len(self.joining) * self.joining_pause_s
        single = [
            (begin_s, (SHORT_TOKENS, self.long_tokens)[at % 2], answers[at // 2 % len(answers)]) for at in range(self.single)
        ]
        first_single = self.together + len(joining)
        before = [-1] * first_single + [0 if together else -1, *range(first_single, first_single + len(single) - 1)]
        requests = []
        for index, (arrival_s, tokens, output_tokens) in enumerate(together + joining + single):
            begins = common if self.together <= index < first_single else 0
            pages = tokens // page_tokens
            own = index * LONG_TOKENS, pages - begins
            requests.append(
                Request(
                    index=index,
                    arrival_s=arrival_s,
                    prompt_tokens=tokens,
                    output_tokens=output_tokens,
                    runs=tuple(run for run in ((0, begins), own) if run[1]),
                    prompt_pages=pages,
                    after=before[index],
                    delay_s=self.pause_s,
                )
            )
        return requests

    def memory_pages(self, requests: Sequence[Request], page_tokens: int) -> int:
        """Return the pages of the requests that may run at once, and of a single one and the one before."""
        pages = [pages_of(request, page_tokens) for request in requests]
        first_single = len(pages) - self.single
        return sum(pages[:first_single]) + 2 * max(pages[first_single:], default=0)


COPIES = Course(
    together=32,
    output_tokens=1,
    joining=(),
    single=48,
    single_output_tokens=(2,),
    pause_s=0.05,
    long_tokens=TOGETHER_TOKENS,
    batch_tokens=TOGETHER_TOKENS,
    is_written_through=True,
)
"""Prompts one after another: the pages of each are copied while the host launches the step of the next, or the decode step."""
INTERPRETED = Course(
    together=2,
    output_tokens=4,
    joining=(1, 2),
    joining_pause_s=0.0,
    single=6,
    single_output_tokens=(4, 2),
    pause_s=0.0,
)
"""For Triton's interpreter."""
INTERPRETED_COPIES = replace(
    COPIES, together=2, together_tokens=SHORT_TOKENS, single=4, long_tokens=SHORT_TOKENS, pause_s=0.0, batch_tokens=SHORT_TOKENS
)


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a course has shown."""

    batches: list[Batch]
    links: list[LinkUse]


def with_overheads(model: ModelSpec, hardware: HardwareSpec, page_tokens: int, device: "torch.device") -> HardwareSpec:
    """Return ``hardware`` with the overheads measured in short runs of the serving engine, but for that of prefill.

    The overhead of a step is its time beyond its parts, as given by ``hardware.compute_curves``: Python, launches, and the
    notification that the step has ended. That of prefill is a part of the launches here; ``with_warming`` tells them apart. Short
    chunks take as long as launching their kernels. The overhead of a copy is its time beyond its latency and rate. All overheads
    are medians and at least 0. Raises UsageError if model and pages do not fit the machine.
    """
    courses = (Course(), COPIES) if device.type == "cuda" else (INTERPRETED, INTERPRETED_COPIES)
    alone, copying = (play(course, model, hardware, page_tokens, device) for course in courses)
    fragment_bytes = model.page_bytes(page_tokens) / model.attention_layers
    known = with_step_overheads(hardware, model, alone.batches)
    copies, first = copying.links, courses[-1].together
    known = replace(known, copy_overhead_s=copy_overhead_s(hardware, fragment_bytes, copies, first))
    return with_copies(known, model, copying, first, alone.batches)


def with_step_overheads(hardware: HardwareSpec, model: ModelSpec, batches: Sequence[Batch]) -> HardwareSpec:
    """Return ``hardware`` with the overheads and launches of these steps. Some of ``batches`` must decode single requests.

    Decode steps in a row have the overhead of a leap once: a single step shows it whole, many in a row hardly show it.
    """
    decodes = [batch for batch in batches if not batch.prefill_requests]
    known = replace(hardware.without_launches(), step_overhead_s=0.0, leap_overhead_s=0.0, prefill_overhead_s=0.0)
    single = [batch for batch in decodes if batch.decode_requests == 1]
    step_s, row_s = (
        middle(excess_s([batch for batch in single if (batch.steps == 1) == is_step], model, known)) for is_step in (True, False)
    )
    rows = excess_s([batch for batch in decodes if batch.steps > 1], model, known)
    known = replace(known, step_overhead_s=max(0.0, middle(rows)), leap_overhead_s=max(0.0, step_s - row_s))
    return with_launches(known, batches)


def with_launches(hardware: HardwareSpec, batches: Iterable[Batch]) -> HardwareSpec:
    """Return ``hardware``, whose overheads are known, with the launches of the batches whose chunks all have ``SHORT_TOKENS``.

    The host takes longer to launch such chunks than the GPU to compute them. Some batches must have one chunk and nothing else;
    single chunks beside decoding requests, and several there, show what these add.
    """
    short = [batch for batch in batches if batch.prefill_tokens == SHORT_TOKENS * batch.prefill_requests > 0]
    single = [batch for batch in short if batch.prefill_requests == 1]
    beside_s = middle([batch.end_s - batch.start_s for batch in single if batch.decode_requests])
    alone_s = middle([batch.end_s - batch.start_s for batch in single if not batch.decode_requests])
    more = [batch for batch in short if batch.prefill_requests > 1 and batch.decode_requests]
    chunk_s = middle([(batch.end_s - batch.start_s - beside_s) / (batch.prefill_requests - 1) for batch in more])
    return replace(
        hardware,
        prefill_launch_s=max(0.0, alone_s - hardware.step_overhead_s),
        chunk_launch_s=max(0.0, chunk_s),
        decode_launch_s=max(0.0, beside_s - alone_s),
    )


def with_copies(hardware: HardwareSpec, model: ModelSpec, copying: Played, first: int, alone: Sequence[Batch]) -> HardwareSpec:
    """Return ``hardware``, whose other overheads are known, with what copies add to the launch of a step and to a leap.

    The ``first`` batches of ``copying`` are prompts one after another; each but the first is launched while the pages of
    the one before are copied. They are compared with prompts as long that are launched alone, later in the same course, because
    the speed of a host changes from second to second. The decode steps that follow its longest prompts are compared with those of
    ``alone``, whose pages are not copied. All times are medians; both results are at least 0, and 0 if nothing was copied.
    """
    if not any(use.name == "gpu-cpu" for use in copying.links):
        return hardware
    beside, later = copying.batches[1:first], copying.batches[first:]
    launched = [batch for batch in later if batch.prefill_requests == 1 and batch.prefill_tokens == beside[0].prefill_tokens]
    launches_s, launches_alone_s, decodes_s, decodes_alone_s = (
        middle(excess_s(batches, model, hardware))
        for batches in (beside, launched, first_decodes(copying.batches), first_decodes(alone))
    )
    return replace(
        hardware,
        copy_launch_s=max(0.0, launches_s - launches_alone_s),
        copy_leap_s=max(0.0, decodes_s - decodes_alone_s),
    )


def first_decodes(batches: Sequence[Batch]) -> list[Batch]:
    """Return the single steps of single decoding requests after the longest of the prompts that are a step by themselves."""
    longest = max((batch.prefill_tokens for batch in batches if batch.prefill_requests == 1), default=0)
    decodes = [batch for batch in batches if batch.decode_requests == batch.steps == 1 and not batch.prefill_requests]
    return [batch for batch in decodes if batch.decode_context_tokens == longest]


def copy_overhead_s(hardware: HardwareSpec, fragment_bytes: float, links: Iterable[LinkUse], first: int) -> float:
    """Return the median time of copies to the host beyond what ``hardware`` predicts, of the ``first`` requests; at least 0."""
    bytes_per_s, latency_s = host_link(replace(hardware, copy_overhead_s=0.0), fragment_bytes)[1]
    stores = [row for use in links if use.name == "gpu-cpu" for row in use.intervals.tolist()]
    beyond = [
        end_s - start_s - latency_s - n_bytes / bytes_per_s for start_s, end_s, n_bytes, request in stores if request < first
    ]
    return max(0.0, middle(beyond))


def pages_of(request: Request, page_tokens: int) -> int:
    """Return the pages of a request's prompt and answer."""
    return -(-(request.prompt_tokens + request.output_tokens) // page_tokens)


def middle(values: Sequence[float]) -> float:
    """Return the median; 0 without values."""
    return median(values) if values else 0.0


class Workload(Protocol):
    """Requests to be served for a measurement."""

    @property
    def batch_tokens(self) -> int:
        """Prompt tokens of a step at most."""

    @property
    def is_written_through(self) -> bool:
        """Whether pages are copied to the host's memory as soon as they are computed."""

    def requests(self, page_tokens: int, *, shares_prefix: bool = True) -> list[Request]:
        """Build the requests; only full pages have ids. Without ``shares_prefix``, no page belongs to several."""

    def memory_pages(self, requests: Sequence[Request], page_tokens: int) -> int:
        """Return the capacity of each tier in pages."""


def play(
    course: Workload, model: ModelSpec, hardware: HardwareSpec, page_tokens: int, device: "torch.device", seed: int = 0
) -> Played:
    """Serve the requests of a course with the serving engine, on this machine.

    ``seed`` is that of the weights. Raises UsageError if model and pages do not fit the machine.
    """
    requests = course.requests(page_tokens, shares_prefix=not model.is_hybrid)  # a hybrid's cache saves no states here
    pages = course.memory_pages(requests, page_tokens)
    settings = EngineSettings(max_batch_tokens=course.batch_tokens)
    demand = Demand(
        model=model,
        hardware=hardware,
        page_tokens=page_tokens,
        gpu_pages=pages,
        cpu_pages=pages if course.is_written_through else 0,
        disk_pages=0,
        max_batch_tokens=settings.max_batch_tokens,
        max_running_requests=settings.max_running_requests,
        is_layerwise=True,
        caches_output=False,
        seed=seed,
        page_ids=max((first + count for request in requests for first, count in request.runs), default=0),
        key=lambda _: b"",
        disk_folder=Path(),
        keeps_disk=False,
        disk_threads=1,
    )
    tiers = build_tiers(["gpu", "cpu"] if course.is_written_through else ["gpu"], pages, page_tokens)
    cache = build_cache(model, tiers, page_tokens)
    substrate = open_machine(demand, device)
    try:
        watch_states(substrate, [cache], demand.max_running_requests, kept_states=0)
        return serve(requests, substrate, tiers, cache, settings)
    finally:
        substrate.close()


def serve(
    requests: list[Request], substrate: Substrate, tiers: Sequence[Tier], cache: ServedCache, settings: EngineSettings
) -> Played:
    """Serve requests in the order of their arrival, on any substrate."""
    recorder = Recorder(substrate.env, tiers)
    cache.watch(recorder)
    engine = Engine(substrate, cache, Prefetching(cache, NoPrefetch(), Offer), settings, FCFS(), watches=[recorder])
    Cluster([engine]).run(requests)
    return Played(batches=recorder.batches, links=substrate.link_use())


def build_tiers(names: Sequence[str], pages: int, page_tokens: int) -> list[Tier]:
    """Build tiers of this many pages each."""
    tiers = []
    for index, name in enumerate(names):
        eviction = LRU()
        eviction.bind(PolicyContext(capacity_pages=pages, page_tokens=page_tokens, tier=index))
        tiers.append(Tier(name, index, SlotPool(pages), eviction, LEVELS.index(name)))
    return tiers


def build_cache(model: ModelSpec, tiers: list[Tier], page_tokens: int) -> ServedCache:
    """Build a cache that writes every page through its tiers and saves no recurrent states."""
    cache = Cache(tiers, chain(tiers, [WriteThrough() for _ in tiers[1:]]), Rules(), page_tokens)
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


def excess_s(batches: Iterable[Batch], model: ModelSpec, hardware: HardwareSpec) -> list[float]:
    """Return the time by which a step of each batch exceeded what ``hardware`` predicts. Each may have one chunk at most."""
    return [(batch.end_s - batch.start_s - expected_s(batch, model, hardware)) / batch.steps for batch in batches]


def expected_s(batch: Batch, model: ModelSpec, hardware: HardwareSpec) -> float:
    """Return the seconds that ``hardware`` predicts for the steps of a batch, with one chunk at most, on a busy GPU."""
    work = Work(
        chunks=[(batch.prefill_tokens, 0)] * batch.prefill_requests,
        decode_requests=batch.decode_requests,
        decode_context_tokens=batch.decode_context_tokens,
        sampled_tokens=batch.prefill_requests,
    )
    return step_times(model, hardware).leap_s(work, batch.steps)
