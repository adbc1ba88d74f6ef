"""The steps of a server that computes prompts before answers, those that no client sees among them.

SGLang, without mixed chunks (``managers/scheduler.py``, ``schedule_policy.py``). A step computes prompts or answers. One of
prompts has so many tokens at most, in whole pages, and only the last prompt of it may go on: with the next step, as the first one
there. So of the requests whose first tokens come from one step, all but the first were admitted to that step, and the first one
to it or, if its prompt has more tokens than were left, to earlier ones. These send no token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvsim.report.servers.pauses import Steps

Times = npt.NDArray[np.float64]
BURST_S = 0.003
"""Requests that are sent within this time may reach an idle server together."""
TO_SERVER_S = 0.002
"""How long a request is on its way to the server's queue at least, less the way of a token to the client."""

LAUNCH_S = 0.005
"""A server takes longer to form and launch a step of prompts."""


class Prompts(NamedTuple):
    """What is known of requests: when each was sent, how long it was in the queue from when the server took it (NaN: not known),
    and how many tokens its prompt was computed for."""

    sent_s: Times
    queued_s: Times
    tokens: npt.NDArray[np.int64]


class Pass(NamedTuple):
    """A step."""

    formed_s: float
    end_s: float
    """When its last token came or, if it sent none, a time between those of the steps around it."""
    admitted: list[int]
    is_seen: bool


def passes_of(groups: Sequence[Sequence[int]], prompts: Prompts, steps: Steps, chunk: int, page: int) -> list[Pass]:
    """Return all steps. ``groups`` has, for each step that was seen, the requests whose first tokens it made, in their order."""
    making = _Making(prompts, steps.ahead, chunk, page)
    for place, group in enumerate(groups):
        following = groups[place + 1] if place + 1 < len(groups) else ()
        making.add(group, float(steps.begin_s[place]), float(steps.end_s[place]), following)
    return making.made


class _Making:
    """Steps, and the prompt that goes on with the next one."""

    def __init__(self, prompts: Prompts, ahead: int, chunk: int, page: int) -> None:
        self.made: list[Pass] = []
        self._prompts, self._ahead, self._chunk, self._page = prompts, ahead, chunk, page
        self._going_on = -1
        self._lacks = 0
        """Tokens that the prompt lacks which goes on."""

    def add(self, group: Sequence[int], begin_s: float, end_s: float, following: Sequence[int]) -> None:
        """Add a step that was seen, and those before it that were not.

        ``following`` are the requests whose first tokens the next step makes. The first of them may begin with what is left.
        """
        admitted: list[list[int]] = [[]]
        left = 0
        if group:
            first = self._lacks if group[0] == self._going_on else self._tokens(group[0])
            unseen = max(0, -(-first // self._chunk) - 1)
            admitted = [[] for _ in range(unseen + 1)]
            admitted[0] += group[:1] if group[0] != self._going_on else []
            admitted[-1] += group[1:]
            left = self._chunk - (first - unseen * self._chunk) - sum(map(self._tokens, group[1:]))
        last_s = min(self.made[-1].end_s, begin_s) if self.made else begin_s
        ends_s = [*np.linspace(last_s, begin_s, len(admitted) + 1)[1:-1].tolist(), end_s]
        self._going_on = -1
        for numbers, at_s in zip(admitted[:-1], ends_s, strict=False):
            self._make(numbers, at_s, is_seen=False)
        if following and 0 < left < self._tokens(following[0]) and self._begins(following[0], admitted[-1], end_s):
            admitted[-1].append(following[0])
            self._going_on, self._lacks = following[0], self._tokens(following[0]) - left
        self._make(admitted[-1], end_s, is_seen=True)

    def _tokens(self, request: int) -> int:
        return -(-int(self._prompts.tokens[request]) // self._page) * self._page

    def _make(self, admitted: list[int], end_s: float, *, is_seen: bool) -> None:
        formed_s = self._formed(admitted)
        if self.made:
            formed_s = max(formed_s, float(np.nextafter(self.made[-1].formed_s, np.inf)))  # no two at one time
        elif not np.isfinite(formed_s):
            formed_s = end_s
        self.made.append(Pass(formed_s, end_s, admitted, is_seen))

    def _end_s(self, before: int) -> float:
        """Return when the step has ended that is so many before the one to be made next."""
        return self.made[-before].end_s if len(self.made) >= before else -np.inf

    def _formed(self, admitted: Sequence[int]) -> float:
        """Return when the next step is formed: when the one before it has ended or, ``ahead`` of that, an earlier one.

        If nobody whom it admits had been sent by then, the server has looked for requests in vain, and again when it was idle.
        """
        sent_s: list[float] = self._prompts.sent_s[list(admitted)].tolist()
        at_s = self._end_s(1 + self._ahead)
        if sent_s and min(sent_s) > at_s - TO_SERVER_S:
            at_s = self._end_s(1)
        return max([at_s, *sent_s])

    def _begins(self, request: int, others: Sequence[int], end_s: float) -> bool:
        """Whether a request seems to be admitted to the next step, with these others, and not to the one after it.

        It must have been sent, and the server has taken it some time after that, and says how long it was in the queue then. A
        step may be formed late, but before the results of the one that runs are sent.
        """
        sent_s, queued_s = float(self._prompts.sent_s[request]), float(self._prompts.queued_s[request])
        this_s = self._formed(others)
        is_burst = bool(others) and sent_s <= max(self._prompts.sent_s[list(others)].tolist()) + BURST_S
        if sent_s > this_s - TO_SERVER_S and not is_burst:
            return False
        left_s = sent_s + queued_s
        next_s = max(self._end_s(self._ahead), this_s) if self._ahead else end_s
        if self._is_told(1 + self._ahead) and left_s > this_s + TO_SERVER_S:
            return self._taken_s(sent_s) + queued_s < next_s - LAUNCH_S
        return not left_s - this_s > next_s - left_s

    def _taken_s(self, sent_s: float) -> float:
        """Return when the server took a request that was sent then: when it formed the next step."""
        return next((one.formed_s for one in self.made if one.formed_s >= sent_s + TO_SERVER_S), float("inf"))

    def _is_told(self, before: int) -> bool:
        """Whether the step that is so many before the next one sent tokens, so that its end is known."""
        return len(self.made) < before or self.made[-before].is_seen
