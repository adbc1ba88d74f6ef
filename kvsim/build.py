"""From a composed configuration to the objects of a run: the only place that reads one.

Each node is merged into its class, so an unknown setting, a wrong type or a bad value ends here, before any work, with a
UsageError that names the key. What would have no effect ends here too.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra.utils
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvsim.capacity import capacity_pages, capacity_states
from kvsim.core.rules import Rules
from kvsim.engine.engine import EngineSettings
from kvsim.engine.replay import ReplaySettings
from kvsim.errors import UsageError
from kvsim.hardware import HardwareSpec
from kvsim.model import ModelSpec
from kvsim.policies.checkpoint.base import CheckpointPolicy
from kvsim.policies.checkpoint.none import NoCheckpoint
from kvsim.policies.eviction.base import BypassEviction, EvictionPolicy
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.prefetch.base import PrefetchPolicy
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.report.logger import Logger
from kvsim.report.validation import Tolerances
from kvsim.substrates import SUBSTRATES
from kvsim.suggest import closest
from kvsim.trace.base import TraceSource

T = TypeVar("T")
Config = dict[str, Any]

TIERS = ("gpu", "cpu", "disk")
WITH_STATES = ("gpu", "cpu")
PER_TIER = {"gpu": ("eviction",), "cpu": ("eviction", "placement"), "disk": ("eviction", "placement")}
GROUPS = ("trace", "model", "hardware", "engine", "rules", "eviction", "placement", "prefetch", "checkpoint", "logger")
WITHOUT_EFFECT = {
    "simulate": ("replay", "curve", "print_tree", "validate"),
    "replay": ("engine", "substrate", "disk", "curve", "timeline", "validate"),
    "validate": ("replay", "curve", "print_tree", "substrate", "logger"),
    "curve": (
        "engine", "hardware", "substrate", "disk", "replay", "tiers", "eviction", "placement", "prefetch", "checkpoint", "preset",
        "print_tree", "timeline", "logger", "sweep.objective", "validate",
    ),
}  # fmt: skip
NOT_RECORDED = ("output", "sweep", "validate")
"""What a run's result does not depend on: it is no part of its record."""

MOST_NUMBERED_SLOTS = 10_000_000


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings at the top of the configuration."""

    page_tokens: int
    substrate: str
    warmup: float
    seed: int
    print_tree: bool
    timeline: bool
    output: str

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, not {self.page_tokens}")
        if self.substrate not in SUBSTRATES:
            raise ValueError(f"substrate must be one of {', '.join(SUBSTRATES)}, not {self.substrate}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be at least 0 and below 1, not {self.warmup}: it is the fraction to leave out")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, not {self.seed}")


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """What a multirun does beside its jobs."""

    fail_fast: bool = False
    dry_run: bool = False
    objective: list[str] | None = None

    def __post_init__(self) -> None:
        if self.objective is not None and not self.objective:
            raise ValueError("objective is empty: name fields of result.json, as [hit_rate, ttft_s.p99], or leave it out")


@dataclass(frozen=True, kw_only=True)
class DiskSettings:
    """The disk tier on real hardware."""

    folder: str | None = None
    threads: int = 4

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")

    @property
    def path(self) -> Path | None:
        """The folder that the user chose."""
        return None if self.folder is None else Path(self.folder)


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """A tier that exists, from the GPU down."""

    name: str
    capacity_pages: int | None
    """None: unlimited."""
    eviction: EvictionPolicy
    placement: PlacementPolicy | None
    """Decides what is written down into this tier; the GPU has none."""
    above: str = ""
    """The tier that it is below; the GPU is below none."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a run needs, checked; policies are not bound yet."""

    trace: TraceSource
    page_tokens: int
    tiers: list[TierPlan]
    prefetch: PrefetchPolicy
    checkpoint: CheckpointPolicy
    states: list[int | None] | None
    """Room for recurrent states on the GPU and the CPU, in states (None: unlimited); None if they share the pages' room."""
    model: ModelSpec
    hardware: HardwareSpec
    engine: EngineSettings
    rules: Rules
    replay: ReplaySettings
    substrate: str
    disk: DiskSettings
    warmup: float
    seed: int
    print_tree: bool
    timeline: bool
    logger: Logger
    sweep: SweepSettings
    tolerances: Tolerances
    output: Path
    config: Config
    """The resolved configuration, for the record; without what does not bear on the result, as the folder."""


