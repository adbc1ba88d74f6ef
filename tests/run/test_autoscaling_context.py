"""What an autoscaling policy knows of an engine is what the simulated engine does."""

import pytest

from kvsim.engine.adapters import AdapterWork
from kvsim.engine.substrate import Work
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.plans.substrate_choice import open_simulated
from kvsim.policies.autoscaling.context import AutoscalingContext
from kvsim.run.autoscaling_context import autoscaling_context
from kvsim.settings.configuration import compose_with_choices

SCALED = ("cluster.engines=4", "autoscaling=dynamo_planner", "tiers.gpu.capacity=1000pages", "page_tokens=16")
DRAFTS = ("engine.speculation.tokens=3", "engine.speculation.acceptance=[0.5]", "engine.speculation.draft_cost=0.1")
ADAPTERS = ("engine.lora.max_loras=2", "engine.lora.adapter_bytes=100000000")


def known(*overrides: str) -> tuple[Plan, AutoscalingContext]:
    words = [*SCALED, *overrides]
    config, choices = compose_with_choices(words)
    plan = build_run(config, command="simulate", overrides=words, choices=choices)
    return plan, autoscaling_context(plan, 4)


def step_s(context: AutoscalingContext, tokens: int, requests: int, cached: int) -> float:
    assert context.step_s is not None
    return context.step_s(tokens, requests, cached)


@pytest.mark.parametrize("more", [(), DRAFTS, ADAPTERS, (*DRAFTS, *ADAPTERS)], ids=["plain", "drafts", "adapters", "both"])
def test_a_step_takes_as_long_as_in_the_simulation(more: tuple[str, ...]) -> None:
    plan, context = known(*more)
    drafted = plan.engine.speculation.tokens_per_request
    assert drafted == (4 if DRAFTS[0] in more else 1)
    work = Work(chunks=[(100, 0)], decode_requests=10, decode_context_tokens=5000, tokens_per_decode=drafted)
    if ADAPTERS[0] in more:
        work.adapters = AdapterWork(100 + 10 * drafted, 2, 0)
    steps = open_simulated(plan, [], []).steps  # type: ignore[attr-defined]
    assert step_s(context, 100, 10, 5000) == steps.leap_s(work, 1)


def test_drafts_and_adapters_make_a_step_longer() -> None:
    plain, drafts, adapters = (step_s(known(*more)[1], 0, 10, 5000) for more in ((), DRAFTS, ADAPTERS))
    assert plain < drafts and plain < adapters
    _, context = known(*DRAFTS)
    assert (context.tokens_per_step, context.step_tokens) == (1.875, 4)


def test_tokens_take_slots_by_the_engines_rules() -> None:
    """Gemma 3 27B has 10 layers with full attention and 52 with a window of 1,024 tokens: one group, and 6 of them."""
    _, context = known()
    assert context.kv_tokens == 16_000
    assert context.taken_tokens is not None and context.taken_tokens(5000.0) == 5000.0
    plan, context = known("model=gemma3_27b", "rules=vllm_window")
    assert (plan.model.sliding_window_layers, plan.model.sliding_window_tokens) == (52, 1024)
    assert context.taken_tokens is not None
    assert context.taken_tokens(5000.0) == 5000.0 + 6 * 1024 and context.taken_tokens(100.0) == 700.0
