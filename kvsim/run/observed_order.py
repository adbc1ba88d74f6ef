"""Hits of a plan's cache if requests are admitted, and overlap, as they did in a real run."""

from collections.abc import Sequence

from kvsim.core.request import Request
from kvsim.engine.outcome import Outcome
from kvsim.plans.plan import Plan
from kvsim.plans.policy_errors import policies_named
from kvsim.replaying.moments import Moments
from kvsim.replaying.observed import ObservedReplay
from kvsim.run.assembly import build_setup, build_tiers
from kvsim.run.play import build_server, check_answers, with_known_answers
from kvsim.run.unchanged import recount, requests_unchanged


@policies_named
@requests_unchanged
def replay_observed(plan: Plan, requests: Sequence[Request], moments: Moments) -> Outcome:
    """Replay requests by the moments of a real run. Raises UsageError."""
    played = open_observed(plan, requests)
    outcome = played.run_observed(requests, moments)
    recount(plan, [played.server], outcome)
    return outcome


def open_observed(plan: Plan, requests: Sequence[Request]) -> ObservedReplay:
    """Return such a replay before its first moment, with an empty cache. Raises UsageError."""
    plan = with_known_answers(plan.with_own_policies(), requests)
    check_answers(plan, requests)
    graph = build_tiers(plan, requests)
    server = build_server(plan, build_setup(plan, graph, requests), requests, None, is_observed=True)
    return ObservedReplay(server, plan.replay, plan.engine.max_batch_tokens)
