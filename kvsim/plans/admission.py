"""Checks of what refuses requests: settings without effect, and runs that take every request."""

from collections.abc import Set

from kvsim.errors import NoEffect, UsageError
from kvsim.plans.plan import Plan
from kvsim.settings.unused_settings import given

KEY = "admission"


def check_admission(plan: Plan, keys: Set[str]) -> None:
    """Raise UsageError for settings of an admission policy without effect, and for one on real GPUs."""
    policy = plan.admission
    for name in policy.without_effect() if policy is not None else ():
        if key := given(set(keys), f"{KEY}.{name}"):
            raise NoEffect(key, f"with these settings of {type(policy).__name__}")
    if plan.may_refuse and plan.substrate != "simulated":
        raise UsageError(f"{KEY}: real GPUs take every request: set substrate=simulated, or {KEY}=none")
