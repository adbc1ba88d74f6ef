"""Whole configurations drawn at random: a trace, and the overrides of a command line, from which a plan is built as usual.

Prompts are words of "a" and "b", a page for each letter, and some tokens more; tiers have a few pages; nothing takes long.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from kvsim.core.request import Request
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.settings.configuration import compose
from kvsim.trace.base import Trace
from kvsim.trace.memory import TokensInMemory

CONF = files("kvsim.conf")
PAGE_TOKENS = 4
PAGE_BYTES = 3072
"""Of ``model=tiny``, with or without recurrent layers."""

RECURRENT = (
    "+model.recurrent_layers=1", "+model.state_key_dim=16", "+model.state_value_dim=16", "+model.conv_width=4",
    "+model.recurrent_in_width=64", "+model.conv_channels=64", "+model.state_flops_per_element=7", "+model.state_dtype_bytes=4",
)  # fmt: skip
LATENT = ("+model.kv_latent_dim=32", "+model.rope_dim=8", "+model.nope_dim=8", "+model.value_dim=16", "model.kv_heads=0",
          "model.head_dim=0")  # fmt: skip
ENGINES_RULES = ("fastdeploy", "lightllm", "lightllm_hybrid", "sglang", "sglang_mamba", "vllm", "vllm_hybrid", "vllm_window")
WINDOWED = ("+model.sliding_window_layers=1", "+model.sliding_window_tokens=10")
STAGED = (
    "hardware=h100", "hardware.flops_per_s=3e8", "hardware.memory_bytes_per_s=1e9", "hardware.step_overhead_s=0.001",
)  # fmt: skip
"""A machine with a roofline that takes some milliseconds for a few tokens of ``model=tiny``."""
BOUNDS = ("belady",)
"""Eviction policies that keep no tier."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, as data: the lines of a ``tokens`` trace, and overrides that both commands take, or one of them."""

    lines: list[dict[str, Any]]
    common: list[str]
    replay: list[str]
    simulate: list[str]
    tail: str = "full"
    bigram: bool = False

    def overrides(self, command: str) -> list[str]:
        return [*self.common, *(self.replay if command == "replay" else self.simulate)]

    def plan(self, command: str) -> Plan:
        """The plan of a command. Raises UsageError."""
        overrides = self.overrides(command)
        return build_run(configured(overrides), command=command, overrides=overrides)

    def trace(self) -> Trace:
        """The trace. Raises TraceError."""
        return TokensInMemory(path="<drawn>", lines=self.lines, tail=self.tail, bigram=self.bigram).load(PAGE_TOKENS)

    def requests(self) -> list[Request]:
        """Its requests. Raises TraceError."""
        return self.trace().requests

    def but(self, *overrides: str) -> "Case":
        """The same run with these overrides for both commands, instead of those of the same keys."""
        keys = {override.split("=")[0] for override in overrides}
        return replace(self, common=[*(each for each in self.common if each.split("=")[0] not in keys), *overrides])


# --- from overrides to a configuration, faster than Hydra -------------------------------------------------------------


@cache
def _defaults() -> dict[str, Any]:
    return OmegaConf.to_container(compose([]))  # type: ignore[return-value]


@cache
def _choice(group: str, name: str) -> Any:
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text())


def configured(overrides: Sequence[str]) -> DictConfig:
    """What ``compose`` returns for overrides of the kinds that are drawn here. Groups come before their settings."""
    config = deepcopy(_defaults())
    for override in sorted(overrides, key=lambda override: "." in override.split("=")[0].split("@")[0]):
        key, _, value = override.partition("=")
        group, _, place = key.removeprefix("+").partition("@")
        is_choice = (CONF / group).is_dir()
        *parents, name = (place or group).split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[name] = deepcopy(_choice(group, value)) if is_choice else yaml.safe_load(value)
    return OmegaConf.create(config)


def choices(group: str) -> list[str]:
    """The names of a group of ``conf``."""
    return sorted(path.name.removesuffix(".yaml") for path in (CONF / group).iterdir() if path.name.endswith(".yaml"))


EVICTIONS = [name for name in choices("eviction") if name not in BOUNDS]


