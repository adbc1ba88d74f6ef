"""Checks of the ranks of ``RankedEviction``: ranks that cannot be ordered raise PolicyError."""

from collections.abc import Iterable
from functools import cmp_to_key
from typing import Any, NoReturn

from kvsim.core.answers import PolicyError
from kvsim.core.tree import Node


def check_rank(policy: object, node: Node, rank: Any) -> None:
    """Raise PolicyError for a rank that is None or not a number."""
    if isinstance(rank, float):  # compiled code compares floats without a call
        is_nan = rank != rank
    elif isinstance(rank, tuple):
        is_nan = False
        for part in rank:
            if isinstance(part, float):
                is_nan = is_nan or part != part
            elif part != part:
                is_nan = True
    elif rank is None:
        raise refused(policy, node, rank, "is a return missing?")
    else:
        is_nan = bool(rank != rank)
    if is_nan:
        raise refused(policy, node, rank, "a rank must be comparable, not NaN")


def check_risen(policy: object, node: Node, before: Any, rank: Any) -> None:
    """Raise PolicyError unless the rank of a node that has stayed evictable has risen from ``before``."""
    try:
        if rank > before:
            return
        check_rank(policy, node, rank)
    except (TypeError, ValueError) as error:
        refuse_order(policy, [before, rank], error)
    raise PolicyError(
        f"{name(policy)} lowered the rank of {node} from {before} to {rank} while it was evictable: "
        "a rank may rise at any time, but a policy that lowers one must call on_evictable()"
    )


def never_still(policy: object, node: Node, rank: Any) -> PolicyError:
    """Return the error for ranks that rise although nothing has happened since they were asked for last."""
    return PolicyError(
        f"{name(policy)} raises the rank of a node whenever it is asked, that of {node} to {rank}: a rank may depend on the node "
        "and on what has happened, not on how often it is asked"
    )


def refuse_order(policy: object, ranks: Iterable[Any], error: Exception) -> NoReturn:
    """Raise PolicyError that shows two ranks which cannot be compared; comparing some of ``ranks`` has raised ``error``."""

    def compare(rank: Any, other: Any) -> int:
        try:
            if rank > other:
                return 1
            return -1 if other > rank else 0
        except (TypeError, ValueError):
            raise PolicyError(
                f"{name(policy)} ranked one node as {rank!r} and one as {other!r}: ranks must be comparable with each other"
            ) from error

    for rank in sorted(ranks, key=cmp_to_key(compare)):
        compare(rank, rank)
    raise error


def refused(policy: object, node: Node, rank: Any, why: str) -> PolicyError:
    """Return the error for an unusable rank."""
    return PolicyError(f"{name(policy)} ranked {node} as {rank}: {why}")


def name(policy: object) -> str:
    """Return the policy's name for an error message."""
    return f"the eviction policy {type(policy).__name__}"
