"""Steps in flight: each stage of a pipeline serves one step after another. See small.py for the round numbers.

With two stages, a token takes half a second in each, and activations take 1 s from one to the other unless a test says so.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cluster.cluster import Cluster
from kvsim.core.request import Reset
from kvsim.policies.scheduling.priority import Priority
from tests.cluster.small_cluster import Sent, small_cluster
from tests.engine.small import (
    FOREVER,
    Ask,
    SmallEngine,
    ask,
    check_idle,
    eager,
    hits,
    make_requests,
    same_outcome,
    seconds,
    small_engine,
)

FIVE = 5
"""Tokens of a step, and of a prompt of one letter."""


def pipeline(stages: int = 2, *, send_s: float = 1.0, hardware: dict[str, Any] | None = None, **about: Any) -> SmallEngine:
    """An engine whose GPUs are the stages of a pipeline."""
    links = {"interconnect_latency_s": send_s, "interconnect_bytes_per_s": FOREVER}
    machine = {"gpus": stages, "pipeline_parallel": stages, **links} | (hardware or {})
    return small_engine(**({"gpu": 100, "max_batch_tokens": FIVE, "hardware": machine} | about))


def test_two_requests_whose_prompts_fill_a_step_each_are_computed_one_behind_the_other() -> None:
    """first prompt    stage 1: 0 to 2.5    stage 2: 3.5 to 6        first token at 6
    second prompt   stage 1: 2.5 to 5    stage 2: 6 to 8.5        first token at 8.5, although its activations come at 6
    first decodes   stage 1: 6 to 6.5    stage 2: 8.5 to 9        behind the second prompt, since 7.5
    second decodes  stage 1: 8.5 to 9    stage 2: 10 to 10.5
    """
    outcome = pipeline().serve(ask("a", output=2), ask("b", output=2))
    assert outcome.ttft_s.tolist() == seconds([6, 8.5])
    assert outcome.e2e_s.tolist() == seconds([9, 10.5])
    assert outcome.engines_busy_s == seconds([10.5])


def test_a_third_request_joins_the_steps_of_the_others_and_its_chunks_follow_each_other() -> None:
    """Two steps are in flight until 6. The third prompt then has 4 of its tokens beside the first request's, and its last one at
    8.5 beside the second's, while the 4 are still computed.

    first and 4   stage 1: 6 to 8.5      stage 2: 9.5 to 12      the first one has its second token at 12
    second and 1  stage 1: 8.5 to 9.5    stage 2: 12 to 13       the second one has its second token, the third its first
    third         stage 1: 13 to 13.5    stage 2: 14.5 to 15
    """
    outcome = pipeline().serve(ask("a", output=2), ask("b", output=2), ask("c", output=2))
    assert outcome.ttft_s.tolist() == seconds([6, 8.5, 13])
    assert outcome.e2e_s.tolist() == seconds([12, 13, 15])


def test_requests_that_fit_into_one_step_stay_together_and_leave_a_stage_idle() -> None:
    """10 tokens take 5 s in each stage. Then two tokens at a time take 1 s in each, and 1 s in between."""
    outcome = pipeline(max_batch_tokens=10).serve(ask("a", output=3), ask("b", output=3))
    assert outcome.ttft_s.tolist() == seconds([11, 11])
    assert outcome.e2e_s.tolist() == seconds([17, 17])


def test_a_request_that_arrives_waits_for_the_oldest_step_though_a_stage_is_free() -> None:
    """As in an engine that blocks on the first batch of its queue. From 6, the next step has a token of the first request and 4
    of the second, whose last one follows at once: it passes the first stage from 8.5 to 9, and the second one from 12 to 12.5.
    """
    outcome = pipeline().serve(ask("a", output=2), ask("b", 1))
    assert outcome.ttft_s.tolist() == seconds([6, 12.5 - 1])
    assert outcome.e2e_s[0] == seconds(12)


@given(stages=st.sampled_from([2, 4]), batches=st.integers(1, 9))
def test_a_pipeline_that_is_filled_and_emptied_has_the_bubble_of_gpipe(stages: int, batches: int) -> None:
    """GPipe (arXiv:1811.06965): of p stages and m batches, each stage is idle for (p - 1) / (m + p - 1) of the time."""
    outcome = pipeline(stages, send_s=0.0, gpu=1000).serve(*[ask(chr(97 + number)) for number in range(batches)])
    stage_s = FIVE / stages
    assert outcome.simulated_s == seconds((batches + stages - 1) * stage_s)
    assert 1 - batches * stage_s / outcome.simulated_s == seconds((stages - 1) / (batches + stages - 1))


def test_the_slowest_stage_limits_what_a_full_pipeline_serves() -> None:
    """Three stages of a model with four layers have 1, 2 and 1: in a full pipeline, 5 tokens take 2.5 s."""
    outcome = pipeline(3, send_s=0.0).serve(*[ask(letter) for letter in "abcdefgh"])
    assert outcome.ttft_s.tolist() == seconds([5 + 2.5 * number for number in range(8)])


def test_overheads_are_the_hosts_which_serves_one_step_at_a_time_while_stages_compute() -> None:
    """The host takes 1 s after the last stage; the first step of the second pair begins when the first has left the host."""
    outcome = pipeline(send_s=0.0, hardware={"step_overhead_s": 1.0}).serve(*[ask(letter) for letter in "abcd"])
    assert outcome.ttft_s.tolist() == seconds([6, 8.5, 12, 14.5])
    slow = pipeline(send_s=0.0, hardware={"step_overhead_s": 10.0}).serve(*[ask(letter) for letter in "abcd"])
    assert slow.ttft_s.tolist() == seconds([15, 25, 35, 45])


def test_one_step_takes_its_stages_and_the_way_between_them() -> None:
    outcome = pipeline(4, send_s=0.25, max_batch_tokens=50).serve(ask("abc"))
    assert outcome.ttft_s.tolist() == seconds([13 + 3 * 0.25])


def test_a_stage_begins_when_its_first_layer_has_landed_and_ends_after_its_last_one() -> None:
    """Six pages land from 100 to 103, over the links of two GPUs: the two layers of each stage at 101.5 and 103.

    5 tokens are computed, the last one and the page that follows. A stage takes 2.5 s, a layer of it 1.25 s.
    """
    engine = pipeline(gpu=8, cpu=20, send_s=0.0, max_batch_tokens=40)
    outcome = engine.serve(ask("abcdef"), ask("uvwxyzk", 40), ask("abcdefg", 100))
    assert hits(outcome, 2) == (0, 6, 0)
    first_ends = max(101.5 + 2.5, 103 + 1.25)
    second_ends = max(max(first_ends, 101.5) + 2.5, 103 + 1.25)
    assert outcome.ttft_s[2] == seconds(second_ends - 100)
    assert outcome.columns["load_s"][2] == seconds(second_ends - 105)


def test_a_step_behind_one_that_waits_for_its_loads_is_not_ahead_of_it() -> None:
    """The other prompt's step has begun behind it: its first stage is free when the one before has served it."""
    engine = pipeline(gpu=16, cpu=20, send_s=0.0, max_batch_tokens=5)
    outcome = engine.serve(ask("abcdef"), ask("uvwxyzklmn", 60), ask("abcdefg", 200), ask("h", 200))
    assert hits(outcome, 2)[1] > 0
    assert outcome.ttft_s[3] == seconds(outcome.ttft_s[2] + 2.5)