def build_run(cfg: DictConfig, *, command: str, overrides: Iterable[str] = ()) -> Plan:
    """The plan of a ``command`` (simulate, replay, validate, curve) with the overrides that the user gave. Raises UsageError."""
    config = resolve(cfg)
    keys = {override.lstrip("+~").split("=", 1)[0] for override in overrides}
    for name in WITHOUT_EFFECT[command]:
        if key := _given(keys, name) or _given(keys, f"{name}@tiers"):
            raise UsageError(f"{key} has no effect on kvsim {command}: leave it out")
    run = construct(RunSettings, {field.name: config.get(field.name) for field in fields(RunSettings)}, "")
    model = construct(ModelSpec, config.get("model"), "model")
    tiers = _tiers(config, run.page_tokens, model, keys)
    plan = Plan(
        trace=construct(TraceSource, config.get("trace"), "trace"),
        page_tokens=run.page_tokens,
        tiers=tiers,
        prefetch=construct(PrefetchPolicy, config.get("prefetch"), "prefetch"),
        checkpoint=construct(CheckpointPolicy, config.get("checkpoint"), "checkpoint"),
        states=_states(config, tiers, model, keys),
        model=model,
        hardware=construct(HardwareSpec, config.get("hardware"), "hardware"),
        engine=construct(EngineSettings, config.get("engine"), "engine"),
        rules=construct(Rules, config.get("rules"), "rules"),
        replay=construct(ReplaySettings, config.get("replay"), "replay"),
        substrate="hardware" if command == "validate" else run.substrate,
        disk=construct(DiskSettings, config.get("disk"), "disk"),
        warmup=run.warmup,
        seed=run.seed,
        print_tree=run.print_tree and command == "replay",
        timeline=run.timeline,
        logger=construct(Logger, config.get("logger"), "logger"),
        sweep=sweep_settings(config.get("sweep")),
        tolerances=construct(Tolerances, config.get("validate"), "validate"),
        output=Path(run.output),
        config={key: value for key, value in config.items() if key not in NOT_RECORDED},
    )
    _check_combination(plan, command, keys)
    _check_hardware(plan, command, keys)
    _check_substrate(plan, keys)
    check_output(plan.output)
    return plan


def sweep_settings(node: Any) -> SweepSettings:
    """The settings of the configuration's ``sweep``; a single objective is a list of one. Raises UsageError."""
    single = {"objective": [node["objective"]]} if isinstance(node, dict) and isinstance(node.get("objective"), str) else {}
    return construct(SweepSettings, node | single if isinstance(node, dict) else node, "sweep")


def build_trace(cfg: DictConfig) -> tuple[TraceSource, int]:
    """The trace and its ``page_tokens`` alone."""
    config = resolve(cfg)
    run = construct(RunSettings, {field.name: config.get(field.name) for field in fields(RunSettings)}, "")
    return construct(TraceSource, config.get("trace"), "trace"), run.page_tokens


def resolve(cfg: DictConfig) -> Config:
    """The configuration as plain dicts, interpolations resolved. Raises UsageError for keys that nothing reads."""
    try:
        config = cast(Config, OmegaConf.to_container(cfg, resolve=True))
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key or 'configuration'}: {_first_line(error)}") from error
    known = [*GROUPS, "tiers", "replay", "disk", "curve", "sweep", "validate", *(field.name for field in fields(RunSettings))]
    _check_names("", config, known)
    _check_names("tiers", config.get("tiers"), TIERS)
    for tier in TIERS:
        own = ("states",) if tier in WITH_STATES else ("below",)
        _check_names(f"tiers.{tier}", config["tiers"].get(tier), ("capacity", *own, *PER_TIER[tier]))
    return config


