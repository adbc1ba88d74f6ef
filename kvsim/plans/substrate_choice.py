"""The choices for ``substrate``: a model of time and bandwidth, or real hardware."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.core.pool import Pool, SlotPool
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.engine.substrate import Substrate
from kvsim.errors import UsageError
from kvsim.hardware.parallelism import DEGREES
from kvsim.hardware.tier_kinds import FILE, GPU_MEMORY, HOST_MEMORY, kind_of
from kvsim.plans.plan import Plan
from kvsim.settings.unused_settings import ALLREDUCE, OF_EXPERTS
from kvsim.states.cache import HybridCache
from kvsim.substrate.simulated.substrate import SimulatedSubstrate

if TYPE_CHECKING:
    from kvsim.substrate.hardware.substrate import HardwareSubstrate


@dataclass(frozen=True, kw_only=True)
class SubstrateChoice:
    """How a run uses one substrate."""

    pool: type[Pool]
    """Class of every tier's page pool."""
    open: Callable[[Plan, Sequence[Request], Sequence[ServedCache]], Substrate]
    """Opens the substrate for a run with empty caches. Raises UsageError if the machine lacks something it needs."""
    check: Callable[[Plan], None]
    """Raises UsageError for a plan that this substrate cannot run, if that can be seen without opening it."""
    without_effect: tuple[str, ...]
    """Settings without effect on this substrate."""


def open_simulated(plan: Plan, requests: Sequence[Request], caches: Sequence[ServedCache]) -> Substrate:
    return SimulatedSubstrate(
        plan.model,
        plan.hardware,
        plan.page_tokens,
        links=plan.engine.links,
        seed=plan.seed,
        layout=plan.layout,
        speculation=plan.engine.speculation,
        lora=plan.engine.lora,
    )


def open_hardware(plan: Plan, requests: Sequence[Request], caches: Sequence[ServedCache]) -> Substrate:
    from kvsim.substrate.hardware.device import find_device

    device = find_device()  # before Triton is imported
    from kvsim.substrate.hardware.disk.restore import restore
    from kvsim.substrate.hardware.machine import Demand, open_machine

    gpu_states, cpu_states = (*(plan.states or ()), 0, 0)[:2]
    capacities = {tier.name: tier.capacity_pages or 0 for tier in plan.tiers}
    unit_pages = max(tier.unit_pages for tier in plan.tiers)
    key = plan.trace.page_keys(plan.page_tokens) if "disk" in capacities else None
    demand = Demand(
        model=plan.model,
        hardware=plan.hardware,
        page_tokens=plan.page_tokens,
        gpu_pages=capacities["gpu"],
        cpu_pages=capacities.get("cpu", 0) // unit_pages * unit_pages,
        disk_pages=capacities.get("disk", 0),
        is_disk_below_gpu=any(kind_of(tier.name).medium == FILE and tier.above == plan.tiers[0].name for tier in plan.tiers),
        unit_pages=unit_pages,
        max_batch_tokens=plan.engine.max_batch_tokens,
        max_running_requests=plan.engine.max_running_requests,
        is_layerwise=plan.engine.overlap == "layerwise",
        caches_output=bool(plan.rules.cache_output),
        seed=plan.seed,
        page_ids=1 + max((last_page(request) for request in requests), default=-1),
        key=key,
        disk_folder=disk_folder(plan),
        keeps_disk=plan.disk.path is not None,
        disk_threads=plan.disk.threads,
        engines=plan.layout.engines,
        cpu_tiers=cpu_tiers(plan),
        ranks=plan.hardware.gpus,
        gpu_states=gpu_states or 0,
        cpu_states=cpu_states or 0,
        detached_states=plan.checkpoint.detached_states or 0,
    )
    substrate = open_machine(demand, device)
    watch_states(substrate, caches, demand.max_running_requests, kept_states=demand.detached_states)
    if substrate.disk is not None and key is not None:
        try:
            substrate.restored_pages = restore(caches[0], requests, key, substrate.disk.recovered(), 0.0)
        except BaseException:
            substrate.close()
            raise
    return substrate


def watch_states(substrate: "HardwareSubstrate", caches: Sequence[ServedCache], requests: int, *, kept_states: int) -> None:
    """Let a substrate with real memory follow what caches of hybrid models save. Up to ``requests`` run at once."""
    from kvsim.substrate.hardware.state_slots import StateSlots

    for cache in caches:
        if isinstance(cache, HybridCache):
            states = StateSlots(cache, requests=requests, kept_states=kept_states)
            substrate.pages[cache.gpu.owner].states = states
            cache.watch(states)