def test_a_request_is_retracted_only_if_no_step_in_flight_computes_it() -> None:
    outcome = pipeline(gpu=6, send_s=0.0).serve(ask("a", output=9), ask("b", output=9), ask("c", output=9))
    assert outcome.retractions > 0
    assert not (outcome.status != 0).any()


def test_a_policy_that_chooses_whom_to_retract_is_asked_of_others_than_those_in_flight() -> None:
    asks = [ask(letter, number / 10, output=12) for number, letter in enumerate("abcdef")]
    outcome = pipeline(gpu=9, send_s=0.0, scheduling=Priority()).serve(*asks)
    assert outcome.retractions > 0 and not (outcome.status != 0).any()


def test_several_answers_to_a_prompt_decode_in_the_same_step() -> None:
    """The second answer computes the last token of the prompt beside the first one's second token, from 5 to 7."""
    requests = make_requests([ask("a", output=3)])
    requests[0].samples = 2
    served = pipeline(send_s=0.0)
    outcome = served.run(requests)
    check_idle(served)
    assert outcome.ttft_s.tolist() == seconds([5]) and outcome.e2e_s.tolist() == seconds([10])


def test_a_reset_waits_until_all_groups_have_ended() -> None:
    requests = make_requests([ask("a", output=5), ask("b", output=2), ask("a", 3)])
    requests[2].resets = (Reset("drain", 2.0),)
    served = pipeline()
    outcome = served.run(requests)
    check_idle(served)
    assert hits(outcome, 2) == (0, 0, 0)
    assert outcome.arrival_s[2] + outcome.columns["queue_s"][2] >= outcome.e2e_s[:2].max()


