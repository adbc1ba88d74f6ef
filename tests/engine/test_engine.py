"""The engine: who runs, who waits, who is sent back, and what is counted. See small.py for the round numbers."""

from functools import partial
from typing import Any

import pytest

from kvsim.engine.engine import EngineSettings
from kvsim.engine.outcome import FINISHED, REJECTED
from kvsim.policies.placement.store_threshold import StoreThreshold
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from tests.engine.small import HARDWARE, PAGE_BYTES, ask, eager, hits, seconds, small_engine

A, B, C = "abcd", "efgh", "ijkl"


# --- beginning and end ---


def test_without_requests_nothing_happens() -> None:
    outcome = small_engine(gpu=5).serve()
    assert len(outcome.status) == 0 and outcome.simulated_s == 0


def test_progress_counts_ended_requests() -> None:
    told: list[int] = []
    engine = small_engine(gpu=5)
    requests = engine.serve(ask("a"), ask("b"), ask(A + B, 50)).requests
    small_engine(gpu=5).run(requests, told.append)
    assert told == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_batch_tokens": 0}, "max_batch_tokens must be at least 1, not 0"),
        ({"max_running_requests": 0}, "max_running_requests must be at least 1, not 0"),
        ({"overlap": "some"}, "overlap must be one of layerwise, none, not some"),
        ({"links": "slow"}, "links must be one of fifo, shared, not slow"),
    ],
)
def test_a_setting_out_of_range_names_itself(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        EngineSettings(**settings)  # type: ignore[arg-type]


# --- rejected requests and closed loops ---


def test_a_request_that_can_never_fit_is_rejected_and_counts_no_hits() -> None:
    outcome = small_engine(gpu=5, cpu=20).serve(ask(A), ask("abcdefgh", 100), ask(A, 200))
    assert outcome.status.tolist() == [FINISHED, REJECTED, FINISHED]
    assert hits(outcome, 1) == (0, 0, 0) and hits(outcome, 2) == (4, 0, 0)
    assert outcome.ttft_s.tolist() == seconds([17, float("nan"), 1])
    assert outcome.e2e_s.tolist() == seconds([17, float("nan"), 1])


def test_an_answer_that_can_never_fit_is_rejected_too() -> None:
    outcome = small_engine(gpu=5).serve(ask(A, output=3), ask(A, 100, output=4))
    assert outcome.status.tolist() == [FINISHED, REJECTED]


def test_in_a_closed_loop_the_delay_counts_from_the_finish() -> None:
    outcome = small_engine(gpu=20).serve(ask("a", 10, output=3), ask("ab", after=0, delay_s=4), ask("abc", after=1, delay_s=0.5))
    assert outcome.e2e_s.tolist() == seconds([5 + 2, 5, 5])
    assert outcome.arrival_s.tolist() == seconds([10, 10 + 7 + 4, 21 + 5 + 0.5])
    assert [hits(outcome, index) for index in (1, 2)] == [(1, 0, 0), (2, 0, 0)]


def test_the_followers_of_a_rejected_request_arrive() -> None:
    outcome = small_engine(gpu=5).serve(ask("abcdefgh", 10), ask("a", after=0, delay_s=3))
    assert outcome.status.tolist() == [REJECTED, FINISHED]
    assert outcome.arrival_s.tolist() == seconds([10, 13])


def test_the_order_of_arrival_is_the_order_of_admission_even_if_a_later_request_would_fit() -> None:
    outcome = small_engine(gpu=7).serve(ask("pqrs", output=8), ask(A, 1), ask("t", 2))
    assert outcome.ttft_s.tolist() == seconds([17, (17 + 7 - 1) + 17 + 5, (17 + 7 - 2) + 17 + 5])


# --- requests that have pages in common ---


SECOND_LOOK = ask(A), ask(B, 100), ask(A, 200)
"""With five pages on the GPU, the third request loads A."""


def test_in_a_closed_loop_who_arrives_first_is_served_first_whatever_its_place_in_the_trace() -> None:
    """The second request of the trace arrives at 10 s, the last one at 8 s; the third runs from 6 to 23 s."""
    outcome = small_engine(gpu=64, max_running_requests=1).serve(
        ask("a"), ask("ab", after=0, delay_s=5.0), ask("cdef", at=6.0), ask("x", at=8.0)
    )
    assert outcome.arrival_s.tolist() == seconds([0.0, 10.0, 6.0, 8.0])
    assert outcome.columns["queue_s"].tolist() == seconds([0.0, 18.0, 0.0, 15.0])


def test_in_a_closed_loop_who_arrived_last_is_retracted_first() -> None:
    """Both answers grow to 6 pages of 9: the second request of the trace arrives last."""
    small = small_engine(gpu=9)
    outcome = small.serve(ask("a"), ask("b", after=0, delay_s=3.0, output=20), ask("c", at=7.0, output=20))
    assert outcome.arrival_s.tolist() == seconds([0.0, 8.0, 7.0])
    assert outcome.columns["retractions"].tolist() == [0, 1, 0]


def test_a_request_shares_a_load_that_is_under_way() -> None:
    asks = ask(A), ask("efghijkl", 100), ask(A, 200), ask(A, 201)
    outcome = small_engine(gpu=9, cpu=30, overlap="none").serve(*asks)
    assert outcome.links["cpu-gpu"].bytes == 4 * PAGE_BYTES
    assert outcome.ttft_s[2:].tolist() == seconds([4 + 2, 3 + 2])
    assert hits(outcome, 2) == (0, 4, 0)
    assert hits(outcome, 3) == (4, 0, 0)


def test_a_shared_load_holds_up_the_layers_of_both() -> None:
    asks = ask(A), ask("efghijkl", 100), ask(A, 200), ask(A, 200)
    outcome = small_engine(gpu=9, cpu=30).serve(*asks)
    assert outcome.ttft_s[2:].tolist() == seconds([max(4 / 4 + 2, 4 + 2 / 4)] * 2)


def test_of_pages_that_two_requests_compute_at_once_one_copy_is_kept() -> None:
    engine = small_engine(gpu=10)
    outcome = engine.serve(ask(A), ask(A))
    assert outcome.ttft_s.tolist() == seconds([34, 34])
    assert hits(outcome, 1) == (0, 0, 0)
    assert outcome.tiers["gpu"].peak_pages == 10
    assert engine.cache.gpu.pool.free == 10 - 4


def test_pages_that_leave_for_a_request_that_was_first_are_not_there_for_the_next() -> None:
    asks = ask(A), ask(B, 100), ask(A, 101)
    outcome = small_engine(gpu=5, cpu=20, placement=WriteBack).serve(*asks)
    assert outcome.ttft_s[1] == seconds(4 + 17)
    assert outcome.ttft_s[2] == seconds((121 - 101) + 4 + max(4 / 4 + 1, 4 + 1 / 4))


def test_a_request_whose_room_was_taken_back_has_its_hits_counted_when_it_runs() -> None:
    slowly = {"flops_per_s": HARDWARE["flops_per_s"] / 10}
    asks = ask("xy", tokens=0), ask(A, 100, tokens=0), ask("xyuvw", 300, tokens=11), ask(A, 301, tokens=0)
    engine = small_engine(gpu=8, cpu=40, placement=WriteBack, recompute_last_token=False, hardware=slowly)
    outcome = engine.serve(*asks)
    # The third request is to have the room of A, which is written back until 304. The fourth one uses A from 301 to 311.
    assert outcome.placement["revived_pages"] == 4
    assert outcome.ttft_s[2:].tolist() == seconds([(311 - 300) + 10 * (3 * 4 + 11), 10])
    assert hits(outcome, 2) == (2, 0, 0)
    assert hits(outcome, 3) == (4, 0, 0)


def test_a_page_that_is_dropped_takes_along_what_follows_it_even_on_its_way_to_disk() -> None:
    asks = ask("a"), ask("ab", 100), ask("pqr", 200), ask("w", 213.5)
    outcome = small_engine(gpu=5, cpu=3, disk=20, placement=[WriteThrough, WriteBack]).serve(*asks)
    # At 213, p, q and r push a and b out of the CPU tier: a is on the GPU only, and b on its way to the disk until 215.
    # w needs its room: a goes, and b with it, since nothing could reach b any more.
    assert outcome.ttft_s[3] == seconds(5)


def test_a_request_is_admitted_only_when_the_step_has_tokens_for_it() -> None:
    outcome = small_engine(gpu=20, max_batch_tokens=17).serve(ask(A), ask(A))
    # The first prompt fills the step. By the time the second one is matched, it is cached.
    assert hits(outcome, 1) == (4, 0, 0)
    assert outcome.ttft_s.tolist() == seconds([17, 17 + 1])
    outcome = small_engine(gpu=20, max_batch_tokens=18).serve(ask(A), ask(A))
    assert hits(outcome, 1) == (0, 0, 0)


def test_a_best_effort_prefetch_goes_on_while_the_step_is_full() -> None:
    before = ask("ab"), ask("cdefgh", 100), ask("ijklmn", 200)
    settings = {"gpu": 10, "cpu": 6, "disk": 40, "max_batch_tokens": 8}
    outcome = small_engine(**settings, prefetch=eager(stop="best_effort")).serve(*before, ask("uvwx", 300), ask("ab", 305))
    # u to x take steps of 8, 8 and 1 tokens. The request that came at 305 is admitted to the third one, at 316, not to the
    # second one, at 308, when only one of its pages had been read.
    assert hits(outcome, 4) == (0, 0, 2)


def test_what_was_fetched_for_a_waiting_request_does_not_leave_before_what_was_used_earlier() -> None:
    before = ask("ab"), ask("cdefgh", 100), ask("ijklmn", 200)
    outcome = small_engine(gpu=10, cpu=6, disk=40, prefetch=eager()).serve(*before, ask("uvwx", 300), ask("ab", 300.5))
    # a and b, last used at 0, come from the disk at 304.5, in place of m and n. At 317 u to x need four pages of the CPU tier:
    # those of i to l, which were used at 200.
    assert hits(outcome, 4) == (0, 0, 2)
    assert outcome.prefetch["fetched_pages"] == outcome.prefetch["used_pages"] == 2


# --- retraction ---


def test_a_retracted_request_resumes_with_what_is_cached_of_its_prompt_and_computes_its_answer_anew() -> None:
    outcome = small_engine(gpu=5).serve(ask("a", output=12), ask("b", output=12))
    # Both hold two of the five pages, 8 tokens, after 3 steps of 2 s, and need a third one. The first request gets it, and takes
    # 8 more steps alone. Then the second one needs 5 + 4 tokens, 4 of them cached, which gives its fifth token, and 7 more steps.
    first_ends = 10 + 3 * 2 + 8 * 1
    second_ends = first_ends + (5 + 4 - 4) * 1 + 7 * 1
    assert outcome.e2e_s.tolist() == seconds([first_ends, second_ends])
    assert outcome.hit_pages.sum() == 0


def test_hits_and_time_to_first_token_of_a_retracted_request_are_those_of_its_first_run() -> None:
    outcome = small_engine(gpu=6).serve(ask("ab"), ask("ax", 100, output=8), ask("ab", 100, output=8))
    assert outcome.retractions >= 1
    assert [hits(outcome, index) for index in (1, 2)] == [(1, 0, 0), (2, 0, 0)]
    assert outcome.ttft_s[1:].tolist() == seconds([5 + 1, 5 + 1])
    assert outcome.status.tolist() == [FINISHED] * 3


@pytest.mark.parametrize("placement", [WriteThroughSelective, partial(StoreThreshold, k=2)])
def test_a_retracted_request_uses_and_offers_its_pages_once_however_often_it_is_admitted(placement: Any) -> None:
    asks = ask("a", output=12), ask("b", output=12)
    outcome = small_engine(gpu=5, cpu=8, placement=placement).serve(*asks)
    assert outcome.retractions == 1 and outcome.placement["written_pages"] == 0
    outcome = small_engine(gpu=5, cpu=8, placement=placement).serve(*asks, ask("b", 100))
    assert outcome.retractions == 1 and outcome.placement["written_pages"] == 1


def test_no_request_is_admitted_after_a_retraction_until_one_has_ended() -> None:
    outcome = small_engine(gpu=5).serve(ask("a", output=12), ask("b", output=12), ask("", 17, tokens=1))
    assert outcome.retractions == 1
    assert outcome.ttft_s[2] == seconds((24 - 17) + (5 + 1))


# --- what is counted ---


def test_bytes_of_a_link_are_pages_times_the_bytes_of_a_page() -> None:
    outcome = small_engine(gpu=5, cpu=4, disk=40, overlap="none").serve(*SECOND_LOOK)
    links = {name: use.bytes // PAGE_BYTES for name, use in outcome.links.items()}
    # A and B are written through twice each; A comes back from the disk, and stays in the CPU tier.
    assert links == {"gpu-cpu": 8, "cpu-disk": 8, "disk-cpu": 4, "cpu-gpu": 4}
    assert outcome.placement["written_pages"] == 16
    assert outcome.placement["loaded_pages"] == outcome.placement["fetched_pages"] == 4
    assert outcome.links["disk-cpu"].busy_s == seconds(8) and outcome.links["cpu-gpu"].busy_s == seconds(4)


def test_a_prefetch_that_is_not_loaded_is_wasted() -> None:
    policy = eager(load_min_tokens=100, stop="wait_complete")
    outcome = small_engine(gpu=5, cpu=4, disk=40, prefetch=policy).serve(*SECOND_LOOK)
    assert outcome.prefetch["fetched_pages"] == outcome.prefetch["wasted_pages"] == 4
    assert hits(outcome, 2) == (0, 0, 0)
