"""Builds the objects of a run from a composed configuration. Only ``tier_plans`` also reads the configuration.

Each node is merged into its class, so an unknown setting, a wrong type or a bad value raises a UsageError that names the key
before any work is done. So does a setting without effect.
"""

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvsim.core.rules import Rules
from kvsim.engine.engine import EngineSettings
from kvsim.errors import IdleSetting, NoEffect, UsageError, first_line, unusable
from kvsim.hardware.spec import HardwareSpec, RemoteStore
from kvsim.hardware.tier_kinds import ALWAYS, FILE, LEVELS, REMOTE, TIER_KINDS, kind_of
from kvsim.model.spec import ModelSource, ModelSpec
from kvsim.numbers import Real, Whole, check_settings
from kvsim.plans.cluster_settings import ClusterSettings
from kvsim.plans.combinations import SEARCHES, check_against_server, check_plan, check_search
from kvsim.plans.command_settings import DiskSettings, SaturateSettings, SweepSettings
from kvsim.plans.construct import check_names, construct, refuse_infinite, with_key
from kvsim.plans.engine_memory import check_memory
from kvsim.plans.parallel import check_shares, with_gpus
from kvsim.plans.plan import Config, Plan, TierPlan
from kvsim.plans.sampling import sampling_of
from kvsim.plans.substrate_choice import SUBSTRATES
from kvsim.plans.tier_plans import gpu_memory_of, settings_of, state_capacities, tier_plans
from kvsim.plans.units import with_numbers
from kvsim.policies.admission.base import AdmissionPolicy
from kvsim.policies.autoscaling.base import AutoscalingPolicy
from kvsim.policies.checkpoint.base import CheckpointPolicy
from kvsim.policies.checkpoint.none import NoCheckpoint
from kvsim.policies.checkpoint.retention import Retention
from kvsim.policies.prefetch.base import PrefetchPolicy
from kvsim.policies.routing.base import RoutingPolicy
from kvsim.policies.routing.least_loaded import LeastLoaded
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.replaying.settings import ReplaySettings
from kvsim.results.chosen_names import chosen
from kvsim.results.logger import Logger
from kvsim.results.slo import Slo
from kvsim.results.tolerances import ValidationSettings
from kvsim.settings.unused_settings import WHY, WITHOUT_EFFECT, given, keys_of
from kvsim.trace.base import TraceSource
from kvsim.trace.formats import format_of

MODEL = f"{ModelSpec.__module__}.{ModelSpec.__qualname__}"
GROUPS = (
    "trace", "model", "hardware", "engine", "rules", "eviction", "placement", "prefetch", "checkpoint", "routing", "scheduling",
    "autoscaling", "admission", "logger",
)  # fmt: skip
AGAINST_SERVER = "validate server"
"""``kvsim validate`` with a server, or with results of one, in place of this machine."""
SHADOW = "shadow"
"""``kvsim shadow``, whose ghosts are replays."""
RUNS_AS = {"saturate": "simulate", "plan": "simulate", AGAINST_SERVER: "simulate", "serve": "simulate", SHADOW: "replay"}
"""Commands that run another one, whose checks apply."""
NOT_RECORDED = ("output", "sweep", "validate", "server", "results", "saturate", "plan", "serve", "shadow", "leaderboard", "train")
"""Settings that do not affect the result and are not recorded with it."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings at the top level of the configuration."""

    page_tokens: int
    substrate: str
    warmup: float
    sample: Any
    sample_draws: int
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
        sampling_of(self.sample, self.sample_draws)
        check_settings(self, Whole(), "seed")
        if self.print_tree not in (False, True, "each"):
            raise ValueError(f"print_tree must be false, true or each, not {self.print_tree}")


