"""Builds the objects of a run from a composed configuration. No other module reads the configuration.

Each node is merged into its class, so an unknown setting, a wrong type or a bad value raises a UsageError that names the key
before any work is done. So does a setting without effect.
"""

import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvsim.capacity import capacity_pages, capacity_states, check_numbered
from kvsim.choices import chosen
from kvsim.cluster_settings import ClusterSettings
from kvsim.construct import check_names, construct, refuse_infinite, with_key
from kvsim.core.rules import Rules
from kvsim.effects import WITHOUT_EFFECT
from kvsim.engine.engine import EngineSettings
from kvsim.engine.replay_settings import ReplaySettings
from kvsim.errors import UsageError, first_line, unusable
from kvsim.gpu_memory import AUTO, SETTINGS, GpuMemory, auto_memory, check_fits
from kvsim.hardware import HardwareSpec
from kvsim.model import ModelSource, ModelSpec
from kvsim.numbers import Real, Whole, check_settings, shown
from kvsim.plan import Config, DiskSettings, Plan, SweepSettings, TierPlan
from kvsim.policies.checkpoint.base import CheckpointPolicy
from kvsim.policies.checkpoint.none import NoCheckpoint
from kvsim.policies.eviction.base import BypassEviction, EvictionPolicy
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.prefetch.base import PrefetchPolicy
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.routing.base import RoutingPolicy
from kvsim.policies.routing.least_loaded import LeastLoaded
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.report.logger import Logger
from kvsim.report.slo import Slo
from kvsim.report.validation import ValidationSettings
from kvsim.saturation import SaturateSettings
from kvsim.substrates import SUBSTRATES
from kvsim.suggest import hint
from kvsim.trace.base import TraceSource
from kvsim.trace.formats import format_of

TIERS = ("gpu", "cpu", "disk")
WITH_STATES = ("gpu", "cpu")
OWN_SETTINGS = {"gpu": ("states", *SETTINGS), "cpu": ("states", "page_tokens", "scope"), "disk": ("below", "scope")}
SCOPES = {"cpu": ("host", "engine"), "disk": ("host", "cluster")}
"""Who may share a tier."""
MODEL = f"{ModelSpec.__module__}.{ModelSpec.__qualname__}"
INTERCONNECT = ("hardware.interconnect_bytes_per_s", "hardware.interconnect_latency_s")
OF_MEMORY = ("hardware", "hardware.gpus", "hardware.memory_bytes")
"""What ``tiers.gpu.capacity=auto`` reads of the machine, even in a replay."""
PER_TIER = {"gpu": ("eviction",), "cpu": ("eviction", "placement"), "disk": ("eviction", "placement")}
GROUPS = (
    "trace", "model", "hardware", "engine", "rules", "eviction", "placement", "prefetch", "checkpoint", "routing", "scheduling",
    "logger",
)  # fmt: skip
RUNS_AS = {"saturate": "simulate"}
"""Commands that run another one, whose checks apply."""
NOT_RECORDED = ("output", "sweep", "validate", "saturate")
"""Settings that do not affect the result and are not recorded with it."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings at the top level of the configuration."""

    page_tokens: int
    substrate: str
    warmup: float
    seed: int
    print_tree: bool | str
    timeline: bool
    events: bool
    output: str

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "page_tokens")
        if self.substrate not in SUBSTRATES:
            raise ValueError(f"substrate must be one of {', '.join(SUBSTRATES)}, not {self.substrate}")
        check_settings(self, Real(least=0, below=1), "warmup", hint="it is the fraction of requests to leave out")
        check_settings(self, Whole(), "seed")
        if self.print_tree not in (False, True, "each"):
            raise ValueError(f"print_tree must be false, true or each, not {self.print_tree}")


