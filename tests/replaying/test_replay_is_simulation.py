"""A replay hits what a simulation hits in which each request ends, transfers included, before the next one arrives.

Both see the same arrivals. How the transfers of one request overlap depends on the machine. On the one of most tests here a step
takes a moment and all else no time, as in a replay; its rates keep the proportions by which policies decide.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from kvsim.core.request import Request
from kvsim.engine.outcome import FINISHED, REJECTED, Outcome
from kvsim.plans.build import build_run
from kvsim.plans.construct import construct
from kvsim.plans.plan import Plan
from kvsim.policies.checkpoint.base import CheckpointPolicy
from kvsim.policies.copies import copied
from kvsim.policies.eviction.base import BypassEviction, EvictionPolicy
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.prefetch.base import PrefetchPolicy
from kvsim.run import play
from tests.engine.configurations import configured
from tests.workloads import conversations, long_conversations

CONF = files("kvsim.conf")
FAMILIES: dict[str, Any] = {
    "eviction": EvictionPolicy, "placement": PlacementPolicy, "prefetch": PrefetchPolicy, "checkpoint": CheckpointPolicy,
}  # fmt: skip


def policy(family: str, name: str, **settings: Any) -> Any:
    """The policy of a file of ``conf``, with its defaults but for these settings."""
    node = OmegaConf.to_container(OmegaConf.create((CONF / family / f"{name}.yaml").read_text()))
    return construct(FAMILIES[family], {**node, **settings}, family)  # type: ignore[dict-item]


def choices(family: str) -> list[str]:
    return sorted(path.name.removesuffix(".yaml") for path in (CONF / family).iterdir() if path.name.endswith(".yaml"))


BY_ARRIVALS = ("prism",)
EVICTIONS = [
    name for name in choices("eviction") if name not in BY_ARRIVALS and not isinstance(policy("eviction", name), BypassEviction)
]
"""All but the bounds, which keep no tier and only replay, and what goes by arrivals, of which a replay has none."""
PLACEMENTS = choices("placement")
PREFETCHES = [name for name in choices("prefetch") if not policy("prefetch", name).follows_calls]
"""All but those that move pages during tool calls, in which no time passes in a replay."""
CHECKPOINTS = choices("checkpoint")
BESIDE_DEFAULTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "eviction": [
        ("ttl", {"ttl_s": "learned"}),
        ("slru", {"segments": "sized"}),
        ("tail_latency", {"threshold": 64}),
        ("workload_aware", {"window_s": 300.0}),
        ("workload_aware", {"reuse": "pages"}),
        ("flop_aware", {"alpha": 0.7}),
    ],
    "placement": [
        ("write_back", {"watermark": 0.5}),
        ("store_threshold", {"k": 2, "tracker_pages": 30}),
        ("by_length", {"min_tokens": 100, "disk_min_tokens": 150}),
    ],
    "prefetch": [
        ("threshold", {"min_tokens": 1, "in_flight_fraction": 1.0}),
        ("threshold", {"min_tokens": 16, "load_min_tokens": 64, "stop": "wait_complete"}),
        ("adaptive", {"min_tokens": 1, "in_flight_fraction": 1.0, "load_min_tokens": 0}),
    ],
}
"""Settings that come to other decisions."""

SHAPES = {
    "two": ("gpu", "cpu"),
    "three": ("gpu", "cpu", "disk"),
    "disk below gpu": ("gpu", "disk"),
    "both below gpu": ("gpu", "cpu", "disk"),
    "four": ("gpu", "cpu", "disk", "remote"),
    "store beside disk": ("gpu", "cpu", "disk", "remote"),
    "store without disk": ("gpu", "cpu", "remote"),
}

FASTER = 1e24
RATES = (
    "flops_per_s", "memory_bytes_per_s", "host_to_device_bytes_per_s", "device_to_host_bytes_per_s",
    "both_directions_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s",
)  # fmt: skip
STEP_S = 1e-6


@cache
def plan_of(command: str, *overrides: str) -> Plan:
    plan = build_run(configured(overrides), command=command, overrides=overrides)
    rates = {name: FASTER * getattr(plan.hardware, name) for name in RATES}
    rates |= {name: 10 * rates[name] for name in RATES if name.startswith("disk")}  # reading pays for some prompts
    if (store := plan.hardware.remote) is not None:
        rates["remote"] = replace(store, bytes_per_s=10 * FASTER * store.bytes_per_s, latency_s=0.0)
    return replace(plan, hardware=replace(plan.hardware, **rates, host_latency_s=0.0, disk_latency_s=0.0, step_overhead_s=STEP_S))


def outcomes(requests: list[Request], overrides: Sequence[str], policies: dict[str, Any], plans: Any) -> Iterator[Outcome]:
    """Of a replay and of a simulation; ``policies`` by family or, for one tier alone, by ``tier_family``."""
    for command in ("replay", "simulate"):
        plan, made = plans(command, *overrides), {name: copied(policy) for name, policy in policies.items()}
        tiers = [
            replace(
                tier,
                eviction=made.get(f"{tier.name}_eviction") or copied(made.get("eviction", tier.eviction)),
                placement=tier.placement
                and (made.get(f"{tier.name}_placement") or copied(made.get("placement", tier.placement))),
            )
            for tier in plan.tiers
        ]
        prefetch = made.get("prefetch") or copied(plan.prefetch)
        checkpoint = made.get("checkpoint") or plan.checkpoint and copied(plan.checkpoint)
        plan = replace(plan, tiers=tiers, prefetch=prefetch, checkpoint=checkpoint)
        yield play.replay(plan, requests) if command == "replay" else play.simulate(plan, requests)


def check(case: str, requests: list[Request], *overrides: str, plans: Any = plan_of, **policies: Any) -> Outcome:
    """Both hit the same pages in the same tiers, request by request, and move as many. Returns what was simulated."""
    replayed, simulated = outcomes(requests, overrides, policies, plans)
    arrival_s, is_served = simulated.arrival_s, simulated.status == FINISHED
    ended_s = arrival_s + np.where(is_served, simulated.e2e_s, 0.0)
    assert (ended_s[:-1] < arrival_s[1:]).all(), "requests overlap"
    for link in simulated.links.values():
        begun, ended = np.searchsorted(arrival_s, link.intervals[:, :2], side="right").T
        assert (begun == ended).all(), "a transfer has not ended when the next request arrives"
    assert replayed.status.tolist() == simulated.status.tolist(), case
    differing = np.flatnonzero((replayed.hit_pages != simulated.hit_pages).any(axis=1)).tolist()
    assert not differing, (
        f"{case}: request {differing[0]} hits {replayed.hit_pages[differing[0]]} or {simulated.hit_pages[differing[0]]}"
    )
    assert (replayed.placement, replayed.prefetch) == (simulated.placement, simulated.prefetch), case
    return simulated


def tiers_of(shape: str, gpu: int = 26, cpu: int = 11, disk: int = 23) -> list[str]:
    pages = {"gpu": gpu, "cpu": cpu, "disk": disk, "remote": 2 * disk}
    overrides = [f"tiers.{name}.capacity={pages[name]}pages" for name in SHAPES[shape]]
    overrides += ["tiers.disk.below=gpu"] * shape.endswith("below gpu")
    return [*overrides, *["tiers.remote.below=cpu"] * shape.startswith("store")]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_on_one_tier(eviction: str) -> None:
    outcome = check(eviction, conversations(), "tiers.gpu.capacity=26pages", eviction=policy("eviction", eviction))
    assert outcome.hit_pages.sum() > 0
    assert (outcome.status == REJECTED).any(), "a request too large for the GPU"


@cache
def plan_of_chunks(command: str, *overrides: str) -> Plan:
    """Steps compute three pages at most, so that most prompts take several."""
    plan = plan_of(command, *overrides)
    return replace(plan, engine=replace(plan.engine, max_batch_tokens=3 * plan.page_tokens + 1))


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_prompts_may_be_computed_in_chunks(eviction: str) -> None:
    """What a chunk makes known at once ends up as if the whole prompt had been computed at once."""
    requests = conversations(1, requests=30)
    outcome = check(eviction, requests, "tiers.gpu.capacity=26pages", plans=plan_of_chunks, eviction=policy("eviction", eviction))
    assert outcome.hit_pages.sum() > 0
    for shape in ("two", "three"):
        policies = {"eviction": policy("eviction", eviction), "placement": policy("placement", "write_back")}
        check(shape, requests, *tiers_of(shape), plans=plan_of_chunks, **policies)


PAIRS = [(eviction, placement) for eviction in EVICTIONS for placement in PLACEMENTS]


@pytest.mark.parametrize(
    ("eviction", "placement"),
    [pair if at % 3 == 0 else pytest.param(*pair, marks=pytest.mark.long) for at, pair in enumerate(PAIRS)],
)
def test_on_several_tiers(eviction: str, placement: str) -> None:
    """Each pair on one shape, each policy on all of them; test_with_a_policy_for_each_tier draws other pairs."""
    seed = (EVICTIONS.index(eviction) + PLACEMENTS.index(placement)) % len(SHAPES)
    shape = list(SHAPES)[seed]
    policies = {"eviction": policy("eviction", eviction), "placement": policy("placement", placement)}
    check(shape, conversations(seed, requests=20), *tiers_of(shape), **policies)


@pytest.mark.parametrize("prefetch", [name for name in PREFETCHES if name != "none"])
def test_with_prefetch(prefetch: str) -> None:
    """Each has arrived before the policy would stop it."""
    requests = conversations(page_tokens=256, requests=40)
    tiers, hits = [*tiers_of("three", cpu=33, disk=61), "page_tokens=256"], 0
    for placement in PLACEMENTS:
        policies = {"placement": policy("placement", placement), "prefetch": policy("prefetch", prefetch)}
        hits += check(placement, requests, *tiers, **policies).prefetch["used_pages"]
    for eviction in EVICTIONS[PREFETCHES.index(prefetch) :: 3]:
        policies = {"eviction": policy("eviction", eviction), "prefetch": policy("prefetch", prefetch)}
        hits += check(eviction, requests, *tiers, "placement=write_back", **policies).prefetch["used_pages"]
    assert hits > 0


HYBRID = ("model=qwen3_next_80b", "model.weight_dtype_bytes=1", "page_tokens=256")
"""A state takes as much room as 13 pages."""
STATE_TIERS = {"gpu": 104, "cpu": 60, "disk": 100}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_with_recurrent_states(checkpoint: str) -> None:
    requests = conversations(page_tokens=256, requests=20)
    for shape in SHAPES:
        for own_room in ((), ("tiers.gpu.states=4states", "tiers.cpu.states=3states")) if shape == "three" else ((),):
            overrides = [*tiers_of(shape, **STATE_TIERS), *HYBRID, "checkpoint=last", "placement=write_back", *own_room]
            outcome = check(f"{shape} {own_room}", requests, *overrides, checkpoint=policy("checkpoint", checkpoint))
            assert outcome.hit_pages.any() == (checkpoint != "none")


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_with_states_beside_pages(eviction: str) -> None:
    overrides = [*tiers_of("two", **STATE_TIERS), *HYBRID, "checkpoint=last", "placement=write_back"]
    check(eviction, conversations(page_tokens=256, requests=20), *overrides, eviction=policy("eviction", eviction))


def draw(random: np.random.Generator, family: str, beside_defaults: float = 0.3) -> tuple[str, Any]:
    """A policy of a family and what to call it."""
    others = BESIDE_DEFAULTS[family]
    if random.random() < beside_defaults:
        name, settings = others[random.integers(len(others))]
        return f"{name} {settings}", policy(family, name, **settings)
    names = {"eviction": EVICTIONS, "placement": PLACEMENTS, "prefetch": PREFETCHES}[family]
    name = names[random.integers(len(names))]
    return name, policy(family, name)


SECONDS = "seg_len weighs seconds since the last use against lengths, and a replay has only those between arrivals"
WITHOUT_STORE = [shape for shape, tiers in SHAPES.items() if "remote" not in tiers]


def check_any(seed: int, is_hybrid: bool, shapes: Sequence[str] = WITHOUT_STORE) -> None:
    """A policy of its own for each tier, any sizes and settings, drawn from a seed."""
    random = np.random.default_rng(seed)
    shape = shapes[random.integers(len(shapes))]
    scale = 4 if is_hybrid else 1
    gpu, cpu, disk = (scale * int(random.integers(least, most)) for least, most in ((21, 41), (3, 45), (3, 70)))
    overrides = tiers_of(shape, gpu, cpu, disk)
    case, policies = [shape], dict[str, Any]()
    for tier in SHAPES[shape]:
        for family in ("eviction", "placement")[: 1 + (tier != "gpu")]:
            name, policies[f"{tier}_{family}"] = draw(random, family)
            case.append(name)
    if shape in ("three", "four", "store without disk"):
        name, policies["prefetch"] = draw(random, "prefetch")
        case.append(name)
    if is_hybrid:
        checkpoint = CHECKPOINTS[random.integers(len(CHECKPOINTS))]
        overrides += [*HYBRID, f"checkpoint={checkpoint}"]
        if checkpoint != "none":
            overrides += ["checkpoint.max_states_per_path=1"] * (random.random() < 0.2)
            overrides += ["checkpoint.detached=true"] * (random.random() < 0.2)
    overrides += [f"rules.{name}={value}" for name, value in (("cache_output", "true"), ("recompute_last_token", "false"))
                  if random.random() < 0.3]  # fmt: skip
    requests = conversations(2 * int(random.integers(100)), page_tokens=256 if is_hybrid else 16, requests=60)
    check(f"seed {seed}: {[*case, *overrides]}", requests, *overrides, plans=plan_of.__wrapped__, **policies)


@pytest.mark.parametrize("is_hybrid", [False, True], ids=["pages", "states"])
@pytest.mark.parametrize(
    "seed", [seed if seed in (0, 1, 2, 106, 120) else pytest.param(seed, marks=pytest.mark.long) for seed in range(200)]
)
def test_with_a_policy_for_each_tier(seed: int, is_hybrid: bool) -> None:
    if (seed, is_hybrid) == (68, True):
        pytest.skip("random draws from leaves in the order of their announcement, which differs where a held prefetch is let go")
    if (seed, is_hybrid) == (28, True):
        pytest.skip(SECONDS)
    check_any(seed, is_hybrid)


@pytest.mark.parametrize("is_hybrid", [False, True], ids=["pages", "states"])
@pytest.mark.parametrize("seed", [seed if seed < 3 else pytest.param(seed, marks=pytest.mark.long) for seed in range(53)])
def test_with_any_tiers_and_a_policy_for_each(seed: int, is_hybrid: bool) -> None:
    if (seed, is_hybrid) == (28, True):
        pytest.skip(SECONDS)
    check_any(seed, is_hybrid, list(SHAPES))


@cache
def plan_on_h200(command: str, *overrides: str) -> Plan:
    return build_run(configured(overrides), command=command, overrides=overrides)


@pytest.fixture(scope="module")
def long_requests() -> list[Request]:
    """Long conversations, 10 minutes apart at least.

    Under MRU, which evicts first what has just arrived, some seeds differ in one request: on this machine, transfers of a
    request overlap that a replay carries out one after another.
    """
    requests = long_conversations(1, requests=700, page_tokens=512)
    for at, request in enumerate(requests):
        request.arrival_s = 1_000 * request.arrival_s + 600 * at
    return requests


BY_SECONDS = ("laru", "learned")
"""Policies whose order depends on how many seconds ago something was, not only on what came first: a replay has other seconds."""


@pytest.mark.parametrize(
    "eviction",
    [name if name == "lru" else pytest.param(name, marks=pytest.mark.long) for name in EVICTIONS if name not in BY_SECONDS],
)
def test_on_a_real_machine(eviction: str, long_requests: list[Request]) -> None:
    tiers = tiers_of("three", gpu=600, cpu=1_000, disk=4_000)
    policies = {"eviction": policy("eviction", eviction)}
    outcome = check(eviction, long_requests, *tiers, "page_tokens=512", "placement=write_back", plans=plan_on_h200, **policies)
    assert outcome.hit_pages.any(axis=0).all(), "all three tiers are hit"
