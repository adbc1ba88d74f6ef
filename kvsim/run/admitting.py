"""Builds what refuses requests, from a plan: the admission policy with what it may know."""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from kvsim.cluster.gate import Gate, goes_by
from kvsim.cluster.hand_over import HandOver
from kvsim.cluster.router import Router
from kvsim.core.request import Request
from kvsim.engine.engine import Engine
from kvsim.errors import UsageError
from kvsim.hardware.tier_kinds import ALWAYS
from kvsim.plans.plan import Plan
from kvsim.policies.admission.base import ENGINE
from kvsim.policies.admission.context import AdmissionContext
from kvsim.policies.copies import copied
from kvsim.results.slo import CLASSES, Slo
from kvsim.run.profile import Profile
from kvsim.run.stop_iteration import refuse_stop_iteration


def build_gate(
    plan: Plan, requests: Sequence[Request], engines: Sequence[Engine], router: Router | None, hand_over: HandOver | None
) -> Gate | None:
    """Build what refuses requests; None if the policy is never asked. Raises UsageError if it lacks an input."""
    if plan.admission is None or not plan.may_refuse:
        return None
    number = len(engines) if goes_by(plan.admission) == ENGINE else 1
    policies = [plan.admission if number == 1 else copied(plan.admission) for _ in range(number)]
    profile = Profile(plan)
    for engine, policy in enumerate(policies):
        known = AdmissionContext(
            engines=len(engines),
            page_tokens=plan.page_tokens,
            max_batch_tokens=plan.engine.max_batch_tokens,
            max_running_requests=plan.engine.max_running_requests,
            requests=requests,
            ttft_s=objective(plan.slo, "ttft_s"),
            tpot_s=objective(plan.slo, "tpot_s"),
            prefill_s=profile.prefill_s,
            decode_step_s=profile.decode_step_s,
            decodes=not plan.layout.pairs,
            tokens_per_step=profile.tokens_per_step,
            rng=np.random.default_rng([plan.seed, len(ALWAYS) + 3, engine]),
        )
        refuse_stop_iteration(policy)
        try:
            policy.bind(known)
        except ValueError as error:
            raise UsageError(f"admission: {type(policy).__name__} {error}") from error
    return Gate(policies, engines, router, hand_over)


def objective(slo: Slo, name: str) -> Callable[[Request], float]:
    """Return what returns the objective of a request, in seconds; infinite: none."""

    def limit_s(request: Request) -> float:
        limit = slo.limit_s("" if slo.by is None else str(getattr(request, CLASSES[slo.by])), name)
        return inf if limit is None else limit

    return limit_s
