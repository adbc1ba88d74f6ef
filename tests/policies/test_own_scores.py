"""A subclass that scores otherwise is asked, also where the policy finds the lowest score without asking for each."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.belady_compute import BeladyCompute
from kvsim.policies.eviction.laru import LearningAugmented
from kvsim.policies.eviction.leaf_features import FEATURES, Vector
from kvsim.policies.eviction.leaf_model import LeafModel
from kvsim.policies.eviction.learned import Learned
from kvsim.policies.eviction.seg_len import SegmentLength
from tests.core.small import MODEL, offered, small_cache


class NewestSegments(SegmentLength):
    def scores(self, nodes: list[Node], now: float) -> list[float]:
        return [-node.last_used for node in nodes]


class NewestByWorth(SegmentLength):
    def worth(self, node: Node) -> tuple[int, float]:
        return 0, -node.last_used


class NewestOfTheFuture(BeladyCompute):
    def score(self, node: Node, now: float) -> float:
        return -node.last_used


class NewestLearned(LearningAugmented):
    def score(self, node: Node, now: float) -> float:
        return -node.last_used


class NewestByScores(Learned):
    def scores(self, nodes: list[Node], now: float) -> list[float]:
        return [-node.last_used for node in nodes]


class NewestByFeatures(Learned):
    """By a model that lets the oldest leave first, of ages that are turned round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = np.zeros((len(FEATURES), 1))
        weights[0] = -1.0
        self.use_model(LeafModel(np.zeros(len(FEATURES)), np.ones(len(FEATURES)), [(weights, np.zeros(1))]))

    def features(self, nodes: Sequence[Node], now: float) -> Vector:
        return -super().features(nodes, now)


@pytest.mark.parametrize(
    "kind", [NewestSegments, NewestByWorth, NewestOfTheFuture, NewestLearned, NewestByScores, NewestByFeatures]
)
def test_a_subclass_with_a_score_of_its_own_is_asked(kind: type[EvictionPolicy]) -> None:
    """Four pages, used one after another; the trace, which BeladyCompute knows, uses each once more in the same order."""
    words = "abcd"
    cache = small_cache(gpu=10, eviction=kind)
    policy = cache.gpu.eviction
    requests = [cache.request(word, index=at) for at, word in enumerate(2 * words)]
    policy.bind(PolicyContext(requests=requests, model=MODEL, page_tokens=1))
    for at, word in enumerate(words):
        cache.use(word, index=at)
    assert offered(policy, 99.0) == [cache.node(word) for word in reversed(words)]
