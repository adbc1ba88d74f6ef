"""What an autoscaling policy knows of the engines before a run, as a profile of one of them would tell."""

import numpy as np

from kvsim.hardware.tier_kinds import ALWAYS
from kvsim.plans.plan import Plan
from kvsim.policies.autoscaling.context import AutoscalingContext
from kvsim.run.profile import Profile


def autoscaling_context(plan: Plan, engines: int) -> AutoscalingContext:
    """Return what the policy of a plan with at most ``engines`` engines is given."""
    pages, profile = plan.tiers[0].capacity_pages, Profile(plan)
    return AutoscalingContext(
        engines=engines,
        least_engines=plan.cluster.min_engines,
        kv_tokens=None if pages is None else pages * plan.page_tokens,
        taken_tokens=lambda tokens: plan.rules.taken_tokens(plan.model, tokens),
        max_batch_tokens=plan.engine.max_batch_tokens,
        max_running_requests=plan.engine.max_running_requests,
        step_s=lambda tokens, requests, context: profile.step_s([(tokens, 0)] if tokens else (), 0, requests, context),
        tokens_per_step=profile.tokens_per_step,
        step_tokens=profile.step_tokens,
        rng=np.random.default_rng([plan.seed, len(ALWAYS) + 2]),
    )
