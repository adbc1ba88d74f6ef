"""Engines that fail, reckoned by hand. See small.py, small_cluster.py and, for prefill and decode apart, test_hand_over.py.

The cluster checks its caches after each failure, and that the engine's GPU is empty.
"""

from functools import partial
from typing import Any

import pytest

from kvsim.cluster.cluster import Failure
from kvsim.core.request import Reset
from kvsim.engine.outcome import FINISHED, Outcome
from kvsim.policies.routing.kv_aware import KVAware
from tests.cluster.small_cluster import Sent, SmallCluster, small_cluster
from tests.engine.small import PAGE_BYTES, ask, bytes_moved, counted, eager, hits, make_requests, seconds

A, B = "abcd", "efgh"


def failing(*failures: tuple[float, ...], **about: Any) -> SmallCluster:
    """Two engines on a host; ``failures`` are (engine, time, seconds until it is back; never by default)."""
    return small_cluster(**({"gpu": 8, "failures": [fail(*failure) for failure in failures]} | about))


def fail(engine: float, at_s: float, back_after_s: float = float("inf")) -> Failure:
    return Failure(engine=int(engine), at_s=at_s, back_after_s=back_after_s)


def engines_of(outcome: Outcome) -> list[list[int]]:
    """The engine that first admitted each request, and the one that ended it."""
    assert outcome.engine is not None and outcome.decoder is not None
    return [outcome.engine.tolist(), outcome.decoder.tolist()]


# --- what becomes of its requests ---


def test_a_request_that_is_computed_begins_again_elsewhere() -> None:
    """10 s are lost."""
    outcome = failing((0, 10)).serve(ask(A, output=3))
    assert outcome.ttft_s[0] == seconds(10 + 17)
    assert outcome.e2e_s[0] == seconds(10 + 17 + 2)
    assert engines_of(outcome) == [[0], [1]]
    assert [use.failures for use in outcome.engines] == [1, 0]
    assert [use.busy_s for use in outcome.engines] == seconds([0, 19])


def test_an_answer_continues_after_its_last_whole_token() -> None:
    """Tokens come at 17, 18, 19 and 20; the fifth is lost at 20.5. 20 tokens are computed again, and 4 are left to decode."""
    outcome = failing((0, 20.5)).serve(ask(A, output=9))
    assert outcome.ttft_s[0] == seconds(17)
    assert outcome.e2e_s[0] == seconds(20.5 + 21 + 4)


def test_the_only_engine_of_a_cluster_comes_back_to_all_that_have_arrived() -> None:
    """A waits from 10 on, B from 12; both are computed in one step of 34 s from 15 on."""
    cluster = failing((0, 10, 5), gpu=20, hosts=(0,))
    assert cluster.router is None
    assert cluster.serve(ask(A), ask(B, 12)).ttft_s.tolist() == seconds([15 + 34, 3 + 34])


def test_requests_that_wait_go_to_other_engines_too() -> None:
    """B has no room beside A on engine 0."""
    outcome = failing((0, 10), routing=Sent(0, 0)).serve(ask(A), ask(B))
    assert engines_of(outcome)[1] == [1, 1]
    assert outcome.ttft_s.tolist() == seconds([27, 44])


def test_samples_go_on_elsewhere_together() -> None:
    requests = make_requests([ask(A, output=6)])
    requests[0].samples = 3
    outcome = failing((0, 21), gpu=20).serve_requests(requests)
    assert outcome.status[0] == FINISHED and outcome.e2e_s[0] > 21 + 17


# --- what becomes of pages ---


@pytest.mark.parametrize(("cpu", "expected"), [(0, (0, 0, 0)), (20, (0, 4, 0))])
def test_it_comes_back_empty_and_finds_what_it_had_written_down(cpu: int, expected: tuple[int, int, int]) -> None:
    outcome = failing((0, 30, 5), cpu=cpu).serve(ask(A), ask(A, 40))
    assert engines_of(outcome) == [[0, 0], [0, 0]]
    assert hits(outcome, 1) == expected


def test_what_it_had_written_down_is_a_hit_for_others_and_hits_are_counted_once() -> None:
    """At 30, engine 0 has A's 4 pages. It fails at 30.5; engine 1 loads them in 4 s, and the last layer takes 0.25 s."""
    outcome = failing((0, 30.5), cpu=20).serve(ask(A), ask(A, 30))
    assert hits(outcome, 1) == (4, 0, 0)
    assert outcome.ttft_s[1] == seconds(0.5 + 4.25)
    assert bytes_moved(outcome)["loaded"] == 4 * PAGE_BYTES


