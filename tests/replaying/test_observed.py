"""Requests that are admitted, computed and ended at given times: hits that can be counted by hand, and those of simulations."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.core.request import Request
from kvsim.engine.outcome import Outcome
from kvsim.plans.plan import Plan
from kvsim.replaying.moments import Moments
from kvsim.report.servers.seen import as_observed, moments_of
from kvsim.results.observed import ObservedRun
from kvsim.run.execute import load_trace
from kvsim.run.observed_order import replay_observed
from kvsim.run.play import simulate
from kvsim.servers.prompts import as_sent
from tests.composing import plan
from tests.workloads import make_request

PAGE = 4


def request(index: int, pages: list[int], output_tokens: int = 1) -> Request:
    """A prompt of these pages and two tokens more, so that the last token is in none of them; its answer has pages of its own."""
    one = make_request(pages, index=index, prompt_tokens=PAGE * len(pages) + 2, output_tokens=output_tokens)
    one.output_runs = ()
    return one


def engine(preset: str, pages: int) -> Plan:
    return plan(f"preset={preset}", f"page_tokens={PAGE}", f"tiers.gpu.capacity={pages}pages", command="simulate")


def played(preset: str, pages: int, *asked: tuple[Request, float, list[float]]) -> list[int]:
    """Hit pages of requests, each with its admission and the times of its tokens; -1: not played, or without room."""
    moments = Moments(
        admitted_s=np.array([admitted_s for _, admitted_s, _ in asked]), tokens_s=[np.array(times) for _, _, times in asked]
    )
    outcome = replay_observed(engine(preset, pages), [one for one, _, _ in asked], moments)
    return np.where(outcome.status == 1, -1, outcome.hit_pages[:, 0]).tolist()


@pytest.mark.parametrize(("preset", "hits"), [("vllm", [0, 2, 2]), ("sglang", [0, 0, 2])])
def test_a_prompt_is_found_from_admission_on_or_once_it_is_computed(preset: str, hits: list[int]) -> None:
    """The second request is looked up while the prompt of the first is computed, the third after that."""
    first, second, third = (request(number, [0, 1]) for number in range(3))
    assert played(preset, 20, (first, 0.0, [2.0]), (second, 1.0, [3.0]), (third, 4.0, [5.0])) == hits


def test_the_order_of_admission_counts_and_not_that_of_the_trace() -> None:
    first, second = request(0, [0, 1]), request(1, [0, 1])
    assert played("vllm", 20, (first, 2.0, [3.0]), (second, 0.0, [1.0])) == [2, 0]


def test_pages_of_a_running_request_stay_and_those_of_an_ended_one_leave() -> None:
    """Six slots, two of them of partial pages. The third prompt needs one more: of the prompt that has ended first, its tail."""
    first, second, third, again = request(0, [0, 1]), request(1, [10, 11]), request(2, [20, 21]), request(3, [10, 11])
    later = (third, 5.0, [6.0]), (again, 7.0, [8.0])
    assert played("vllm", 6, (first, 0.0, [1.0]), (second, 2.0, [3.0]), *later) == [0, 0, 0, 2]
    ended_late = (first, 0.0, [4.5]), (second, 2.0, [3.0]), *later
    assert played("vllm", 6, *ended_late) == [0, 0, 0, 1]


def test_an_answer_takes_its_pages_when_it_needs_them() -> None:
    """The answer's third token is in a new page, for which a page of the first prompt leaves: after the look-up or before it."""
    first, second = request(0, [0, 1, 2]), request(1, [10], output_tokens=6)
    again = request(2, [0, 1, 2])
    tokens_s = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert played("vllm", 5, (first, 0.0, [1.0]), (second, 1.5, tokens_s), (again, 3.5, [8.0]))[2] == 3
    assert played("vllm", 5, (first, 0.0, [1.0]), (second, 1.5, tokens_s), (again, 6.5, [8.0]))[2] == 2


def test_a_request_without_room_finds_some_at_the_next_end() -> None:
    """Its client saw the first request end later than the engine did."""
    assert played("vllm", 3, (request(0, [0, 1]), 0.0, [2.1]), (request(1, [0, 1]), 2.0, [3.0])) == [0, 2]


def test_what_failed_is_not_played_and_what_never_fits_is_rejected() -> None:
    failed, big, last = request(0, [0, 1]), request(1, [0, 1, 2, 3, 4]), request(2, [0, 1])
    assert played("sglang", 4, (failed, float("nan"), [1.0]), (big, 1.0, [2.0]), (last, 3.0, [4.0])) == [-1, -1, 0]


@pytest.mark.parametrize("lag_s", [0.0, 0.01])
@pytest.mark.parametrize("capacity", ["600000tokens", "150000tokens"])
@pytest.mark.parametrize("engine", ["preset=vllm", "preset=vllm rules.loop=overlap", "preset=sglang page_tokens=16"])
def test_the_order_of_a_simulation_has_the_hits_of_the_simulation(engine: str, capacity: str, lag_s: float) -> None:
    """Up to 30 requests overlap, and with the smaller capacity pages leave all the time.

    A client sends a request up to some 10 ms before the engine has it, and sees its tokens as late: about half a step.
    """
    one = plan(
        *engine.split(), f"tiers.gpu.capacity={capacity}", "trace=synthetic", "trace.sessions=40", "trace.limit=300",
        "trace.sessions_per_s=3", command="simulate",
    )  # fmt: skip
    requests = as_sent(load_trace(one)[0].requests, one.page_tokens)
    simulated: Outcome = simulate(one.with_own_policies(), requests)
    given = replay_observed(one, requests, moments_of(late(as_observed(simulated, "simulated"), lag_s)))
    assert simulated.hit_pages.sum() > 0 and given.hit_pages.tolist() == simulated.hit_pages.tolist()


def late(run: ObservedRun, lag_s: float) -> ObservedRun:
    """The run as a client sees it whose requests and answers are under way for this time, on average."""
    there, back = np.random.default_rng(0).exponential(lag_s, (2, len(run.sent_s)))
    return replace(run, sent_s=run.sent_s - there, first_token_s=run.first_token_s + back, end_s=run.end_s + back)


def test_pages_of_a_vllm_answer_are_found_from_the_token_after_them_on() -> None:
    """The prompt ends within its third page. Its answer fills that page at 3 s and the next one at 7 s; it ends at 20 s."""
    first = replace(request(0, [0, 1], output_tokens=8), output_runs=((2, 2),))
    times_s = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 20.0]
    for at_s, found in ((2.5, 2), (3.5, 3), (6.5, 3), (7.5, 4)):
        later = request(1, [0, 1, 2, 3]), at_s, [at_s + 0.1]
        assert played("vllm", 30, (first, 0.0, times_s), later) == [0, found]
