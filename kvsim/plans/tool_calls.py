"""Checks of policies that decide what pages do during tool calls."""

from collections.abc import Set

from kvsim.errors import NoEffect, UsageError
from kvsim.hardware.tier_kinds import HOST_MEMORY, kind_of
from kvsim.plans.plan import Plan
from kvsim.settings.unused_settings import given

KEY = "prefetch"


def check_tool_calls(plan: Plan, command: str, keys: Set[str]) -> None:
    """Raise UsageError for a plan in which nothing can leave the GPU during a tool call and come back, and for settings of the
    policy without effect."""
    policy = plan.prefetch
    name = type(policy).__name__
    if command == "replay":
        raise NoEffect(
            KEY, "on kvsim replay, in which no time passes during a tool call", "use kvsim simulate", subject=_named(name)
        )
    if not any(kind_of(tier.name).medium == HOST_MEMORY for tier in plan.tiers):
        raise NoEffect(KEY, "without a CPU tier", "set tiers.cpu.capacity", subject=_named(name))
    for setting in policy.without_effect():
        if key := given(set(keys), f"{KEY}.{setting}"):
            raise NoEffect(key, f"with these settings of {name}")
    rules = plan.rules
    for problem, is_there, way in (
        (
            "by substrate=hardware, which loads pages for running requests only",
            plan.substrate != "simulated",
            "set substrate=simulated",
        ),
        ("with recurrent layers, whose states would have to move, too", plan.model.is_hybrid, "choose another policy"),
        (
            f"by the rules of {rules.engine}, which know no offload of idle pages",
            bool(rules.engine) or rules.scheduler() is not None,
            "set rules=default",
        ),
        (
            "where prefill and decode are apart: pages are on another engine than the next prompt",
            bool(plan.layout.pairs),
            "set cluster.engines instead",
        ),
        ("where engines are started and stopped", plan.is_scaled, "set autoscaling=none"),
        ("by several processes", plan.cluster.workers > 1, "set cluster.workers=1"),
    ):
        if is_there:
            raise UsageError(f"{_named(name)} is not simulated {problem}: {way}")


def check_calls_known(plan: Plan) -> None:
    """Raise UsageError where requests come that nobody knows in advance, and so no call that another request will continue."""
    if plan.prefetch.follows_calls:
        name = type(plan.prefetch).__name__
        raise UsageError(f"{_named(name)} must know which request continues another one: choose another policy")


def _named(name: str) -> str:
    return f"{KEY}: {name}"