def build_run(cfg: DictConfig, *, command: str, overrides: Iterable[str] = (), choices: Mapping[Any, Any] | None = None) -> Plan:
    """Build the plan of a command (simulate, saturate, replay, validate, curve). Raises UsageError.

    ``overrides`` are those given by the user: one that has no effect on this command is an error. ``choices`` are Hydra's
    runtime choices: the names that the record has for policies, model and trace.
    """
    config = resolve(cfg)
    keys = _keys(overrides)
    for name in WITHOUT_EFFECT[command]:
        if key := _given(keys, name) or _given(keys, f"{name}@tiers"):
            raise UsageError(f"{key} has no effect on kvsim {command}: leave it out")
    is_search, command = command in RUNS_AS, RUNS_AS.get(command, command)
    run = construct(RunSettings, {field.name: config.get(field.name) for field in fields(RunSettings)}, "")
    source = _model_source(config)
    trace, recognised = _trace(config)
    if not trace.draws_at_random:
        config["trace"].pop("seed", None)  # runs that differ in it alone share the trace and its bounds
    model, choices = source.spec(), chosen({**choices, **recognised} if choices else {}, config, keys)
    if source is not model:
        config["model"] = {"_target_": MODEL, **asdict(model)}
        choices["model"] = source.name
    cluster = construct(ClusterSettings, config.get("cluster"), "cluster")
    hardware = construct(HardwareSpec, config.get("hardware"), "hardware")
    gpu_memory = _gpu_memory(config, model, hardware, keys)
    tiers = _tiers(config, run.page_tokens, model, cluster, gpu_memory, keys)
    rules, rules_note = _rules(config, command, [tier.name for tier in tiers])
    validation = _validation_settings(config.get("validate"))
    plan = Plan(
        trace=trace,
        page_tokens=run.page_tokens,
        tiers=tiers,
        prefetch=construct(PrefetchPolicy, config.get("prefetch"), "prefetch"),
        checkpoint=construct(CheckpointPolicy, config.get("checkpoint"), "checkpoint"),
        routing=construct(RoutingPolicy, config.get("routing"), "routing"),
        scheduling=construct(SchedulingPolicy, config.get("scheduling"), "scheduling"),
        states=_states(config, tiers, model, keys),
        model=model,
        hardware=hardware.with_cluster_disk() if any(tier.scope == "cluster" for tier in tiers) else hardware,
        engine=construct(EngineSettings, config.get("engine"), "engine"),
        rules=rules,
        cluster=cluster,
        layout=cluster.layout(next((tier.scope for tier in tiers if tier.name == "disk"), "host")),
        decode_routing=_decode_routing(config),
        rules_note=rules_note,
        replay=construct(ReplaySettings, config.get("replay"), "replay"),
        substrate="hardware" if command == "validate" and not validation.measured else run.substrate,
        disk=construct(DiskSettings, config.get("disk"), "disk"),
        warmup=run.warmup,
        seed=run.seed,
        print_tree=run.print_tree is not False and command == "replay",
        print_steps=run.print_tree == "each",
        timeline=run.timeline,
        events=run.events,
        logger=construct(Logger, config.get("logger"), "logger"),
        slo=construct(Slo, config.get("slo") or {}, "slo"),
        saturate=construct(SaturateSettings, config.get("saturate") or {}, "saturate"),
        sweep=sweep_settings(config.get("sweep")),
        validation=validation,
        output=Path(run.output),
        config={key: value for key, value in config.items() if key not in NOT_RECORDED},
        gpu_memory=gpu_memory,
        choices=choices,
        model_note=source.note(),
    )
    refuse_infinite("", config)
    if is_search:
        _check_search(plan, keys)
    check_plan(plan, command, keys)
    check_output(plan.output)
    return plan


def check_plan(plan: Plan, command: str, overrides: Iterable[str]) -> None:
    """Raise UsageError for settings that contradict each other or have no effect; ``overrides`` are those given by the user."""
    keys = _keys(overrides)
    _check_combination(plan, command, keys)
    _check_hardware(plan, command, keys)
    _check_substrate(plan, command, keys)
    if command == "validate":
        _check_validation(plan, keys)


def _model_source(config: Config) -> ModelSource:
    """The model, or what describes it. The recorded configuration has the model itself."""
    node = config.get("model")
    return construct(ModelSource, {"_target_": MODEL, **node} if isinstance(node, dict) else node, "model")


def sweep_settings(node: Any) -> SweepSettings:
    """Build the ``sweep`` settings; a single objective becomes a list of one. Raises UsageError."""
    single = {"objective": [node["objective"]]} if isinstance(node, dict) and isinstance(node.get("objective"), str) else {}
    return construct(SweepSettings, node | single if isinstance(node, dict) else node, "sweep")


