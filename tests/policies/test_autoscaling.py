"""Autoscaling policies: what every one of them owes the cluster, and what each answers, by hand."""

from random import Random
from typing import Any

import pytest

from kvsim.policies.autoscaling.base import percentile
from kvsim.policies.autoscaling.context import AutoscalingContext
from kvsim.policies.autoscaling.knative_concurrency import KnativeConcurrency
from kvsim.policies.autoscaling.schedule import ScheduledEngines
from kvsim.policies.autoscaling.slo_feedback import SloFeedback
from kvsim.policies.autoscaling.target_utilization import TargetUtilization
from tests.policies.small_scaling import NAMES, Seen, answers, policy_of


def bound(name: str) -> Any:
    """A policy before engines whose steps take 10 ms and 1 ms for each 100 prompt tokens."""
    policy = policy_of(name)
    policy.bind(AutoscalingContext(engines=8, kv_tokens=100_000, step_s=lambda tokens, requests, context: 0.01 + tokens * 1e-5))
    return policy


def random_load(random: Random, up: int, starting: int) -> dict[str, Any]:
    requests = random.choice((0, 0, random.randint(1, 400)))
    return {
        "up": up, "starting": starting, "draining": random.randint(0, 2), "least_engines": 1, "most_engines": 8,
        "waiting_requests": random.choice((0, random.randint(0, 200))), "running_requests": random.randint(0, 200),
        "kv_use": random.random(), "mean_requests": random.random() * 300, "arrived_requests": requests,
        "arrived_tokens": requests * 1000, "begun_tokens": requests * 900, "hit_tokens": requests * 400,
        "ended_requests": requests // 2, "ended_tokens": requests * 50,
        "ttft_s": [random.random() * 5 for _ in range(requests // 2)],
    }  # fmt: skip


# --- every policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_whole_numbers_and_the_same_again(name: str, seed: int) -> None:
    found = []
    for _ in range(2):
        policy, random = bound(name), Random(seed)
        found.append([])
        for number in range(1, 60):
            up, starting = random.randint(0, 6), random.choice((0, 0, 1, 2))
            status: Any = Seen(now=number * 15.0, **random_load(random, up, starting))
            found[-1].append(policy.engines(status))
    assert found[0] == found[1] and all(type(engines) is int and engines >= 0 for engines in found[0])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("none", "schedule")])
def test_load_that_stays_far_above_what_engines_hold_brings_more(name: str) -> None:
    load = {
        "waiting_requests": 2000, "running_requests": 100, "kv_use": 1.0, "mean_requests": 2100.0, "arrived_requests": 4000,
        "arrived_tokens": 4_000_000, "ended_requests": 10, "ended_tokens": 1000, "ttft_s": [30.0] * 10,
    }  # fmt: skip
    assert answers(bound(name), [load] * 40)[-1] > 4


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("none", "schedule", "dynamo_planner")])
def test_without_load_the_fewest_are_left_in_the_end(name: str) -> None:
    assert answers(bound(name), [{}] * 400, up=8)[-1] == 1


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
@pytest.mark.parametrize("interval_s", [0.0, -1.0])
def test_an_interval_without_length_is_refused(name: str, interval_s: float) -> None:
    with pytest.raises(ValueError, match=f"interval_s must be .*(0.001|above).*, not {interval_s}"):
        type(policy_of(name))(interval_s=interval_s)  # type: ignore[call-arg]


def test_none_is_never_asked() -> None:
    assert policy_of("none").asked_every_s == float("inf")


def test_a_percentile_is_one_of_the_values() -> None:
    """At least 90 % of ten values are at or below the ninth; of eleven, the tenth is needed."""
    assert percentile(list(range(1, 11)), 0.9) == 9 and percentile(list(range(1, 12)), 0.9) == 10
    assert percentile([7.0], 0.01) == percentile([7.0], 1.0) == 7.0


# --- target_utilization --------------------------------------------------------------------------------------------------


def hpa(**settings: Any) -> TargetUtilization:
    return TargetUtilization(**{"target": 10.0, "scale_down_window_s": 0.0, "growth_engines": 100, **settings})


def test_engines_follow_the_metric_in_proportion() -> None:
    """2 engines with 30 requests have 15 each: 1.5 times the target, so 3; then 12 requests need 2."""
    seen = [{"waiting_requests": 10, "running_requests": 20}, {"running_requests": 12}, {"running_requests": 1}]
    assert answers(hpa(), seen, up=2) == [3, 2, 1]


@pytest.mark.parametrize(("requests", "engines"), [(18, 2), (21, 2), (23, 3), (17, 2), (9, 1)])
def test_a_metric_within_the_tolerance_changes_nothing(requests: int, engines: int) -> None:
    assert answers(hpa(), [{"running_requests": requests}], up=2) == [engines]


