"""What an autoscaling policy knows of the engines before a run, as a profile of one of them would tell."""

import numpy as np

from kvsim.engine.adapters import AdapterWork
from kvsim.engine.substrate import Work
from kvsim.hardware.tier_kinds import ALWAYS
from kvsim.plans.plan import Plan
from kvsim.policies.autoscaling.context import AutoscalingContext
from kvsim.substrate.simulated.compute import step_times
from kvsim.substrate.simulated.engine_steps import engine_steps


def autoscaling_context(plan: Plan, engines: int) -> AutoscalingContext:
    """Return what the policy of a plan with at most ``engines`` engines is given.

    A step with adapters is one of requests that all have one, as many different ones as the engine has places for.
    """
    engine, model, pages = plan.engine, plan.model, plan.tiers[0].capacity_pages
    drafts, lora = engine.speculation, engine.lora
    steps = engine_steps(step_times(model, plan.hardware), plan.hardware, drafts, lora)

    def step_s(tokens: int, requests: int, context: int) -> float:
        work = Work(
            chunks=[(tokens, 0)] if tokens else [],
            decode_requests=requests,
            decode_context_tokens=context,
            tokens_per_decode=drafts.tokens_per_request,
        )
        if lora.is_on:
            computed, different = tokens + requests * drafts.tokens_per_request, requests + bool(tokens)
            work.adapters = AdapterWork(computed, min(lora.max_loras, different), 0)
        return steps.leap_s(work, 1)

    return AutoscalingContext(
        engines=engines,
        least_engines=plan.cluster.min_engines,
        kv_tokens=None if pages is None else pages * plan.page_tokens,
        taken_tokens=lambda tokens: plan.rules.taken_tokens(model, tokens),
        max_batch_tokens=engine.max_batch_tokens,
        max_running_requests=engine.max_running_requests,
        step_s=step_s,
        tokens_per_step=drafts.expected_tokens(),
        step_tokens=drafts.tokens_per_request,
        rng=np.random.default_rng([plan.seed, len(ALWAYS) + 2]),
    )