def test_an_engine_that_fails_begins_anew_with_idle_stages() -> None:
    """It fails at 4 with two prompts in its stages, and is back at 5: they take as long as at first."""
    served = pipeline(send_s=0.0)
    failures = [(4.0, 0, 5.0)]
    outcome = Cluster([served], failures=plan_of(failures)).run(make_requests([ask("a"), ask("b")]))
    assert outcome.ttft_s.tolist() == seconds([5 + 5, 5 + 7.5])
    check_idle(served)


def plan_of(failures: list[tuple[float, int, float]]) -> Any:
    from kvsim.plans.cluster_settings import ClusterSettings

    listed = [{"engine": engine, "at_s": at_s, "back_after_s": back_s - at_s} for at_s, engine, back_s in failures]
    return ClusterSettings(engines=1, failures=listed).plan_failures()


asks_drawn = st.lists(
    st.builds(
        ask,
        st.text("abcd", min_size=1, max_size=4),
        st.floats(0, 60),
        tokens=st.integers(1, 4),
        output=st.integers(1, 6),
    ),
    min_size=1,
    max_size=8,
)


@given(asks=asks_drawn, stages=st.sampled_from([2, 3, 4]), gpu=st.integers(8, 30), cpu=st.sampled_from([0, 20]))
def test_every_request_ends_and_nothing_is_left_whatever_comes(asks: list[Ask], stages: int, gpu: int, cpu: int) -> None:
    served = pipeline(stages, gpu=gpu, cpu=cpu, prefetch=eager() if cpu else None)
    served.is_checked = True
    outcome = served.serve(*sorted(asks, key=lambda one: one.at))
    assert not (outcome.status != 0).any() and (outcome.e2e_s >= outcome.ttft_s).all()
    assert outcome.engines_busy_s[0] <= outcome.simulated_s + 1e-9


@given(asks=asks_drawn)
def test_slower_links_between_stages_never_help_a_request_that_is_alone(asks: list[Ask]) -> None:
    alone = [asks[0]]
    times = [pipeline(2, send_s=send_s).serve(*alone).e2e_s[0] for send_s in (0.0, 0.5, 2.0)]
    assert times == sorted(times)


@given(asks=asks_drawn)
def test_one_stage_changes_nothing(asks: list[Ask]) -> None:
    asks = sorted(asks, key=lambda one: one.at)
    plain = small_engine(gpu=30, cpu=20, max_batch_tokens=FIVE).serve(*asks)
    assert same_outcome(plain, pipeline(1, gpu=30, cpu=20).serve(*asks))


def test_prefill_and_decode_engines_may_have_stages() -> None:
    links = {"interconnect_latency_s": 0.0, "interconnect_bytes_per_s": FOREVER}
    machine = {"gpus": 2, "pipeline_parallel": 2, **links}
    cluster = small_cluster(gpu=40, prefill=1, hardware=machine, settings={"max_batch_tokens": FIVE})
    outcome = cluster.serve(ask("a", output=3), ask("b", 1, output=3), ask("c", 1, output=3))
    assert outcome.ttft_s.tolist() == seconds([5, 5 + 5 - 1, 5 + 7.5 - 1])
    assert outcome.columns["decoder"].tolist() == [1, 1, 1]


def test_the_kv_of_a_prompt_leaves_a_pipeline_when_its_first_layer_is_computed() -> None:
    """Two layers in a stage: 5 tokens take 1.25 s in each layer. The second prompt waits for the first stage until 2.5."""
    links = {"interconnect_latency_s": 1.0, "interconnect_bytes_per_s": FOREVER}
    machine = {"gpus": 2, "pipeline_parallel": 2, **links}
    cluster = small_cluster(gpu=40, prefill=1, hardware=machine, settings={"max_batch_tokens": FIVE})
    outcome = cluster.serve(ask("a", output=2), ask("b", output=2))
    assert outcome.links["gpu-gpu"].intervals[:, 0].tolist() == seconds([1.25, 2.5 + 1.25])
    assert outcome.ttft_s.tolist() == seconds([6 + 1, 8.5 + 1])


