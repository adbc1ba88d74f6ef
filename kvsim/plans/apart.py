"""Which engines of a plan are independent of each other, so that processes can simulate them apart (``cluster.workers``)."""

from collections.abc import Sequence

from kvsim.core.request import Request
from kvsim.errors import NoEffect, UsageError
from kvsim.plans.plan import Plan
from kvsim.policies.admission.base import CLUSTER
from kvsim.policies.routing.base import RoutingPolicy

KEY = "cluster.workers"
ALONE = f"set {KEY}=1"
SHORTEST_S = 1e-4
"""Reports that are less late leave processes too little to play at a time."""


def independent(plan: Plan) -> list[list[int]]:
    """Return the engines, by sets that share neither a tier nor a link nor the memory of a host."""
    is_one = any(tier.scope == "cluster" for tier in plan.tiers)
    groups: dict[int, list[int]] = {}
    for engine, host in enumerate(plan.layout.hosts):
        groups.setdefault(engine if len(plan.tiers) == 1 else 0 if is_one else host, []).append(engine)
    return list(groups.values())


def chooses_by(routing: RoutingPolicy) -> str:
    """Return what the choices of a policy depend on (``RoutingPolicy.chooses_by``): what its class says, unless one derived from
    that class has methods of its own."""
    for kind in type(routing).__mro__:
        if "chooses_by" in vars(kind):
            return routing.chooses_by
        if any(callable(member) for name, member in vars(kind).items() if not name.startswith("_")):
            return "state"
    return "state"


def check_apart(plan: Plan) -> None:
    """Raise UsageError unless processes can simulate the engines of a plan apart."""
    if plan.layout.engines == 1:
        raise NoEffect(KEY, "with one engine", "set cluster.engines above 1, or leave it out")
    if plan.substrate != "simulated":
        raise NoEffect(KEY, f"on substrate={plan.substrate}")
    for what, is_so in (
        ("the engines that compute prompts and those that decode depend on each other", bool(plan.layout.pairs)),
        ("requests of an engine that fails go to others", bool(plan.cluster.failures)),
        ("autoscaling starts and stops engines by the load of all", plan.is_scaled),
        (
            f"{type(plan.admission).__name__} refuses requests by the load of all engines",
            plan.admission is not None and plan.may_refuse and plan.admission.goes_by == CLUSTER,
        ),
        ("engine.reset_at_s resets all engines once all are idle", bool(plan.engine.reset_at_s)),
        ("timeline is written in one process", plan.timeline),
        ("events are written in one process", plan.events),
        (
            "hardware.rank_jitter and hardware.rank_faults are drawn for all engines in turn",
            bool(plan.hardware.rank_jitter or plan.hardware.rank_faults),
        ),
    ):
        if is_so:
            raise UsageError(f"{KEY}: {what}: {ALONE}")
    _check_routing(plan.routing)
    if len(independent(plan)) == 1:
        raise UsageError(
            f"{KEY}: all engines share a tier or the links of a host: {ALONE}, or set cluster.engines_per_host lower"
        )


def _check_routing(routing: RoutingPolicy) -> None:
    """Raise UsageError if a router chooses by what engines do at the same time."""
    name, by = type(routing).__name__, chooses_by(routing)
    if by == "state":
        remedy = "or routing=session_affinity"
        if hasattr(routing, "late_answers"):
            remedy += ", or routing.late_answers=true with routing.staleness_s above 0"
        raise UsageError(f"{KEY}: {name} chooses by the state of all engines: {ALONE}, {remedy}")
    if by == "reports" and routing.staleness_s < SHORTEST_S:
        late_s = f"{routing.staleness_s:g}"
        raise UsageError(
            f"{KEY}: {name} hears of engines {late_s} s late: {ALONE}, or routing.staleness_s to {SHORTEST_S:g} or more"
        )
    if by == "reports" and routing.may_keep:
        raise UsageError(f"{KEY}: {name} may keep requests until an engine reports: {ALONE}")


def check_requests_apart(plan: Plan, requests: Sequence[Request]) -> None:
    """Raise UsageError if what a trace asks for makes engines depend on each other."""
    if any(request.resets for request in requests):
        raise UsageError(f"{KEY}: the trace resets the caches of all engines: {ALONE}")
    if chooses_by(plan.routing) in ("order", "reports") and any(request.after >= 0 for request in requests):
        raise UsageError(
            f"{KEY}: {type(plan.routing).__name__} chooses by the order of requests, and in this trace some arrive when others "
            f"have ended: {ALONE}, or routing=session_affinity"
        )