# --- traces -----------------------------------------------------------------------------------------------------------


def tokens_of(word: str) -> list[int]:
    """A page of equal tokens for each letter."""
    return [ord(letter) for letter in word for _ in range(PAGE_TOKENS)]


WORDS = st.text("ab", max_size=6) | st.sampled_from(["aaaaaa", "aaabbb", "abab"])


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a trace has besides prompts."""

    has_answers: bool = False
    has_sessions: bool = True
    has_resets: bool = True
    has_samples: bool = True
    has_persistent: bool = True
    has_images: bool = True
    has_tenants: bool = True
    apart_ms: float = 0.0
    """If not 0, requests are this far apart, and no session waits for its answers."""


PLAIN = Kind(has_sessions=False, has_resets=False, has_samples=False, has_persistent=False, has_images=False, has_tenants=False)


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    """Any kind of trace; each part is missing from half of them."""
    return Kind(**{name: draw(st.booleans()) for name in Kind.__dataclass_fields__ if name.startswith("has_")})


@st.composite
def traces(draw: st.DrawFn, kind: Kind, most: int = 24) -> list[dict[str, Any]]:
    """The lines of a trace."""
    lines: list[dict[str, Any]] = []
    at_ms, is_timed = 0.0, kind.apart_ms > 0 or not kind.has_sessions or draw(st.booleans())
    for number in range(draw(st.integers(1, most))):
        at_ms += kind.apart_ms or draw(st.sampled_from([0.0, 0.0, 0.0, 1.0, 20.0, 300.0, 5000.0]))
        if kind.has_resets and number and draw(st.integers(0, 9)) == 0:
            reset: dict[str, Any] = {"reset": draw(st.sampled_from(["drain", "now"]))}
            lines.append(reset | ({"timestamp": at_ms} if is_timed and draw(st.booleans()) else {}))
        lines.append(draw(requests(kind)) | ({"timestamp": at_ms} if is_timed else {}))
    return lines


@st.composite
def requests(draw: st.DrawFn, kind: Kind) -> dict[str, Any]:
    """The line of one request, without its time."""
    tokens = tokens_of(draw(WORDS)) + [99] * draw(st.integers(0, PAGE_TOKENS))
    tokens = tokens or [99]
    output = draw(st.sampled_from([0, 1, 2, 5, 9, 15, 70]))
    line: dict[str, Any] = {"token_ids": tokens, "output_length": output}
    if kind.has_samples and output and draw(st.integers(0, 5)) == 0:
        line["n"] = draw(st.integers(2, 3))
    if kind.has_answers:
        answers = [(tokens_of(draw(WORDS)) * 18 + [99] * output)[:output] for _ in range(line.get("n", 1))]
        line["output_token_ids"] = answers if line.get("n", 1) > 1 else answers[0]
    if kind.has_sessions and draw(st.booleans()):
        line["session_id"] = draw(st.integers(0, 3))
        if not kind.apart_ms and draw(st.booleans()):
            line["delay"] = draw(st.sampled_from([0, 10, 2000]))
    if kind.has_persistent and draw(st.integers(0, 5)) == 0:
        line["persistent"] = True
    if kind.has_images and draw(st.integers(0, 3)) == 0:
        begin = draw(st.integers(0, len(tokens) - 1))
        line["images"] = [[begin, draw(st.integers(begin + 1, len(tokens)))]]
    if kind.has_tenants:
        line["tenant"] = draw(st.sampled_from(["x", "x", "y"]))
        line["priority"] = draw(st.integers(-1, 1))
    return line


# --- settings ---------------------------------------------------------------------------------------------------------

PREFETCHES = [name for name in choices("prefetch") if name != "tool_calls"]
"""tool_calls, which needs sessions with calls and rules of kvsim's own, is drawn in tests/cluster/test_tool_calls.py."""

