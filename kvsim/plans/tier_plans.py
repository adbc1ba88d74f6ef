"""The plans of a run's tiers, from the configuration: their capacities, their policies and who shares them."""

from collections.abc import Collection
from typing import Any

from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.numbers import Whole, shown
from kvsim.plans.capacity import capacity_pages, capacity_states
from kvsim.plans.cluster_settings import ClusterSettings
from kvsim.plans.construct import construct
from kvsim.plans.gpu_memory import AUTO, SETTINGS, GpuMemory, auto_memory
from kvsim.plans.plan import Config, TierPlan
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.settings.unused_settings import given
from kvsim.suggest import hint

TIERS = ("gpu", "cpu", "disk")
WITH_STATES = ("gpu", "cpu")
OWN_SETTINGS = {"gpu": ("states", *SETTINGS), "cpu": ("states", "page_tokens", "scope"), "disk": ("below", "scope")}
SCOPES = {"cpu": ("host", "engine"), "disk": ("host", "cluster")}
"""Who may share a tier."""
PER_TIER = {"gpu": ("eviction",), "cpu": ("eviction", "placement"), "disk": ("eviction", "placement")}


def gpu_memory_of(config: Config, model: ModelSpec, hardware: HardwareSpec, keys: set[str]) -> GpuMemory | None:
    """How the memory of an engine's GPUs is divided if that decides the size of its GPU tier; else None."""
    node = config["tiers"]["gpu"]
    if node.get("capacity") != AUTO:
        for name in SETTINGS:
            if key := given(keys, f"tiers.gpu.{name}"):
                raise UsageError(f"{key} has no effect on a capacity given as a number: set tiers.gpu.capacity=auto")
        return None
    room = node["states"] if model.is_hybrid else "shared"
    try:
        states = 0 if room == "shared" else capacity_states(room, state_bytes=model.state_bytes)
    except ValueError as error:
        raise UsageError(f"tiers.gpu.states: {error}") from error
    if states is None:
        raise UsageError("tiers.gpu.states is unlimited, which leaves no room for tiers.gpu.capacity=auto: give it a size")
    return auto_memory(node, model, hardware, states * model.state_bytes)


def tier_plans(
    config: Config, page_tokens: int, model: ModelSpec, cluster: ClusterSettings, memory: GpuMemory | None, keys: set[str]
) -> list[TierPlan]:
    capacities = {}
    for name in TIERS:
        try:
            capacity = config["tiers"].get(name, {}).get("capacity", 0)
            if name == "gpu" and memory is not None:
                capacity = f"{memory.kv_bytes}B"
            pages = capacity_pages(capacity, page_tokens=page_tokens, page_bytes=model.page_bytes(page_tokens))
        except ValueError as error:
            raise UsageError(f"tiers.{name}.capacity: {error}") from error
        if pages != 0:
            capacities[name] = pages
    if "gpu" not in capacities:
        raise UsageError("tiers.gpu.capacity is 0: every run needs a GPU tier")
    _check_tier_policies(config, list(capacities), keys)
    above = {"gpu": "", "cpu": "gpu", "disk": _above_disk(config, list(capacities), keys)}
    units = {"gpu": 1, "cpu": _cpu_unit_pages(config, page_tokens, capacities, keys), "disk": 1}
    scopes = {"gpu": "engine"} | {name: _scope(config, name, cluster, capacities, keys) for name in SCOPES}
    if scopes["cpu"] == "engine" and capacities.get("cpu"):
        capacities["cpu"] = _divided(capacities["cpu"], cluster.per_host)
    return [_tier(config, name, pages, above[name], units[name], scopes[name]) for name, pages in capacities.items()]


def _scope(config: Config, name: str, cluster: ClusterSettings, present: Collection[str], keys: set[str]) -> str:
    """Who shares a tier. Raises UsageError for an unknown choice, and for one without effect."""
    key, scope = f"tiers.{name}.scope", config["tiers"][name].get("scope")
    if scope not in SCOPES[name]:
        message = f"{key} must be {' or '.join(SCOPES[name])}, not {scope}"
        raise UsageError(f"{message}{hint(message)}")
    if given(keys, key) and (name not in present or cluster.total == 1):
        why = "without that tier" if name not in present else "with one engine"
        raise UsageError(f"{key} has no effect {why}: leave it out")
    return str(scope)


def _divided(pages: int | None, engines: int) -> int | None:
    """Divide a host's CPU tier among its engines."""
    if pages is not None and pages < engines:
        raise UsageError(f"tiers.cpu.capacity: {pages} pages are too few to be divided among {engines} engines")
    return None if pages is None else pages // engines