@pytest.mark.parametrize(
    ("metric", "engines"), [("requests", 9), ("running_requests", 6), ("waiting_requests", 3), ("kv_use", 1)]
)
def test_the_metric_is_the_one_that_is_named(metric: str, engines: int) -> None:
    """30 waiting and 60 running on 2 engines; a share of 0.5 is far below a target of 10."""
    seen = [{"waiting_requests": 30, "running_requests": 60, "kv_use": 0.5}]
    assert answers(hpa(metric=metric), seen, up=2) == [engines]


def test_a_share_of_kv_is_a_mean() -> None:
    assert answers(hpa(metric="kv_use", target=0.5), [{"kv_use": 0.75}], up=4) == [6]


def test_engines_that_start_count_with_nothing_when_more_are_wanted() -> None:
    """45 requests on 2 engines are 2.25 times the target; on 4, 1.125 times: 5. 36 on 4 would be below it: 4 stay."""
    assert answers(hpa(), [{"running_requests": 45, "up": 2, "starting": 2}]) == [5]
    assert answers(hpa(), [{"running_requests": 36, "up": 2, "starting": 2}]) == [4]


def test_fewer_engines_are_what_all_of_the_window_agree_on() -> None:
    """From 5: the recommendation of 15 s, 4 engines, is 30 s old at 45 s, and no more within the window."""
    seen = [{"running_requests": requests} for requests in (40, 10, 10, 10)]
    assert answers(hpa(scale_down_window_s=30.0), seen, up=5) == [4, 4, 1, 1]


def test_more_engines_are_what_all_of_the_window_agree_on() -> None:
    seen = [{"running_requests": requests} for requests in (10, 50, 50, 50)]
    assert answers(hpa(scale_up_window_s=30.0), seen, up=1) == [1, 1, 5, 5]


def test_engines_are_added_at_a_bounded_rate() -> None:
    """HPA's defaults: in 15 s at most 4 more, or twice as many. 1, 5, 10, 20."""
    policy = TargetUtilization(target=10.0)
    assert answers(policy, [{"running_requests": 10_000}] * 3, up=1) == [5, 10, 20]


def test_engines_added_in_the_period_count_for_its_bound() -> None:
    """4 in 60 s: the next ones come when the change at 15 s is 60 s old."""
    policy = hpa(growth_engines=4, growth_share=0.0, growth_period_s=60.0)
    assert answers(policy, [{"running_requests": 10_000}] * 6, up=1) == [5, 5, 5, 5, 9, 9]


def test_from_no_engine_the_first_comes_with_a_request() -> None:
    seen = [{"up": 0, "least_engines": 0}, {"up": 0, "least_engines": 0, "waiting_requests": 3}]
    assert answers(hpa(), seen) == [0, 1]


def test_growth_that_never_adds_an_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="never add an engine"):
        TargetUtilization(growth_engines=0, growth_share=0.0)


def test_engines_that_wait_for_room_are_there() -> None:
    """2 engines are up and 18 drain, of 20 at most. 4 more are asked for, none of which can start yet; 4 more may follow in each
    period nevertheless: Kubernetes counts the replicas that it has asked for."""
    policy = hpa(growth_engines=4, growth_share=0.0)
    load = {"up": 2, "running_requests": 200, "most_engines": 20}
    assert answers(policy, [{**load, "draining": 18}] * 3) == [6, 10, 14]


def test_engines_that_wait_for_room_still_do_when_the_metric_is_at_its_target() -> None:
    policy = hpa()
    seen: list[dict[str, Any]] = [{"up": 2, "running_requests": requests, "draining": 6} for requests in (60, 20, 15)]
    assert answers(policy, seen) == [6, 6, 2]


# --- knative_concurrency -------------------------------------------------------------------------------------------------


def kpa(**settings: Any) -> KnativeConcurrency:
    return KnativeConcurrency(**{"target_requests": 10.0, "stable_window_s": 12.0, "panic_window_s": 4.0, **settings})


def concurrency(*means: float) -> list[dict[str, Any]]:
    return [{"mean_requests": mean, "least_engines": 0} for mean in means]


def test_stable_engines_follow_the_mean_of_the_long_window() -> None:
    """Means of 10, 20 and 30 over 2 s each: 10, 15 and 20 over the window, so 1, 2, 2. Panic would need twice the engines."""
    assert answers(kpa(panic_threshold=10.0), concurrency(10, 20, 30), every_s=2.0) == [1, 2, 2]


def test_a_burst_is_answered_by_the_short_window() -> None:
    """Over 4 s, (10 + 90) / 2 need 5 engines, at least twice the one that is up; over 12 s, 4 would do."""
    assert answers(kpa(), concurrency(10, 10, 90), every_s=2.0) == [1, 1, 5]


