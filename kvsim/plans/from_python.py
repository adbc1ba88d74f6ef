"""From the arguments of the Python API to a plan, in which policy objects take the place of configured policies."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from kvsim.errors import UsageError
from kvsim.plans.arguments import Arguments
from kvsim.plans.build import build_run
from kvsim.plans.combinations import check_plan
from kvsim.plans.plan import Plan, TierPlan
from kvsim.policies.copies import copied
from kvsim.settings.configuration import Composed, compose_with_choices
from kvsim.trace.base import Trace, TraceSource
from kvsim.trace.check import check_requests
from kvsim.trace.memory import RequestsInMemory, source_of

OF_THE_TRACE = ("trace", "page_tokens")
PER_TIER = ("eviction", "placement")
RUN_WIDE = {name: name for name in ("prefetch", "checkpoint", "routing", "scheduling", "autoscaling", "admission")} | {
    "routing@cluster.decode_routing": "decode_routing"
}
"""Keys of the policies that a run has once, with the plan's fields for them."""


def plan_for(
    command: str, trace: Trace, arguments: Arguments, compose: Callable[[list[str]], Composed] = compose_with_choices
) -> Plan:
    """Return the checked plan of a command on a loaded trace. ``compose`` composes overrides. Raises UsageError."""
    check_given(trace, arguments)
    given = [*arguments.overrides, *(f"{key}=object" for key in arguments.objects)]
    config, choices = compose(composed(trace, arguments))
    plan = on_source(build_run(config, command=command, overrides=given, choices=choices), source_of(trace))
    if arguments.objects:
        plan = _with_objects(plan, arguments.objects)
        check_plan(plan, command, given)
    return plan


def check_given(trace: Trace, arguments: Arguments) -> None:
    """Raise UsageError for settings of a trace that is loaded already, and for requests that cannot be."""
    for line in (*arguments.overrides, *arguments.objects):
        if line.split("=", 1)[0].split(".", 1)[0] in OF_THE_TRACE:
            raise UsageError(f"{line}: the trace is already loaded; pass this to load_trace instead")
    if not trace.origin:
        check_requests(trace.requests)


def on_source(plan: Plan, source: TraceSource | None) -> Plan:
    """Return a plan whose trace is in memory, as its configuration says, too; the plan itself without a source."""
    if source is None:
        return plan
    plan = replace(plan, trace=source)
    if not isinstance(source, RequestsInMemory):
        return plan
    recorded = {**plan.config, "trace": source.description()}
    return replace(plan, config=recorded, choices=plan.choices | {"trace": source.trace.name})


def composed(trace: Trace, arguments: Arguments) -> list[str]:
    """Return the overrides of a run on this trace that Hydra composes."""
    return [*trace.origin, f"page_tokens={trace.page_tokens}", *arguments.overrides]


def is_described(objects: Mapping[str, Any]) -> bool:
    """Whether a configuration can say all about these policy objects, so that another process could make the same ones."""
    return all(isinstance(_node(policy), dict) and _is_importable(type(policy)) for policy in objects.values())


def _with_objects(plan: Plan, objects: Mapping[str, Any]) -> Plan:
    """Return the plan with these policies. Every tier that uses one gets a copy of it.

    A policy for all tiers does not replace one that was chosen for a tier alone.
    """
    tiers = [replace(tier, **_of_tier(plan, tier, objects)) for tier in plan.tiers]
    run_wide = {field: copied(objects[key]) for key, field in RUN_WIDE.items() if key in objects}
    choices = plan.choices | {key: type(policy).__name__ for key, policy in objects.items()}
    return replace(plan, tiers=tiers, config=_configured(plan.config, objects), choices=choices, **run_wide)


def _of_tier(plan: Plan, tier: TierPlan, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policies of a tier that are objects, by family."""
    found = {}
    for family in PER_TIER:
        has_own = plan.config["tiers"][tier.name].get(family) is not None
        policy = objects.get(f"{family}@tiers.{tier.name}.{family}", None if has_own else objects.get(family))
        if policy is not None and getattr(tier, family) is not None:
            found[family] = copied(policy)
    return found


def _configured(config: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with a description of each policy object in its place."""
    configured: dict[str, Any] = json.loads(json.dumps(config))
    for key, policy in objects.items():
        *groups, name = (key.partition("@")[2] or key).split(".")
        place = configured
        for group in groups:
            place = place[group]
        place[name] = _node(policy)
    return configured


def _node(policy: Any) -> dict[str, Any] | str:
    """Describe a policy as the configuration does, by its class and its settings; as text if JSON cannot hold the settings."""
    if not is_dataclass(policy):
        return repr(policy)
    settings = {field.name: getattr(policy, field.name) for field in fields(policy) if field.init}
    try:
        same: dict[str, Any] = json.loads(json.dumps(settings))
    except (TypeError, ValueError):
        return repr(policy)
    return {"_target_": f"{_module(type(policy))}.{type(policy).__qualname__}"} | same


def _is_importable(kind: type) -> bool:
    """Whether every process finds the class under its name."""
    module = sys.modules.get(kind.__module__)
    return _module(kind) != "__main__" and hasattr(module, "__file__") and getattr(module, kind.__qualname__, None) is kind


def _module(kind: type) -> str:
    """Return the module of a class; a script has the same name in the processes that it starts."""
    return "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