def test_failing_while_it_loads() -> None:
    """Engine 0 has loaded 2 of 4 pages at 32. Engine 1 has all, and needs 1 s."""
    outcome = failing((0, 32), cpu=20, routing=Sent(1, 0)).serve(ask(A), ask(A, 30))
    assert hits(outcome, 1) == (0, 4, 0)
    assert outcome.ttft_s[1] == seconds(2 + 1)
    assert bytes_moved(outcome)["loaded"] == 2 * PAGE_BYTES


def test_failing_with_a_prefetch_under_way() -> None:
    """B has left one page of A in the CPU tier. Engine 0 has fetched one of the others at 103, for nobody."""
    prefetch = partial(eager, stop="wait_complete")
    cluster = failing((0, 103), cpu=5, disk=20, prefetch=prefetch, routing=Sent(1, 1, 0), gpu=12)
    outcome = cluster.serve(ask(A), ask(B, 40), ask(A, 100))
    assert counted(outcome) == {"fetched": 1, "wasted": 1}
    assert (outcome.status == FINISHED).all()


# --- resets ---


@pytest.mark.parametrize("mode", ["drain", "now"])
def test_a_failure_during_a_reset(mode: str) -> None:
    """B runs when the cache is reset at 25. Engine 0 fails at 30; with a drain, B waits for the reset on engine 1.

    It is computed there from 30 to 47, and A has room when B's pages have been written down, at 51.
    """
    requests = make_requests([ask(A), ask(B, 22, output=3), ask(A, 25), ask(A, 90)])
    requests[2].resets = (Reset(mode, 25.0),)
    outcome = failing((0, 30), cpu=20).serve_requests(requests)
    assert outcome.ttft_s[1:3].tolist() == seconds([8 + 17, 51 - 25 + 17])
    assert hits(outcome, 2) == (0, 0, 0)
    assert hits(outcome, 3) == (4, 0, 0)


def test_a_drain_when_no_engine_is_up() -> None:
    cluster = failing((0, 10, 10), hosts=(0,), settings={"reset_at_s": [12.0]})
    assert cluster.serve(ask(A), ask(A, 60)).ttft_s.tolist() == seconds([20 + 17, 1])


# --- prefill and decode apart ---


def divided(*failures: tuple[float, ...], **about: Any) -> SmallCluster:
    """Prefill engines 0 and 1, decode engines 2 and 3, with ``overlap: none``: a prompt leaves from 17 to 21.25."""
    form = {"gpu": 20, "hosts": (0,) * 4, "prefill": 2, "settings": {"overlap": "none"}}
    return failing(*failures, **(form | about))


def test_a_decode_engine_fails_while_a_prompt_for_it_is_computed() -> None:
    """The step goes on to 17, for nothing; then the prompt is computed again, for engine 3."""
    outcome = divided((2, 10)).serve(ask(A, output=3))
    assert outcome.ttft_s[0] == seconds(17 + 17 + 4.25)
    assert engines_of(outcome) == [[0], [3]]


@pytest.mark.parametrize("overlap", ["none", "layerwise"])
def test_a_prefill_engine_fails_while_it_sends(overlap: str) -> None:
    """The first token had not arrived: it comes from the other prefill engine."""
    at_s, left_s = (19, 4.25) if overlap == "none" else (17.5, 1.0625)
    outcome = divided((0, at_s), settings={"overlap": overlap}).serve(ask(A, output=3))
    assert outcome.ttft_s[0] == seconds(at_s + 17 + left_s)
    assert outcome.e2e_s[0] == seconds(at_s + 17 + left_s + 2)


def test_a_decode_engine_fails_while_it_decodes() -> None:
    """At 22.5, two tokens have come. Of these 19 tokens, engine 0 has 16; it computes 3, sends all, and 6 more are decoded."""
    outcome = divided((2, 22.5)).serve(ask(A, output=9))
    assert outcome.ttft_s[0] == seconds(21.25)
    assert outcome.e2e_s[0] == seconds(22.5 + 3 + 4.75 + 6)


def test_a_router_that_weighs_caches_learns_that_a_prompt_is_computed_the_second_time_too() -> None:
    """A is lost in decoding and computed again on engine 1 by 38; from then on it no longer counts as a prompt to compute."""
    routing = KVAware()
    cluster = failing((0, 20.5, 1), gpu=40, hosts=(0, 0), routing=routing)
    cluster.run(make_requests([ask(A, output=9), ask(B, 43, output=2)]))
    assert all(active.total_prefill_tokens == 0 for active in routing._active.values())