POLICY_SETTINGS: dict[str, list[str]] = {
    "threshold": ["prefetch.min_tokens=1", "prefetch.in_flight_fraction=1.0", "prefetch.load_min_tokens=0"],
    "adaptive": ["prefetch.min_tokens=1", "prefetch.load_min_tokens=4"],
    "priority": ["scheduling.max_wait_s=0.05"],
    "strata": ["scheduling.delay_hit_tokens=4", "scheduling.load_ratio=0.5", "scheduling.look_ahead=3"],
    "dlpm": ["scheduling.quantum_tokens=5", "scheduling.max_wait_s=0.5"],
    "kv_aware": ["routing.staleness_s=0.01", "routing.router_temperature=0.5"],
    "prefix_aware": ["routing.balance_abs_threshold=1"],
    "dynamo": ["routing.router_predicted_ttl_s=0.1", "routing.overlap_score_credit_decay=1", "routing.staleness_s=0.01"],
    "llm_d": [
        "routing.prefix=precise",
        "routing.no_hit_lru_weight=1",
        "routing.picker=weighted_random",
        "routing.staleness_s=0.01",
    ],
    "preble": ["routing.window_s=0.2", "routing.balance_threshold=1"],
    "kv_routing_greedy": ["routing.half_life_s=0.01", "routing.slack_s=0", "routing.max_tree_tokens=20"],
    "skylb": ["routing.staleness_s=0.01", "routing.max_tree_tokens=20"],
    "by_length": ["placement.min_tokens=8", "placement.disk_min_tokens=13"],
    "write_back": ["placement.watermark=0.5"],
    "store_threshold": ["placement.k=2", "placement.tracker_pages=9"],
    "slru": ["eviction.protected_hits=1"],
    "ttl": ["eviction.ttl_s=0.1"],
}
"""Settings by which policies also decide otherwise on small tiers, by the policy's name."""


@st.composite
def policies(draw: st.DrawFn, family: str, names: Sequence[str], place: str = "") -> list[str]:
    """A policy of a family, for the whole run or for a tier; sometimes with other settings than its own."""
    name = draw(st.sampled_from(list(names)))
    choice = [f"{family}{place}={name}"]
    if not place and name in POLICY_SETTINGS and draw(st.booleans()):
        choice += POLICY_SETTINGS[name]
    return choice


@st.composite
def models(draw: st.DrawFn) -> tuple[str, list[str]]:
    """What kind of model, and its overrides."""
    kind = draw(st.sampled_from(["dense", "dense", "hybrid", "hybrid", "latent"]))
    if kind == "hybrid":
        heads, chunk = draw(st.sampled_from([1, 3, 6])), draw(st.sampled_from([1, 4, 8]))
        return kind, ["model=tiny", *RECURRENT, f"+model.state_heads={heads}", f"+model.kernel_chunk_tokens={chunk}"]
    return kind, ["model=tiny", *(LATENT if kind == "latent" else ())]


@st.composite
def tier_settings(draw: st.DrawFn, *, is_hybrid: bool) -> tuple[list[str], list[str]]:
    """The names of the tiers, and the overrides for them with their policies."""
    shape = draw(
        st.sampled_from(
            [
                ("gpu",),
                ("gpu", "cpu"),
                ("gpu", "cpu"),
                ("gpu", "cpu", "disk"),
                ("gpu", "disk"),
                ("gpu", "cpu", "disk", "remote"),
                ("gpu", "cpu", "remote"),
            ]
        )
    )
    scale = 2 if is_hybrid else 1
    sizes = {"gpu": st.integers(3, 16), "cpu": st.integers(2, 14), "disk": st.integers(2, 16), "remote": st.integers(2, 30)}
    settings: list[str] = []
    for name in shape:
        settings.append(f"tiers.{name}.capacity={scale * draw(sizes[name])}pages")
    is_beside = "remote" in shape and ("disk" not in shape or draw(st.booleans()))
    if is_beside:
        settings.append("tiers.remote.below=cpu")
    if "disk" in shape and ("cpu" not in shape or draw(st.booleans())) and (is_beside or "remote" not in shape):
        settings.append("tiers.disk.below=gpu")
    if is_hybrid and draw(st.booleans()):
        settings.append(f"tiers.gpu.states={draw(st.integers(1, 6))}states")
        if "cpu" in shape:
            settings.append(f"tiers.cpu.states={draw(st.integers(0, 4))}states")
    settings += draw(policies("eviction", EVICTIONS))
    for name in shape[1:]:
        if draw(st.integers(0, 2)) == 0:
            settings += draw(policies("eviction", EVICTIONS, f"@tiers.{name}.eviction"))
    if len(shape) > 1:
        settings += draw(policies("placement", choices("placement")))
    if "remote" in shape or shape == ("gpu", "cpu", "disk") and "tiers.disk.below=gpu" not in settings:
        settings += draw(policies("prefetch", PREFETCHES))
    return list(shape), settings


