"""Policies of a user's own, of every family and with settings: the copy of each engine decides by what was set.

Ordinary classes derived from kvsim's, which may be compiled: a copy that lost its settings would decide by the defaults.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import kvsim
from kvsim.core.queue_view import Waiting
from kvsim.core.request import Request
from kvsim.core.tree import Node
from kvsim.policies.admission.base import AdmissionPolicy, ClusterLoad
from kvsim.policies.autoscaling.base import AutoscalingPolicy, ClusterStatus
from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill
from kvsim.policies.eviction.base import RankedEviction
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.trace.base import Trace

SETTING, DEFAULT = 7, 1
ASKED: dict[str, dict[object, int]] = {}
"""By family, the copies that were asked something, each with the setting that it had then."""


def asked(family: str, policy: Any) -> int:
    """Note which copy decides, and return what its setting is."""
    setting: int = policy.setting
    ASKED.setdefault(family, {})[policy] = setting
    return setting


@dataclass(kw_only=True, eq=False)
class MyEviction(RankedEviction):
    setting: int = DEFAULT

    def rank(self, node: Node) -> float:
        return asked("eviction", self) * node.last_used


@dataclass(kw_only=True, eq=False)
class MyPlacement(PlacementPolicy):
    setting: int = DEFAULT

    def after_use(self, node: Node, now: float) -> bool:
        return node.hits >= asked("placement", self)

    def after_eviction(self, node: Node, now: float) -> bool:
        return node.hits >= asked("placement", self)


@dataclass(kw_only=True, eq=False)
class MyPrefetch(PrefetchPolicy):
    setting: int = DEFAULT

    def fetch(self, offer: Offer) -> int:
        return offer.stored_pages if offer.stored_pages >= asked("prefetch", self) else 0

    def load(self, request: Request, gpu_pages: int, cpu_pages: int, disk_pages: int) -> int:
        return cpu_pages if asked("prefetch", self) else 0


@dataclass(kw_only=True, eq=False)
class MyCheckpoint(CheckpointPolicy):
    setting: int = DEFAULT

    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        return [prefill.full] if prefill.full >= asked("checkpoint", self) else []


@dataclass(kw_only=True, eq=False)
class MyRouting(RoutingPolicy):
    setting: int = DEFAULT

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        return engines[request.index * asked("routing", self) % len(engines)].engine


@dataclass(kw_only=True, eq=False)
class MyScheduling(SchedulingPolicy):
    setting: int = DEFAULT

    def rank(self, waiting: Waiting) -> float:
        return waiting.request.prompt_tokens // asked("scheduling", self)


@dataclass(kw_only=True, eq=False)
class MyAutoscaling(AutoscalingPolicy):
    setting: int = DEFAULT

    def engines(self, status: ClusterStatus) -> int:
        return 1 + asked("autoscaling", self) % status.most_engines


@dataclass(kw_only=True, eq=False)
class MyAdmission(AdmissionPolicy):
    setting: int = DEFAULT

    def admits(self, request: Request, load: ClusterLoad) -> bool:
        return load.engines[0].waiting_requests < asked("admission", self)


FAMILIES: dict[str, Any] = {
    "eviction": MyEviction,
    "placement": MyPlacement,
    "prefetch": MyPrefetch,
    "checkpoint": MyCheckpoint,
    "routing": MyRouting,
    "scheduling": MyScheduling,
    "autoscaling": MyAutoscaling,
    "admission": MyAdmission,
}
TIERS = ("tiers.gpu.capacity=3000pages", "tiers.cpu.capacity=2000pages", "tiers.disk.capacity=20000pages")
HYBRID = ("model=nemotron_h_8b", "tiers.gpu.capacity=8GiB", "tiers.cpu.capacity=0", "tiers.disk.capacity=0")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return kvsim.load_trace("synthetic", sessions=40, page_tokens=16)


OF_CLUSTERS = ("routing", "autoscaling")
CASES = [(family, engines) for family in FAMILIES for engines in (1, 4) if family not in OF_CLUSTERS or engines > 1]


@pytest.mark.parametrize(("family", "engines"), CASES)
def test_settings_reach_the_copy_of_every_engine(family: str, engines: int, trace: Trace) -> None:
    settings = HYBRID if family == "checkpoint" else TIERS
    if engines > 1:
        settings += (f"cluster.engines={engines}", "cluster.engines_per_host=1")
    ASKED.clear()
    kvsim.simulate(trace, *settings, **{family: FAMILIES[family](setting=SETTING)})
    assert set(ASKED[family].values()) == {SETTING}
    assert len(ASKED[family]) >= (1 if family in OF_CLUSTERS else engines)
