"""The clock means something: every time here follows from one line of arithmetic. See small.py for the round numbers."""

from functools import partial
from typing import Any

import pytest

from kvsim.engine.outcome import FINISHED, Outcome
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.adaptive import AdaptivePrefetch
from tests.engine.small import PAGE_BYTES, STEP_READS, Ask, ask, counted, eager, hits, seconds, small_engine

A, B, C = "abcd", "efgh", "ijkl"
"""Prompts of four pages and a token: 17 s to compute, 4 s to load, 8 s to read from disk; each needs five pages."""
A_IS_BELOW = (ask(A, 0), ask(B, 100))
"""In a GPU of five pages, the second request pushes out what the first one left."""


def ttft(*asks: Ask, **settings: object) -> list[float]:
    """Seconds from each arrival to the first token."""
    return served(*asks, **settings).ttft_s.tolist()


def served(*asks: Ask, **settings: object) -> Outcome:
    return small_engine(**settings).serve(*asks)  # type: ignore[arg-type]


# --- computing ---


def test_every_chunk_pays_the_overhead_of_a_step() -> None:
    overhead = {"step_overhead_s": 0.5}
    assert ttft(ask(A), gpu=5, hardware=overhead) == seconds([17 + 0.5])
    assert ttft(ask(A), gpu=5, hardware=overhead, max_batch_tokens=5) == seconds([17 + 4 * 0.5])


def test_prompts_that_fit_into_one_step_have_their_first_token_together() -> None:
    assert ttft(ask(A), ask(B), gpu=10) == seconds([17 + 17, 17 + 17])


def test_prompts_that_do_not_fit_into_one_step_share_the_steps_in_order() -> None:
    assert ttft(ask(A), ask(B), gpu=10, max_batch_tokens=20) == seconds([20, 20 + 14])


def test_a_request_that_finds_all_running_waits_for_the_end_of_one() -> None:
    assert ttft(ask(A), ask(B, 10), gpu=10, max_running_requests=1) == seconds([17, 7 + 17])


def test_the_last_token_is_computed_even_if_its_page_is_there() -> None:
    again = ask(A), ask(A, 100, tokens=0)
    outcome = served(*again, gpu=10)
    assert hits(outcome, 1) == (3, 0, 0) and outcome.ttft_s[1] == seconds(4)
    outcome = served(*again, gpu=10, recompute_last_token=False)
    assert hits(outcome, 1) == (4, 0, 0) and outcome.ttft_s[1] == seconds(1)


# --- a load ---


def test_a_load_without_overlap_comes_before_computing() -> None:
    outcome = served(*A_IS_BELOW, ask(A, 200), gpu=5, cpu=20, overlap="none")
    assert outcome.ttft_s[2] == seconds(4 + 1)
    assert hits(outcome, 2) == (0, 4, 0)


def test_a_load_that_is_longer_than_computing_hides_all_but_the_last_layer_of_it() -> None:
    assert ttft(*A_IS_BELOW, ask(A, 200), gpu=5, cpu=20)[2] == seconds(max(4 / 4 + 1, 4 + 1 / 4))


def test_a_load_that_is_shorter_than_computing_delays_it_by_its_first_layer() -> None:
    asks = ask(A), ask("efghi", 100), ask(A, 200, tokens=7)
    assert ttft(*asks, gpu=6, cpu=20)[2] == seconds(max(4 / 4 + 7, 4 + 7 / 4))


def test_chunks_after_the_first_find_everything_loaded() -> None:
    asks = ask(A), ask("efghi", 100), ask(A, 200, tokens=7)
    assert ttft(*asks, gpu=6, cpu=20, max_batch_tokens=2)[2] == seconds(max(4 / 4 + 2, 4 + 2 / 4) + 5)


def test_latency_is_paid_once_a_transfer() -> None:
    latency = {"host_latency_s": 0.25}
    assert ttft(*A_IS_BELOW, ask(A, 200), gpu=5, cpu=20, overlap="none", hardware=latency)[2] == seconds(0.25 + 4 + 1)


# --- several transfers on the links ---


TWO_LOADS = ask(A), ask(B, 100), ask("ijklmnopq", 200), ask(A, 300), ask(B, 300)
"""The third request needs all ten pages, so that the last two have four pages each to load."""


