"""Copies of policies, for further tiers or runs."""

from copy import deepcopy
from typing import Any, TypeVar

Policy = TypeVar("Policy")


def copied(policy: Policy) -> Policy:
    """Return a policy with the same settings and its own state.

    The policy must not be bound yet: ``bind`` creates its state, which may hold compiled objects that cannot be copied. For
    an ordinary class derived from a compiled one, ``deepcopy`` alone copies only the attributes that the compiled class
    declares.
    """
    copy: Any = deepcopy(policy)
    if hasattr(policy, "__dict__"):
        vars(copy).update(deepcopy(vars(policy)))
    result: Policy = copy
    return result
