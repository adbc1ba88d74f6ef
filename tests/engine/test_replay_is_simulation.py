"""A replay hits what a simulation hits in which each request ends, transfers included, before the next one arrives.

Both see the same arrivals. On the machine of these tests a step takes a moment and everything else no time; its rates keep the
proportions by which policies decide.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from kvsim import run
from kvsim.build import Plan, build_run, construct
from kvsim.configuration import compose
from kvsim.core.request import Request
from kvsim.engine.outcome import FINISHED, Outcome
from kvsim.policies.checkpoint.base import CheckpointPolicy
from kvsim.policies.eviction.base import BypassEviction, EvictionPolicy
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.prefetch.base import PrefetchPolicy
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.synthetic import Kind, Synthetic

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


EVICTIONS = [name for name in choices("eviction") if not isinstance(policy("eviction", name), BypassEviction)]
"""All but the bounds, which keep no tier and only replay."""
PLACEMENTS = choices("placement")

GPU, CPU, DISK = "tiers.gpu.capacity=26pages", "tiers.cpu.capacity=11pages", "tiers.disk.capacity=23pages"
BELOW_GPU = "tiers.disk.below=gpu"
CHAIN = (GPU, CPU, DISK)
SHAPES = {"two": (GPU, CPU), "three": CHAIN, "disk below gpu": (GPU, DISK, BELOW_GPU), "both below gpu": (*CHAIN, BELOW_GPU)}

FASTER = 1e24
RATES = (
    "flops_per_s", "memory_bytes_per_s", "host_to_device_bytes_per_s", "device_to_host_bytes_per_s", "both_directions_bytes_per_s",
    "disk_read_bytes_per_s", "disk_write_bytes_per_s",
)  # fmt: skip
STEP_S = 1e-6


@lru_cache(maxsize=None)
def plan_of(command: str, *overrides: str) -> Plan:
    plan = build_run(compose(overrides), command=command, overrides=overrides)
    rates = {name: FASTER * getattr(plan.hardware, name) for name in RATES}
    return replace(plan, hardware=replace(plan.hardware, **rates, host_latency_s=0.0, disk_latency_s=0.0, step_overhead_s=STEP_S))


def conversations(seed: int = 0, *, page_tokens: int = 16, requests: int = 40, gap_s: float = 100.0) -> list[Request]:
    """Sessions in turn, with shared beginnings; prompts of 20 pages at most, some with answers too long for the GPU."""
    scale = page_tokens / 16
    chat = {"systems": 3, "system_tokens": 60 * scale, "turns": 4, "message_tokens": 40 * scale, "pause_s": 3 * gap_s}
    document = {"systems": 2, "system_tokens": 30 * scale, "document_tokens": 100 * scale, "turns": 3, "pause_s": gap_s,
                "message_tokens": 20 * scale, "remembers": False}  # fmt: skip
    trace = Synthetic(
        seed=seed, limit=requests, sessions=requests, sessions_per_s=0.5 / gap_s, arrivals="open_loop",
        max_prompt_tokens=20 * page_tokens, tail=("full", "all")[seed % 2],
        mix={"chat": Kind(weight=2, answer_tokens=60, **chat), "document": Kind(weight=1, answer_tokens=30, **document)},
    ).load(page_tokens)  # fmt: skip
    for request in trace.requests:
        request.priority = request.session % 3
    return trace.requests


def outcomes(requests: list[Request], overrides: Sequence[str], policies: dict[str, Any]) -> Iterator[Outcome]:
    """Of a replay and of a simulation; ``policies`` by family or, for one tier alone, by ``tier.family``."""
    for command in ("replay", "simulate"):
        plan, made = plan_of(command, *overrides), deepcopy(policies)
        tiers = [
            replace(
                tier,
                eviction=made.pop(f"{tier.name}.eviction", None) or deepcopy(made.get("eviction", tier.eviction)),
                placement=tier.placement
                and (made.pop(f"{tier.name}.placement", None) or deepcopy(made.get("placement", tier.placement))),
            )
            for tier in plan.tiers
        ]
        others = {family: made[family] for family in ("prefetch", "checkpoint") if family in made}
        yield getattr(run, command)(replace(plan, tiers=tiers, **others), requests)


def check(requests: list[Request], *overrides: str, **policies: Any) -> Outcome:
    """Both hit the same pages in the same tiers, request by request, and move as many. Returns what was simulated."""
    replayed, simulated = outcomes(requests, overrides, {name.replace("_", "."): made for name, made in policies.items()})
    is_served = simulated.status == FINISHED
    ended_s = simulated.arrival_s + np.where(is_served, simulated.e2e_s, 0.0)
    assert (ended_s[:-1] < simulated.arrival_s[1:]).all(), "requests overlap"
    for link in simulated.links.values():
        begun, ended = np.searchsorted(simulated.arrival_s, link.intervals[:, :2], side="right").T
        assert (begun == ended).all(), "a transfer has not ended when the next request arrives"
    assert replayed.status.tolist() == simulated.status.tolist()
    assert replayed.hit_pages.tolist() == simulated.hit_pages.tolist()
    assert (replayed.placement, replayed.prefetch) == (simulated.placement, simulated.prefetch)
    return simulated


def checked(case: str, *args: Any, **kwargs: Any) -> Outcome:
    """``check``, which says the case if it fails."""
    try:
        return check(*args, **kwargs)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_on_one_tier(eviction: str) -> None:
    assert check(conversations(), GPU, eviction=policy("eviction", eviction)).hit_pages.sum() > 0


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_on_several_tiers(eviction: str, placement: str) -> None:
    for seed, (shape, tiers) in enumerate(SHAPES.items()):
        checked(
            shape, conversations(seed), *tiers, eviction=policy("eviction", eviction), placement=policy("placement", placement)
        )


PREFETCHES = [
    {"prefetch": policy("prefetch", name, **settings)}
    for name in choices("prefetch")
    for settings in [{}]
]
