"""Checks what policies answer: a policy can be wrong, a result cannot. What cannot be used is a PolicyError.

Answers are taken as objects. Compiled code that took them as what they should be would raise a TypeError of its own, which does
not name the policy.
"""

from collections.abc import Iterable, Iterator
from math import inf, nan
from types import MethodDescriptorType
from typing import Any

import numpy as np

from kvsim.core.tier import PolicyError, Tier
from kvsim.core.tree import NO_LIMIT, READY, Node, RadixTree


def refused(policy: str, call: str, answer: object, expected: str) -> PolicyError:
    """The error of an answer that is not what was expected."""
    hint = ": is a return missing?" if answer is None else ""
    return PolicyError(f"{policy} returned {answer!r} from {call}, not {expected}{hint}")


def is_typed(policy: object, *calls: str) -> bool:
    """Whether these methods of a policy are compiled: their answers are of the right type then, and need no look."""
    return all(isinstance(getattr(type(policy), call), MethodDescriptorType) for call in calls)


def truth(policy: str, call: str, answer: object) -> bool:
    """An answer that is True or False. ``policy`` names who gave it, ``call`` what was asked."""
    if answer is True:
        return True
    if answer is False:
        return False
    if isinstance(answer, np.bool_):
        return bool(answer)
    raise refused(policy, call, answer, "True or False")


def whole_number(policy: str, call: str, answer: object, most: int, least: int = 0) -> int:
    """An answer that is a whole number from ``least``, 0 or more, to ``most``."""
    found = -1
    if isinstance(answer, int):
        if not isinstance(answer, bool):
            found = answer
    elif isinstance(answer, np.integer):
        found = int(answer)
    if least <= found <= most:
        return found
    raise refused(
        policy, call, answer, f"a whole number of at least {least}" + (f" and at most {most}" if most < NO_LIMIT else "")
    )


def whole_numbers(policy: str, call: str, answer: object, most: int) -> list[int]:
    """An answer that lists whole numbers from 0 to ``most``, in any order."""
    if not isinstance(answer, Iterable):
        raise refused(policy, call, answer, "a list of whole numbers")
    return [whole_number(policy, call, one, most) for one in answer]


def number(policy: str, call: str, answer: object, most: float = inf) -> float:
    """An answer that is a number from 0 to ``most``."""
    found = nan
    if isinstance(answer, (int, float, np.integer, np.floating)) and not isinstance(answer, bool):
        found = float(answer)
    if 0 <= found <= most:
        return found
    raise refused(policy, call, answer, "a number of at least 0" + (f" and at most {most:g}" if most < inf else ""))


# --- eviction ------------------------------------------------------------------------------------------------------------


def eviction_policy(tier: Tier) -> str:
    """Names the policy in a message."""
    return f"the eviction policy of the {tier.name} tier, {type(tier.eviction).__name__},"


def victims(tier: Tier, now: float) -> Iterator[object]:
    """What the tier's eviction policy offers; ``victim`` checks each."""
    offered: Any = tier.eviction.victims(now)
    try:
        return iter(offered)
    except TypeError:
        raise refused(eviction_policy(tier), "victims()", offered, "nodes, one after another") from None


def victim(offered: object, tree: RadixTree, tier: Tier) -> Node:
    """What is offered, if it is a node that can leave the tier."""
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
    """How many pages of the node that the policy has just offered are to leave, at most."""
    most = tier.eviction.most_pages
    if most >= 1:
        return int(most)
    return whole_number(eviction_policy(tier), "most_pages", most, NO_LIMIT, 1)


def check_enough(tier: Tier, missing: int) -> None:
    """After the last victim, so many more pages must leave: if there are any, the policy has left out some victims."""
    if missing > 0:
        raise PolicyError(
            f"{eviction_policy(tier)} offered too few victims: {missing:,} more pages must leave, and {tier.evictable_pages:,} "
            "could; victims() must offer every evictable leaf"
        )


def cut_after(node: Node, pages: object, tree: RadixTree, tier: Tier) -> int:
    """After how many pages the policy wants a node cut: each part must have some."""
    if node.tree is tree and not node.is_state and isinstance(pages, (int, np.integer)) and 0 < pages < node.pages:
        return int(pages)
    raise PolicyError(
        f"{eviction_policy(tier)} called cut({node}, {pages!r}): cut() takes a node of this cache and a whole number of pages, "
        f"from 1 to {node.pages - 1} for this one"
    )
