"""The plans of a run's tiers, from the configuration: their capacities, their policies and who shares them."""

from collections.abc import Collection
from typing import Any

from kvsim.engine.engine import EngineSettings
from kvsim.errors import NoEffect, UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.hardware.tier_kinds import LEVELS, TIER_KINDS, TierKind, kind_of
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

WITH_STATES = [kind.name for kind in TIER_KINDS if kind.has_states]
PER_TIER = {kind.name: ("eviction", "placement") if kind.above else ("eviction",) for kind in TIER_KINDS}
"""Families of policies that a tier has one of."""


def gpu_memory_of(config: Config, model: ModelSpec, hardware: HardwareSpec, keys: set[str]) -> GpuMemory | None:
    """How the memory of an engine's GPUs is divided if that decides the size of its GPU tier; else None."""
    node = config["tiers"]["gpu"]
    if node.get("capacity") != AUTO:
        for name in SETTINGS:
            if key := given(keys, f"tiers.gpu.{name}"):
                raise NoEffect(key, "on a capacity given as a number", "set tiers.gpu.capacity=auto")
        return None
    room = node["states"] if model.is_hybrid else "shared"
    try:
        states = 0 if room == "shared" else capacity_states(room, state_bytes=model.state_bytes)
    except ValueError as error:
        raise UsageError(f"tiers.gpu.states: {error}") from error
    if states is None:
        raise UsageError("tiers.gpu.states is unlimited, which leaves no room for tiers.gpu.capacity=auto: give it a size")
    return auto_memory(node, model, hardware, states * model.state_bytes, _adapters_bytes(config))


def _adapters_bytes(config: Config) -> int:
    """Return the bytes of the places for LoRA adapters. Raises UsageError for settings that are none."""
    engine = construct(EngineSettings, config.get("engine"), "engine")
    return engine.lora.all_bytes


def tier_plans(
    config: Config,
    page_tokens: int,
    page_bytes: int,
    model: ModelSpec,
    cluster: ClusterSettings,
    memory: GpuMemory | None,
    keys: set[str],
) -> list[TierPlan]:
    capacities = {}
    for name in LEVELS:
        try:
            capacity = config["tiers"].get(name, {}).get("capacity", 0)
            if not kind_of(name).above and memory is not None:
                capacity = f"{memory.kv_bytes}B"
            pages = capacity_pages(capacity, page_tokens=page_tokens, page_bytes=page_bytes)
        except ValueError as error:
            raise UsageError(f"tiers.{name}.capacity: {error}") from error
        if pages != 0:
            capacities[name] = pages
    if "gpu" not in capacities:
        raise UsageError("tiers.gpu.capacity is 0: every run needs a GPU tier")
    present = list(capacities)
    _check_tier_policies(config, present, keys)
    _check_absent(present, keys)
    above = {kind.name: _above(config, kind, present, keys) for kind in TIER_KINDS}
    _check_reads(above, present)
    units = {kind.name: _unit_pages(config, kind.name, page_tokens, capacities, keys) for kind in TIER_KINDS}
    scopes = {kind.name: _scope(config, kind, cluster, present, keys) for kind in TIER_KINDS}
    return [
        _tier(
            config,
            kind_of(name),
            _divided(name, pages, cluster.per_host) if above[name] and scopes[name] == "engine" else pages,
            above[name],
            units[name],
            scopes[name],
        )
        for name, pages in capacities.items()
    ]


def _check_absent(present: Collection[str], keys: set[str]) -> None:
    """Raise UsageError for a setting of its own that the user gave a tier that the run does not have."""
    for kind in TIER_KINDS:
        for name in kind.settings if kind.name not in present else ():
            if key := given(keys, f"tiers.{kind.name}.{name}"):
                raise NoEffect(key, "without that tier", f"set tiers.{kind.name}.capacity")


def _check_reads(above: dict[str, str], present: Collection[str]) -> None:
    """Raise UsageError unless pages can be read into the tier that their kind is read into, and pass no other one by."""
    for kind in [kind_of(name) for name in present if kind_of(name).reads_into]:
        into, upper = kind.reads_into, above[kind.name]
        label = kind_of(into).label
        if into not in present:
            raise UsageError(f"tiers.{kind.name} needs a {label} tier, which its pages are read into: set tiers.{into}.capacity")
        if upper != into and above[upper] != into:
            raise UsageError(
                f"tiers.{upper}.below={above[upper]}: pages of the {kind.label} pass through the {label} tier: set "
                f"tiers.{upper}.below={into} or tiers.{kind.name}.below={into}"
            )


def settings_of(kind: TierKind) -> list[str]:
    """Names of the settings of a tier."""
    names = ["capacity", *["states"] * kind.has_states, *kind.settings]
    names += [*["below"] * (len(kind.above) > 1), *["scope"] * (len(kind.scopes) > 1)]
    return [*names, *PER_TIER[kind.name]]


