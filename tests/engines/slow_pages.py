"""The page-by-page model of the core, with the sizes and rules of a preset."""

from collections.abc import Sequence

from kvsim.core.request import Request
from kvsim.engine.outcome import REJECTED
from kvsim.plans.build import Plan
from kvsim.policies.context import PolicyContext
from kvsim.run.play import replay
from tests.core.page_model import Edge, Hits, PageModel
from tests.core.page_rules import LRU, Placement


def play(plan: Plan, requests: list[Request]) -> list[Hits | None]:
    """The hits of each request in a replay; None for one that can never run."""
    outcome = replay(plan, requests)
    rows = zip(outcome.hit_pages.tolist(), outcome.status.tolist(), strict=True)
    return [None if status == REJECTED else tuple(row) for row, status in rows]


def play_slowly(plan: Plan, requests: list[Request], placements: Sequence[Placement]) -> list[Hits | None]:
    """The same by the model, with LRU in every tier of a chain and these rules for the edges from the top."""
    capacities = [tier.capacity_pages or 0 for tier in plan.tiers]
    plan.prefetch.bind(PolicyContext(tier=1, capacity_pages=capacities[1], page_tokens=plan.page_tokens))
    model = PageModel(
        capacities,
        [LRU] * len(capacities),
        [Edge(at, at + 1, placement) for at, placement in enumerate(placements)],
        prefetch=plan.prefetch,
        page_tokens=plan.page_tokens,
        recompute_last_token=plan.rules.recompute_last_token,
        in_flight=plan.replay.in_flight,
        hold_output=plan.replay.hold_output,
    )
    return model.play(requests)
