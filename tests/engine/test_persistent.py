"""Persistent prompts: their pages stay on the GPU once their requests have ended, and take room from all others.

See small.py for the round numbers: a page has 4 tokens.
"""

from collections.abc import Sequence
from typing import Any

import pytest

import kvsim
from kvsim.cluster.cluster import Failure
from kvsim.core.request import Request, Reset
from kvsim.engine.outcome import FINISHED, REJECTED, Outcome
from kvsim.errors import UsageError
from kvsim.policies.checkpoint.every_page import EveryPage
from kvsim.trace.base import Trace
from tests.cluster.small_cluster import Sent, small_cluster
from tests.engine.small import Ask, ask, hits, make_requests, small_engine
from tests.states.small_hybrid import hybrid
from tests.workloads import conversations

A, B, C = "abcd", "efgh", "ijkl"


def asked(asks: Sequence[Ask], *persistent: int) -> list[Request]:
    """The requests, those of these numbers with persistent prompts."""
    requests = make_requests(asks)
    for number in persistent:
        requests[number].persistent = True
    return requests


def played(command: str, requests: list[Request], *overrides: str) -> Outcome:
    trace = Trace(name="small", requests=requests, page_tokens=4, block_tokens=None)
    outcome: Outcome = getattr(kvsim, command)(trace, "model=tiny", *overrides).outcome
    return outcome


def simulated(requests: list[Request], gpu: int) -> tuple[list[int], int]:
    """The status of each request, and the pages that are still held when all have ended."""
    engine = small_engine(gpu=gpu)
    outcome = engine.run(requests)
    engine.cache.check()
    return outcome.status.tolist(), engine.gpu.pool.capacity - engine.gpu.available_pages


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("apart_s", [0.0, 1000.0], ids=["together", "apart"])
def test_as_many_are_served_as_fit_beside_those_before_them(command: str, apart_s: float) -> None:
    """Each prompt takes 4 pages of 12, and its answer a fifth while it runs; the two that are kept leave 4."""
    asks = [ask(word, at * apart_s, tokens=0, output=2) for at, word in enumerate((A, B, C))]
    outcome = played(command, asked(asks, 0, 1, 2), "tiers.gpu.capacity=12pages")
    assert outcome.status.tolist() == [FINISHED, FINISHED, REJECTED]


@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_pages_of_16_tokens(command: str) -> None:
    prompts = [{"token_ids": list(range(first, first + 64)), "output_length": 2} for first in (0, 100, 200)]
    trace = kvsim.trace_from_tokens([p["token_ids"] for p in prompts], output_tokens=2, page_tokens=16)  # type: ignore[misc]
    for request in trace.requests:
        request.persistent = True
    for capacity, served in ((12, 2), (13, 3), (8, 1)):
        result = getattr(kvsim, command)(trace, f"tiers.gpu.capacity={capacity}pages")
        assert result.outcome.status.tolist() == [FINISHED] * served + [REJECTED] * (3 - served)


def test_in_a_cluster_each_engine_keeps_what_it_has_served() -> None:
    requests = asked([ask(word, tokens=0, output=2) for word in (A, A, B, B, C, C)], 0, 1, 2, 3, 4, 5)
    outcome = played("simulate", requests, "tiers.gpu.capacity=12pages", "cluster.engines=2")
    assert outcome.status.tolist() == [FINISHED] * 4 + [REJECTED] * 2
    assert outcome.engine is not None and outcome.engine.tolist() == [0, 1, 0, 1, -1, -1]


def test_prefill_and_decode_engines_both_keep_them() -> None:
    """Each keeps a prompt when it has done its part. The third answer finds no room to decode beside two prompts."""
    requests = asked([ask(word, tokens=0, output=4) for word in (A, B, C)], 0, 1, 2)
    cluster = small_cluster(gpu=20, decode_gpu=12, prefill=1, routing=Sent(0), decode_routing=Sent(1))
    outcome = cluster.run(requests)
    cluster.check()
    assert outcome.status.tolist() == [FINISHED, FINISHED, REJECTED]
    assert [engine.gpu.pool.capacity - engine.gpu.available_pages for engine in cluster.engines] == [12, 8]