def _scope(config: Config, kind: TierKind, cluster: ClusterSettings, present: Collection[str], keys: set[str]) -> str:
    """Who shares a tier. Raises UsageError for an unknown choice, and for one without effect."""
    name = kind.name
    key, scope = f"tiers.{name}.scope", config["tiers"].get(name, {}).get("scope", kind.scopes[0])
    if scope not in kind.scopes:
        message = f"{key} must be {' or '.join(kind.scopes)}, not {scope}"
        raise UsageError(f"{message}{hint(message)}")
    if given(keys, key) and (name not in present or cluster.total == 1):
        why = "without that tier" if name not in present else "with one engine"
        raise NoEffect(key, why)
    return str(scope)


def _divided(name: str, pages: int | None, engines: int) -> int | None:
    """Divide a host's tier among its engines."""
    if pages is not None and pages < engines:
        raise UsageError(f"tiers.{name}.capacity: {pages} pages are too few to be divided among {engines} engines")
    return None if pages is None else pages // engines


def _unit_pages(config: Config, name: str, page_tokens: int, capacities: dict[str, int | None], keys: set[str]) -> int:
    """GPU pages in a page of the tier. Raises UsageError unless this is a whole number, and one such page fits.

    A preset's pages of the tier give way to larger pages of the GPU.
    """
    key, tokens = f"tiers.{name}.page_tokens", config["tiers"].get(name, {}).get("page_tokens")
    if tokens is None:
        return 1
    if name not in capacities:
        return 1
    if not given(keys, key) and Whole(1).holds(tokens) and tokens < page_tokens:
        config["tiers"][name]["page_tokens"] = None
        return 1
    if not Whole(1).holds(tokens) or tokens % page_tokens:
        raise UsageError(f"{key} must be a multiple of page_tokens={page_tokens}, not {shown(tokens)}")
    pages = capacities[name]
    if pages is not None and pages * page_tokens < tokens:
        raise UsageError(f"tiers.{name}.capacity: {pages * page_tokens} tokens are less than one page of {key}={tokens}")
    return tokens // page_tokens


def _above(config: Config, kind: TierKind, present: list[str], keys: set[str]) -> str:
    """Name of the tier directly above; empty for the top. Raises UsageError for an impossible choice."""
    if not kind.above:
        return ""
    key, above = f"tiers.{kind.name}.below", str(config["tiers"].get(kind.name, {}).get("below", kind.above[0]))
    if above not in kind.above:
        raise UsageError(f"{key} must be {' or '.join(kind.above)}, not {above}: the tier directly above the {kind.label}")
    if kind.name not in present:
        if given(keys, key):
            raise NoEffect(key, "without that tier", f"set tiers.{kind.name}.capacity")
    elif above not in present:
        others = [f"or {key}={other} to connect the {kind.label} to the {kind_of(other).label}" for other in kind.above[1:]]
        raise UsageError(
            ", ".join([f"tiers.{kind.name} needs a {kind_of(above).label} tier above it: set tiers.{above}.capacity", *others])
        )
    return above


def _tier(config: Config, kind: TierKind, pages: int | None, above: str, unit_pages: int, scope: str) -> TierPlan:
    name = kind.name
    return TierPlan(
        name=name,
        capacity_pages=pages,
        eviction=construct(EvictionPolicy, *_policy(config, name, "eviction")),
        placement=construct(PlacementPolicy, *_policy(config, name, "placement")) if above else None,
        above=above,
        reads_into=kind.reads_into or above,
        unit_pages=unit_pages,
        scope=scope,
    )


def _policy(config: Config, tier: str, family: str) -> tuple[Any, str]:
    """The node of the tier's own policy, or of the one for all tiers, with its key."""
    own = config["tiers"][tier].get(family)
    return (config.get(family), family) if own is None else (own, f"tiers.{tier}.{family}")


def _check_tier_policies(config: Config, present: list[str], keys: set[str]) -> None:
    """Raise UsageError for a policy that the user chose and no tier uses."""
    for tier in LEVELS:
        for family in PER_TIER[tier]:
            key = given(keys, f"tiers.{tier}.{family}") or given(keys, f"{family}@tiers.{tier}.{family}")
            if key and tier not in present:
                raise NoEffect(key, "without that tier", f"set tiers.{tier}.capacity")
    for family in ("eviction", "placement"):
        takers = [tier for tier in present if family in PER_TIER[tier]]
        if not (key := given(keys, family)):
            continue
        if not takers:
            raise NoEffect(key, "without a lower tier", "set tiers.cpu.capacity")
        if all(config["tiers"][tier].get(family) for tier in takers):
            raise NoEffect(key, f"because every tier has its own {family}")


def state_capacities(config: Config, tiers: list[TierPlan], model: ModelSpec, keys: set[str]) -> list[int | None] | None:
    """Capacity for recurrent states per tier, from the GPU down; None if states share the pages' capacity."""
    names = [tier.name for tier in tiers if tier.name in WITH_STATES]
    for name in WITH_STATES:
        if (key := given(keys, f"tiers.{name}.states")) and (not model.is_hybrid or name not in names):
            why = "without that tier" if model.is_hybrid else "on a model without recurrent layers"
            raise NoEffect(key, why)
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