def build_run(cfg: DictConfig, *, command: str, overrides: Iterable[str] = (), choices: Mapping[Any, Any] | None = None) -> Plan:
    """Build a command's plan: simulate, saturate, plan, replay, curve, validate, ``AGAINST_SERVER``, serve, ``SHADOW``.

    Raises UsageError.

    ``overrides`` are those given by the user: one that has no effect on this command is an error. ``choices`` are Hydra's
    runtime choices: the names that the record has for policies, model and trace.
    """
    config = resolve(cfg)
    keys = keys_of(overrides)
    for name in WITHOUT_EFFECT[command]:
        if key := given(keys, name) or given(keys, f"{name}@tiers"):
            raise NoEffect(key, f"on kvsim {command}{WHY.get((command, name), '')}")
    asked, command = command, RUNS_AS.get(command, command)
    run = construct(RunSettings, {field.name: config.get(field.name) for field in fields(RunSettings)}, "")
    source = _model_source(config)
    trace, recognised = _trace(config, keys)
    if not trace.draws_at_random:
        config["trace"].pop("seed", None)  # runs that differ in it alone share the trace and its bounds
    model, choices = source.spec(), chosen({**choices, **recognised} if choices else {}, config, keys)
    if source is not model:
        config["model"] = {"_target_": MODEL, **asdict(model)}
        choices["model"] = source.name
    cluster = construct(ClusterSettings, config.get("cluster"), "cluster")
    check_memory(cluster)
    hardware = _hardware(config, keys)
    check_shares(model, hardware)
    if command == "validate":  # on this machine's GPUs, which exchange no activations
        hardware = replace(hardware, allreduce_bytes_per_s=None)
    gpu_memory = gpu_memory_of(config, model, hardware, keys)
    page_bytes = construct(Rules, config.get("rules"), "rules").page_bytes(model, run.page_tokens)
    tiers = tier_plans(config, run.page_tokens, page_bytes, model, cluster, gpu_memory, keys)
    disk_scope = next((tier.scope for tier in tiers if kind_of(tier.name).medium == FILE), "host")
    rules, rules_note = _rules(config, command, [tier.name for tier in tiers])
    if not rules.has_coarse_pages and (rules_note or "rules" in keys):
        tiers, rules_note = _in_equal_pages(config, tiers, rules_note, keys)
    validation = _validation_settings(config.get("validate"))
    plan = Plan(
        trace=trace,
        page_tokens=run.page_tokens,
        tiers=tiers,
        prefetch=construct(PrefetchPolicy, config.get("prefetch"), "prefetch"),
        checkpoint=_checkpoint(config, choices, is_needed=model.is_hybrid and not rules.decides_checkpoints),
        routing=construct(RoutingPolicy, config.get("routing"), "routing"),
        scheduling=construct(SchedulingPolicy, config.get("scheduling"), "scheduling"),
        autoscaling=construct(AutoscalingPolicy, config.get("autoscaling"), "autoscaling"),
        admission=construct(AdmissionPolicy, config.get("admission"), "admission"),
        states=state_capacities(config, tiers, model, keys),
        model=model,
        hardware=_with_stores(hardware, config, tiers, disk_scope),
        engine=_engine(config),
        rules=rules,
        cluster=cluster,
        layout=cluster.layout(disk_scope),
        decode_routing=_decode_routing(config),
        rules_note=rules_note,
        replay=construct(ReplaySettings, config.get("replay"), "replay"),
        substrate="hardware" if command == "validate" and not validation.measured else run.substrate,
        disk=construct(DiskSettings, config.get("disk"), "disk"),
        warmup=run.warmup,
        sampling=sampling_of(run.sample, run.sample_draws),
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
        config=_recorded(config, [tier.name for tier in tiers]),
        gpu_memory=gpu_memory,
        choices=choices,
        model_note="; ".join(filter(None, [source.note(), _window_note(model, rules)])),
    )
    if rules.cache_output is None and command == "replay" and not plan.replay.hold_output:
        plan = plan.with_answers(False)
    refuse_infinite("", config)
    if asked in SEARCHES:
        check_search(plan, asked, keys)
    check_plan(plan, command, keys)
    if asked == AGAINST_SERVER:
        check_against_server(plan, keys)
    check_output(plan.output)
    return plan


def _window_note(model: ModelSpec, rules: Rules) -> str:
    """Say that KV is kept that engines free behind the windows of some layers; empty if it is not."""
    if not model.sliding_window_layers or rules.serves_windows:
        return ""
    return (
        f"{model.sliding_window_layers} of {model.attention_layers} attention layers have a window of "
        f"{model.sliding_window_tokens:,} tokens, but under these rules their KV is kept for the whole prompt"
    )


