"""Checks of a whole plan: settings that contradict each other, and settings without effect on it."""

from collections.abc import Iterable

from kvsim.core.rules import IN_TIME
from kvsim.errors import NoEffect, UsageError
from kvsim.hardware.tier_kinds import FILE, REMOTE, TIER_KINDS, kind_of
from kvsim.plans.admission import check_admission
from kvsim.plans.apart import check_apart
from kvsim.plans.capacity import check_numbered
from kvsim.plans.engine_extras import check_extras
from kvsim.plans.gpu_memory import check_fits
from kvsim.plans.parallel import SHARES_MEMORY, check_parallel
from kvsim.plans.plan import Plan
from kvsim.plans.scaling import check_scaling
from kvsim.plans.substrate_choice import SUBSTRATES
from kvsim.plans.tool_calls import check_tool_calls
from kvsim.policies.checkpoint.none import NoCheckpoint
from kvsim.policies.eviction.base import BypassEviction
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.results.slo import Slo
from kvsim.settings.unused_settings import given, keys_of

INTERCONNECT = ("hardware.interconnect_bytes_per_s", "hardware.interconnect_latency_s")
OF_MEMORY = ("hardware", "hardware.gpus", "hardware.memory_bytes", *SHARES_MEMORY)
"""What ``tiers.gpu.capacity=auto`` reads of the machine, even in a replay."""

SEARCHES = {
    "saturate": "the highest rate that meets them",
    "plan": "the cheapest configuration that meets them",
}
"""The commands that need objectives, and what they search for."""


def check_plan(plan: Plan, command: str, overrides: Iterable[str]) -> None:
    """Raise UsageError for settings that contradict each other or have no effect; ``overrides`` are those given by the user."""
    keys = keys_of(overrides)
    _check_combination(plan, command, keys)
    _check_hardware(plan, command, keys)
    _check_substrate(plan, command, keys)
    if command == "validate":
        _check_validation(plan, keys)