def test_in_panic_mode_engines_only_come() -> None:
    """The threshold is last exceeded at 6 s; panic ends after 12 s more, and at most half of the engines leave at once."""
    found = answers(kpa(), concurrency(10, 10, 90, *[5] * 9), every_s=2.0)
    assert found == [1, 1, 5, 5, 5, 5, 5, 5, 5, 2, 1, 1]


def test_it_begins_in_panic_mode_with_several_engines() -> None:
    found = answers(kpa(), concurrency(*[1] * 8), up=4, every_s=2.0)
    assert found == [4, 4, 4, 4, 4, 4, 2, 1]


def test_what_is_asked_for_is_within_the_rates() -> None:
    assert answers(kpa(max_scale_up_rate=3.0), concurrency(1000), up=2, every_s=2.0) == [6]


def test_the_delay_keeps_what_was_asked_for() -> None:
    found = answers(kpa(scale_down_delay_s=6.0, panic_threshold=100.0), concurrency(60, *[0] * 12), up=1, every_s=2.0)
    assert found[0] == 6 and found == sorted(found, reverse=True) and found[-1] == 0
    assert found.index(0) > answers(kpa(panic_threshold=100.0), concurrency(60, *[0] * 12), up=1, every_s=2.0).index(0)


def test_a_panic_window_above_the_stable_one_is_refused() -> None:
    with pytest.raises(ValueError, match="panic_window_s=20 is above stable_window_s=12"):
        kpa(panic_window_s=20.0)


# --- slo_feedback --------------------------------------------------------------------------------------------------------


def feedback(**settings: Any) -> SloFeedback:
    return SloFeedback(**{"ttft_s": 2.0, "window_s": 30.0, "hold_s": 60.0, **settings})


def test_a_miss_multiplies_the_engines() -> None:
    """1.5 * 2 is 3, then 4.5 is 5; of ten times, the ninth is 3 s."""
    late = {"ttft_s": [1.0] * 8 + [3.0] * 2}
    assert answers(feedback(), [late, late], up=2) == [3, 5]
    assert answers(feedback(), [{"ttft_s": [1.1] * 9 + [3.0]}], up=2) == [2]


def test_a_miss_adds_nothing_while_engines_start() -> None:
    assert answers(feedback(), [{"ttft_s": [9.0], "up": 2, "starting": 1}]) == [3]


def test_requests_that_wait_without_any_first_token_are_a_miss() -> None:
    assert answers(feedback(), [{"waiting_requests": 5}], up=2) == [3]


def test_an_engine_leaves_after_some_time_with_room_to_spare() -> None:
    """The late time is in the window at 30 s, too. The 60 s count from each change: 30, 90 and 150 s."""
    found = answers(feedback(), [{"ttft_s": [9.0]}, *[{"ttft_s": [0.1]}] * 12], up=2)
    assert found == [3, 5, 5, 5, 5, 4, 4, 4, 4, 3, 3, 3, 3]


# --- schedule ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "engines"), [(0.0, 2), (5.0, 1), (9.0, 1), (10.0, 4), (49.0, 4), (50.0, 2), (99.0, 2), (104.0, 2), (105.0, 1)]
)
def test_engines_are_those_of_the_last_step(now: float, engines: int) -> None:
    """A period of 100 s: before its first step, at 5 s, the last one of the period before counts."""
    status: Any = Seen(now=now)
    steps = [[5, 1], [10, 4], [50, 2]]
    assert ScheduledEngines(steps=steps, period_s=100.0).engines(status) == engines
    assert ScheduledEngines(steps=steps, period_s=100.0, offset_s=100.0).engines(status) == engines
    later: Any = Seen(now=now + 70.0)
    assert ScheduledEngines(steps=steps, period_s=100.0, offset_s=30.0).engines(later) == engines


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "steps is empty"),
        ([[0, 1, 2]], "each is \\[at_s, engines\\]"),
        ([[0, 1], [0, 2]], "steps must be in order of time: 0 comes after 0"),
        ([[100, 1]], "steps: at_s must be at least 0 and below 100, not 100"),
        ([[0, -1]], "steps: engines must be 0 or more, not -1"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(steps: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduledEngines(steps=steps, period_s=100.0)


@pytest.mark.parametrize(("engines", "is_refused"), [(0, True), (1, False), (4, False), (5, True)])
def test_more_or_fewer_engines_than_the_cluster_has_are_refused(engines: int, is_refused: bool) -> None:
    policy = ScheduledEngines(steps=[[0, 2], [10.5, engines]], period_s=100.0)
    context = AutoscalingContext(engines=4, least_engines=1)
    if not is_refused:
        policy.bind(context)
        return
    message = f"has {engines} engines in steps, from 10.5 s on, which is not between cluster.min_engines=1 and cluster.engines=4"
    with pytest.raises(ValueError, match=message):
        policy.bind(context)