def _cpu_unit_pages(config: Config, page_tokens: int, capacities: dict[str, int | None], keys: set[str]) -> int:
    """GPU pages in a page of the CPU tier. Raises UsageError unless this is a whole number, and one such page fits."""
    key, tokens = "tiers.cpu.page_tokens", config["tiers"]["cpu"].get("page_tokens")
    if tokens is None:
        return 1
    if "cpu" not in capacities:
        if given(keys, key):
            raise UsageError(f"{key} has no effect without that tier: set tiers.cpu.capacity")
        return 1
    if not Whole(1).holds(tokens) or tokens % page_tokens:
        raise UsageError(f"{key} must be a multiple of page_tokens={page_tokens}, not {shown(tokens)}")
    pages = capacities["cpu"]
    if pages is not None and pages * page_tokens < tokens:
        raise UsageError(f"tiers.cpu.capacity: {pages * page_tokens} tokens are less than one page of {key}={tokens}")
    return tokens // page_tokens


def _above_disk(config: Config, present: list[str], keys: set[str]) -> str:
    """Name of the tier directly above the disk. Raises UsageError for an impossible choice."""
    above = config["tiers"]["disk"].get("below", "cpu")
    if above not in ("cpu", "gpu"):
        raise UsageError(f"tiers.disk.below must be cpu or gpu, not {above}: the tier directly above the disk")
    if "disk" not in present:
        if key := given(keys, "tiers.disk.below"):
            raise UsageError(f"{key} has no effect without that tier: set tiers.disk.capacity")
    elif above not in present:
        raise UsageError(
            "tiers.disk needs a CPU tier above it: set tiers.cpu.capacity, or tiers.disk.below=gpu to connect the disk to the GPU"
        )
    return str(above)


def _tier(config: Config, name: str, pages: int | None, above: str, unit_pages: int, scope: str) -> TierPlan:
    eviction = construct(EvictionPolicy, *_policy(config, name, "eviction"))
    placement = None if name == "gpu" else construct(PlacementPolicy, *_policy(config, name, "placement"))
    return TierPlan(
        name=name, capacity_pages=pages, eviction=eviction, placement=placement, above=above, unit_pages=unit_pages, scope=scope
    )


def _policy(config: Config, tier: str, family: str) -> tuple[Any, str]:
    """The node of the tier's own policy, or of the one for all tiers, with its key."""
    own = config["tiers"][tier].get(family)
    return (config.get(family), family) if own is None else (own, f"tiers.{tier}.{family}")


def _check_tier_policies(config: Config, present: list[str], keys: set[str]) -> None:
    """Raise UsageError for a policy that the user chose and no tier uses."""
    for tier in TIERS:
        for family in PER_TIER[tier]:
            key = given(keys, f"tiers.{tier}.{family}") or given(keys, f"{family}@tiers.{tier}.{family}")
            if key and tier not in present:
                raise UsageError(f"{key} has no effect without that tier: set tiers.{tier}.capacity")
    for family in ("eviction", "placement"):
        takers = [tier for tier in present if family in PER_TIER[tier]]
        if not (key := given(keys, family)):
            continue
        if not takers:
            raise UsageError(f"{key} has no effect without a lower tier: set tiers.cpu.capacity")
        if all(config["tiers"][tier].get(family) for tier in takers):
            raise UsageError(f"{key} has no effect because every tier has its own {family}: leave it out")


def state_capacities(config: Config, tiers: list[TierPlan], model: ModelSpec, keys: set[str]) -> list[int | None] | None:
    """Capacity for recurrent states per tier, from the GPU down; None if states share the pages' capacity."""
    names = [tier.name for tier in tiers if tier.name in WITH_STATES]
    for name in WITH_STATES:
        if (key := given(keys, f"tiers.{name}.states")) and (not model.is_hybrid or name not in names):
            why = "without that tier" if model.is_hybrid else "on a model without recurrent layers"
            raise UsageError(f"{key} has no effect {why}: leave it out")
    rooms = {name: config["tiers"][name].get("states") for name in names}
    if not model.is_hybrid or all(room == "shared" for room in rooms.values()):
        return None
    states: list[int | None] = []
    for name, room in rooms.items():
        if room == "shared":
            raise UsageError(f"tiers.{name}.states: mixed with shared states: set it to 64states or 10GiB, like the other tier")
        try:
            states.append(capacity_states(room, state_bytes=model.state_bytes))
        except ValueError as error:
            raise UsageError(f"tiers.{name}.states: {error}") from error
    if states[0] == 0:
        raise UsageError("tiers.gpu.states is 0, so no state could be saved: set it to 64states or 10GiB")
    return [room for room in states if room != 0]
