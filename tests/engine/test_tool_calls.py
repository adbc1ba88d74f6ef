"""Tool calls by hand, in the round numbers of small.py: a page takes 4 s to compute and 1 s on the link, a token 1 s."""

from typing import Any

import pytest

from kvsim.core.answers import PolicyError
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import ToolCall
from tests.engine.calling import Planned, calls_of
from tests.engine.small import SmallEngine, ask, hits, seconds, small_engine

NEXT = ask("abcdef", after=0, delay_s=20.0)
"""Continues a request of the pages a to d, which is computed in 17 s: it arrives at 37 s."""


def engine(policy: Planned, **settings: Any) -> SmallEngine:
    """An engine whose steps wait for all loads, over two tiers that write back unless told otherwise."""
    known: dict[str, Any] = {"gpu": 10, "cpu": 10, "placement": WriteBack, "overlap": "none", "prefetch": policy}
    made = small_engine(**(known | settings))
    made.is_checked = True
    return made


def test_what_was_offloaded_is_loaded_by_the_next_request() -> None:
    """Written from 17 to 21 s, loaded from 37 to 41 s; then e, f and the last token are computed."""
    small = engine(Planned())
    outcome = small.serve(ask("abcd"), NEXT)
    assert hits(outcome, 1) == (0, 4, 0)
    assert outcome.ttft_s.tolist() == seconds([17.0, 4.0 + 9.0])
    assert outcome.links["gpu-cpu"].intervals[:, :2].tolist() == [seconds([17.0, 21.0])]
    assert calls_of(small) == {"calls": 1, "offloads": 1, "offloaded": 4}


def test_what_is_back_before_the_next_request_costs_it_nothing() -> None:
    """10 s after the beginning of the call, from 27 to 31 s, its pages are loaded."""
    policy = Planned(begin_s=10.0)
    small = engine(policy)
    outcome = small.serve(ask("abcd"), NEXT)
    assert hits(outcome, 1) == (4, 0, 0)
    assert outcome.ttft_s.tolist() == seconds([17.0, 9.0])
    assert outcome.links["cpu-gpu"].intervals[:, :2].tolist() == [seconds([27.0, 31.0])]
    assert calls_of(small) == {"calls": 1, "offloads": 1, "offloaded": 4, "uploads": 1, "uploaded": 4, "used": 4}
    assert policy.ended == [(0, seconds(20.0))]


def test_a_request_that_comes_during_its_upload_waits_for_the_rest_of_it() -> None:
    small = engine(Planned(begin_s=18.0))
    outcome = small.serve(ask("abcd"), NEXT)
    assert hits(outcome, 1) == (4, 0, 0)
    assert outcome.ttft_s[1] == seconds(2.0 + 9.0)
    assert calls_of(small)["used"] == 4


def test_a_request_that_comes_before_its_upload_loads_for_itself() -> None:
    small = engine(Planned(begin_s=21.0))
    outcome = small.serve(ask("abcd"), NEXT)
    assert hits(outcome, 1) == (0, 4, 0)
    assert calls_of(small) == {"calls": 1, "offloads": 1, "offloaded": 4}


@pytest.mark.parametrize(("offloads", "waits_s"), [(True, 0.0), (False, 3.0)])
def test_room_that_was_made_in_time_costs_the_others_nothing(offloads: bool, waits_s: float) -> None:
    """At 25 s, w to z need 5 of 6 pages: without an offload, 3 pages are written down first."""
    small = engine(Planned(offloads=offloads), gpu=6)
    outcome = small.serve(ask("abcd"), ask("abcde", after=0, delay_s=100.0), ask("wxyz", at=25.0))
    assert outcome.ttft_s[2] == seconds(waits_s + 17.0)


def test_pages_that_are_being_written_down_leave_when_that_has_ended() -> None:
    """The prompt is written through from 17 to 21 s; then the policy is asked, and nothing has to be written."""
    policy = Planned()
    small = engine(policy, placement=WriteThrough)
    small.serve(ask("abcd"), NEXT)
    (call,) = policy.offered
    assert (call.path_pages, call.idle_pages, call.unwritten_pages) == (4, 4, 0)
    assert calls_of(small) == {"calls": 1, "offloads": 1, "offloaded": 4}


def test_a_call_that_ends_before_its_pages_are_written_offloads_nothing() -> None:
    policy = Planned()
    small = engine(policy, placement=WriteThrough)
    outcome = small.serve(ask("abcd"), ask("abcdef", after=0, delay_s=3.0))
    assert not policy.offered and hits(outcome, 1) == (4, 0, 0)
    assert calls_of(small) == {"calls": 1}


def test_pages_of_others_stay() -> None:
    """The second request, which decodes long after the first one's end, uses a and b."""
    policy = Planned()
    small = engine(policy, gpu=20)
    small.serve(ask("abcd", output=2), ask("abcdef", after=0, delay_s=90.0), ask("abx", output=30))
    assert [(call.path_pages, call.idle_pages, call.unwritten_pages) for call in policy.offered] == [(4, 2, 2)]
    assert calls_of(small) == {"calls": 1, "offloads": 1, "offloaded": 2}


def test_nothing_leaves_without_room_below() -> None:
    small = engine(Planned(), cpu=3)
    outcome = small.serve(ask("abcd"), NEXT)
    assert hits(outcome, 1) == (4, 0, 0)
    assert calls_of(small) == {"calls": 1, "no_room_offloads": 1}