def construct(kind: type[T], node: Any, key: str) -> T:
    """An object of ``kind`` from the node at ``key``, of the class that its ``_target_`` names if it has one.

    The class is a dataclass; its fields are the settings. Raises UsageError for what does not fit them.
    """
    if not isinstance(node, dict):
        raise UsageError(f"{key}={node}: choose one by its name, {key}=NAME" if node else f"{key} is missing: say {key}=NAME")
    cls = _class(kind, node.get("_target_"), key)
    given = {name: value for name, value in node.items() if name != "_target_"}
    _check_names(key, given, [field.name for field in fields(cast(Any, cls)) if field.init])
    try:
        values = _convert(cls, given, key)
        return cls(**values)
    except OmegaConfBaseException as error:
        raise UsageError(f"{_join(key, error.full_key)}: {_first_line(error)}") from error
    except ValueError as error:
        raise UsageError(_with_key(key, str(error), given)) from error


def check_output(folder: Path) -> None:
    """Raise UsageError unless files can be written to ``folder``. Leaves nothing behind."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UsageError(f"output: cannot write to {folder}: {error.strerror}; choose another folder with output=DIR") from error


def _tiers(config: Config, page_tokens: int, model: ModelSpec, keys: set[str]) -> list[TierPlan]:
    capacities = {}
    for name in TIERS:
        try:
            capacity = config["tiers"].get(name, {}).get("capacity", 0)
            pages = capacity_pages(capacity, page_tokens=page_tokens, page_bytes=model.page_bytes(page_tokens))
        except ValueError as error:
            raise UsageError(f"tiers.{name}.capacity: {error}") from error
        if pages != 0:
            capacities[name] = pages
    if "gpu" not in capacities:
        raise UsageError("tiers.gpu.capacity is 0: every run has a GPU tier")
    _check_tier_policies(config, list(capacities), keys)
    above = {"gpu": "", "cpu": "gpu", "disk": _above_disk(config, list(capacities), keys)}
    return [_tier(config, name, pages, above[name]) for name, pages in capacities.items()]


def _above_disk(config: Config, present: list[str], keys: set[str]) -> str:
    """The tier that the disk is directly below. Raises UsageError if that is not possible."""
    above = config["tiers"]["disk"].get("below", "cpu")
    if above not in ("cpu", "gpu"):
        raise UsageError(f"tiers.disk.below must be cpu or gpu, not {above}: the tier that the disk is directly below")
    if "disk" not in present:
        if key := _given(keys, "tiers.disk.below"):
            raise UsageError(f"{key} has no effect without that tier: set tiers.disk.capacity")
    elif above not in present:
        raise UsageError(
            "tiers.disk is below the CPU tier, through which its pages pass: set tiers.cpu.capacity, or tiers.disk.below=gpu"
        )
    return str(above)


def _states(config: Config, tiers: list[TierPlan], model: ModelSpec, keys: set[str]) -> list[int | None] | None:
    """Room for states of their own, from the GPU down; None if they share the pages'."""
    names = [tier.name for tier in tiers if tier.name in WITH_STATES]
    for name in WITH_STATES:
        if (key := _given(keys, f"tiers.{name}.states")) and (not model.is_hybrid or name not in names):
            why = "without that tier" if model.is_hybrid else "on a model without recurrent layers"
            raise UsageError(f"{key} has no effect {why}: leave it out")
    rooms = {name: config["tiers"][name].get("states") for name in names}
    if not model.is_hybrid or all(room == "shared" for room in rooms.values()):
        return None
    states: list[int | None] = []
    for name, room in rooms.items():
        if room == "shared":
            raise UsageError(f"tiers.{name}.states: all tiers share room with the pages, or none does: say 64states or 10GiB")
        try:
            states.append(capacity_states(room, state_bytes=model.state_bytes))
        except ValueError as error:
            raise UsageError(f"tiers.{name}.states: {error}") from error
    if states[0] == 0:
        raise UsageError("tiers.gpu.states is 0: nothing could be saved; say shared, 64states or 10GiB, or checkpoint=none")
    return [room for room in states if room != 0]


