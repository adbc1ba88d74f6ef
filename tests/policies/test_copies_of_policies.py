"""A copy of a policy has its settings and nothing else of it, whether its class is compiled or derives from one that is."""

from dataclasses import dataclass

import pytest

from kvsim.core.tree import Node
from kvsim.errors import UsageError
from kvsim.policies.copies import copied
from kvsim.policies.eviction.base import RankedEviction
from kvsim.policies.eviction.lru_k import LRUK
from kvsim.policies.placement.by_length import ByLength
from kvsim.policies.routing.kv_aware import KVAware


@dataclass(kw_only=True, eq=False)
class Mine(RankedEviction):
    """As a user writes one."""

    weight: float = 1.0

    def __post_init__(self) -> None:
        self.seen: list[int] = []

    def rank(self, node: Node) -> float:
        return self.weight * node.last_used


def test_a_users_policy() -> None:
    policy = Mine(weight=3.0)
    other = copied(policy)
    other.seen.append(1)
    assert type(other) is Mine and other.weight == 3.0
    assert policy.seen == []


def test_a_bundled_policy() -> None:
    assert copied(LRUK(k=3)).k == 3
    assert copied(ByLength(min_tokens=7)).min_tokens == 7
    assert copied(KVAware(staleness_s=2.0)).staleness_s == 2.0


def test_nothing() -> None:
    assert copied(None) is None


@pytest.mark.parametrize("answer", ["None", "self", "LRUK()"])
def test_a_copy_that_is_none_is_refused(answer: str) -> None:
    kind = type("Mine", (Mine,), {"__deepcopy__": eval(f"lambda self, memo: {answer}")})
    with pytest.raises(
        UsageError, match=r"Mine cannot be copied for another tier, engine or run: its copy is .*remove __deepcopy__"
    ):
        copied(kind())


def test_what_refers_to_a_policy_refers_to_its_copy() -> None:
    policy = Mine(weight=3.0)
    policy.scored = policy.rank  # type: ignore[attr-defined]
    copy = copied(policy)
    assert copy is not policy and copy.scored.__self__ is copy  # type: ignore[attr-defined]