def _validation_settings(node: Any) -> ValidationSettings:
    """Build the ``validate`` settings; a single folder becomes a list of one. Raises UsageError."""
    folders = node.get("measured") if isinstance(node, dict) else None
    single = {"measured": [folders]} if isinstance(folders, str) else {"measured": []} if folders is None else {}
    return construct(ValidationSettings, node | single if isinstance(node, dict) else node, "validate")


def build_trace(cfg: DictConfig) -> tuple[TraceSource, int]:
    """Build only the trace source; returned with ``page_tokens``."""
    config = resolve(cfg)
    run = construct(RunSettings, {field.name: config.get(field.name) for field in fields(RunSettings)}, "")
    return _trace(config)[0], run.page_tokens


def _trace(config: Config) -> tuple[TraceSource, dict[str, str]]:
    """Build the trace source, and the choices that this changes: the format, if it was left open and is recognised.

    The configuration then describes that format.
    """
    node = config.get("trace")
    given = construct(TraceSource, node, "trace")
    try:
        source = given.resolved()
    except ValueError as error:
        raise UsageError(with_key("trace", str(error), cast(Config, node))) from error
    if source is given:
        return source, {}
    config["trace"] = {"_target_": f"{type(source).__module__}.{type(source).__qualname__}", **asdict(source)}
    return source, {"trace": format_of(source)}


def resolve(cfg: DictConfig) -> Config:
    """Convert the configuration to plain dicts and resolve interpolations. Raises UsageError for unknown keys."""
    try:
        config = cast(Config, OmegaConf.to_container(cfg, resolve=True))
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key or 'configuration'}: {first_line(error)}") from error
    _check_texts(config, "")
    known = [
        *GROUPS,
        "tiers",
        "cluster",
        "replay",
        "disk",
        "curve",
        "saturate",
        "slo",
        "sweep",
        "validate",
        *(field.name for field in fields(RunSettings)),
    ]
    check_names("", config, known)
    check_names("tiers", config.get("tiers"), TIERS)
    for tier in TIERS:
        check_names(f"tiers.{tier}", config["tiers"].get(tier), ("capacity", *OWN_SETTINGS[tier], *PER_TIER[tier]))
    return config


