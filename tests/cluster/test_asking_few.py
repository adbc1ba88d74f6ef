"""What concerns few engines costs little, however many there are. Routers that ask few choose as if they asked all.

KVSIM_ENGINE_RUNS=5000 makes as many runs.
"""

from dataclasses import replace

from hypothesis import assume, event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvsim.core.request import Request
from kvsim.policies.routing.base import EngineStatus
from kvsim.policies.routing.kv_aware import KVAware
from tests.cluster.small_cluster import Sent, small_cluster
from tests.engine.configurations import Case, cases
from tests.engine.drawn import RUNS, SETTINGS
from tests.engine.small import ask
from tests.engine.test_configurations_random import refusals, served

ASKED = {"all": 0, "few": 0}
"""How often an engine has been asked for its cost."""


class AskingAll(KVAware):
    """A class that has costs of its own is asked for that of every engine."""

    def cost(self, request: Request, status: EngineStatus) -> float:
        ASKED["all"] += 1
        return super().cost(request, status)


class AskingFew(KVAware):
    def _tokens(self, request: Request, status: EngineStatus) -> int:
        ASKED["few"] += 1
        return super()._tokens(request, status)


@hypothesis_settings(SETTINGS, max_examples=max(1, RUNS // 3))
@given(
    case=cases().filter(lambda case: any(each.startswith("cluster.") for each in case.simulate)),
    staleness_s=st.sampled_from([0.0, 0.0, 0.001, 0.02]),
    weight=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    temperature=st.sampled_from([0.0, 0.0, 0.5]),
)
def test_kv_aware_asks_only_engines_that_may_have_some_of_a_prompt(
    case: Case, staleness_s: float, weight: float, temperature: float
) -> None:
    ASKED.update(all=0, few=0)
    outcomes = []
    for kind in (AskingAll, AskingFew):
        with refusals():
            plan, requests = case.plan("simulate"), case.requests()
            assume(plan.layout.engines > 1)
            routing = [
                kind(overlap_score_weight=weight, router_temperature=temperature, staleness_s=staleness_s) for _ in range(2)
            ]
            plan = replace(plan, routing=routing[0], decode_routing=routing[1])
            outcomes.append(served(plan, requests)[0])
    asked, few = outcomes
    for name in ("engine", "decoder", "status", "arrival_s", "ttft_s", "e2e_s"):
        assert getattr(asked, name).tobytes() == getattr(few, name).tobytes(), name
    assert asked.hit_pages.tobytes() == few.hit_pages.tobytes()
    event(f"fewer asked: {ASKED['few'] < ASKED['all']}, apart: {plan.layout.prefill_engines > 0}")


def test_engines_without_requests_are_not_told_of_transfers() -> None:
    """All three are above the same CPU memory; pages of requests on the first are written down and loaded again."""
    cluster = small_cluster(gpu=6, cpu=12, hosts=(0, 0, 0), routing=Sent(0))
    outcome = cluster.serve(ask("abcd"), ask("wxyz", 30), ask("abcd", 60))
    assert outcome.hit_pages.sum() == 4
    assert set(cluster.engines[0].mover.awaiting) <= {0}
