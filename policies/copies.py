"""A further policy like one that there is, for another tier or run."""

from copy import deepcopy
from typing import Any, TypeVar

Policy = TypeVar("Policy")


def copied(policy: Policy) -> Policy:
    """A policy with the same settings and a state of its own.

    The policy is not bound yet: what it remembers is made in ``bind``, and compiled objects of other classes cannot be copied.
    Of an ordinary class that derives from a compiled one, ``deepcopy`` alone takes only what the compiled class has declared.
    """
    copy: Any = deepcopy(policy)
    if hasattr(policy, "__dict__"):
        vars(copy).update(deepcopy(vars(policy)))
    result: Policy = copy
    return result
