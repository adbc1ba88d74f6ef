"""Checks of what eviction policies offer, so that a wrong policy cannot give a wrong result. A wrong offer raises PolicyError."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvsim.core.answers import PolicyError, refused, whole_number
from kvsim.core.pool import UNLIMITED
from kvsim.core.tier import Tier
from kvsim.core.tree import READY, Node, RadixTree


def eviction_policy(tier: Tier) -> str:
    """Return the policy's name for an error message."""
    return f"the eviction policy of the {tier.name} tier, {type(tier.eviction).__name__},"


def victims(tier: Tier, now: float) -> Iterator[object]:
    """Iterate over what the tier's eviction policy offers; ``victim`` checks each item."""
    offered: Any = tier.eviction.victims(now)
    try:
        return iter(offered)
    except TypeError:
        raise refused(eviction_policy(tier), "victims()", offered, "an iterable of nodes") from None


def victim(offered: object, tree: RadixTree, tier: Tier) -> Node:
    """Return ``offered`` as a node; raise PolicyError unless it is a node that can leave the tier."""
    if not isinstance(offered, Node):
        raise PolicyError(f"{eviction_policy(tier)} offered {offered!r}, which is not a node")
    index = tier.index
    if offered.tree is not tree:
        why = "it is not in the tree of this cache"
    elif offered.state[index] != READY:
        why = "it is not in the tier, or was offered before"
    elif offered.pins[index]:
        why = "it is pinned, or was offered before"
    elif offered.children_in[index]:
        why = "it has children in the tier"
    else:
        return offered
    raise PolicyError(f"{eviction_policy(tier)} offered a node that cannot leave, {offered}: {why}")


def most_pages(tier: Tier) -> int:
    """Return how many pages of the node just offered may leave."""
    most: Any = tier.eviction.most_pages
    if type(most) is int and most >= 1:
        return most
    return whole_number(eviction_policy(tier), "most_pages", most, UNLIMITED, 1)


def check_enough(tier: Tier, missing: int) -> None:
    """Raise PolicyError if pages are still missing after the last victim: the policy has left out victims."""
    if missing > 0:
        raise PolicyError(
            f"{eviction_policy(tier)} offered too few victims: {missing:,} more pages must leave, and {tier.evictable_pages:,} "
            "still can; victims() must offer every evictable leaf"
        )


def cut_after(node: Node, pages: object, tree: RadixTree, tier: Tier) -> int:
    """Return the number of pages after which the policy cuts a node; neither part may be empty."""
    if node.tree is tree and not node.is_state and isinstance(pages, (int, np.integer)) and 0 < pages < node.pages:
        return int(pages)
    raise PolicyError(
        f"{eviction_policy(tier)} called cut({node}, {pages!r}): cut() takes a node of this cache and a whole number of pages, "
        f"from 1 to {node.pages - 1} for this one"
    )