def _check_texts(node: Any, key: str) -> None:
    """Raise UsageError for a text that can neither name a file nor be written to the result."""
    if isinstance(node, str):
        if problem := unusable(node):
            raise UsageError(f"{key}: {node!r} {problem}")
    elif isinstance(node, dict):
        for name, below in node.items():
            _check_texts(below, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for number, below in enumerate(node):
            _check_texts(below, f"{key}[{number}]")


def check_output(folder: Path) -> None:
    """Raise UsageError unless files can be written to ``folder``. Creates nothing."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UsageError(f"output: cannot write to {folder}: {error.strerror}; choose another folder with output=DIR") from error


def _rules(config: Config, command: str, tiers: list[str]) -> tuple[Rules, str]:
    """Return the rules that apply to a command with these tiers and, if they stand in for those of an engine, a line about it."""
    chosen = construct(Rules, config.get("rules"), "rules")
    try:
        applied = chosen.for_command(command, tiers)
    except ValueError as error:
        raise UsageError(with_key("rules", str(error), config["rules"])) from error
    if applied.engine == chosen.engine:
        return applied, ""
    return applied, f"kvsim's own: those of {chosen.engine} do not cover kvsim {command} with tiers {', '.join(tiers)}"


def _gpu_memory(config: Config, model: ModelSpec, hardware: HardwareSpec, keys: set[str]) -> GpuMemory | None:
    """How the memory of an engine's GPUs is divided if that decides the size of its GPU tier; else None."""
    node = config["tiers"]["gpu"]
    if node.get("capacity") != AUTO:
        for name in SETTINGS:
            if key := _given(keys, f"tiers.gpu.{name}"):
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


def _decode_routing(config: Config) -> RoutingPolicy:
    """The router's policy for decode engines; by default, the least loaded one gets the request."""
    node = config["cluster"].get("decode_routing")
    return LeastLoaded() if node is None else construct(RoutingPolicy, node, "cluster.decode_routing")


def _tiers(
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
    if _given(keys, key) and (name not in present or cluster.total == 1):
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
        if _given(keys, key):
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
        if key := _given(keys, "tiers.disk.below"):
            raise UsageError(f"{key} has no effect without that tier: set tiers.disk.capacity")
    elif above not in present:
        raise UsageError(
            "tiers.disk needs a CPU tier above it: set tiers.cpu.capacity, or tiers.disk.below=gpu to connect the disk to the GPU"
        )
    return str(above)


def _states(config: Config, tiers: list[TierPlan], model: ModelSpec, keys: set[str]) -> list[int | None] | None:
    """Capacity for recurrent states per tier, from the GPU down; None if states share the pages' capacity."""
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
            raise UsageError(f"tiers.{name}.states: mixed with shared states: set it to 64states or 10GiB, like the other tier")
        try:
            states.append(capacity_states(room, state_bytes=model.state_bytes))
        except ValueError as error:
            raise UsageError(f"tiers.{name}.states: {error}") from error
    if states[0] == 0:
        raise UsageError("tiers.gpu.states is 0, so no state could be saved: set it to 64states or 10GiB")
    return [room for room in states if room != 0]


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
            raise UsageError(f"{key} has no effect because every tier has its own {family}: leave it out")


def _check_hardware(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError for ``hardware`` set on a replay in which no policy reads it, and for a validation without it."""
    if command == "validate" and not _given(keys, "hardware"):
        raise UsageError("hardware: set hardware=NAME, the file that kvsim calibrate wrote for this machine")
    is_read = command != "replay" or plan.reads_hardware
    of_memory = OF_MEMORY if plan.gpu_memory is not None else ()
    if (key := _given(keys - {*of_memory}, "hardware")) and not is_read:
        raise UsageError(f"{key} has no effect on kvsim {command}: leave it out")
    _check_memory(plan, command)
    _check_ranks(plan, keys)


def _check_memory(plan: Plan, command: str) -> None:
    """Raise UsageError if a model and its GPU tier do not fit into an engine's GPUs. A replay has no GPUs, a curve no tiers."""
    pages, states = plan.tiers[0].capacity_pages, plan.states[0] if plan.states else 0
    if command in ("simulate", "validate"):
        kv_bytes = (pages or 0) * plan.model.page_bytes(plan.page_tokens)
        check_fits(plan.model, plan.hardware, kv_bytes, (states or 0) * plan.model.state_bytes)


def _check_ranks(plan: Plan, keys: set[str]) -> None:
    """Raise UsageError for settings of tensor-parallel ranks that concern no link of the run."""
    if (key := _given(keys, "hardware.rank_jitter")) and len(plan.tiers) == 1:
        raise UsageError(f"{key} has no effect without a lower tier: set tiers.cpu.capacity")
    links = {link for tier in plan.tiers[1:] for link in (f"{tier.above}-{tier.name}", f"{tier.name}-{tier.above}")}
    for fault in plan.hardware.rank_faults if _given(keys, "hardware.rank_faults") else ():
        if fault.link not in links:
            there = f"its links are {', '.join(sorted(links))}" if links else "set tiers.cpu.capacity"
            raise UsageError(f"hardware.rank_faults has no effect on {fault.link}, which this run does not have: {there}")
    is_late = any(fault.share and fault.link == "disk-gpu" for fault in plan.hardware.rank_faults)
    if is_late and plan.engine.overlap == "layerwise":
        raise UsageError(
            "hardware.rank_faults: a load from disk that fails while layers are computed behind it is not modelled: set "
            "engine.overlap=none"
        )


def _check_substrate(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError for a plan that the substrate cannot run, and for settings without effect on it.

    A validation runs on all substrates, and only what has no effect on any of them has none on it.
    """
    choice = SUBSTRATES[plan.substrate]
    others = SUBSTRATES.values() if command == "validate" and not plan.validation.measured else ()
    for name in choice.without_effect:
        if (key := _given(keys, name)) and all(name in other.without_effect for other in others):
            raise UsageError(f"{key} has no effect on substrate={plan.substrate}: leave it out")
    if (key := _given(keys, "disk")) and plan.tiers[-1].name != "disk":
        raise UsageError(f"{key} has no effect without a disk tier: set tiers.disk.capacity")
    choice.check(plan)


def _check_validation(plan: Plan, keys: set[str]) -> None:
    """Raise UsageError for settings of a validation without effect, and for real runs that would not begin alike."""
    runs, noise = plan.validation.runs, plan.hardware.noise
    if (key := _given(keys, "validate.runs")) and plan.validation.measured:
        raise UsageError(f"{key} has no effect with validate.measured: leave it out")
    if key := _given(keys, "validate.simulations"):
        if runs == 1 and not plan.validation.measured:
            raise UsageError(f"{key} has no effect with a single real run: set validate.runs=3")
        if noise is None:
            raise UsageError(f"{key} has no effect on a machine without noise: repeat kvsim calibrate, which measures it")
    if runs > 1 and plan.disk.path is not None:
        raise UsageError("disk.folder keeps pages from one real run to the next: leave it out, and set output to a folder there")


def _check_combination(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError for settings that contradict each other.

    A prefetch policy chosen by the user needs a disk tier. One that comes with a preset does not: it belongs to the engine.
    """
    names = [tier.name for tier in plan.tiers]
    try:
        plan.rules.check(command, names)
    except ValueError as error:
        raise UsageError(with_key("rules", str(error), plan.config["rules"])) from error
    if any(tier.unit_pages > 1 for tier in plan.tiers) and not plan.rules.has_coarse_pages:
        raise UsageError(
            "tiers.cpu.page_tokens: larger CPU pages are for kvsim replay with rules=lightllm and without a disk tier: "
            f"leave it out, or set it to page_tokens={plan.page_tokens}"
        )
    check_bypass(plan, command)
    if not plan.slo.is_set and any(name.split(".")[0] == "slo" for name in plan.sweep.objective or ()):
        raise UsageError("sweep.objective: slo is null without objectives: set slo.ttft_s or slo.tpot_s")
    if plan.rules.cache_output and command == "replay" and not plan.replay.hold_output:
        raise UsageError("rules.cache_output needs replay.hold_output=true: an answer that occupies no pages cannot be cached")
    if not isinstance(plan.prefetch, NoPrefetch):
        name, lowest = type(plan.prefetch).__name__, plan.tiers[-1]
        if lowest.name != "disk" and _given(keys, "prefetch"):
            raise UsageError(f"prefetch: {name} has no effect without a disk tier: set tiers.disk.capacity")
        if lowest.name == "disk" and lowest.above != "cpu":
            raise UsageError(
                f"prefetch: {name} reads ahead into the CPU tier, which is not above the disk: set tiers.disk.below=cpu or "
                "prefetch=none"
            )
    if plan.print_tree:
        check_numbered({tier.name: tier.capacity_pages for tier in plan.tiers})
    _check_own_cache(plan, command, keys)
    _check_schedule(plan, command, keys)
    _check_cluster(plan, keys)
    if not plan.model.is_hybrid and not isinstance(plan.checkpoint, NoCheckpoint):
        raise UsageError("checkpoint: the model has no recurrent layers, so there is no state to save: set checkpoint=none")


def _check_search(plan: Plan, keys: set[str]) -> None:
    """Raise UsageError for a search for the highest rate without objectives, or with two rates to begin with."""
    if not plan.slo.is_set:
        raise UsageError(
            "slo: set slo.ttft_s or slo.tpot_s, or both: kvsim saturate searches for the highest rate that meets them"
        )
    if "trace.rate" in keys and plan.saturate.rate is not None:
        raise UsageError("trace.rate has no effect with saturate.rate, the rate that is run first: leave one of them out")


def _check_own_cache(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError if an engine's own rules do not fit the model, or for settings that the rules do not use."""
    rules = plan.rules
    if rules.has_own_cache and rules.serves_hybrid_models != plan.model.is_hybrid:
        which = "with" if rules.serves_hybrid_models else "without"
        raise UsageError(f"rules: these rules of an engine need a model {which} recurrent layers: set rules=default")
    if command == "replay" and plan.replay.prefill_chunk_tokens is not None and not rules.prefills_in_chunks:
        raise UsageError("replay.prefill_chunk_tokens has no effect under rules without prefill chunks: leave it out")
    if rules.decides_checkpoints and (key := _given(keys, "checkpoint")):
        raise UsageError(
            f"{key} has no effect under the rules of an engine that decides itself where states are saved: leave it out, or set "
            "rules=default"
        )


def _check_schedule(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError for a scheduling policy that the engine whose schedule is simulated does not have, or for settings of one
    that have no effect."""
    policy = plan.scheduling
    for name in policy.without_effect():
        if key := _given(keys, f"scheduling.{name}"):
            raise UsageError(f"{key} has no effect with these settings of {type(policy).__name__}: leave it out")
    if command == "simulate" and plan.rules.schedules_by_priority and not policy.orders_by_priority():
        raise UsageError(
            f"scheduling: {type(policy).__name__}: {plan.rules.engine}'s schedule is by arrival or by priority, without a bound: "
            "set scheduling=fcfs, scheduling=priority with scheduling.max_wait_s=null, or rules=default"
        )


def _check_cluster(plan: Plan, keys: set[str]) -> None:
    """Raise UsageError for settings of a cluster that have no effect, and for what a cluster cannot do."""
    if plan.layout.engines == 1:
        for name in ("routing", "cluster.engines_per_host", "hardware.host_memory_bytes_per_s"):
            if key := _given(keys, name):
                raise UsageError(f"{key} has no effect with one engine: set cluster.engines above 1, or leave it out")
        if plan.cluster.failures and not all("back_after_s" in failure for failure in plan.cluster.failures):
            raise UsageError("cluster.failures: the only engine must come back: set back_after_s")
    if not plan.layout.pairs:
        for name in ("cluster.decode_routing", "routing@cluster.decode_routing", *INTERCONNECT):
            if key := _given(keys, name):
                raise UsageError(f"{key} has no effect unless cluster.prefill and cluster.decode are set: leave it out")
    elif plan.model.is_hybrid:
        raise UsageError("cluster.prefill: recurrent states cannot be handed to another engine: set cluster.engines instead")
    elif plan.rules.engine:
        raise UsageError(f"cluster.prefill: {plan.rules.engine}'s own rules serve undivided engines: set rules=default")
    key = _given(keys, "hardware.cluster_disk_read_bytes_per_s") or _given(keys, "hardware.cluster_disk_write_bytes_per_s")
    if key and all(tier.scope != "cluster" for tier in plan.tiers):
        raise UsageError(f"{key} has no effect without a disk that all hosts share: set tiers.disk.scope=cluster")
    users = {"engine": 1, "host": plan.cluster.per_host, "cluster": plan.cluster.total}
    is_shared = any(users[tier.scope] > 1 for tier in plan.tiers)
    if plan.model.is_hybrid and (is_shared or plan.cluster.failures and len(plan.tiers) > 1):
        raise UsageError(
            "cluster: engines that serve a model with recurrent layers share no tier, and do not fail with tiers below the GPU: "
            "set tiers.cpu.scope=engine, without a disk and without failures"
        )


def check_bypass(plan: Plan, command: str) -> None:
    """Raise UsageError where an eviction policy that is a bound (Belady) is used for anything but a plain replay of one tier."""
    for tier in plan.tiers:
        if not isinstance(tier.eviction, BypassEviction):
            continue
        name = type(tier.eviction).__name__
        if plan.model.is_hybrid:
            raise UsageError(f"eviction: {name} is not a valid bound for models with recurrent layers")
        if command != "replay" or len(plan.tiers) > 1:
            raise UsageError(f"eviction: {name} is a bound for kvsim replay with one tier only: choose another policy")
        if plan.replay.in_flight > 1:
            raise UsageError(f"replay.in_flight has no effect on {name}, which ignores running requests: leave it out")
        if plan.rules.has_own_cache:
            raise UsageError(f"eviction: {name} is a bound under kvsim's own rules: set rules=default or choose another policy")
        if plan.print_tree:
            raise UsageError(f"print_tree has no effect on {name}, which has no tree: leave it out")


def _keys(overrides: Iterable[str]) -> set[str]:
    """The keys that overrides set."""
    return {override.lstrip("+~").split("=", 1)[0] for override in overrides}


def _given(keys: set[str], name: str) -> str | None:
    """The first of the user's override keys that is ``name`` or below it."""
    return next((key for key in sorted(keys) if key == name or key.startswith(f"{name}.")), None)
