"""What concerns few engines costs little, however many there are. Routers that ask few choose as if they asked all.

KVSIM_ENGINE_RUNS=5000 makes as many runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvsim.core.request import Request
from kvsim.engine.outcome import Outcome
from kvsim.policies.routing.base import EngineStatus
from kvsim.policies.routing.kv_aware import KVAware
from tests.cluster.small_cluster import Sent, small_cluster
from tests.engine.configurations import WORDS, Case, cases, tokens_of
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


class RoundRobinAtTimes(KVAware):
    """Asks no engine about every second request."""

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        if request.index % 2:
            return super().choose(request, engines, now)
        self._tokens_to_compute = request.prompt_tokens
        return engines[request.index // 2 % len(engines)].engine


class RoundRobinOrAskingAll(RoundRobinAtTimes, AskingAll):
    pass


class RoundRobinOrAskingFew(RoundRobinAtTimes, AskingFew):
    pass


PAIRS = [(AskingAll, AskingFew), (RoundRobinOrAskingAll, RoundRobinOrAskingFew)]


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The lines of conversations that mostly begin with less than a page; each prompt has all that was said before."""
    said = [[draw(st.integers(1, 3))] * draw(st.integers(1, 5)) for _ in range(draw(st.integers(1, 6)))]
    lines: list[dict[str, Any]] = []
    at_ms = 0.0
    for _ in range(draw(st.integers(1, 3))):
        for number, prompt in enumerate(said):
            at_ms += draw(st.sampled_from([0.0, 20.0, 300.0, 5000.0]))
            output = draw(st.sampled_from([1, 2, 5, 9, 15]))
            answers = [(tokens_of(draw(WORDS)) + [number] * output)[:output] for _ in range(draw(st.sampled_from([1, 1, 1, 2])))]
            several = {"n": len(answers), "output_token_ids": answers} if len(answers) > 1 else {"output_token_ids": answers[0]}
            lines.append({"timestamp": at_ms, "token_ids": prompt, "output_length": output, **several})
            said[number] = prompt + draw(st.sampled_from(answers)) + [99] * draw(st.integers(1, 3))
    return lines


CLUSTERS = cases().filter(lambda case: any(each.startswith("cluster.") for each in case.simulate))


@st.composite
def chatting(draw: st.DrawFn) -> Case:
    """A cluster that caches the answers of chats."""
    return replace(draw(CLUSTERS), lines=draw(chats()), tail="full").but("rules.cache_output=true")


@pytest.mark.parametrize("pair", PAIRS, ids=["always", "at times"])
@hypothesis_settings(SETTINGS, max_examples=max(1, RUNS // 3))
@given(
    case=CLUSTERS | chatting(),
    staleness_s=st.sampled_from([0.0, 0.0, 0.001, 0.02]),
    weight=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    temperature=st.sampled_from([0.0, 0.0, 0.5]),
)
def test_kv_aware_asks_only_engines_that_may_have_some_of_a_prompt(
    case: Case, staleness_s: float, weight: float, temperature: float, pair: tuple[type[KVAware], type[KVAware]]
) -> None:
    ASKED.update(all=0, few=0)
    outcomes = []
    for kind in pair:
        with refusals():
            plan, requests = case.plan("simulate"), case.requests()
            assume(plan.layout.engines > 1)
            routing = [
                kind(overlap_score_weight=weight, router_temperature=temperature, staleness_s=staleness_s) for _ in range(2)
            ]
            plan = replace(plan, routing=routing[0], decode_routing=routing[1])
            outcomes.append(served(plan, requests)[0])
    check_same(*outcomes)
    event(f"fewer asked: {ASKED['few'] < ASKED['all']}, apart: {plan.layout.prefill_engines > 0}")


def check_same(asked: Outcome, few: Outcome) -> None:
    """Both sent every request to the same engine, at the same times."""
    for name in ("engine", "decoder", "status", "arrival_s", "ttft_s", "e2e_s"):
        assert getattr(asked, name).tobytes() == getattr(few, name).tobytes(), name
    assert asked.hit_pages.tobytes() == few.hit_pages.tobytes()


PLAIN_CLUSTER = ["cluster.engines=4", "routing=kv_aware", "hardware=linear", "hardware.fixed_s=0.005"]


@pytest.mark.parametrize("pair", PAIRS, ids=["always", "at times"])
def test_engines_are_known_to_hold_answers_to_prompts_shorter_than_a_page(pair: tuple[type[KVAware], type[KVAware]]) -> None:
    """The pages of 2 tokens and the first 9 of an answer begin with the answer's first page; the second turns hit both pages.

    Chats differ, and are far enough from each other that each second turn finds its engine idle.
    """
    first = [{"token_ids": [number] * 2, "output_length": 10, "output_token_ids": [number] * 10} for number in range(7)]
    second = [{"token_ids": [number] * 15, "output_length": 1, "output_token_ids": [0]} for number in range(7)]
    lines = [line | {"timestamp": 1000.0 * at} for at, line in enumerate([*first, *second])]
    case = Case(
        lines=lines,
        common=["model=tiny", "page_tokens=4", "tiers.gpu.capacity=200pages", "rules.cache_output=true"],
        replay=[],
        simulate=PLAIN_CLUSTER,
    )
    outcomes = [served(replace(case.plan("simulate"), routing=kind()), case.requests())[0] for kind in pair]
    check_same(*outcomes)
    asked_about = [index for index in range(7, 14) if pair is PAIRS[0] or index % 2]
    assert outcomes[1].hit_pages[asked_about].sum(1).tolist() == [2] * len(asked_about)


def test_engines_without_requests_are_not_told_of_transfers() -> None:
    """All three are above the same CPU memory; pages of requests on the first are written down and loaded again."""
    cluster = small_cluster(gpu=6, cpu=12, hosts=(0, 0, 0), routing=Sent(0))
    outcome = cluster.serve(ask("abcd"), ask("wxyz", 30), ask("abcd", 60))
    assert outcome.hit_pages.sum() == 4
    assert set(cluster.engines[0].mover.awaiting) <= {0}
