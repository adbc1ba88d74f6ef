"""Checks of what policies return, so that a wrong policy cannot give a wrong result. An unusable answer raises PolicyError.

Answers are typed as plain objects. With the expected types, compiled code would raise its own TypeError, which does not name
the policy.
"""

from collections.abc import Collection, Iterable, Sequence
from math import inf, nan
from types import MethodDescriptorType
from typing import Any

import numpy as np

from kvsim.core.pool import UNLIMITED

LONGEST = 200
"""Characters of an answer that an error message repeats."""

REPEATED = 1000
"""How many numbers a list may have beyond one for each number that is allowed: an endless list is an error."""


class PolicyError(Exception):
    """A policy broke its contract; the message names the policy and what it did."""


def users_classes(kind: type) -> list[type]:
    """Return those of a class and its bases that are no part of kvsim and none of ``object``, ``ABC`` and their like."""
    known = ("kvsim", "abc", "typing", "builtins")
    return [one for one in kind.__mro__ if one.__module__.partition(".")[0] not in known]


def refused(policy: str, call: str, answer: object, expected: str) -> PolicyError:
    """Return the error for an answer that is not what was expected."""
    hint = ": is a return missing?" if answer is None else ""
    text = repr(answer)
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return PolicyError(f"{policy} returned {shown} from {call}, not {expected}{hint}")


def is_typed(policy: object, *calls: str) -> bool:
    """Whether these methods of a policy are compiled. Their answers then have the right type and need no check."""
    return all(isinstance(getattr(type(policy), call), MethodDescriptorType) for call in calls)


def truth(policy: str, call: str, answer: object) -> bool:
    """Return an answer that must be True or False. ``policy`` and ``call`` name the policy and its method in the error."""
    if answer is True:
        return True
    if answer is False:
        return False
    if isinstance(answer, np.bool_):
        return bool(answer)
    raise refused(policy, call, answer, "True or False")


def whole_number(policy: str, call: str, answer: object, most: int, least: int = 0) -> int:
    """Return an answer that must be a whole number from ``least`` (0 or more) to ``most``."""
    found = -1
    if isinstance(answer, int):
        if not isinstance(answer, bool):
            found = answer
    elif isinstance(answer, np.integer):
        found = int(answer)
    if least <= found <= most:
        return found
    raise refused(
        policy, call, answer, f"a whole number of at least {least}" + (f" and at most {most}" if most < UNLIMITED else "")
    )


def whole_numbers(policy: str, call: str, answer: object, most: int) -> list[int]:
    """Return an answer that must list whole numbers from 0 to ``most``, in any order."""
    if not isinstance(answer, Iterable):
        raise refused(policy, call, answer, "a list of whole numbers")
    found: list[int] = []
    for one in answer:
        found.append(whole_number(policy, call, one, most))
        if len(found) > most + REPEATED:
            raise PolicyError(
                f"{policy} returned more than {most + REPEATED:,} numbers from {call}, of at most {most + 1:,} places"
            )
    return found


def number(policy: str, call: str, answer: object, most: float = inf) -> float:
    """Return an answer that must be a number from 0 to ``most``."""
    found = nan
    if isinstance(answer, (int, float, np.integer, np.floating)) and not isinstance(answer, bool):
        found = _as_float(answer)
    if 0 <= found <= most:
        return found
    raise refused(policy, call, answer, "a number of at least 0" + (f" and at most {most:g}" if most < inf else ""))


def engine(policy: str, call: str, answer: object, offered: Collection[int]) -> int:
    """Return an answer that must be the number of an offered engine."""
    found = -1
    if isinstance(answer, (int, np.integer)) and not isinstance(answer, bool):
        found = int(answer)
    if found in offered:
        return found
    raise refused(policy, call, answer, f"the number of an engine that is up ({', '.join(map(str, sorted(offered)))})")


def rank_number(policy: str, call: str, answer: object) -> float:
    """Return an answer that must be a number, of any size but not NaN."""
    found = nan
    if isinstance(answer, (int, float, np.integer, np.floating)) and not isinstance(answer, bool):
        found = _as_float(answer)
    if found == found:
        return found
    raise refused(policy, call, answer, "a number")


def _as_float(answer: Any) -> float:
    """Return a number as a float; NaN for a whole number too large for one."""
    try:
        return float(answer)
    except OverflowError:
        return nan


def every_one(policy: str, call: str, answer: object, expected: Sequence[object]) -> list[Any]:
    """Return an answer that must contain each of the ``expected`` waiting requests once, in any order."""
    if not isinstance(answer, Iterable):
        raise refused(policy, call, answer, "the waiting requests in order")
    given: list[Any] = []
    left = {id(one) for one in expected}
    for one in answer:  # not as a list, which may be endless: the first one too many is refused
        given.append(one)
        if id(one) not in left:
            raise refused(policy, call, one, "a waiting request that it has not returned before")
        left.remove(id(one))
    if left:
        raise PolicyError(f"{policy} returned {len(given)} of {len(expected)} waiting requests from {call}: it must return all")
    return given