@st.composite
def machines(draw: st.DrawFn, tiers: Sequence[str], *, has_stages: bool = False) -> list[str]:
    """A machine on which steps take some milliseconds and a page as long, or much less or more.

    ``has_stages``: its GPUs can be the stages of a pipeline, where a step takes what the model takes.
    """
    speed = st.sampled_from([10.0, 300.0, 1e5])
    stages = draw(st.sampled_from([1, 1, 2, 3])) if has_stages else 1
    settings = ["hardware=linear", f"hardware.fixed_s={draw(st.sampled_from([0.0001, 0.005]))}"]
    if stages > 1:
        settings = [*STAGED, f"hardware.pipeline_parallel={stages}"]
    names = ("host_to_device_bytes_per_s", "device_to_host_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")
    rates = {name: PAGE_BYTES * draw(speed) for name in names}
    rates["both_directions_bytes_per_s"] = 1.2 * max(rates[name] for name in names[:2])
    settings += [f"hardware.{name}={rate}" for name, rate in rates.items()]
    settings.append(f"hardware.host_latency_s={draw(st.sampled_from([0.0, 0.002]))}")
    if "remote" in tiers:
        settings += [f"tiers.remote.bytes_per_s={PAGE_BYTES * draw(speed)}", "tiers.remote.latency_s=0.002"]
        settings.append(f"tiers.remote.requests_per_s={draw(st.sampled_from([100.0, 1e6]))}")
    if stages == 1 and draw(st.integers(0, 3)) == 0:
        settings.append("hardware.gpus=2")
        if len(tiers) > 1:
            settings.append(f"hardware.rank_jitter={draw(st.sampled_from([0.0, 0.5]))}")
    return settings


ADMISSIONS: list[list[str]] = [
    [], [], [],
    ["admission=queue_limit", "admission.waiting_requests=1"],
    ["admission=queue_limit", "admission.of=cluster", "admission.prefill_tokens=20", "admission.kv_use=0.7"],
    ["admission=predicted_ttft", "admission.ttft_s=0.02", "admission.decode_load=true", "slo.tpot_s=0.01"],
    ["admission=predicted_ttft", "admission.ttft_s=0.02", "admission.waits_for_room=true"],
    ["admission=priority_shed", "admission.waiting_requests=1", "admission.protected_from=1"],
]  # fmt: skip


@st.composite
def engine_settings(draw: st.DrawFn, *, is_single: bool) -> list[str]:
    """How an engine batches and loads and, unless they are one after another, in which order requests wait."""
    if is_single:
        return [f"engine.max_batch_tokens={draw(st.sampled_from([3, 10, 1000]))}"]
    drafts = draw(st.sampled_from([0, 0, 0, 2]))
    most = draw(st.sampled_from([1, 3, 100]))
    return [
        f"engine.max_batch_tokens={max(draw(st.sampled_from([3, 10, 1000])), (1 + drafts) * most if drafts else 0)}",
        f"engine.max_running_requests={most}",
        *([f"engine.speculation.tokens={drafts}", "engine.speculation.acceptance=[0.6]"] if drafts else []),
        f"engine.overlap={draw(st.sampled_from(['none', 'layerwise']))}",
        f"engine.links={draw(st.sampled_from(['fifo', 'shared']))}",
        f"engine.reset_at_s={draw(st.sampled_from(['[]', '[]', '[0.05,3.0]']))}",
        *draw(policies("scheduling", choices("scheduling"))),
        *draw(st.sampled_from(ADMISSIONS)),
    ]