def cpu_tiers(plan: Plan) -> int:
    """Return how many CPU tiers there are on the one host: none, one, or one per engine."""
    if all(tier.name != "cpu" for tier in plan.tiers):
        return 0
    return len({plan.owner("cpu", engine) for engine in range(plan.layout.engines)})


def last_page(request: Request) -> int:
    """The highest page id of a request; -1 if it has none."""
    paths = (request.runs, request.output_runs or (), *request.sample_output_runs)
    return max((start + pages - 1 for path in paths for start, pages in path), default=-1)


def check_simulated(plan: Plan) -> None:
    """Accept every plan: everything can be simulated."""


def check_hardware(plan: Plan) -> None:
    """Raise UsageError for a plan that has no kernels or needs more host memory or disk than this machine has."""
    for name in DEGREES:
        if getattr(plan.hardware, name) > 1:
            raise UsageError(f"hardware.{name}: on real GPUs, all of an engine's are tensor-parallel: set hardware.{name}=1")
    if plan.model.is_hybrid:
        check_states(plan)
    if plan.rules.engine and not plan.rules.knows_slots:
        raise UsageError(f"rules: those of {plan.rules.engine} have no real memory: set rules=default or substrate=simulated")
    if len(set(plan.layout.hosts)) > 1:
        raise UsageError("cluster.engines_per_host: substrate=hardware runs on one host: leave it out")
    if plan.cluster.failures:
        raise UsageError("cluster.failures: substrate=hardware has no planned failures: leave them out, or kill a GPU's process")
    for tier in plan.tiers:
        kind = kind_of(tier.name)
        if kind.medium not in (GPU_MEMORY, HOST_MEMORY, FILE):
            raise UsageError(
                f"tiers.{tier.name}: substrate=hardware has no {kind.label}: set tiers.{tier.name}.capacity=0 or "
                "substrate=simulated"
            )
        if tier.capacity_pages is None:
            raise UsageError(f"tiers.{tier.name}.capacity is unlimited: substrate=hardware needs a size, such as 40GiB")
    from kvsim.substrate.hardware.memory.available import available_bytes, free_disk_bytes, gib

    folder, page_bytes = disk_folder(plan), plan.model.page_bytes(plan.page_tokens)
    many = {"cpu": cpu_tiers(plan)}
    room = {
        "cpu": (available_bytes(), "of memory available"),
        "disk": (free_disk_bytes(folder), f"free for {folder}"),
    }
    for tier in plan.tiers[1:]:
        n_bytes, (there, where) = (tier.capacity_pages or 0) * page_bytes * many.get(tier.name, 1), room[tier.name]
        if n_bytes > there:
            raise UsageError(f"tiers.{tier.name}.capacity: {gib(n_bytes)}, more than the {gib(there)} {where}: set it lower")


def check_states(plan: Plan) -> None:
    """Raise UsageError for recurrent states without limit, and for those that a kept disk file could not give back."""
    if plan.checkpoint.detached and plan.checkpoint.detached_states is None:
        raise UsageError("checkpoint.detached_states is null: substrate=hardware needs a number of states to keep")
    if plan.states is not None and None in plan.states:
        name = plan.tiers[plan.states.index(None)].name
        raise UsageError(f"tiers.{name}.states is unlimited: substrate=hardware needs a size, such as 64states")
    if plan.disk.path is not None:
        raise UsageError("disk.folder: recurrent states cannot be restored from an earlier run's disk: leave it out")


def disk_folder(plan: Plan) -> Path:
    """Folder of the disk tier's file: the user's choice, or inside the run's folder."""
    return plan.disk.path or plan.output / "disk"


SUBSTRATES = {
    "simulated": SubstrateChoice(pool=Pool, open=open_simulated, check=check_simulated, without_effect=("disk",)),
    "hardware": SubstrateChoice(
        pool=SlotPool,
        open=open_hardware,
        check=check_hardware,
        without_effect=(
            "engine.links",
            "hardware.rank_jitter",
            "hardware.rank_faults",
            "hardware.noise",
            *ALLREDUCE,
            *OF_EXPERTS,
        ),
    ),
}
