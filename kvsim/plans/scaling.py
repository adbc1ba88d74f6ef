"""Checks of what starts and stops engines: settings that contradict it, or have no effect without it."""

from collections.abc import Set

from kvsim.errors import NoEffect, UsageError
from kvsim.plans.cluster_settings import STARTS
from kvsim.plans.plan import Plan
from kvsim.settings.unused_settings import SCALING, given

KEY = SCALING[0]


def check_scaling(plan: Plan, keys: Set[str]) -> None:
    """Raise UsageError for a plan whose engines cannot be started and stopped, and for settings of that without effect."""
    policy = plan.autoscaling
    for name in policy.without_effect():
        if key := given(set(keys), f"{KEY}.{name}"):
            raise NoEffect(key, f"with these settings of {type(policy).__name__}")
    if not plan.is_scaled:
        for name in SCALING[1:]:
            if key := given(set(keys), name):
                raise NoEffect(key, "without autoscaling", "set autoscaling=NAME, or leave it out")
        return
    if plan.layout.engines == 1:
        raise NoEffect(KEY, "with one engine", "set cluster.engines, the most there may be, above 1")
    if not STARTS.holds(plan.start_s):
        raise UsageError(f"cluster.start_s: this machine loads the weights in {plan.start_s:g} s, more than a day: set it")
    scopes = [tier.scope for tier in plan.tiers[1:]]
    for why, is_so, way in (
        ("a GPU of this machine cannot be started and stopped", plan.substrate != "simulated", "set substrate=simulated"),
        ("engines that only prefill or only decode are not scaled", bool(plan.layout.pairs), "set cluster.engines instead"),
        ("engines that fail are not replaced", bool(plan.cluster.failures), "leave out cluster.failures"),
        (
            "the CPU tier of an engine that stops ends with it, and the tier below, which others share, does not; that is not "
            "simulated",
            "engine" in scopes and len(set(scopes)) > 1,
            "set tiers.cpu.scope=host",
        ),
    ):
        if is_so:
            raise UsageError(f"{KEY}: {why}: {way}")
    if plan.model.is_hybrid and len(plan.tiers) > 1 and "engine" not in scopes:
        raise UsageError(
            f"{KEY}: recurrent states below the GPU of an engine that stops cannot be kept: set tiers.cpu.scope=engine"
        )