def _tier(config: Config, name: str, pages: int | None, above: str) -> TierPlan:
    eviction = construct(EvictionPolicy, *_policy(config, name, "eviction"))
    placement = None if name == "gpu" else construct(PlacementPolicy, *_policy(config, name, "placement"))
    return TierPlan(name=name, capacity_pages=pages, eviction=eviction, placement=placement, above=above)


def _policy(config: Config, tier: str, family: str) -> tuple[Any, str]:
    """The node of the tier's own policy, or else of the one for all tiers, and its key."""
    own = config["tiers"][tier].get(family)
    return (config.get(family), family) if own is None else (own, f"tiers.{tier}.{family}")


def _check_tier_policies(config: Config, present: list[str], keys: set[str]) -> None:
    """Raise UsageError for a policy that the user chose and no tier takes."""
    for tier in TIERS:
        for family in PER_TIER[tier]:
            key = _given(keys, f"tiers.{tier}.{family}") or _given(keys, f"{family}@tiers.{tier}.{family}")
            if key and tier not in present:
                raise UsageError(f"{key} has no effect without that tier: set tiers.{tier}.capacity")
    for family in ("eviction", "placement"):
        takers = [tier for tier in present if family in PER_TIER[tier]]
        if not (key := _given(keys, family)):
            continue
        if not takers:
            raise UsageError(f"{key} has no effect without a lower tier: set tiers.cpu.capacity")
        if all(config["tiers"][tier].get(family) for tier in takers):
            raise UsageError(f"{key} has no effect, as every tier has its own {family}: leave it out")


