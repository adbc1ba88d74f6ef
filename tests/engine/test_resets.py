"""Resets of the cache between requests, in replays and simulations. See small.py for the round numbers."""

from dataclasses import replace
from math import inf, nan
from random import Random
from typing import Any

import pytest

import kvsim
from kvsim.core.request import RESETS, Request, Reset
from kvsim.engine.engine import EngineSettings
from kvsim.engine.outcome import Outcome
from kvsim.errors import UsageError
from kvsim.run import play
from kvsim.trace.base import Trace
from tests.engine.small import Ask, SmallEngine, ask, check_idle, hits, make_requests, seconds, small_engine
from tests.replaying.test_replay_is_simulation import EVICTIONS, HYBRID, STATE_TIERS, check, policy, tiers_of
from tests.workloads import conversations

A, B, C = "abcd", "efgh", "ijkl"


def with_resets(requests: list[Request], resets: dict[int, Reset | str]) -> list[Request]:
    """The requests, with a reset before those with these numbers: of that mode as they arrive, or at a time."""
    for number, reset in resets.items():
        requests[number].resets = (*requests[number].resets, Reset(reset, nan) if isinstance(reset, str) else reset)
    return requests


def serve(engine: SmallEngine, *asks: Ask, resets: dict[int, Reset | str]) -> Outcome:
    outcome = engine.run(with_resets(make_requests(asks), resets))
    check_idle(engine)
    return outcome


# --- simulations ---


@pytest.mark.parametrize("mode", RESETS)
def test_nothing_is_found_after_a_reset(mode: str) -> None:
    asks = ask(A), ask(A, 100), ask(A, 200)
    outcome = serve(small_engine(gpu=5, cpu=20), *asks, resets={1: mode})
    assert [hits(outcome, index) for index in range(3)] == [(0, 0, 0), (0, 0, 0), (4, 0, 0)]


def test_a_draining_reset_waits_for_those_that_run_and_holds_up_the_others() -> None:
    """The first request takes 17 s for its prompt and 10 s more for its answer: B, which arrives at 20, runs from 27 on."""
    outcome = serve(small_engine(gpu=20), ask(A, output=11), ask(B, 20), ask(A, 100), resets={1: "drain"})
    assert outcome.ttft_s.tolist() == seconds([17, 27 - 20 + 17, 17])
    assert hits(outcome, 2) == (0, 0, 0)


def test_a_reset_now_waits_for_nobody_and_what_runs_is_not_cached() -> None:
    """B is prefilled beside the decoding: a step of 18 tokens, in which the last of 11 tokens is not yet made."""
    outcome = serve(small_engine(gpu=20), ask(A, output=11), ask(B, 20), ask(A, 100), ask(B, 200), resets={1: "now"})
    assert outcome.ttft_s[1] == seconds(18)
    assert hits(outcome, 2) == (0, 0, 0) and hits(outcome, 3) == (4, 0, 0)


def test_requests_that_wait_for_a_drain_share_what_is_computed_after_it() -> None:
    asks = ask(A, output=11), ask(A, 18), ask(A, 19)
    outcome = serve(small_engine(gpu=30, max_running_requests=1), *asks, resets={1: Reset("drain", 17.5)})
    assert [hits(outcome, index) for index in (1, 2)] == [(0, 0, 0), (4, 0, 0)]
    assert outcome.ttft_s[1:].tolist() == seconds([27 - 18 + 17, 27 + 17 - 19 + 1])


def test_a_reset_at_a_time_comes_before_requests_that_arrive_then() -> None:
    engine = small_engine(gpu=20, reset_at_s=[200.0, 100.0])
    outcome = engine.serve(ask(A), ask(A, 100), ask(A, 150), ask(A, 200))
    assert [hits(outcome, index)[0] for index in range(4)] == [0, 0, 4, 0]


def test_in_a_closed_loop_a_reset_without_a_time_comes_when_the_turn_does() -> None:
    """The second turn arrives at 17 + 13 = 30; a reset at 25 comes before it, and so does one of its own."""
    for reset in ("drain", Reset("drain", 25.0)):
        outcome = serve(small_engine(gpu=20), ask(A), ask(A, 1000, after=0, delay_s=13), resets={1: reset})
        assert outcome.arrival_s[1] == seconds(30)
        assert hits(outcome, 1) == (0, 0, 0)
    outcome = serve(small_engine(gpu=20), ask(A), ask(A, 1000, after=0, delay_s=13), resets={1: Reset("drain", 35.0)})
    assert hits(outcome, 1) == (4, 0, 0)