def _model_source(config: Config) -> ModelSource:
    """The model, or what describes it. The recorded configuration has the model itself."""
    node = config.get("model")
    return construct(ModelSource, {"_target_": MODEL, **node} if isinstance(node, dict) else node, "model")


def _engine(config: Config) -> EngineSettings:
    """The engine's settings. The configuration loses the seed of drafts if there are none: runs that differ in it are equal."""
    node = config.get("engine")
    engine = construct(EngineSettings, node, "engine")
    if isinstance(node, dict) and isinstance(node.get("speculation"), dict) and not engine.speculation.is_on:
        node["speculation"].pop("seed", None)
    return engine


def sweep_settings(node: Any) -> SweepSettings:
    """Build the ``sweep`` settings; a single objective becomes a list of one. Raises UsageError."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    single = {"objective": [node["objective"]]} if isinstance(node, dict) and isinstance(node.get("objective"), str) else {}
    return construct(SweepSettings, node | single if isinstance(node, dict) else node, "sweep")


def _validation_settings(node: Any) -> ValidationSettings:
    """Build the ``validate`` settings; a single folder becomes a list of one. Raises UsageError."""
    folders = node.get("measured") if isinstance(node, dict) else None
    single = {"measured": [folders]} if isinstance(folders, str) else {"measured": []} if folders is None else {}
    return construct(ValidationSettings, node | single if isinstance(node, dict) else node, "validate")


def build_shape(cfg: DictConfig, overrides: Iterable[str]) -> tuple[ModelSpec, HardwareSpec]:
    """Build only the model and the machine; ``overrides`` are those given by the user. Raises UsageError."""
    config = resolve(cfg)
    model, hardware = _model_source(config).spec(), _hardware(config, keys_of(overrides))
    check_shares(model, hardware)
    return model, hardware


def _hardware(config: Config, keys: set[str]) -> HardwareSpec:
    """Build the machine. The configuration then has the number of GPUs that the degrees of parallelism give."""
    config["hardware"] = with_gpus(config.get("hardware"), keys)
    return construct(HardwareSpec, config["hardware"], "hardware")


def build_trace(cfg: DictConfig) -> tuple[TraceSource, int]:
    """Build only the trace source; returned with ``page_tokens``."""
    config = resolve(cfg)
    run = construct(RunSettings, {field.name: config.get(field.name) for field in fields(RunSettings)}, "")
    return _trace(config, set())[0], run.page_tokens


def _trace(config: Config, keys: set[str]) -> tuple[TraceSource, dict[str, str]]:
    """Build the trace source, and the choices that this changes: the format, if it was left open and is recognised.

    The configuration then describes that format. ``keys`` are those that the user has given.
    """
    node = config.get("trace")
    try:
        given = construct(TraceSource, node, "trace")
    except UsageError as error:
        about = re.match(r"(trace\.\w+): there is no such setting", str(error))
        if about and {"preset", "trace"} <= keys and about[1] not in keys:
            raise UsageError(
                f"{about[1]} is set by the preset, and the trace has no such setting: leave out trace=NAME"
            ) from error
        raise
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
    config = cast(Config, with_numbers(config))
    known = [
        *GROUPS,
        "tiers",
        "cluster",
        "replay",
        "disk",
        "curve",
        "leaderboard",
        "train",
        "saturate",
        "plan",
        "slo",
        "sweep",
        "validate",
        "server",
        "results",
        "shadow",
        "serve",
        *(field.name for field in fields(RunSettings)),
    ]
    check_names("", config, known)
    check_names("tiers", config.get("tiers"), LEVELS)
    for kind in TIER_KINDS:
        if kind.is_always_listed or kind.name in config["tiers"]:
            check_names(f"tiers.{kind.name}", config["tiers"].get(kind.name), settings_of(kind))
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
    """Return the rules that apply to a command with these tiers and, if they stand in for those of an engine, a line about it.

    Raises UsageError if they do not support the command, a tier or a setting.
    """
    chosen = construct(Rules, config.get("rules"), "rules")
    if chosen.cache_output is None and not chosen.can_cache_answers(command, tiers):
        chosen = replace(chosen, cache_output=False)
        config["rules"]["cache_output"] = False
    try:
        applied = chosen.for_command(command, tiers)
        applied.check(command, tiers)
    except IdleSetting as error:
        raise NoEffect(f"rules.{error.name}", error.why, error.remedy, subject=f"rules.{error.subject}") from error
    except ValueError as error:
        raise UsageError(with_key("rules", str(error), config["rules"])) from error
    if applied.engine == chosen.engine:
        return applied, ""
    return applied, f"kvsim's own: those of {chosen.whose} do not cover kvsim {command} with tiers {', '.join(tiers)}"


def _checkpoint(config: Config, choices: dict[str, str], *, is_needed: bool) -> CheckpointPolicy:
    """Build the policy; without a choice, that of a hybrid model is vLLM's. The configuration and the choices then name it."""
    if config.get("checkpoint") is None:
        default = Retention() if is_needed else NoCheckpoint()
        config["checkpoint"] = {"_target_": f"{type(default).__module__}.{type(default).__qualname__}", **asdict(default)}
        choices["checkpoint"] = "retention" if is_needed else "none"
    return construct(CheckpointPolicy, config["checkpoint"], "checkpoint")


