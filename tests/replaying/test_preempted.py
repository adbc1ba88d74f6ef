"""Requests that a real engine has preempted, and the steps in which it computes: hits that can be counted by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsim.core.request import Request
from kvsim.engines.vllm.rules import VLLMRules
from kvsim.plans.plan import Plan
from kvsim.replaying import observed
from kvsim.replaying.moments import Moments
from kvsim.report.servers.measures import preemptions
from kvsim.report.servers.seen import as_observed, moments_of
from kvsim.results.observed_file import read_observed
from kvsim.run.execute import load_trace
from kvsim.run.observed_order import open_observed, replay_observed
from kvsim.servers.prompts import as_sent
from tests.composing import plan
from tests.workloads import make_request

PAGE = 4
RUNS = Path(__file__).resolve().parents[2] / "experiments/real_servers/runs"
SESSIONS = (
    "trace=synthetic", "trace.seed=1", "trace.sessions=40", "trace.arrivals=open_loop", "trace.max_prompt_tokens=24000",
    "trace.mix.agent.weight=0.4", "trace.mix.agent.turns=6", "trace.mix.agent.message_tokens=800",
    "trace.mix.agent.answer_tokens=120", "trace.mix.chat.turns=3", "trace.mix.chat.answer_tokens=150",
)  # fmt: skip
"""The generated sessions that the study ``real_servers`` has played (``experiments/real_servers/workloads.py``)."""


def request(index: int, pages: Sequence[int], output_tokens: int = 1) -> Request:
    """A prompt of these pages and two tokens more, so that the last token is in none of them; its answer has pages of its own."""
    one = make_request(pages, index=index, prompt_tokens=PAGE * len(pages) + 2, output_tokens=output_tokens)
    one.output_runs = ()
    return one


def engine(pages: int, step_tokens: int = 8192, preset: str = "vllm") -> Plan:
    settings = (
        f"preset={preset}",
        f"page_tokens={PAGE}",
        f"tiers.gpu.capacity={pages}pages",
        f"engine.max_batch_tokens={step_tokens}",
    )
    return plan(*settings, *(["rules.version=0.25.1"] if preset == "vllm" else []), command="simulate")


class Played:
    """A replay, with the pages that requests hold after each moment."""

    def __init__(self, one: Plan, asked: Sequence[tuple[Request, float, list[float]]], **about: object) -> None:
        if not observed.__file__.endswith(".py"):
            pytest.skip("a method of a compiled class cannot be replaced")
        requests = [each for each, _, _ in asked]
        tokens_s = [np.array(times_s) for _, _, times_s in asked]
        moments = Moments(admitted_s=np.array([at_s for _, at_s, _ in asked]), tokens_s=tokens_s, **about)
        self.replay = open_observed(one, requests)
        self.held: dict[float, int] = {}
        self._happen = self.replay._happen
        self.replay._happen = self._watched  # type: ignore[method-assign]
        self.outcome = self.replay.run_observed(requests, moments)
        self.replay.server.verify()
        self.hits = self.outcome.hit_pages[:, 0].tolist()

    def _watched(self, event: tuple[float, int, int, int, int]) -> None:
        self._happen(event)
        gpu = self.replay.server.tiers[0]
        self.held[event[0]] = gpu.pool.capacity - gpu.pool.free - gpu.evictable_pages


def test_a_preempted_request_gives_its_pages_back_and_takes_them_again() -> None:
    """Six pages. The first request holds three, and from its third token on four. From 4 s to 9 s it has been preempted.

    Meanwhile the second one takes five pages: of the first one's, the tail leaves. So it finds one page when it resumes, with two
    full pages and four tokens of its answer, and computes the rest: in all it holds four pages again.
    """
    first, second = request(0, [0, 1], output_tokens=6), request(1, [10, 11, 12, 13])
    tokens_s = [1.0, 2.0, 3.0, 4.0, 10.0, 11.0]
    asked = (first, 0.0, tokens_s), (second, 5.0, [6.0]), (request(2, [0, 1]), 20.0, [21.0])
    played = Played(engine(6), asked, pauses_s={0: [(4.0, 9.0)]}, preemptions=1)
    assert (played.hits, played.held[3.0], played.held[4.0], played.held[5.0], played.held[9.0]) == ([0, 0, 2], 4, 0, 5, 4)
    assert played.held[21.0] == 0


def test_what_a_request_has_found_counts_until_its_first_token_in_vllm_0_25() -> None:
    """It is preempted before its first token, and finds its own two pages when it resumes; after its first token, or in later
    versions, that is none of its hits."""
    asked = (request(0, [0, 1], output_tokens=3), 0.0, [5.0, 6.0, 9.0])
    before, after = {0: [(1.0, 4.0)]}, {0: [(6.0, 8.0)]}
    assert Played(engine(6), [asked], pauses_s=before, preemptions=1).hits == [2]
    assert Played(engine(6), [asked], pauses_s=after, preemptions=1).hits == [0]
    later = replace(engine(6), rules=VLLMRules())
    assert Played(later, [asked], pauses_s=before, preemptions=1).hits == [0]


def test_an_engine_that_does_not_preempt_keeps_the_pages() -> None:
    asked = (request(0, [0, 1], output_tokens=3), 0.0, [1.0, 2.0, 9.0])
    played = Played(engine(6, preset="lightllm"), [asked], pauses_s={0: [(2.0, 8.0)]}, preemptions=1)
    assert played.held[2.0] == played.held[1.0] > 0


def test_prompts_take_their_pages_step_by_step_in_the_order_of_admission() -> None:
    """Steps of 10 tokens. The first prompt has 18 of them: 10, then 8; 2 of the second step are left for the other prompt's 6,
    and the third step computes its last 4, beside the first request's second token. Pages of 4 tokens."""
    asked = (request(0, [0, 1, 2, 3], 2), 0.0, [2.5, 3.5]), (request(1, [10], 1), 1.0, [3.5])
    played = Played(engine(20, step_tokens=10), asked, formed_s=np.array([0.0, 1.0, 2.0]))
    assert [played.held[at_s] for at_s in (0.0, 1.0, 2.0, 2.5, 3.5)] == [3, 6, 7, 7, 0]


