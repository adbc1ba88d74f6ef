"""Two neighbouring tiers: what the placement policy between them is asked, and that its answers are looked at."""

from collections.abc import Callable
from typing import Any

import pytest

from kvsim.core.answers import PolicyError
from kvsim.core.pool import Pool
from kvsim.core.tier import Edge, Tier, chain
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.base import PlacementPolicy
from tests.core.small import small_cache
from tests.workloads import make_request


class Answering(PlacementPolicy):
    """Gives the same answer to everything."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def after_use(self, node: Any, now: float) -> Any:
        return self.answer

    def after_eviction(self, node: Any, now: float) -> Any:
        return self.answer

    def wanted_pages(self, request: Any, path: Any, now: float) -> Any:
        return self.answer

    @property
    def keeps_loaded(self) -> Any:
        return self.answer

    @property
    def watermark(self) -> Any:
        return self.answer


def tiers_of(count: int) -> list[Tier]:
    return [Tier(("gpu", "cpu", "disk")[index], index, Pool(8), LRU()) for index in range(count)]


def edge_of(placement: PlacementPolicy) -> Edge:
    (edge,) = chain(tiers_of(2), [placement])
    return edge


@pytest.mark.parametrize(
    ("ask", "answer", "expected"),
    [
        (lambda edge, node, request: edge.wants_used(node, 0.0), None, "None from after_use(), not True or False"),
        (lambda edge, node, request: edge.wants_evicted(node, 0.0), 1, "1 from after_eviction(), not True or False"),
        (lambda edge, node, request: edge.keeps_loaded(), "yes", "'yes' from keeps_loaded, not True or False"),
        (lambda edge, node, request: edge.watermark(), 1.5, "1.5 from watermark, not a number of at least 0 and at most 1"),
        (lambda edge, node, request: edge.watermark(), -0.1, "-0.1 from watermark, not a number"),
        (lambda edge, node, request: edge.wanted_pages(request, [], 0.0), 4, "4 from wanted_pages(), not a whole number"),
        (lambda edge, node, request: edge.wanted_pages(request, [], 0.0), True, "True from wanted_pages(), not a whole"),
    ],
)
def test_a_wrong_answer_names_the_policy_and_the_tier_below(
    ask: Callable[[Edge, Any, Any], object], answer: Any, expected: str
) -> None:
    edge = edge_of(Answering(answer))
    with pytest.raises(PolicyError) as error:
        ask(edge, small_cache(gpu=4).tree.root, make_request([0, 1, 2]))
    assert str(error.value).startswith(f"the placement policy of the cpu tier, Answering, returned {expected}")
