"""A tier's sums, its edges, and which of its policy's hooks are called."""

import pytest

from kvsim.core.pool import Pool
from kvsim.core.tier import GPU, Tier, overrides
from kvsim.core.tree import Node
from kvsim.policies.eviction.lru import LRU


class Listener(LRU):
    """Wants to know of hits."""

    def on_hit(self, node: Node, now: float) -> None:
        """Do nothing with it."""


class Heir(Listener):
    """Has the hook from the class that it derives from."""


def tier_of(eviction: LRU, name: str = "gpu", index: int = GPU, pages: int | None = 8) -> Tier:
    return Tier(name, index, Pool(pages), eviction)


@pytest.mark.parametrize(("policy", "is_heard"), [(LRU(), False), (Listener(), True), (Heir(), True)])
def test_hooks_of_a_policy_are_called_only_if_it_has_them(policy: LRU, is_heard: bool) -> None:
    assert overrides(policy, "on_hit") == tier_of(policy).wants_hits == is_heard
    assert not tier_of(policy).wants_arrivals