@st.composite
def cluster_settings(draw: st.DrawFn, tiers: Sequence[str], *, is_hybrid: bool, is_divisible: bool) -> list[str]:
    """One engine or several, what they share, and when they fail."""
    if draw(st.booleans()):
        return draw(failures(1)) if draw(st.integers(0, 3)) == 0 else []
    engines = draw(st.sampled_from([2, 3, 4]))
    per_host = draw(st.sampled_from([size for size in (1, 2, engines) if engines % size == 0]))
    settings = [f"cluster.engines_per_host={per_host}", *draw(policies("routing", choices("routing")))]
    if is_divisible and draw(st.booleans()):
        prefill = draw(st.integers(1, engines - 1))
        settings += [f"cluster.prefill={prefill}", f"cluster.decode={engines - prefill}"]
        settings += draw(policies("routing", [name for name in choices("routing") if name != "skylb"], "@cluster.decode_routing"))
        settings.append(f"hardware.interconnect_bytes_per_s={PAGE_BYTES * draw(st.sampled_from([30.0, 1e5]))}")
    else:
        settings.append(f"cluster.engines={engines}")
    if "cpu" in tiers:
        settings.append(f"tiers.cpu.scope={'engine' if is_hybrid else draw(st.sampled_from(['host', 'engine']))}")
    if "disk" in tiers:
        settings.append(f"tiers.disk.scope={draw(st.sampled_from(['host', 'cluster']))}")
    if draw(st.integers(0, 2)) == 0 and not (is_hybrid and len(tiers) > 1):
        settings += draw(failures(engines))
    elif f"cluster.engines={engines}" in settings and draw(st.booleans()):
        settings += draw(scaling(engines))
    return settings


@st.composite
def scaling(draw: st.DrawFn, engines: int) -> list[str]:
    """Engines that a policy starts and stops, within milliseconds."""
    name = draw(st.sampled_from(choices("autoscaling")))
    if name == "none":
        return ["autoscaling=none"]
    few = draw(st.integers(1, engines))
    settings = [
        f"autoscaling={name}",
        f"autoscaling.interval_s={draw(st.sampled_from([0.01, 0.2]))}",
        f"cluster.min_engines={few}",
    ]
    settings.append(f"cluster.start_s={draw(st.sampled_from([0.0, 0.05]))}")
    return settings + {
        "target_utilization": ["autoscaling.target=2", "autoscaling.scale_down_window_s=0.3"],
        "knative_concurrency": [
            "autoscaling.target_requests=2",
            "autoscaling.stable_window_s=1",
            "autoscaling.panic_window_s=0.1",
        ],
        "slo_feedback": ["autoscaling.ttft_s=0.01", "autoscaling.hold_s=0.1", "autoscaling.window_s=0.3"],
        "schedule": ["autoscaling.steps=[[0,1],[0.3,4],[0.6,2]]", "autoscaling.period_s=1"],
    }.get(name, [])


@st.composite
def failures(draw: st.DrawFn, engines: int) -> list[str]:
    """Engines that fail and come back."""
    plan: list[str] = []
    for engine in range(engines):
        at_s = 0.0
        for _ in range(draw(st.sampled_from([0, 1, 2]))):
            at_s += draw(st.sampled_from([0.001, 0.02, 0.3, 5.0]))
            away_s = draw(st.sampled_from([0.001, 0.2, 10.0]))
            plan.append(f"{{engine: {engine}, at_s: {at_s}, back_after_s: {away_s}}}")
            at_s += away_s + 0.0005
    return [f"cluster.failures=[{', '.join(plan)}]"] if plan else []


