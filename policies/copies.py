"""A further policy like one that there is, for another tier or run."""

from copy import deepcopy
from typing import Any, TypeVar

Policy = TypeVar("Policy")


def copied(policy: Policy) -> Policy:
    """A policy with the same settings and a state of its own.

    A compiled object is made without arguments before its state is copied, so whatever a new policy holds must allow that.
    Of an ordinary class that derives from a compiled one, ``deepcopy`` alone takes only what the compiled class has declared.
    """
    copy: Any = deepcopy(policy)
    if hasattr(policy, "__dict__"):
        vars(copy).update(deepcopy(vars(policy)))
    result: Policy = copy
    return result