def test_one_step_over_two_loads_waits_for_both() -> None:
    fifo = ttft(*TWO_LOADS, gpu=10, cpu=30)[3:]
    assert fifo == seconds([max(4 + 4 / 4 + 2, 8 + 2 / 4)] * 2)
    shared = ttft(*TWO_LOADS, gpu=10, cpu=30, links="shared")[3:]
    assert shared == seconds([max(8 / 4 + 2, 8 + 2 / 4)] * 2)


@pytest.mark.parametrize(("total", "slowdown"), [(2, 1), (1.5, 1 / 0.75), (1, 2)])
def test_both_directions_at_once_are_limited_to_the_total(total: float, slowdown: float) -> None:
    both = {"both_directions_bytes_per_s": total * PAGE_BYTES}
    outcome = served(*BOTH_WAYS, gpu=16, cpu=40, overlap="none", hardware=both)
    assert hits(outcome, 3) == (0, 4, 0)
    assert outcome.ttft_s[3] == seconds(4 * slowdown + 1)


BOTH_WAYS = ask(A), ask("efghijklmnopqrs", 100), ask("tuvw", 200), ask(A, 217)
"""The third request has been computed, and is written down, when the fourth one loads four pages."""


# --- writing down ---


def test_with_write_back_room_is_there_only_when_the_bytes_are_out() -> None:
    assert ttft(*A_IS_BELOW, gpu=5, cpu=20, placement=WriteBack) == seconds([17, 4 + 17])


def test_with_write_through_eviction_frees_at_once() -> None:
    assert ttft(*A_IS_BELOW, gpu=5, cpu=20, placement=WriteThrough) == seconds([17, 17])


def test_what_write_back_wrote_early_does_not_have_to_be_waited_for() -> None:
    early = partial(WriteBack, watermark=0.1)
    assert ttft(*A_IS_BELOW, gpu=5, cpu=20, placement=early) == seconds([17, 17])
    assert ttft(ask(A), ask(B, 18), gpu=5, cpu=20, placement=early)[1] == seconds((4 - 1) + 17)


def test_write_back_writes_early_what_is_above_the_watermark_and_no_page_more() -> None:
    early = partial(WriteBack, watermark=0.2)  # one of five pages: b, c and d are written, and a only when it leaves
    assert ttft(*A_IS_BELOW, gpu=5, cpu=20, placement=early) == seconds([17, 1 + 17])


def test_a_write_back_chain_frees_the_lowest_tier_first() -> None:
    chain = ask(A), ask(B, 100), ask(C, 200)
    assert ttft(*chain, gpu=5, cpu=4, disk=20, placement=WriteBack) == seconds([17, 4 + 17, 8 + 4 + 17])


# --- the disk, and prefetch ---


ON_DISK = {"gpu": 5, "cpu": 4, "disk": 40, "overlap": "none"}
"""Write-through: after A and B, only the disk has A."""


def test_a_layer_is_computed_only_after_the_disk_has_been_read() -> None:
    assert ttft(*A_IS_BELOW, ask(A, 200), gpu=5, cpu=4, disk=40)[2] == seconds(8 + max(4 / 4 + 1, 4 + 1 / 4))


BUSY = ask(C, 200, output=20)
"""Keeps the engine busy until 200 + 17 + 19 = 236."""
ONE_AT_A_TIME = ON_DISK | {"max_running_requests": 1, "cpu": 8}
ONLY_DISK_HAS_A = ask(A, 0), ask(B, 50), ask("wxyz", 100)


def test_a_prefetch_wins_what_it_reads_while_the_request_waits() -> None:
    asks = *ONLY_DISK_HAS_A, BUSY, ask(A, 210)
    late = served(*asks, **ONE_AT_A_TIME | {"gpu": 10})
    early = served(*asks, **ONE_AT_A_TIME | {"gpu": 10}, prefetch=eager())
    assert hits(late, 4) == hits(early, 4) == (0, 0, 4)
    assert late.ttft_s[4] == seconds(236 - 210 + 8 + 4 + 1)
    assert early.ttft_s[4] == seconds(236 - 210 + 4 + 1)
    assert early.prefetch["fetched_pages"] == early.prefetch["used_pages"] == 4