def test_engines_of_a_cluster_have_a_pipeline_each() -> None:
    machine = {"gpus": 2, "pipeline_parallel": 2, "interconnect_latency_s": 1.0, "interconnect_bytes_per_s": FOREVER}
    cluster = small_cluster(gpu=40, routing=Sent(0, 1), hardware=machine, settings={"max_batch_tokens": FIVE})
    outcome = cluster.serve(ask("a"), ask("b"))
    assert outcome.ttft_s.tolist() == seconds([6, 6])


@pytest.mark.parametrize("stages", [2, 4])
def test_loads_that_a_step_waits_for_whole_are_there_before_it_begins(stages: int) -> None:
    engine = pipeline(stages, gpu=8, cpu=20, send_s=0.0, max_batch_tokens=40, overlap="none")
    outcome = engine.serve(ask("abcdef"), ask("uvwxyzk", 40), ask("abcdefg", 100))
    assert hits(outcome, 2) == (0, 6, 0)
    assert outcome.ttft_s[2] == seconds(6 / stages + 5)


def test_a_request_is_given_up_while_steps_in_flight_compute_it() -> None:
    """At 4, the first 5 tokens of a prompt are in the second stage, until 5, and 4 more in the first. These end at 7."""
    served = pipeline(send_s=0.0)

    def give_up() -> Any:
        yield served.env.timeout(4.0)
        (job,) = served.running.admitted
        assert (job.computed, job.flying) == (0, 9)
        served.abort(job)
        for after_s in (0.5, 1.0, 1.0):
            assert served.gpu.pool.free + served.gpu.evictable_pages < 100
            yield served.env.timeout(after_s)
        yield served.env.timeout(1.0)
        assert served.gpu.pool.free + served.gpu.evictable_pages == 100

    served.env.process(give_up())
    outcome = served.run(make_requests([ask("ab"), ask("c", 20)]))
    check_idle(served)
    assert outcome.ttft_s[1] == seconds(5)
    assert served.gpu.pool.free + served.gpu.evictable_pages == 100


@given(
    asks=asks_drawn,
    stages=st.sampled_from([2, 3, 4]),
    gpu=st.integers(8, 30),
    at=st.lists(st.tuples(st.floats(0, 60), st.integers(0, 7)), min_size=1, max_size=6),
)
def test_requests_given_up_at_any_time_keep_their_pages_while_steps_compute_them(
    asks: list[Ask], stages: int, gpu: int, at: list[tuple[float, int]]
) -> None:
    served = pipeline(stages, gpu=gpu, send_s=0.0)
    served.is_checked = True
    given_up: list[int] = []

    def give_up(at_s: float, number: int) -> Any:
        yield served.env.timeout(at_s)
        if served.running.admitted:
            job = list(served.running.admitted)[number % len(served.running.admitted)]
            served.abort(job)
            given_up.append(job.request.index)
        while served.schedule._flight:
            computed = served.schedule._computed
            assert all(job.lease is not None for job in computed), "a step computes what has no pages"
            yield served.env.timeout(0.25)

    for at_s, number in at:
        served.env.process(give_up(at_s, number))
    outcome = served.run(make_requests(sorted(asks, key=lambda one: one.at)))
    check_idle(served)
    ended = [index for index in range(len(asks)) if index not in given_up]
    assert not (outcome.status[ended] != 0).any() and (outcome.e2e_s[ended] > 0).all()
    assert served.gpu.pool.free + served.gpu.evictable_pages == gpu


def test_a_request_that_decodes_is_given_up_while_a_step_computes_it() -> None:
    served = pipeline(send_s=0.0)

    def give_up() -> Any:
        yield served.env.timeout(6.0)
        assert [len(group.jobs) for group in served.running.groups] == [1, 0]
        served.abort(next(iter(served.running.groups[0].jobs)))

    served.env.process(give_up())
    outcome = served.run(make_requests([ask("a", output=9), ask("b", output=2)]))
    check_idle(served)
    assert outcome.e2e_s[1] > 0
