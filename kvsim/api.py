"""The Python API: load a trace, run it, read the result. Configuration, checks and results are those of the commands."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsim import run
from kvsim.bounds.curves import Curve, CurveSettings
from kvsim.build import build_run, build_trace
from kvsim.configuration import compose
from kvsim.construct import construct
from kvsim.errors import UsageError
from kvsim.execute import Result, draw, execute
from kvsim.plan import Plan, TierPlan
from kvsim.policies.copies import copied
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.prefetch.base import PrefetchPolicy
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.trace.base import Trace

__all__ = ["Result", "curve", "load_trace", "replay", "simulate"]

OF_THE_TRACE = ("trace", "page_tokens")


def load_trace(name: str = "synthetic", *, page_tokens: int = 16, **settings: Any) -> Trace:
    """Read a trace: a choice of the config group ``trace`` (mooncake, weka, tokens, synthetic, ...) with its settings.

    ``load_trace("mooncake", path="conversation.jsonl")`` reads a file. Raises UsageError, or TraceError for a file that cannot be
    used.
    """
    origin = (f"trace={name}", *(f"trace.{key}={_quoted(value)}" for key, value in settings.items()))
    source, pages = build_trace(compose([*origin, f"page_tokens={page_tokens}"]))
    trace = source.load(pages)
    trace.origin = origin
    return trace


def replay(
    trace: Trace,
    *overrides: str,
    eviction: EvictionPolicy | None = None,
    placement: PlacementPolicy | None = None,
    prefetch: PrefetchPolicy | None = None,
    advance: Callable[[int], None] | None = None,
) -> Result:
    """Replay a trace without a clock: ``kvsim replay`` with overrides such as ``"tiers.gpu.capacity=6000pages"``.

    A policy may be given as an object: each tier without a policy of its own for that family gets a copy. ``advance`` is
    called now and then with the number of finished requests. Raises UsageError.
    """
    return _run("replay", trace, overrides, {"eviction": eviction, "placement": placement, "prefetch": prefetch}, advance)


def simulate(
    trace: Trace,
    *overrides: str,
    eviction: EvictionPolicy | None = None,
    placement: PlacementPolicy | None = None,
    prefetch: PrefetchPolicy | None = None,
    scheduling: SchedulingPolicy | None = None,
    advance: Callable[[int], None] | None = None,
) -> Result:
    """Serve a trace in simulated time: ``kvsim simulate``. Arguments are as for ``replay``; ``scheduling`` orders the queue.

    ``"substrate=hardware"`` serves it on this machine instead; raises WrongResult if a reused page held wrong data.
    """
    policies = {"eviction": eviction, "placement": placement, "prefetch": prefetch, "scheduling": scheduling}
    return _run("simulate", trace, overrides, policies, advance)


def curve(
    trace: Trace,
    *overrides: str,
    capacities: Sequence[int | str] | None = None,
    policies: Sequence[str] = (),
    fraction: float = 1.0,
    advance: Callable[[int], None] | None = None,
) -> Curve:
    """Compute hit rate against the capacity of one tier: ``kvsim curve``. Includes exact LRU, in one pass, and Belady's bound.

    ``capacities`` are numbers of pages or strings such as ``"40GiB"``; None chooses 1, 2, 5, 10, ... from the largest prompt on.
    ``policies`` are eviction policies by name, with optional settings: ``"slru protected_hits=3"``. A ``fraction`` below 1
    replays only this share of the requests, at proportionally smaller capacities. Raises UsageError.
    """
    plan = _plan("curve", trace, overrides)
    sizes = None if capacities is None else list(capacities)
    settings = construct(CurveSettings, {"capacities": sizes, "policies": list(policies), "fraction": fraction}, "curve")
    return draw(plan, settings, trace, watch=lambda _: nullcontext(advance)).curve


def _plan(command: str, trace: Trace, overrides: Sequence[str]) -> Plan:
    for override in overrides:
        if override.split("=", 1)[0].split(".", 1)[0] in OF_THE_TRACE:
            raise UsageError(f"{override}: the trace is already loaded; pass this to load_trace instead")
    cfg = compose([*trace.origin, f"page_tokens={trace.page_tokens}", *overrides])
    return build_run(cfg, command=command, overrides=overrides)


def _run(
    command: str,
    trace: Trace,
    overrides: Sequence[str],
    policies: dict[str, Any],
    advance: Callable[[int], None] | None,
) -> Result:
    plan = _with_objects(_plan(command, trace, overrides), policies)
    result = execute(command, plan, trace, watch=lambda _: nullcontext(advance), is_named=not any(policies.values()))
    run.check_verified(result.outcome)
    return result


def _with_objects(plan: Plan, policies: dict[str, Any]) -> Plan:
    """Return the plan with the given policy objects, except where a tier's configuration chooses its own policy."""
    given = {family: policy for family, policy in policies.items() if policy is not None}
    if not given:
        return plan
    config = plan.config | {family: repr(policy) for family, policy in given.items()}
    tiers = [
        replace(tier, **{family: copied(given[family]) for family in given if _takes(plan, tier, family)}) for tier in plan.tiers
    ]
    run_wide = {family: given.get(family, getattr(plan, family)) for family in ("prefetch", "scheduling")}
    return replace(plan, tiers=tiers, config=config, **run_wide)


def _takes(plan: Plan, tier: TierPlan, family: str) -> bool:
    """Whether the tier has a policy of this family that was not chosen for this tier alone."""
    return getattr(tier, family, None) is not None and plan.config["tiers"][tier.name].get(family) is None


def _quoted(value: Any) -> str:
    """Format a value so that Hydra's override grammar reads it back unchanged."""
    if isinstance(value, str | Path):
        escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return "null" if value is None else str(value)
