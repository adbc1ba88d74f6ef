"""The steps of a server as its clients see them, and when requests were preempted: their answers pause while others go on."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
SAME_STEP_S = 0.003
"""Tokens of a step reach clients within this time, and steps take longer."""
CLOCK_S = 1e-9
"""Less than two times that differ."""
LEAST_MISSED = 2
"""Steps without a token of a request that make a pause. A client that is late misses one."""


class Steps(NamedTuple):
    """When the first and the last token of each step came, and how many steps run while one is formed."""

    begin_s: Times
    end_s: Times
    ahead: int

    def formed_s(self, tokens_s: Times) -> Times:
        """Return when the steps were formed that made these tokens: when the step before had ended or, ``ahead`` of that, an
        earlier one. Without so many steps before it, the token's own time."""
        before = np.searchsorted(self.end_s, tokens_s) - 1 - self.ahead
        return np.where(before >= 0, self.end_s[np.clip(before, 0, None)], tokens_s)


class Pause(NamedTuple):
    """A request without pages."""

    request: int
    begin_s: float
    end_s: float
    missed: float
    """Steps in which most others had a token, and this request none."""


def steps_of(tokens_s: Sequence[Times], ahead: int) -> Steps:
    """Return the steps that made tokens: a request has one token of a step at most, and none comes long after the one before."""
    came_s = np.concatenate([np.empty(0), *tokens_s])
    whose = np.repeat(np.arange(len(tokens_s)), [len(one) for one in tokens_s])
    order = np.argsort(came_s, kind="stable")
    begins_s, ends_s, seen = list[float](), list[float](), set[int]()
    for at_s, request in zip(came_s[order].tolist(), whose[order].tolist(), strict=True):
        if not seen or at_s > ends_s[-1] + SAME_STEP_S or request in seen and at_s > ends_s[-1]:
            begins_s.append(at_s)
            ends_s.append(at_s)
            seen.clear()
        seen.add(request)
        ends_s[-1] = at_s
    return Steps(np.array(begins_s), np.array(ends_s), ahead)


def pauses(
    tokens_s: Sequence[Times], admitted_s: Times, steps: Steps, most: int, *, goes_last: bool = False
) -> Mapping[int, list[tuple[float, float]]]:
    """Return from when to when requests had been preempted, at most ``most`` times in all: the longest pauses.

    A request loses its pages when the step after that of its last token is formed, and has new ones when the step of its next
    token is. Nobody else is admitted in between, since it is the first one of the queue.

    ``goes_last``: it goes to the end of the queue, and what steps in flight compute of it is lost.
    """
    lost = steps.ahead if goes_last else 0
    found = [pause for number in range(len(tokens_s)) for pause in _pauses_of(number, tokens_s, steps, lost)] if most else []
    found.sort(key=lambda pause: -pause.missed)
    by_request: dict[int, list[tuple[float, float]]] = {}
    for pause in sorted(found[:most], key=lambda pause: pause.begin_s):
        later_s = admitted_s[(admitted_s > pause.begin_s) & (admitted_s < pause.end_s) & (not goes_last)]
        by_request.setdefault(pause.request, []).append((pause.begin_s, float(later_s.min(initial=pause.end_s))))
    return by_request


def brief_pauses(
    tokens_s: Sequence[Times], steps: Steps, seen: Mapping[int, Sequence[tuple[float, float]]]
) -> Mapping[int, list[tuple[float, float]]]:
    """Return when requests missed one step alone, the first that one of those ``seen`` to be preempted missed.

    They may have been preempted with it. Otherwise a client that is late has not seen their tokens in time.
    """
    begins_s = {begin_s for pauses_s in seen.values() for begin_s, _ in pauses_s}
    found: dict[int, list[tuple[float, float]]] = {}
    for number, own_s in enumerate(tokens_s):
        at = np.searchsorted(steps.end_s, own_s - CLOCK_S)
        for place in np.flatnonzero(np.diff(at) == 2).tolist():
            begin_s, end_s = steps.formed_s(np.array([steps.end_s[at[place] + 1], own_s[place + 1]])).tolist()
            if begin_s in begins_s and not any(first_s <= begin_s < last_s for first_s, last_s in seen.get(number, ())):
                found.setdefault(number, []).append((begin_s, end_s))
    return found


def _pauses_of(number: int, tokens_s: Sequence[Times], steps: Steps, lost: int) -> list[Pause]:
    """Return the pauses of a request, of which ``lost`` steps after that of its last token send none although they compute it."""
    own_s, found = tokens_s[number], list[Pause]()
    gaps_s = np.diff(own_s)
    if not len(gaps_s):
        return found
    for place in np.flatnonzero(gaps_s > LEAST_MISSED * np.median(gaps_s)).tolist():
        last_s, next_s = own_s[place], own_s[place + 1]
        others = [one for at, one in enumerate(tokens_s) if at != number and one[0] <= last_s and one[-1] >= next_s]
        between = [np.count_nonzero((one > last_s + SAME_STEP_S) & (one < next_s - SAME_STEP_S)) for one in others]
        missed = float(np.median(between)) if others else 0.0
        if missed >= LEAST_MISSED:
            after = min(int(np.searchsorted(steps.end_s, last_s)) + 1 + lost, len(steps.end_s) - 1)
            begin_s, end_s = steps.formed_s(np.array([steps.end_s[after], next_s])).tolist()
            found.append(Pause(number, begin_s, end_s, missed))
    return found
