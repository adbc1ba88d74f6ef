"""Orders of waiting requests that are kept up to date: in every round, that of a model that looks all of them up anew.

KVSIM_ENGINE_RUNS=5000 makes as many runs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import assume, event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvsim.core.lease import LOOK
from kvsim.core.queue_view import LookUps, Waiting
from kvsim.engine.engine import EngineSettings
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.policies.scheduling.dfs_weight import DfsWeight
from kvsim.policies.scheduling.kept_order import KeptOrder
from kvsim.policies.scheduling.longest_prefix import LongestPrefix
from kvsim.policies.scheduling.shortest_prefill import ShortestPrefill
from tests.engine.configurations import PAGE_TOKENS, Case, Kind, cases, engine_cases, engine_settings, machines, traces
from tests.engine.drawn import RUNS, SETTINGS
from tests.engine.test_configurations_random import refusals, served
from tests.policies.slow_orders import SLOW

ROUNDS: Counter[str] = Counter()
"""Rounds of the example, and those in which less than all had to be looked up."""


class Checked(KeptOrder):
    """An order that is compared with the slow one in every round, and with what all look-ups would find now."""

    def __init__(self, policy: SchedulingPolicy, order: KeptOrder) -> None:
        self.policy = policy
        self.order = order
        self.line: list[Waiting] = []

    def add(self, waiting: Waiting) -> None:
        self.order.add(waiting)
        self.line.append(waiting)

    def remove(self, waiting: Waiting) -> None:
        self.order.remove(waiting)
        self.line.remove(waiting)
        assert self.order.in_order() == self.line

    def update(self, changed: Sequence[Waiting], look_ups: LookUps) -> None:
        found = {}
        for one in self.line:
            lease = look_ups._cache.match(one.request, look_ups._gpu, LOOK)
            found[one] = lease.gpu_pages, (lease.gpu_pages + lease.leading_pages) * PAGE_TOKENS
        self.order.update(changed, look_ups)
        assert {one: (look_ups.gpu_pages(one), look_ups.cached_tokens(one)) for one in self.line} == found
        kind = next(kind for kind in SLOW if isinstance(self.policy, kind))
        self.line = SLOW[kind](self.policy, self.line, found, PAGE_TOKENS)
        assert self.order.in_order() == self.line
        ROUNDS["all"] += 1
        ROUNDS["few"] += len(changed) < len(self.line)

    def first(self) -> Waiting:
        first = self.order.first()
        assert first is self.line[0]
        return first

    def in_order(self) -> list[Waiting]:
        return self.order.in_order()


class CheckedPrefix(LongestPrefix):
    def kept_order(self) -> KeptOrder:
        return Checked(self, super().kept_order())


class CheckedPrefill(ShortestPrefill):
    def kept_order(self) -> KeptOrder:
        return Checked(self, super().kept_order())


class CheckedWeight(DfsWeight):
    def kept_order(self) -> KeptOrder:
        return Checked(self, super().kept_order())


@st.composite
def policies(draw: st.DrawFn) -> SchedulingPolicy:
    """A policy with thresholds of small pages."""
    bounds = {"max_wait_s": draw(st.sampled_from([None, None, 0.01])), "fcfs_above": draw(st.sampled_from([None, None, 3]))}
    kind: Any = draw(st.sampled_from([CheckedPrefix, CheckedPrefill, CheckedWeight]))
    if kind is CheckedWeight:
        return CheckedWeight(**bounds)
    thresholds = {"check_up_to_tokens": draw(st.sampled_from([0, 4, 8])), "shared_tokens": draw(st.sampled_from([1, 4, 8]))}
    chosen = {"in_batch_duplicates": "equal"} if draw(st.integers(0, 4)) == 0 else thresholds
    made: SchedulingPolicy = kind(**bounds, **chosen)
    return made


@st.composite
def swapping_cases(draw: st.DrawFn) -> Case:
    """FastDeploy, with the tiers and the placement that it has: swaps to CPU memory, and a store beside it."""
    names = draw(st.sampled_from([("gpu",), ("gpu", "cpu"), ("gpu", "disk"), ("gpu", "cpu", "disk")]))
    common = ["model=tiny", "rules=fastdeploy", "eviction=lru", f"page_tokens={PAGE_TOKENS}"]
    common += [f"tiers.{name}.capacity={draw(st.integers(8, 16))}pages" for name in names]
    common += ["placement=exclusive"] if "cpu" in names else []
    common += ["tiers.disk.below=gpu", "placement@tiers.disk.placement=write_through"] if "disk" in names else []
    about = Kind(has_persistent=draw(st.booleans()), has_resets=draw(st.booleans()), has_samples=False)
    simulate = [*draw(machines(names)), *draw(engine_settings(is_single=False))]
    return Case(lines=draw(traces(about)), common=common, replay=[], simulate=simulate)


@hypothesis_settings(SETTINGS, max_examples=max(1, RUNS // 2))
@given(case=cases() | engine_cases() | swapping_cases(), policy=policies(), crowd=st.booleans())
def test_an_order_is_that_of_looking_all_up_anew(case: Case, policy: SchedulingPolicy, crowd: bool) -> None:
    """On every kind of cache that kvsim's own schedule runs on; in a crowd, most requests wait for one that runs."""
    ROUNDS.clear()
    with refusals():
        plan, requests = case.plan("simulate"), case.requests()
        assume(plan.rules.scheduler() is None)
        engine = plan.engine
        if crowd:
            fields = {name: getattr(engine, name) for name in EngineSettings.__dataclass_fields__}
            engine = EngineSettings(**fields | {"max_running_requests": 1})
        plan = replace(plan, scheduling=policy, engine=engine)
        served(plan, requests)
    event(f"rules: {plan.rules.engine or 'own'}, hybrid: {plan.model.is_hybrid}")
    event(f"rounds with few look-ups: {ROUNDS['few'] > 0}")