def test_the_policy_knows_what_waits_and_what_is_free() -> None:
    """When the first request ends, the second runs with 3 pages; the third needs 9 pages and waits."""
    policy = Planned(offloads=False)
    small = engine(policy, gpu=11)
    small.serve(ask("abcd"), ask("abcde", after=0, delay_s=90.0), ask("wx", output=12), ask("mnopqrst", at=2.0, output=3))
    (call,) = policy.offered
    assert call.waiting_pages == 9 and call.request.index == 0
    assert call.free_pages == 11 - 4 - 3 and call.duration_s != call.duration_s


@pytest.mark.parametrize(("until_s", "expected"), [(1000.0, (4, 0, 0)), (20.0, (3, 1, 0))])
def test_what_is_kept_is_evicted_last(until_s: float, expected: tuple[int, ...]) -> None:
    """a to d are back at 31 s, and used less recently than u to w, of which one page has to leave at 50 s; or d, from 37 s on."""
    small = engine(Planned(begin_s=10.0, until_s=until_s))
    outcome = small.serve(ask("abcd"), ask("abcde", after=0, delay_s=100.0), ask("uvw", at=32.0), ask("opq", at=50.0))
    assert hits(outcome, 1) == expected
    assert calls_of(small)["used"] == expected[0]


def test_what_is_kept_gives_way_to_a_request_that_waits() -> None:
    """a to d are back at 31 s. At 32 s, 6 pages are needed of 8: at once, since the four are in the CPU tier, too."""
    small = engine(Planned(begin_s=10.0), gpu=8)
    outcome = small.serve(ask("abcd"), ask("abcde", after=0, delay_s=100.0), ask("uvwxy", at=32.0))
    assert outcome.ttft_s[2] == seconds(21.0)
    assert hits(outcome, 1) == (2, 2, 0)
    assert calls_of(small) == {"calls": 1, "offloads": 1, "offloaded": 4, "uploads": 1, "uploaded": 4, "used": 2, "wasted": 2}


def test_what_is_kept_for_a_request_that_is_here_gives_way_last() -> None:
    """At 73 s the fourth request needs 8 pages of 14, of which two calls have 4 each: u to x are needed at 334 s only, a to d by
    a request that has waited since 67 s."""
    small = engine(Planned(begin_s=10.0), gpu=14, cpu=20, max_running_requests=1)
    followers = ask("abcde", after=0, delay_s=50.0), ask("uvwxy", after=1, delay_s=300.0)
    outcome = small.serve(ask("abcd"), ask("uvwx"), ask("mno", at=60.0), ask("pqrstAB", at=62.0), *followers)
    assert hits(outcome, 4) == (4, 0, 0) and hits(outcome, 5) == (0, 4, 0)


def test_nothing_comes_back_while_requests_wait() -> None:
    """At 27 s, one request computes, and another one waits for its turn."""
    small = engine(Planned(begin_s=10.0), gpu=20, max_running_requests=1)
    outcome = small.serve(ask("abcd"), ask("abcde", after=0, delay_s=100.0), ask("uvw", at=22.0), ask("opq", at=26.0))
    assert hits(outcome, 1) == (0, 4, 0)
    assert calls_of(small) == {"calls": 1, "offloads": 1, "offloaded": 4, "no_room_uploads": 1}


def test_what_is_kept_gives_way_to_an_answer_that_grows() -> None:
    """The answer of the third request takes 6 pages, and a to d have 4 of 6: nothing is retracted."""
    small = engine(Planned(begin_s=10.0), gpu=6)
    outcome = small.serve(ask("abcd"), ask("abcde", after=0, delay_s=300.0), ask("m", at=40.0, output=18))
    assert outcome.retractions == 0 and not outcome.status.any()
    assert calls_of(small)["uploaded"] == calls_of(small)["wasted"] == 4


def test_without_room_on_the_gpu_nothing_is_brought_back() -> None:
    small = engine(Planned(begin_s=10.0), gpu=6)
    outcome = small.serve(ask("abcd"), ask("abcde", after=0, delay_s=100.0), ask("uvwx", at=22.0, output=4))
    assert hits(outcome, 1) == (0, 4, 0)
    assert calls_of(small) == {"calls": 1, "offloads": 1, "offloaded": 4, "no_room_uploads": 1}


def test_an_upload_reads_the_disk_through_the_cpu_tier() -> None:
    """b of the first request's a and b is written to the disk when w to z go to the CPU tier."""
    small = engine(Planned(begin_s=100.0), gpu=6, cpu=4, disk=10)
    outcome = small.serve(ask("ab"), ask("abc", after=0, delay_s=200.0), ask("uvwxy", at=12.0), ask("opqrs", at=40.0))
    assert hits(outcome, 1) == (2, 0, 0)
    assert calls_of(small)["used"] == 2


def test_answers_that_are_cached_leave_and_come_back_too() -> None:
    """The answer of 5 tokens fills a page together with the last token of the prompt."""
    policy = Planned(begin_s=10.0)
    small = engine(policy, cache_output=True)
    requests = [ask("ab", output=4), ask("ab", after=0, delay_s=30.0)]
    small.serve(*requests)
    (call,) = policy.offered
    assert isinstance(call, ToolCall) and call.path_pages == call.idle_pages
    assert calls_of(small)["used"] >= 2


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("offload", 1, r"Planned returned 1 from offload\(\), not True or False"),
        ("upload", 3.0, r"Planned returned 3.0 from upload\(\), not an Upload or None"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(method: str, answer: Any, message: str) -> None:
    policy = Planned()
    setattr(policy, method, lambda call: answer)
    with pytest.raises(PolicyError, match=message):
        engine(policy).serve(ask("abcd"), NEXT)