def _check_hardware(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError for a machine that the user chose for a replay, where no policy decides by its rates.

    What is measured on this machine has to be compared with what is known of it.
    """
    if command == "validate" and not _given(keys, "hardware"):
        raise UsageError("hardware: say hardware=NAME, the choice that kvsim calibrate has written for this machine")
    policies = [plan.prefetch, *(tier.eviction for tier in plan.tiers), *(tier.placement for tier in plan.tiers)]
    is_read = command != "replay" or any(getattr(policy, "reads_hardware", False) for policy in policies)
    if (key := _given(keys, "hardware")) and not is_read:
        raise UsageError(f"{key} has no effect on kvsim {command}: leave it out")


def _check_substrate(plan: Plan, keys: set[str]) -> None:
    """Raise UsageError for what the substrate cannot carry out, and for settings that mean nothing to it."""
    choice = SUBSTRATES[plan.substrate]
    for name in choice.without_effect:
        if key := _given(keys, name):
            raise UsageError(f"{key} has no effect on substrate={plan.substrate}: leave it out")
    if (key := _given(keys, "disk")) and plan.tiers[-1].name != "disk":
        raise UsageError(f"{key} has no effect without a disk tier: set tiers.disk.capacity")
    choice.check(plan)


def _check_combination(plan: Plan, command: str, keys: set[str]) -> None:
    """A preset's prefetch stands for an engine, with a disk or without; one that the user chose needs a disk. Both read into the
    CPU tier."""
    try:
        plan.rules.check(command, [tier.name for tier in plan.tiers])
    except ValueError as error:
        raise UsageError(_with_key("rules", str(error), plan.config["rules"])) from error
    check_bypass(plan, command)
    if plan.rules.cache_output and command == "replay" and not plan.replay.hold_output:
        raise UsageError("rules.cache_output needs replay.hold_output=true: an answer that takes no room cannot be cached")
    if not isinstance(plan.prefetch, NoPrefetch):
        name, lowest = type(plan.prefetch).__name__, plan.tiers[-1]
        if lowest.name != "disk" and _given(keys, "prefetch"):
            raise UsageError(f"prefetch: {name} has no effect without a disk tier: set tiers.disk.capacity")
        if lowest.name == "disk" and lowest.above != "cpu":
            raise UsageError(
                f"prefetch: {name} reads ahead into the CPU tier, and the disk is not below it: set tiers.disk.below=cpu, or "
                "prefetch=none"
            )
    if plan.print_tree:
        check_numbered(plan.tiers)
    if plan.model.is_hybrid and plan.rules.has_own_cache:
        raise UsageError("rules: these are for models without recurrent layers: choose rules=default, or another model")
    if not plan.model.is_hybrid and not isinstance(plan.checkpoint, NoCheckpoint):
        raise UsageError("checkpoint: the model has no recurrent layers whose state could be saved; say checkpoint=none")


def check_bypass(plan: Plan, command: str) -> None:
    """Raise UsageError for a policy that is a bound and cannot be what is asked of it."""
    for tier in plan.tiers:
        if not isinstance(tier.eviction, BypassEviction):
            continue
        name = type(tier.eviction).__name__
        if plan.model.is_hybrid:
            raise UsageError(f"eviction: {name} is no bound for models with recurrent layers: choose another policy or model")
        if command != "replay" or len(plan.tiers) > 1:
            raise UsageError(f"eviction: {name} is a bound, for kvsim replay with one tier: choose another policy")
        if plan.replay.in_flight > 1:
            raise UsageError(f"replay.in_flight has no effect on {name}, for which running requests take no room: leave it out")
        if plan.rules.has_own_cache:
            raise UsageError(f"eviction: {name} is a bound by kvsim's own rules: say rules=default, or choose another policy")
        if plan.print_tree:
            raise UsageError(f"print_tree has no effect on {name}, which keeps no tree: leave it out")


def check_numbered(tiers: list[TierPlan]) -> None:
    """Raise UsageError if a tier has too many slots to number them all for a printed tree."""
    for tier in tiers:
        if tier.capacity_pages is None or tier.capacity_pages > MOST_NUMBERED_SLOTS:
            size = "unlimited" if tier.capacity_pages is None else f"{tier.capacity_pages:,} pages"
            raise UsageError(
                f"print_tree numbers every slot, and tiers.{tier.name}.capacity is {size}: "
                f"give it at most {MOST_NUMBERED_SLOTS:,} pages"
            )


def _given(keys: set[str], name: str) -> str | None:
    """The first of the user's override keys that concerns ``name``, and not a tier's own ``name``."""
    return next((key for key in sorted(keys) if key == name or key.startswith(f"{name}.")), None)


def _class(kind: type[T], target: Any, key: str) -> type[T]:
    if target is None:
        return kind
    try:
        cls = hydra.utils.get_class(target)
    except Exception as error:
        raise UsageError(f"{key}._target_: there is no class {target}") from error
    if not issubclass(cls, kind):
        raise UsageError(f"{key}._target_: {target} is no {kind.__name__}")
    return cls


def _convert(cls: type, given: Config, key: str) -> Config:
    """The settings in the types of the class's fields. The jobs of a sweep share most of them."""
    return deepcopy(_converted(cls, json.dumps(given), key))


@lru_cache(maxsize=256)
def _converted(cls: type, text: str, key: str) -> Config:
    given = json.loads(text)
    merged = OmegaConf.merge(OmegaConf.structured(cls), given)
    for name in sorted(OmegaConf.missing_keys(merged)):
        raise UsageError(f"{_join(key, name)} is missing: say {_join(key, name)}=...")
    return {
        str(name): OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
        for name, value in merged.items()
        if name in given
    }


def _check_names(key: str, node: Any, known: Iterable[str]) -> None:
    if not isinstance(node, Mapping):
        raise UsageError(f"{key} must hold settings ({', '.join(known)}), not {node!r}")
    for name in node:
        if name not in known:
            hint = closest(name, known) or f"; there is {', '.join(sorted(known)) or 'none'}"
            raise UsageError(f"{_join(key, name)}: there is no such setting{hint}")


def _with_key(key: str, message: str, settings: Config) -> str:
    """The message of a class about one of its settings, with the setting's full key."""
    about = message.split(maxsplit=1)[0] if message else ""
    return _join(key, message) if about in settings else f"{key}: {message}"


def _join(key: str, name: str | None) -> str:
    return ".".join(part for part in (key, name) if part)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
