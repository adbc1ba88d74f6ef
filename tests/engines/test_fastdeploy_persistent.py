"""Persistent prompts under ``rules=fastdeploy``, in a replay and in time: they stay on the GPU, and take room from all others.

See tests/engine/small.py for the round numbers: a page has 4 tokens.
"""

from random import Random

import pytest

import kvsim
from kvsim.core.request import Request, Reset
from kvsim.engine.outcome import FINISHED, REJECTED, Outcome
from kvsim.trace.base import Trace
from tests.engine.small import ask, hits, make_requests
from tests.engines.test_fastdeploy_time import serve, small
from tests.workloads import EXAMPLES, Words, make_request, pages_of, random_requests

A, B, C = "abcd", "efgh", "ijkl"
CPU, STORAGE = "tiers.cpu.capacity=30pages", "tiers.disk.capacity=40pages"
TIERS: dict[str, list[str]] = {"gpu": [], "cpu": [CPU], "storage": [CPU, STORAGE]}


def kept(requests: list[Request], *numbers: int) -> list[Request]:
    for number in numbers:
        requests[number].persistent = True
    return requests


def played(command: str, requests: list[Request], gpu: int, tiers: str) -> Outcome:
    trace = Trace(name="small", requests=requests, page_tokens=4, block_tokens=None)
    settings = ["model=tiny", "preset=fastdeploy", "tiers.cpu.capacity=0", f"tiers.gpu.capacity={gpu}pages"]
    outcome: Outcome = getattr(kvsim, command)(trace, *settings, *TIERS[tiers]).outcome
    return outcome


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("apart_s", [0.0, 1000.0], ids=["together", "apart"])
def test_as_many_are_served_as_fit_beside_those_before_them(command: str, tiers: str, apart_s: float) -> None:
    """Each prompt takes 4 pages of 12, and its answer a fifth while it runs; the two that are kept leave 4."""
    requests = make_requests([ask(word, at * apart_s, tokens=0, output=2) for at, word in enumerate((A, B, C))])
    outcome = played(command, kept(requests, 0, 1, 2), 12, tiers)
    assert outcome.status.tolist() == [FINISHED, FINISHED, REJECTED]


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("tiers", TIERS)
def test_with_tiers_below_a_prompt_that_is_kept_needs_room_a_second_time(command: str, tiers: str) -> None:
    """5 pages, 4 of them kept. With tiers below, FastDeploy makes room for all of it before it looks it up."""
    for gpu, status in ((9, FINISHED), (8, FINISHED if tiers == "gpu" else REJECTED)):
        outcome = played(command, kept(make_requests([ask(A), ask(A, 1000.0)]), 0), gpu, tiers)
        assert outcome.status.tolist() == [FINISHED, status]
        assert hits(outcome, 1)[0] == (4 if status == FINISHED else 0)


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("tiers", TIERS)
def test_what_is_kept_is_hit_on_the_gpu_whatever_came_between(command: str, tiers: str) -> None:
    requests = make_requests([ask(A), ask(B, 100.0), ask(C, 200.0), ask(A, 300.0)])
    assert hits(played(command, kept(requests, 0), 10, tiers), 3) == (4, 0, 0)


def test_only_the_prompt_is_kept_and_not_its_answer() -> None:
    ids = Words().pages("abcd")
    request = make_request(ids[:2], prompt_tokens=8, output_tokens=9, output_runs=((ids[2], 2),), persistent=True)
    for tiers in ((12,), (12, 20), (12, 20, 20)):
        cache = small(*tiers, cache_output=True)
        serve(cache, [request])
        assert cache.gpu.held_pages == 4 and cache.gpu.evictable_pages == 2


def test_a_running_request_is_rejected_if_what_is_kept_leaves_it_no_room_to_end() -> None:
    """The short answer ends first; its 4 pages leave the long one 8 of 12, and it needs 9."""
    for first, second in ((2, 18), (18, 2)):
        cache = small(12)
        requests = kept(make_requests([ask(A, tokens=0, output=first), ask(B, tokens=0, output=second)]), 0, 1)
        outcome = serve(cache, requests)
        assert sorted(outcome.status.tolist()) == [FINISHED, REJECTED] and outcome.status[int(first > second)] == FINISHED
        assert sum(node.pages for node in cache.persistent.nodes(cache.gpu)) == 4


def test_the_answer_of_a_retracted_request_is_not_kept_although_it_is_computed_like_a_prompt() -> None:
    """The two need 9 and 7 pages of 12. The second is retracted before its answer is complete."""
    cache = small(12)
    requests = kept(make_requests([ask(A, tokens=0, output=18), ask(B, tokens=0, output=12)]), 1)
    outcome = serve(cache, requests)
    assert outcome.columns["retractions"].tolist() == [0, 1] and outcome.status.tolist() == [FINISHED, FINISHED]
    found = [page for node in cache.persistent.nodes(cache.gpu) for page in pages_of(node.runs)]
    assert sorted(found) == pages_of(requests[1].runs)
    assert any(node.depth >= 4 for node in cache.tree.root.descendants())


@pytest.mark.parametrize("mode", ["drain", "now"])
@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_a_reset_gives_everything_back(mode: str, command: str) -> None:
    requests = kept(make_requests([ask(A), ask(B, 50.0)]), 0)
    requests[1].resets = (Reset(mode, float("nan")),)
    assert played(command, requests, 7, "cpu").status.tolist() == [FINISHED, FINISHED]


@pytest.mark.parametrize("tiers", [(20,), (16, 40), (14, 40, 30)], ids=list(TIERS))
@pytest.mark.parametrize("seed", range(EXAMPLES // 3))
def test_exactly_the_prompts_of_those_that_finished_are_kept(tiers: tuple[int, ...], seed: int) -> None:
    random = Random(seed)
    requests = random_requests(seed, requests=40)
    for request in requests:
        request.persistent = random.random() < 0.15
        request.output_tokens *= 2  # so that requests are retracted, and compute their answers like prompts
    cache = small(*tiers)
    outcome = serve(cache, requests, max_batch_tokens=random.choice([5, 64]))
    ended = [one for one, status in zip(requests, outcome.status.tolist(), strict=True) if one.persistent and status == FINISHED]
    expected = {page for request in ended for page in pages_of(request.runs)}
    found = {page for node in cache.persistent.nodes(cache.gpu) for page in pages_of(node.runs)}
    assert found == expected
    assert (outcome.status == FINISHED).sum() > 5
