"""Checks the ranks of ``RankedEviction``: nodes whose ranks cannot be put into an order are a PolicyError."""

from collections.abc import Iterable
from functools import cmp_to_key
from typing import Any, NoReturn

from kvsim.core.tier import PolicyError
from kvsim.core.tree import Node


def check_rank(policy: object, node: Node, rank: Any) -> None:
    """Raise PolicyError for a rank that is None or not a number."""
    if type(rank) is tuple:
        for part in rank:
            if part != part:
                raise refused(policy, node, rank, "a rank must be comparable, not NaN")
    elif rank is None:
        raise refused(policy, node, rank, "is a return missing?")
    elif rank != rank:
        raise refused(policy, node, rank, "a rank must be comparable, not NaN")


def has_risen(policy: object, node: Node, before: Any, rank: Any) -> bool:
    """Whether the rank of a node that has been evictable ever since is higher than before: if not, it must be the same."""
    try:
        if rank == before:
            return False
        if rank > before:
            return True
        check_rank(policy, node, rank)
    except (TypeError, ValueError) as error:
        refuse_order(policy, [before, rank], error)
    raise PolicyError(
        f"{name(policy)} lowered the rank of {node} from {before} to {rank} while it was evictable: "
        "a rank may rise at any time, but one that falls must be announced by on_evictable()"
    )


def refuse_order(policy: object, ranks: Iterable[Any], error: Exception) -> NoReturn:
    """Comparing some of these ranks has raised this error. Raise PolicyError with two that cannot be compared."""

    def compare(rank: Any, other: Any) -> int:
        try:
            if rank > other:
                return 1
            return -1 if other > rank else 0
        except (TypeError, ValueError):
            raise PolicyError(
                f"{name(policy)} ranked one node as {rank!r} and one as {other!r}: ranks must be comparable with each other"
            ) from error

    found = list(ranks)
    compare(found[0], found[0])
    sorted(found, key=cmp_to_key(compare))
    raise error


def refused(policy: object, node: Node, rank: Any, why: str) -> PolicyError:
    """The error of a rank that is none."""
    return PolicyError(f"{name(policy)} ranked {node} as {rank}: {why}")


def name(policy: object) -> str:
    """Names the policy in a message."""
    return f"the eviction policy {type(policy).__name__}"