def test_a_request_that_is_rejected_keeps_nothing_and_has_no_times() -> None:
    """The third is computed and then retracted for room; what it had goes to the fourth."""
    requests = asked([*(ask(word, tokens=0, output=2) for word in (A, B, C)), ask("qrs", 50.0)], 0, 1, 2)
    engine = small_engine(gpu=12)
    outcome = engine.run(requests)
    engine.cache.check()
    assert outcome.retractions and outcome.status.tolist() == [FINISHED, FINISHED, REJECTED, FINISHED]
    assert engine.gpu.pool.capacity - engine.gpu.available_pages == 8
    numbers = (outcome.ttft_s[2], outcome.tpot_s[2], outcome.e2e_s[2], *outcome.phases_s[2], outcome.engine[2])
    assert [str(number) for number in numbers] == ["nan"] * 6 + ["-1"] and hits(outcome, 2) == (0, 0, 0)


def test_a_prompt_that_repeats_what_is_kept_needs_no_room_for_it() -> None:
    assert simulated(asked([ask(A), ask(A + "xyz", 100.0), ask(A + "wxyz", 200.0)], 0), gpu=8)[0] == [
        FINISHED,
        FINISHED,
        REJECTED,
    ]


def test_prompts_that_share_pages_keep_them_once() -> None:
    """Beside "abcdef" and "abcdxy", 8 pages of 12 are taken."""
    status, kept = simulated(asked([ask("abcdef"), ask("abcdxy"), ask("pqr", 100.0), ask("stuv", 200.0)], 0, 1), gpu=12)
    assert status == [FINISHED, FINISHED, FINISHED, REJECTED] and kept == 8


def test_a_request_that_runs_is_rejected_if_what_is_kept_leaves_it_no_room_to_end() -> None:
    """The short answer ends first; its 4 pages leave the long one 8 of 12, and it needs 9."""
    for first, second in ((2, 18), (18, 2)):
        status, kept = simulated(asked([ask(A, tokens=0, output=first), ask(B, tokens=0, output=second)], 0, 1), gpu=12)
        assert sorted(status) == [FINISHED, REJECTED] and status[first > second] == FINISHED and kept == 4


def test_only_the_prompt_is_kept_and_not_its_answer() -> None:
    requests = asked([ask("ab", tokens=0, output=9)], 0)
    last = requests[0].runs[-1]
    requests[0].output_runs = ((last[0] + last[1], 2),)
    engine = small_engine(gpu=12, cache_output=True)
    engine.run(requests)
    engine.cache.check()
    assert engine.gpu.held_pages == 4 and engine.gpu.evictable_pages == 2


@pytest.mark.parametrize("mode", ["drain", "now"])
def test_a_reset_gives_everything_back(mode: str) -> None:
    requests = asked([ask(A), ask(B, 50.0)], 0)
    requests[1].resets = (Reset(mode, float("nan")),)
    status, kept = simulated(requests, gpu=7)
    assert status == [FINISHED, FINISHED] and kept == 0


def test_an_engine_that_fails_loses_them() -> None:
    cluster = small_cluster(gpu=7, hosts=(0,), failures=[Failure(engine=0, at_s=30.0, back_after_s=5.0)])
    outcome = cluster.run(asked([ask(A), ask(B, 20.0), ask(B, 50.0)], 0))
    cluster.check_idle()
    assert outcome.status.tolist() == [FINISHED, REJECTED, FINISHED]


def test_states_are_saved_as_far_as_kept_prompts_leave_room() -> None:
    """A state takes 2 pages of 8; beside the 3 that are kept, and 4 of its own, a prompt can save none."""
    cache = hybrid(EveryPage(), gpu=8, shared_pages=2)
    kept = cache.run("abc", persistent=True)
    cache.finish(kept)
    other = cache.look("wxyz")
    assert cache.kept_pages(other) == 3
    assert cache.admit(other, 4, 100.0)
    cache.release(other)
    cache.check()


def test_bounds_refuse_persistent_prompts() -> None:
    requests = conversations()
    requests[3].persistent = True
    trace = Trace(name="small", requests=requests, page_tokens=16, block_tokens=None)
    capacity: Any = "tiers.gpu.capacity=40pages"
    with pytest.raises(UsageError, match="eviction: Belady is not an exact bound for a trace that has persistent prompts"):
        kvsim.replay(trace, "eviction=belady", capacity)
    with pytest.raises(UsageError, match="kvsim curve: the trace has persistent prompts, which no curve accounts for"):
        kvsim.curve(trace)
    assert not kvsim.replay(trace, capacity).record.get("bounds")