def _in_equal_pages(config: Config, tiers: list[TierPlan], note: str, keys: set[str]) -> tuple[list[TierPlan], str]:
    """Return the tiers in pages of ``page_tokens``, and the note on the rules that says so.

    Larger pages of a tier that the user did not ask for belong to the engine of a preset whose rules do not apply.
    """
    coarse = [tier.name for tier in tiers if tier.unit_pages > 1 and not given(keys, f"tiers.{tier.name}.page_tokens")]
    for name in coarse:
        note = f"{note}; tiers.{name}.page_tokens={config['tiers'][name]['page_tokens']} does not apply" if note else ""
        config["tiers"][name]["page_tokens"] = None
    return [replace(tier, unit_pages=1) if tier.name in coarse else tier for tier in tiers], note


def _with_stores(hardware: HardwareSpec, config: Config, tiers: list[TierPlan], disk_scope: str) -> HardwareSpec:
    """Return the machine with the stores that all hosts share: the disk, if it is theirs, and the remote store."""
    if hardware.remote is not None:
        raise UsageError("hardware.remote: the rates of the store are settings of its tier: set tiers.remote.bytes_per_s")
    hardware = hardware.with_cluster_disk() if disk_scope == "cluster" else hardware
    present = [tier.name for tier in tiers]
    for kind in TIER_KINDS:
        if kind.medium == REMOTE and kind.name in config["tiers"]:
            node = {name: config["tiers"][kind.name][name] for name in kind.settings}
            store = construct(RemoteStore, node, f"tiers.{kind.name}")  # its numbers are checked without the tier, too
            hardware = replace(hardware, remote=store) if kind.name in present else hardware
    return hardware


def _recorded(config: Config, present: Sequence[str]) -> Config:
    """Return what is recorded of the configuration: settings that affect the result, of the tiers that results list."""
    listed = {name: node for name, node in config["tiers"].items() if name in ALWAYS or name in present}
    recorded = {key: listed if key == "tiers" else value for key, value in config.items() if key not in NOT_RECORDED}
    if isinstance(cluster := recorded.get("cluster"), dict):
        recorded["cluster"] = {key: value for key, value in cluster.items() if key != "workers"}
    return recorded


def _decode_routing(config: Config) -> RoutingPolicy:
    """The router's policy for decode engines; by default, the least loaded one gets the request."""
    node = config["cluster"].get("decode_routing")
    policy = LeastLoaded() if node is None else construct(RoutingPolicy, node, "cluster.decode_routing")
    if policy.may_keep:
        kind = type(policy).__name__
        raise UsageError(
            f"cluster.decode_routing: {kind} keeps requests at the router, which only routing can: choose another one"
        )
    return policy