def test_a_prefetch_that_is_waited_for_delays_a_request_that_could_have_run() -> None:
    outcome = served(*A_IS_BELOW, ask(A, 200), **ON_DISK, prefetch=eager(stop="wait_complete"))
    assert outcome.ttft_s[2] == seconds(8 + 4 + 1)
    slow = {"disk_read_bytes_per_s": PAGE_BYTES / 20}
    outcome = served(*A_IS_BELOW, ask(A, 200), **ON_DISK, hardware=slow, prefetch=eager(stop="wait_complete"))
    assert outcome.ttft_s[2] == seconds(80 + 4 + 1) and 80 + 4 + 1 > 17


def test_a_prefetch_that_times_out_keeps_the_whole_pages_that_have_arrived() -> None:
    outcome = served(*A_IS_BELOW, ask(A, 200), **ON_DISK, prefetch=eager(stop="timeout", base_s=5.0))
    assert hits(outcome, 2) == (0, 0, 5 // 2)
    assert outcome.ttft_s[2] == seconds(5 + 2 + (4 - 2) * 4 + 1)
    assert outcome.links["disk-cpu"].bytes == 2.5 * PAGE_BYTES
    assert outcome.prefetch["fetched_pages"] == outcome.prefetch["used_pages"] == 2


def test_a_best_effort_prefetch_loses_to_an_idle_engine() -> None:
    outcome = served(*A_IS_BELOW, ask(A, 200), **ON_DISK, prefetch=eager(stop="best_effort"))
    assert hits(outcome, 2) == (0, 0, 0)
    assert outcome.ttft_s[2] == seconds(17)


def test_a_best_effort_prefetch_reads_as_long_as_the_engine_is_busy() -> None:
    asks = *ONLY_DISK_HAS_A, BUSY, ask(A, 231)
    outcome = served(*asks, **ONE_AT_A_TIME | {"gpu": 10}, prefetch=eager(stop="best_effort"))
    assert hits(outcome, 4) == (0, 0, (236 - 231) // 2)
    assert outcome.ttft_s[4] == seconds((236 - 231) + 2 + (4 - 2) * 4 + 1)


CPU_IN_USE = ask(A), ask(B, 100), ask("w", 200, tokens=15), ask(B, 300), ask(A, 301)
"""When A comes back, the load of B (300 to 304) keeps four of the five CPU pages in use; A is on disk."""


def test_what_memory_leaves_out_of_a_prefetch_is_counted() -> None:
    policy = AdaptivePrefetch(min_tokens=1, in_flight_fraction=1.0, load_min_tokens=0, stop="wait_complete")
    counts = served(*CPU_IN_USE, **ON_DISK | {"cpu": 5}, prefetch=policy).prefetch
    assert (counts["fetched_pages"], counts["used_pages"], counts["refused_by_memory_pages"]) == (1, 1, 3)


TWO_WAIT = ask(A), ask(B, 50), ask("wxyz", 100), ask("pqrs", 150), BUSY, ask(A, 205), ask(B, 206)
"""The CPU tier has room for 8 pages; A and B are on disk when they come back, one second after the other."""


def test_pages_in_flight_count_for_the_rate_limit_until_the_turn_of_their_request() -> None:
    """The fetch of A ends at 213. Its request runs from 236 on, and B is asked for before that."""
    asks = *TWO_WAIT[:-1], ask(B, 220)
    outcome = served(*asks, **ONE_AT_A_TIME | {"gpu": 10}, prefetch=eager(in_flight_fraction=0.5))
    assert outcome.prefetch["refused_by_rate_limit_pages"] == 4


WAITS_LONG = (
    *[ask(word, 50 * at) for at, word in enumerate((A, B, "wxyz", "pqrs", "1234", "5678"))],
    ask(C, 300, output=20), ask("mnop", 301), ask("qrst", 302), ask(A, 315),
)  # fmt: skip
"""A is on disk when it comes back. While it waits, three others are computed and push others out of the GPU."""


@pytest.mark.parametrize("cpu", [4, 5])
@pytest.mark.parametrize("placement", [WriteThrough, WriteBack, Exclusive])
def test_what_was_fetched_stays_until_the_turn_of_its_request(placement: Any, cpu: int) -> None:
    """The CPU tier is full of it, or nearly: meanwhile nothing, or one page, can be written down, and nobody has to wait."""
    outcome = served(*WAITS_LONG, **ONE_AT_A_TIME | {"gpu": 10, "cpu": cpu}, placement=placement, prefetch=eager())
    assert (outcome.status == FINISHED).all()
    assert hits(outcome, 9) == (0, 0, 4)
    assert counted(outcome) == {"fetched": 4, "used": 4}


def test_what_was_fetched_and_is_on_the_gpu_before_its_request_runs_is_wasted() -> None:
    asks = *ONLY_DISK_HAS_A, ask("pqrs", 150), ask(A, 300), ask(A, 300)
    counts = served(*asks, **ON_DISK | {"gpu": 10, "cpu": 8}, prefetch=eager(stop="timeout", base_s=5.0)).prefetch
    # The second one computes A from 300 to 317, while the first one waits for its fetch, which ends at 308.
    assert (counts["fetched_pages"], counts["used_pages"], counts["wasted_pages"]) == (4, 0, 4)


def test_a_prefetch_waits_until_the_cpu_tier_has_written_back_what_it_evicts() -> None:
    asks = ask(A), ask(B, 100), ask(C, 200), ask(A, 300)
    outcome = served(*asks, **ON_DISK | {"placement": WriteBack}, prefetch=eager(stop="wait_complete"))
    assert hits(outcome, 3) == (0, 0, 4)
    assert outcome.ttft_s[3] == seconds(8 + 8 + 4 + 1)


def test_a_prefetch_abandoned_before_it_starts_delays_no_request() -> None:
    fill = ask(A), ask("p", 100, tokens=35), ask(B, 200), ask("q", 300, tokens=35)
    asks = *fill, ask("x", 400, output=10), ask(A, 406)
    outcome = served(*asks, gpu=10, cpu=4, disk=40, placement=WriteBack, prefetch=eager(stop="best_effort"))
    # A's prefetch would wait until 414 for B to leave the CPU. A runs at 406 instead, in one step with a token of x.
    assert hits(outcome, 5) == (0, 0, 0)
    assert outcome.ttft_s[5] == seconds(17 + 1)
    assert outcome.e2e_s[4] == seconds(5 + 1 + 18 + 7)


# --- decode ---


def test_each_token_after_the_first_takes_a_step() -> None:
    outcome = served(ask(A, output=5), gpu=10)
    assert (outcome.ttft_s[0], outcome.tpot_s[0], outcome.e2e_s[0]) == seconds((17, 1, 17 + 4))


def test_where_steps_read_weights_requests_that_decode_together_do_not_slow_each_other_down() -> None:
    outcome = served(ask(A, output=5), ask(B, output=9), gpu=20, hardware=STEP_READS)
    assert outcome.tpot_s.tolist() == seconds([1, 1])
    assert outcome.e2e_s.tolist() == seconds([1 + 4, 1 + 8])


def test_an_arrival_cuts_a_leap_at_the_next_boundary_between_steps() -> None:
    outcome = served(ask("a", output=41), ask("b", 20.5), gpu=20)
    assert outcome.ttft_s.tolist() == seconds([5, (21 - 20.5) + 5 + 1])
    assert outcome.e2e_s[0] == seconds(5 + 40 + 5)


def test_a_request_alone_decodes_in_one_leap_and_two_in_leaps_of_64_steps() -> None:
    settings: dict[str, Any] = {"gpu": 80, "hardware": STEP_READS | {"leap_overhead_s": 1000.0}}
    assert served(ask(A, output=101), **settings).e2e_s.tolist() == seconds([1 + 100 + 1000])
    assert served(ask(A, output=101), ask(B, output=101), **settings).e2e_s.tolist() == seconds([1 + 100 + 2 * 1000] * 2)


def test_a_decoding_request_takes_part_in_every_prefill_step() -> None:
    outcome = served(ask("x", output=4), ask("abcde", 5.0), gpu=20, max_batch_tokens=8)
    # 21 tokens in chunks of 7, each step with a decode token; the decoder is done after three of them.
    assert outcome.e2e_s.tolist() == seconds([5 + 3 * 8, 3 * 8])


def test_a_prefill_that_ends_gives_the_first_token_with_its_step() -> None:
    outcome = served(ask("a", output=1), ask("b", output=0), ask("c", output=2), gpu=20, max_running_requests=1)
    assert outcome.ttft_s.tolist() == seconds([5, 10, 15])
    assert outcome.e2e_s.tolist() == seconds([5, 10, 15 + 1])
    assert outcome.tpot_s.tolist() == seconds([float("nan"), float("nan"), 1])
