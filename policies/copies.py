"""Copies of policies, for further tiers, engines or runs. The only way to copy one."""

from copy import deepcopy
from typing import Any, TypeVar

from kvsim.errors import UsageError

Policy = TypeVar("Policy")


def copied(policy: Policy) -> Policy:
    """Return a policy with the same settings and its own state.

    The policy must not be bound yet: ``bind`` creates its state, which may hold compiled objects that cannot be copied. For
    an ordinary class derived from a compiled one, ``deepcopy`` alone copies only the attributes that the compiled class
    declares.

    Raises UsageError if the policy's own ``__deepcopy__`` does not return one of its class.
    """
    memo: dict[int, Any] = {}
    copy: Any = deepcopy(policy, memo)
    if type(copy) is not type(policy) or copy is policy and policy is not None:
        raise UsageError(
            f"{type(policy).__name__} cannot be copied for another tier, engine or run: its copy is {copy!r}; "
            "remove __deepcopy__ and __reduce__, or let them return a new policy with the same settings"
        )
    if hasattr(policy, "__dict__"):
        vars(copy).update(deepcopy(vars(policy), memo))  # what refers to the policy refers to its copy
    result: Policy = copy
    return result