def test_a_write_down_under_way_ends_and_is_forgotten() -> None:
    """A is written down from 17 to 21. It is dropped at 18, and its room in the CPU tier is free when the copy ends."""
    engine = small_engine(gpu=5, cpu=20)
    outcome = serve(engine, ask(A), ask(A, 18), resets={1: "drain"})
    assert hits(outcome, 1) == (0, 0, 0)
    assert outcome.links["gpu-cpu"].bytes > 0


@pytest.mark.parametrize("time_s", [-1.0, nan, inf])
def test_a_time_out_of_range_is_named(time_s: float) -> None:
    with pytest.raises(
        ValueError, match=rf"reset_at_s must be (0 or more|a finite number of at least 0), not {time_s}; it is a list of times"
    ):
        EngineSettings(reset_at_s=[time_s])


# --- replays ---


def reset_randomly(requests: list[Request], seed: int, share: float = 0.15, modes: tuple[str, ...] = RESETS) -> list[Request]:
    rng = Random(seed)
    return with_resets(requests, {request.index: rng.choice(modes) for request in requests[1:] if rng.random() < share})


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_replay_hits_what_a_simulation_hits_whose_requests_do_not_overlap(eviction: str) -> None:
    for seed, shape in enumerate(("two", "three")):
        requests = reset_randomly(conversations(seed, requests=30), seed)
        outcome = check(shape, requests, *tiers_of(shape), "placement=write_back", eviction=policy("eviction", eviction))
        assert outcome.hit_pages.sum() > 0


@pytest.mark.parametrize("checkpoint", ["last", "branch"])
def test_recurrent_states_are_dropped_too(checkpoint: str) -> None:
    requests = reset_randomly(conversations(page_tokens=256, requests=30), 1)
    for own_room in ((), ("tiers.gpu.states=4states", "tiers.cpu.states=3states")):
        overrides = [*tiers_of("two", **STATE_TIERS), *HYBRID, "checkpoint=last", "placement=write_back", *own_room]
        check(f"{own_room}", requests, *overrides, checkpoint=policy("checkpoint", checkpoint))


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_a_replay_with_drains_hits_what_its_stretches_hit_alone(seed: int, in_flight: int) -> None:
    requests = reset_randomly(conversations(seed, requests=60), seed, modes=("drain",))
    plan = kvsim_plan("replay", "tiers.gpu.capacity=40pages", f"replay.in_flight={in_flight}")
    whole = play.replay(plan, requests).hit_pages.tolist()
    parts, part = [], list[Request]()
    for request in requests:
        if request.resets:
            parts.append(part)
            part = []
        part.append(replace(request, resets=()))
    parts.append(part)
    assert len(parts) > 2
    assert whole == [row for part in parts if part for row in play.replay(plan, part).hit_pages.tolist()]


def test_a_reset_now_leaves_running_requests_their_pages() -> None:
    """Of two in flight, the first still holds its 4 pages when the third comes, which therefore does not fit beside it."""
    requests = with_resets(make_requests([ask(A, output=0), ask(B, output=0), ask(C, output=0)]), {1: "now"})
    plan = kvsim_plan("replay", "tiers.gpu.capacity=10pages", "page_tokens=4", "replay.in_flight=3")
    outcome = play.replay(plan, requests)
    assert outcome.tiers["gpu"].peak_pages == 10
    requests = with_resets(make_requests([ask(A, output=0), ask(B, output=0), ask(C, output=0)]), {1: "drain", 2: "drain"})
    assert play.replay(plan, requests).tiers["gpu"].peak_pages == 5


# --- what has no resets ---


def kvsim_plan(command: str, *overrides: str) -> Any:
    from kvsim.plans.build import build_run
    from kvsim.settings.configuration import compose

    return build_run(compose(overrides), command=command, overrides=overrides)


def reset_trace() -> Trace:
    return Trace(name="small", requests=reset_randomly(conversations(), 0), page_tokens=16, block_tokens=None)


def test_rules_of_an_engine_refuse_a_trace_with_resets() -> None:
    with pytest.raises(UsageError, match=r"^rules: the trace resets the cache, which an engine's own rules do not"):
        kvsim.replay(reset_trace(), "rules=vllm")


def test_bounds_refuse_a_trace_with_resets() -> None:
    with pytest.raises(UsageError, match="eviction: Belady is not an exact bound for a trace that resets the cache"):
        kvsim.replay(reset_trace(), "eviction=belady", "tiers.gpu.capacity=40pages")
    with pytest.raises(UsageError, match="kvsim curve: the trace resets the cache, which no curve accounts for: use kvsim"):
        kvsim.curve(reset_trace())


def test_a_comparison_shows_no_bound_for_a_trace_with_resets() -> None:
    assert "bounds" not in kvsim.replay(reset_trace()).record or not kvsim.replay(reset_trace()).record["bounds"]