@st.composite
def cases(
    draw: st.DrawFn,
    kind: st.SearchStrategy[Kind] | None = None,
    *,
    gpu: st.SearchStrategy[Any] | None = None,
    is_single: bool = False,
) -> Case:
    """A trace and a configuration that fit each other. ``is_single``: one engine, and requests one after another."""
    about = draw(kinds() if kind is None else kind)
    model, common = draw(models())
    is_hybrid = model == "hybrid"
    names, tiers = draw(tier_settings(is_hybrid=is_hybrid))
    common = [*common, *tiers, f"seed={draw(st.integers(0, 3))}", f"page_tokens={PAGE_TOKENS}"]
    if is_hybrid:
        common += draw(policies("checkpoint", choices("checkpoint")))
    keeps_answers = about.has_answers and draw(st.booleans())
    common.append(f"rules.cache_output={'true' if keeps_answers else 'false'}")
    common.append(f"rules.recompute_last_token={draw(st.sampled_from(['true', 'true', 'false']))}")
    replay = [f"replay.in_flight={1 if is_single else draw(st.sampled_from([1, 1, 2, 5]))}"]
    replay.append(f"replay.hold_output={'true' if keeps_answers or is_single else draw(st.sampled_from(['true', 'false']))}")
    simulate = [*draw(machines(names, has_stages=not (is_single or is_hybrid))), *draw(engine_settings(is_single=is_single))]
    simulate.append(f"rules.cache_chunks={draw(st.sampled_from(['true', 'true', 'false']))}")
    if not is_single:
        simulate += draw(cluster_settings(names, is_hybrid=is_hybrid, is_divisible=not (is_hybrid or about.has_samples)))
    tail = "full" if keeps_answers else draw(st.sampled_from(["full", "full", "all"]))
    return Case(
        lines=draw(traces(about)), common=common, replay=replay, simulate=simulate, tail=tail, bigram=draw(st.integers(0, 5)) == 0
    )


@st.composite
def engine_cases(draw: st.DrawFn) -> Case:
    """A replay by the rules of an engine, or a simulation of the one whose schedule is simulated."""
    rules = draw(st.sampled_from(ENGINES_RULES))
    model = RECURRENT if rules in ("lightllm_hybrid", "sglang_mamba", "vllm_hybrid") else ()
    names, tiers = draw(tier_settings(is_hybrid=bool(model)))
    common = ["model=tiny", *model, *(["+model.state_heads=1", "+model.kernel_chunk_tokens=4"] if model else []), *tiers]
    common += [*(WINDOWED if rules == "vllm_window" else ()), f"rules={rules}", f"page_tokens={PAGE_TOKENS}"]
    about = draw(st.sampled_from([Kind(**{**vars(PLAIN), "has_tenants": True}), Kind(**{**vars(PLAIN), "has_answers": True})]))
    if about.has_answers and draw(st.booleans()):
        common.append("rules.cache_output=true")
    replay = [f"replay.in_flight={draw(st.sampled_from([1, 2, 5]))}"]
    if model and draw(st.booleans()):
        replay.append(f"replay.prefill_chunk_tokens={draw(st.sampled_from([0, 4, 8]))}")
    simulate = [*draw(machines(names)), *draw(engine_settings(is_single=draw(st.booleans())))]
    return Case(lines=draw(traces(about)), common=common, replay=replay, simulate=simulate)


MISTAKES = (
    "checkpoint=last", "prefetch=threshold", "placement=write_back", "tiers.cpu.states=3states", "tiers.gpu.states=2states",
    "tiers.disk.below=gpu", "tiers.disk.capacity=7pages", "eviction=belady", "eviction@tiers.disk.eviction=lfu",
    "rules=sglang", "rules=vllm", "rules=fastdeploy", "rules=lightllm", "rules=vllm_hybrid", "rules=sglang_mamba",
    "rules=lightllm_hybrid", "rules.cache_output=true", "rules.cache_chunks=false", "tiers.cpu.page_tokens=8",
    "tiers.gpu.capacity=0", "tiers.gpu.capacity=1pages", "warmup=0.9", "warmup=1", "tiers.gpu.states=unlimited",
    "tiers.cpu.states=0",
    "tiers.cpu.capacity=0", "eviction=ttl", "events=true", "seed=-1", "placement=store_threshold", "eviction=workload_aware",
    "checkpoint=retention", "tiers.gpu.workspace=1GiB", "tiers.remote.capacity=5pages", "tiers.remote.below=cpu",
    "tiers.remote.object_bytes=100",
)  # fmt: skip
"""Overrides that often do not fit the others."""
