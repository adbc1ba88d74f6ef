"""Policies that keep an index of loads or of prompts choose as if they looked at every engine, in any run.

KVSIM_ENGINE_RUNS=5000 makes as many runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvsim.core.request import Request
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.least_loaded import LeastLoaded
from kvsim.policies.routing.prefix_aware import PrefixAware
from tests.cluster.test_asking_few import CLUSTERS, check_same
from tests.engine.configurations import Case
from tests.engine.drawn import RUNS, SETTINGS
from tests.engine.test_configurations_random import refusals, served
from tests.policies.test_prefix_aware import SlowTree
from tests.workloads import pages_of


class SlowLeastLoaded(RoutingPolicy):
    def __init__(self, load: str) -> None:
        self.load = load

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        return min(engines, key=lambda status: (getattr(status, f"outstanding_{self.load}"), status.engine)).engine


class SlowPrefixAware(RoutingPolicy):
    """The rules of ``PrefixAware``, engine by engine and page by page."""

    def __init__(self, fallback: str, threshold: float, most_tokens: int) -> None:
        self.fallback = fallback
        self.threshold = threshold
        self.most_tokens = most_tokens

    def bind(self, context: RoutingContext) -> None:
        self.page_tokens, self.first = context.page_tokens, context.engines[0]
        self.tree = SlowTree(len(context.engines), self.most_tokens // context.page_tokens)
        self.clock = 0

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        loads = {status.engine: status.outstanding_requests for status in engines}
        idlest = min(engines, key=lambda status: (loads[status.engine], status.engine)).engine
        highest, lowest = max(loads.values()), min(loads.values())
        if highest - lowest > 1 and highest > 1.5 * lowest:
            return idlest
        pages, at = self.tree.longest(pages_of(request.runs))
        if pages * self.page_tokens > self.threshold * request.prompt_tokens:
            return self.first + at
        if self.fallback == "least_loaded":
            return idlest
        return min(engines, key=lambda status: (len(self.tree.last[status.engine - self.first]), status.engine)).engine

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        self.clock += 1
        self.tree.add(pages_of(request.runs), engine - self.first, self.clock)

    def on_down(self, engine: int, now: float) -> None:
        self.tree.forget(engine - self.first)


def check_pair(case: Case, *pair: partial[RoutingPolicy]) -> None:
    outcomes = []
    for kind in pair:
        with refusals():
            plan, requests = case.plan("simulate"), case.requests()
            assume(plan.layout.engines > 1)
            outcomes.append(served(replace(plan, routing=kind(), decode_routing=kind()), requests)[0])
    check_same(*outcomes)


@pytest.mark.parametrize("load", ["tokens", "requests"])
@hypothesis_settings(SETTINGS, max_examples=max(1, RUNS // 4))
@given(case=CLUSTERS)
def test_least_loaded_chooses_as_if_it_looked_at_every_engine(case: Case, load: str) -> None:
    check_pair(case, partial(SlowLeastLoaded, load), partial(LeastLoaded, load=load))


@pytest.mark.parametrize("fallback", ["least_loaded", "smallest_tree"])
@hypothesis_settings(SETTINGS, max_examples=max(1, RUNS // 4))
@given(case=CLUSTERS, threshold=st.sampled_from([0.0, 0.3, 0.9]), most_tokens=st.sampled_from([64, 200, 10_000]))
def test_prefix_aware_chooses_as_if_each_engine_had_a_tree(case: Case, fallback: str, threshold: float, most_tokens: int) -> None:
    fast = partial(
        PrefixAware,
        cache_threshold=threshold,
        balance_abs_threshold=1,
        max_tree_tokens=most_tokens,
        fallback=fallback,
    )
    check_pair(case, partial(SlowPrefixAware, fallback, threshold, most_tokens), fast)