def _check_combination(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError for settings that contradict each other.

    A prefetch policy chosen by the user needs a disk tier. One that comes with a preset does not: it belongs to the engine.
    """
    if any(tier.unit_pages > 1 for tier in plan.tiers) and not plan.rules.has_coarse_pages:
        raise UsageError(
            "tiers.cpu.page_tokens: larger CPU pages work only with rules=lightllm, without a disk tier: "
            f"leave it out, or set it to page_tokens={plan.page_tokens}"
        )
    check_bypass(plan, command)
    if not plan.slo.is_set and any(name.split(".")[0] == "slo" for name in plan.sweep.objective or ()):
        raise UsageError("sweep.objective: slo is null without objectives: set slo.ttft_s or slo.tpot_s")
    if plan.rules.cache_output and command == "replay" and not plan.replay.hold_output:
        raise UsageError("rules.cache_output needs replay.hold_output=true: an answer that occupies no pages cannot be cached")
    if plan.prefetch.follows_calls:
        check_tool_calls(plan, command, keys)
    elif not isinstance(plan.prefetch, NoPrefetch):
        name, far = type(plan.prefetch).__name__, [tier for tier in plan.tiers if kind_of(tier.name).is_far]
        if not far and given(keys, "prefetch"):
            raise NoEffect("prefetch", "without a disk tier", "set tiers.disk.capacity", subject=f"prefetch: {name}")
        if far and all(tier.reads_into == plan.tiers[0].name for tier in far):
            raise UsageError(
                f"prefetch: {name} reads ahead into the CPU tier, which is not above the disk: set tiers.disk.below=cpu or "
                "prefetch=none"
            )
    if plan.print_tree:
        check_numbered({tier.name: tier.capacity_pages for tier in plan.tiers})
    _check_sample(plan, keys)
    _check_own_cache(plan, command, keys)
    _check_schedule(plan, command, keys)
    check_extras(plan, keys)
    check_admission(plan, keys)
    _check_cluster(plan, keys)
    if not plan.model.is_hybrid and not isinstance(plan.checkpoint, NoCheckpoint):
        raise NoEffect("checkpoint", "on a model without recurrent layers, which has no state to save", "set checkpoint=none")


def _check_sample(plan: Plan, keys: set[str]) -> None:
    """Raise UsageError for a sample of what cannot be scaled down, or of what would not be that of the whole trace."""
    if plan.sampling is None:
        if "sample_draws" in keys:
            raise NoEffect("sample_draws", "without sample", "set sample=1%, or leave it out")
        return
    if plan.model.is_hybrid:
        raise UsageError("sample: recurrent states cannot be scaled down with the pages: replay the whole trace")
    if plan.rules.serves_windows:
        raise UsageError("sample: windows cannot be scaled down with the pages: replay the whole trace")
    for name, is_set in (("events", plan.events), ("print_tree", plan.print_tree)):
        if is_set:
            raise UsageError(f"sample: {name} would show a sample, not the trace: leave out one of them")


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
            raise NoEffect("replay.in_flight", f"on {name}, which ignores running requests")
        if plan.rules.engine:
            raise UsageError(f"eviction: {name} is a bound under kvsim's own rules: set rules=default or choose another policy")
        if plan.print_tree:
            raise NoEffect("print_tree", f"on {name}, which has no tree")


def check_unforeseen(plan: Plan, subject: str = "") -> None:
    """Raise UsageError where requests come that nobody knows in advance, for an eviction policy that looks ahead."""
    for tier in plan.tiers:
        if tier.eviction.needs_future:
            name = type(tier.eviction).__name__
            raise UsageError(f"{subject}eviction: {name} must know all requests in advance: choose another policy")


def _check_own_cache(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError if an engine's own rules do not fit the model, or for settings that the rules do not use."""
    rules = plan.rules
    if rules.engine and rules.serves_hybrid_models != plan.model.is_hybrid:
        which = "with" if rules.serves_hybrid_models else "without"
        raise UsageError(f"rules: these rules of an engine need a model {which} recurrent layers: set rules=default")
    for name in () if command in IN_TIME else rules.settings_in_time:
        if key := given(keys, f"rules.{name}"):
            raise NoEffect(key, f"on kvsim {command}, which has no clock")
    try:
        rules.check_model(plan.model)
    except ValueError as error:
        raise UsageError(f"rules: {error}") from error
    has_chunks = rules.serves_hybrid_models or rules.serves_windows or rules.prefills_in_chunks
    if command == "replay" and plan.replay.prefill_chunk_tokens is not None and not has_chunks:
        raise NoEffect("replay.prefill_chunk_tokens", "under rules without prefill chunks")
    if command == "replay" and plan.replay.copy_steps and not rules.counts_steps:
        raise NoEffect("replay.copy_steps", "under rules that count no steps")
    if rules.decides_checkpoints and (key := given(keys, "checkpoint")):
        why = "under the rules of an engine that decides itself where states are saved"
        raise NoEffect(key, why, "leave it out, or set rules=default")


def _check_schedule(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError for a scheduling policy that the engine whose schedule is simulated does not have, or for settings of one
    that have no effect."""
    policy = plan.scheduling
    for name in policy.without_effect():
        if key := given(keys, f"scheduling.{name}"):
            raise NoEffect(key, f"with these settings of {type(policy).__name__}")
    if command == "simulate":
        try:
            plan.rules.check_schedule(policy, plan.page_tokens, plan.engine.max_batch_tokens)
        except ValueError as error:
            raise UsageError(str(error)) from error


def _check_cluster(plan: Plan, keys: set[str]) -> None:
    """Raise UsageError for settings of a cluster that have no effect, and for what a cluster cannot do."""
    for place, router in (("routing", plan.routing), ("cluster.decode_routing", plan.decode_routing)):
        for name in router.without_effect():
            if key := given(keys, f"{place}.{name}"):
                raise NoEffect(key, f"with these settings of {type(router).__name__}")
    check_scaling(plan, keys)
    if plan.cluster.workers > 1:
        check_apart(plan)
    if plan.layout.engines == 1:
        for name in ("routing", "cluster.engines_per_host", "hardware.host_memory_bytes_per_s"):
            if key := given(keys, name):
                raise NoEffect(key, "with one engine", "set cluster.engines above 1, or leave it out")
        if plan.cluster.failures and not all("back_after_s" in failure for failure in plan.cluster.failures):
            raise UsageError("cluster.failures: the only engine must come back: set back_after_s")
    if not plan.layout.pairs:
        has_stages = plan.hardware.pipeline_parallel > 1
        for name in ("cluster.decode_routing", "routing@cluster.decode_routing", *(() if has_stages else INTERCONNECT)):
            if key := given(keys, name):
                or_stages = " (or hardware.pipeline_parallel)" if name in INTERCONNECT else ""
                raise NoEffect(key, f"unless cluster.prefill and cluster.decode{or_stages} are set")
    elif plan.model.is_hybrid:
        raise UsageError("cluster.prefill: recurrent states cannot be handed to another engine: set cluster.engines instead")
    elif plan.rules.engine:
        raise UsageError(f"cluster.prefill: {plan.rules.engine}'s own rules serve undivided engines: set rules=default")
    key = given(keys, "hardware.cluster_disk_read_bytes_per_s") or given(keys, "hardware.cluster_disk_write_bytes_per_s")
    if key and all(tier.scope != "cluster" for tier in plan.tiers if kind_of(tier.name).medium == FILE):
        raise NoEffect(key, "without a disk that all hosts share", "set tiers.disk.scope=cluster")
    users = {"engine": 1, "host": plan.cluster.per_host, "cluster": plan.cluster.total}
    is_shared = any(users[tier.scope] > 1 for tier in plan.tiers)
    if plan.model.is_hybrid and (is_shared or plan.cluster.failures and len(plan.tiers) > 1):
        raise UsageError(
            "cluster: engines that serve a model with recurrent layers share no tier, and do not fail with tiers below the GPU: "
            "set tiers.cpu.scope=engine, without a disk and without failures"
        )


def check_search(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError for a search without objectives, or with two rates to begin with."""
    check_objectives(plan.slo, command)
    if "trace.rate" in keys and plan.saturate.rate is not None:
        raise NoEffect("trace.rate", "with saturate.rate, the rate that is run first", "leave one of them out")


def check_objectives(slo: Slo, command: str) -> None:
    """Raise UsageError for a search without objectives."""
    if slo.classes:
        raise UsageError(f"slo.classes: kvsim {command} searches by the objectives of all requests: leave slo.by and it out")
    if not slo.is_set:
        raise UsageError(f"slo: set slo.ttft_s or slo.tpot_s, or both: kvsim {command} searches for {SEARCHES[command]}")


def _check_hardware(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError for ``hardware`` set on a replay in which no policy reads it, and for a validation without it."""
    if command == "validate":
        _check_named(keys, "hardware", "the file that kvsim calibrate wrote for this machine")
    is_read = command != "replay" or plan.reads_hardware
    of_memory = OF_MEMORY if plan.gpu_memory is not None else ()
    for name in ("hardware", "drive", "network"):
        if (key := given(keys - {*of_memory}, name)) and not is_read:
            raise NoEffect(key, f"on kvsim {command}")
    for kind in [kind for kind in TIER_KINDS if kind.medium == REMOTE and not is_read]:
        if key := next((key for name in kind.settings if (key := given(keys, f"tiers.{kind.name}.{name}"))), None):
            raise NoEffect(key, f"on kvsim {command}")
    _check_memory(plan, command)
    _check_ranks(plan, keys)
    check_parallel(plan, command, keys)
    _check_devices(plan, keys)


def _check_named(keys: set[str], name: str, what: str) -> None:
    """Raise UsageError unless a file of a group is chosen: a setting of it, which may be the server's own, names none."""
    if name not in keys:
        raise UsageError(f"{name}: set {name}=NAME, {what}")


def check_against_server(plan: Plan, keys: set[str]) -> None:
    """Raise UsageError for a validation against a server that says too little, or with settings without effect."""
    _check_named(keys, "hardware", "the machine that the server runs on")
    _check_named(keys, "model", "the model that the server serves")
    if not given(keys, "tiers.gpu.capacity"):
        raise UsageError(
            "tiers.gpu.capacity: the server does not say how much memory it has for KV: set it, such as 300000tokens"
        )
    if plan.layout.engines > 1:
        raise UsageError("cluster: a server is one engine: leave it out")
    _check_simulations(plan, keys, is_single=bool(given(keys, "server")) and plan.validation.runs == 1)


def _check_memory(plan: Plan, command: str) -> None:
    """Raise UsageError if a model and its GPU tier do not fit into an engine's GPUs. A replay has no GPUs, a curve no tiers."""
    pages, states = plan.tiers[0].capacity_pages, plan.states[0] if plan.states else 0
    if command in ("simulate", "validate"):
        kv_bytes = (pages or 0) * plan.page_bytes
        adapters_bytes = plan.engine.lora.all_bytes
        check_fits(plan.model, plan.hardware, kv_bytes, (states or 0) * plan.model.state_bytes, adapters_bytes)


def _check_ranks(plan: Plan, keys: set[str]) -> None:
    """Raise UsageError for settings of tensor-parallel ranks that concern no link of the run."""
    if (key := given(keys, "hardware.rank_jitter")) and len(plan.tiers) == 1:
        raise NoEffect(key, "without a lower tier", "set tiers.cpu.capacity")
    links = {link for tier in plan.tiers[1:] for link in (f"{tier.above}-{tier.name}", f"{tier.name}-{tier.reads_into}")}
    for fault in plan.hardware.rank_faults if given(keys, "hardware.rank_faults") else ():
        if fault.link not in links:
            there = f"its links are {', '.join(sorted(links))}" if links else "set tiers.cpu.capacity"
            raise NoEffect("hardware.rank_faults", f"on {fault.link}, which this run does not have", there)
    is_late = any(fault.share and fault.link.endswith(f"-{plan.tiers[0].name}") for fault in plan.hardware.rank_faults)
    if is_late and plan.engine.overlap == "layerwise":
        raise UsageError(
            "hardware.rank_faults: a load from disk that fails while layers are computed behind it is not modelled: set "
            "engine.overlap=none"
        )


def _check_devices(plan: Plan, keys: set[str]) -> None:
    """Raise NoEffect for a drive or a network card that the run has no use for."""
    media = [kind_of(tier.name).medium for tier in plan.tiers]
    if given(keys, "drive") and FILE not in media:
        raise NoEffect("drive", "without a disk tier", "set tiers.disk.capacity, or leave it out")
    is_between = plan.layout.pairs or plan.hardware.pipeline_parallel > 1
    if given(keys, "network") and REMOTE not in media and not is_between:
        why = "without a remote tier, without prefill and decode engines, and without stages of a pipeline"
        ways = "tiers.remote.capacity, or cluster.prefill and cluster.decode, or hardware.pipeline_parallel"
        raise NoEffect("network", why, f"set {ways}, or leave it out")


def _check_substrate(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError for a plan that the substrate cannot run, and for settings without effect on it.

    A validation runs on all substrates, and only what has no effect on any of them has none on it.
    """
    choice = SUBSTRATES[plan.substrate]
    others = SUBSTRATES.values() if command == "validate" and not plan.validation.measured else ()
    for name in choice.without_effect:
        if (key := given(keys, name)) and all(name in other.without_effect for other in others):
            raise NoEffect(key, f"on substrate={plan.substrate}")
    if (key := given(keys, "disk")) and all(kind_of(tier.name).medium != FILE for tier in plan.tiers):
        raise NoEffect(key, "without a disk tier", "set tiers.disk.capacity")
    choice.check(plan)


def _check_validation(plan: Plan, keys: set[str]) -> None:
    """Raise UsageError for settings of a validation without effect, and for real runs that would not begin alike."""
    runs = plan.validation.runs
    if (key := given(keys, "validate.runs")) and plan.validation.measured:
        raise NoEffect(key, "with validate.measured")
    _check_simulations(plan, keys, is_single=runs == 1 and not plan.validation.measured)
    if runs > 1 and plan.disk.path is not None:
        raise UsageError("disk.folder keeps pages from one real run to the next: leave it out, and set output to a folder there")


def _check_simulations(plan: Plan, keys: set[str], *, is_single: bool) -> None:
    """Raise UsageError for a number of simulations where there is only one: with a single real run, or without noise."""
    if key := given(keys, "validate.simulations"):
        if is_single:
            raise NoEffect(key, "with a single real run", "set validate.runs=3")
        if plan.hardware.noise is None:
            raise NoEffect(key, "on a machine without noise", "repeat kvsim calibrate, which measures it")