def test_steps_that_are_formed_ahead_take_pages_for_tokens_that_are_still_to_come() -> None:
    """A prompt of 6 tokens, in two pages. The third token of its answer is in the third page: the step that computes it is formed
    when that token has come or, one step ahead, when the second one has."""
    tokens_s = [1.0, 2.0, 3.0, 4.0, 5.0]
    asked = [(request(0, [0], 5), 0.0, tokens_s)]
    for ahead, held in ((0, [2, 2, 3, 3, 0]), (1, [2, 3, 3, 3, 0])):
        played = Played(engine(6), asked, formed_s=np.array(tokens_s), steps_ahead=ahead)
        assert [played.held[at_s] for at_s in tokens_s] == held


def test_sglang_finds_a_prompt_whose_step_was_formed_ahead_with_its_first_token() -> None:
    """The second request is looked up when the step after that of the first prompt is formed, the third when its token comes."""
    asked = (request(0, [0, 1]), 0.0, [2.0]), (request(1, [0, 1]), 1.0, [3.0]), (request(2, [0, 1]), 2.0, [4.0])
    formed_s = np.array([0.0, 1.0, 2.0, 3.0])
    for ahead, hits in ((0, [0, 2, 2]), (1, [0, 0, 2])):
        played = Played(engine(20, preset="sglang"), asked, formed_s=formed_s, steps_ahead=ahead)
        assert played.hits == hits


def test_tokens_of_answers_take_none_of_a_step_of_prompts_from_sglang() -> None:
    """Steps of 8 tokens, while an answer grows. The first chunk of the second prompt has all 8: two pages, which the third
    request finds when the next step is formed."""
    times_s = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    asked = (request(0, [0], 8), 0.0, times_s), (request(1, [10, 11, 12, 13]), 2.0, [6.0]), (request(2, [10, 11]), 3.0, [7.0])
    assert Played(engine(20, step_tokens=8, preset="sglang"), asked, formed_s=np.array(times_s)).hits == [0, 0, 2]


@pytest.mark.parametrize(("preemptions", "hits", "held"), [(1, [0, 3], [4, 7, 3, 3, 6]), (0, [0, 0], [4, 7, 6, 6, 0])])
def test_the_last_request_without_a_token_is_preempted_for_room_if_the_server_has_preempted(
    preemptions: int, hits: list[int], held: list[int]
) -> None:
    """Eight pages, steps of 8 tokens, one of which is the first answer's; its ninth token is in a third page, at 3 s.

    The second prompt has 22 tokens: 7 at 2 s, in two pages, and 7 at 3 s, in four. Its sixth page is one too many at 4 s. So it
    gives its pages back and, when the first request has ended at 8 s, finds three of them. Without preemptions, the first request
    must have ended by 4 s.
    """
    asked = (request(0, [0], 8), 0.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]), (request(1, [10, 11, 12, 13, 14]), 2.0, [9.0])
    formed_s = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 8.5])
    played = Played(engine(8, step_tokens=8), asked, formed_s=formed_s, preemptions=preemptions)
    assert (played.hits, [played.held[at_s] for at_s in (2.0, 3.0, 4.0, 5.0, 8.5 if preemptions else 9.0)]) == (hits, held)


def test_a_recorded_run_with_preemptions_finds_what_the_server_said() -> None:
    """202 requests of vLLM 0.25.1 on an H100 with a pool of 8,399 pages, three of them preempted, which takes two seconds."""
    run = read_observed(RUNS / "0.7x/sessions/3.jsonl.gz")
    one = plan(
        "preset=vllm",
        "rules.loop=overlap",
        "rules.version=0.25.1",
        "tiers.gpu.capacity=134384tokens",
        "engine.max_batch_tokens=8192",
        *SESSIONS,
        command="simulate",
    )
    moments = moments_of(run)
    assert preemptions(run) == moments.preemptions == 3 and sum(map(len, moments.pauses_s.values())) == 3
    requests = as_sent(load_trace(one)[0].requests, one.page_tokens)
    assert as_observed(replay_observed(one, requests, moments), "replayed").cached_tokens.tolist() == run.cached_tokens.tolist()
