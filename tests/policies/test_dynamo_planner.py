"""Dynamo's planner by hand, and its forecasts."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from kvsim.policies.autoscaling.context import AutoscalingContext
from kvsim.policies.autoscaling.dynamo_planner import DynamoPlanner
from kvsim.policies.autoscaling.forecasts import Forecast, forecast_of
from tests.policies.small_scaling import answers


def planner(
    step_s: Callable[[int, int, int], float] = lambda tokens, requests, context: 0.01 + tokens * 1e-5, **settings: Any
) -> DynamoPlanner:
    """Steps of 10 ms and 1 ms for each 100 prompt tokens; KV for 100,000 tokens."""
    names = ("kv_tokens", "max_batch_tokens", "taken_tokens", "tokens_per_step", "step_tokens")
    known = {name: settings.pop(name) for name in names if name in settings}
    policy = DynamoPlanner(**settings)
    policy.bind(AutoscalingContext(engines=100, step_s=step_s, **{"kv_tokens": 100_000, **known}))
    return policy


def load(requests: int, *, prompt: int = 1000, answer: int = 100, hit_rate: float = 0.0) -> dict[str, Any]:
    return {
        "arrived_requests": requests, "arrived_tokens": requests * prompt, "begun_tokens": requests * prompt,
        "hit_tokens": round(requests * prompt * hit_rate), "ended_requests": requests, "ended_tokens": requests * answer,
    }  # fmt: skip


def test_an_engine_serves_the_largest_batch_that_fits() -> None:
    """1,050 tokens of KV for each request: 95. With 10 prompt tokens for each in a step: 10 + 9.5 ms, and 100 steps an answer."""
    assert planner().engine_requests_per_s(1000.0, 100.0, 0.0) == pytest.approx(95 / (100 * 0.0195))


def test_the_time_per_token_bounds_the_batch() -> None:
    """A batch of 50 takes 15 ms, one of 51 longer."""
    assert planner(tpot_s=0.015).engine_requests_per_s(1000.0, 100.0, 0.0) == pytest.approx(50 / (100 * 0.015))


def test_the_time_to_first_token_bounds_the_batch() -> None:
    """10 tokens for each request of the batch and 1,000 of the next prompt: 10 + 10 + b / 10 ms; 24.1 ms at 41."""
    assert planner(ttft_s=0.02411).engine_requests_per_s(1000.0, 100.0, 0.0) == pytest.approx(41 / (100 * 0.0141))


def test_prompts_are_computed_in_chunks() -> None:
    """Steps of 250 tokens: 1,010 tokens take 4 of 12.5 ms and one of 10.1 ms, 60.1 in all; a batch of 2 takes 60.2 ms."""
    one = planner(ttft_s=0.06015, max_batch_tokens=250).engine_requests_per_s(1000.0, 100.0, 0.0)
    assert one == pytest.approx(1 / (100 * 0.0101))


def test_reused_tokens_are_not_computed() -> None:
    """Half of the prompt is reused: 5 tokens for each request in a step."""
    assert planner().engine_requests_per_s(1000.0, 100.0, 0.5) == pytest.approx(95 / (100 * 0.01475))


def test_prompts_keep_up_with_answers() -> None:
    """Of 1,100 tokens a step, a request in the middle of its answer takes 1 + 1000 / 100: 100 of them."""
    per_s = planner(max_batch_tokens=1100, kv_tokens=None).engine_requests_per_s(1000.0, 100.0, 0.0)
    assert per_s == pytest.approx(100 / (100 * 0.02))


def test_drafts_yield_several_tokens_a_step() -> None:
    """Two tokens a step: 50 steps an answer, in which 20 prompt tokens for each request come with it: 10 + 19 ms for 95 of them.
    A step may take twice the objective."""
    rate = planner(tokens_per_step=2.0).engine_requests_per_s(1000.0, 100.0, 0.0)
    assert rate == pytest.approx(95 / (50 * 0.029))
    rate = planner(tokens_per_step=2.0, tpot_s=0.0100001).engine_requests_per_s(1000.0, 100.0, 0.0)
    assert rate == pytest.approx(50 / (50 * 0.02))


def test_an_answer_takes_a_step_however_many_tokens_that_yields() -> None:
    """Answers of one token: a step each, beside 1,000 prompt tokens. With 4 of them, it takes 50 ms."""
    plain = planner().engine_requests_per_s(1000.0, 1.0, 0.0)
    assert planner(tokens_per_step=4.0).engine_requests_per_s(1000.0, 1.0, 0.0) == plain == pytest.approx(4 / 0.05)


def test_drafts_take_tokens_of_a_step() -> None:
    """Of 1,200 tokens, a request takes 4 and brings 1000 / 50: 50 of them keep up. Of 21 tokens, 5 decode beside a prompt."""
    drafts: dict[str, Any] = {"tokens_per_step": 2.0, "step_tokens": 4, "kv_tokens": None}
    rate = planner(max_batch_tokens=1200, **drafts).engine_requests_per_s(1000.0, 100.0, 0.0)
    assert rate == pytest.approx(50 / (50 * 0.02))
    rate = planner(max_batch_tokens=21, **drafts).engine_requests_per_s(1.0, 100.0, 0.0)
    assert rate == pytest.approx(5 / (50 * (0.01 + round(5 / 50) * 1e-5)))


def test_groups_of_layers_take_slots_of_their_own() -> None:
    """Five groups with a window of 100 tokens take 500 tokens beside 1,050: 64 requests fit."""
    rate = planner(taken_tokens=lambda tokens: tokens + 5 * min(tokens, 100.0)).engine_requests_per_s(1000.0, 100.0, 0.0)
    assert rate == pytest.approx(64 / (100 * 0.0164))


def test_objectives_that_cannot_be_met_leave_a_batch_of_one() -> None:
    assert planner(tpot_s=0.001).engine_requests_per_s(1000.0, 100.0, 0.0) == pytest.approx(1 / (100 * 0.0101))


def test_engines_serve_what_is_predicted() -> None:
    """48.7 requests/s an engine; 1,800 in 15 s are 120 a second."""
    assert answers(planner(), [load(1800), load(600), load(1)]) == [3, 1, 1]


def test_without_a_load_as_many_stay_as_there_are() -> None:
    assert answers(planner(), [{}, {}], up=3) == [3, 3]
    assert answers(planner(), [load(1800), {}], up=1) == [3, 3]


def test_it_needs_the_steps_of_an_engine() -> None:
    with pytest.raises(ValueError, match="needs a model and a machine"):
        DynamoPlanner().bind(AutoscalingContext())


def test_a_predictor_has_a_name() -> None:
    with pytest.raises(ValueError, match="predictor must be one of constant, moving_average, kalman, not arima"):
        DynamoPlanner(predictor="arima")


def test_only_a_moving_average_has_values() -> None:
    assert DynamoPlanner().without_effect() == ("values",) and not DynamoPlanner(predictor="moving_average").without_effect()


# --- forecasts -----------------------------------------------------------------------------------------------------------


def after(forecast: Forecast, *values: float) -> float:
    for value in values:
        forecast.add(value)
    return forecast.next()


@pytest.mark.parametrize("name", ["constant", "moving_average", "kalman"])
def test_the_time_before_the_first_load_does_not_count(name: str) -> None:
    assert after(forecast_of(name, 5), 0.0, 0.0) == 0.0
    assert after(forecast_of(name, 5), 0.0, 0.0, 8.0) == 8.0


def test_constant_is_the_last_value_and_a_moving_average_the_mean_of_the_last() -> None:
    assert after(forecast_of("constant", 2), 4.0, 8.0, 0.0) == 0.0
    assert after(forecast_of("moving_average", 2), 4.0, 8.0, 0.0) == 4.0


def kalman(values: list[float]) -> float:
    """The filter with matrices: level and trend, of which the level is seen."""
    state, spread = np.array([[values[0]], [0.0]]), np.eye(2) * 1000.0
    step, seen, drift = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[1.0, 0.0]]), np.diag([1.0, 0.1])
    for value in values[1:]:
        state, spread = step @ state, step @ spread @ step.T + drift
        gain = spread @ seen.T / (seen @ spread @ seen.T + 10.0)
        state = state + gain * (value - seen @ state)
        spread = (np.eye(2) - gain @ seen) @ spread
    return float((step @ state)[0, 0])


def test_the_kalman_filter_is_that_of_the_matrices() -> None:
    random = Random(1)
    values = [50.0 + 3 * number + random.random() for number in range(30)]
    for count in range(1, 31):
        assert after(forecast_of("kalman", 5), *values[:count]) == pytest.approx(kalman(values[:count]))


def test_the_kalman_filter_follows_a_trend_and_predicts_no_less_than_nothing() -> None:
    assert after(forecast_of("kalman", 5), *range(10, 110, 10)) == pytest.approx(110, abs=1)
    assert after(forecast_of("kalman", 5), 1000.0, 500.0, 1.0) == 0.0
