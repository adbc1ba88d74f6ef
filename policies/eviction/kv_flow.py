"""KVFlow (Pan et al.: KVFlow: Efficient prefix caching for accelerating LLM-based multi-agent workflows, NeurIPS 2025,
arXiv:2507.07400)."""

from dataclasses import dataclass
from math import inf
from typing import Final

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import RankedEviction

NEVER: Final = -1


class Call:
    """A call of an agent that has ended, and when its workflow calls the agent again."""

    __slots__ = ("due", "ends", "is_over", "session", "states")

    def __init__(self, session: int, due: int) -> None:
        self.session = session
        self.due = due
        """The step of the workflow that calls the agent again; NEVER if none does."""
        self.is_over = due == NEVER
        """Whether that call has ended, too."""
        self.ends: list[Node] = []
        """Where the paths of its samples ended."""
        self.states: list[Node] = []
        """Recurrent states that it used."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class StepsToExecution(RankedEviction):
    """KVFlow: keeps the prompts of agents that their workflow calls next, whenever they were called last.

    steps    requests of the workflow until it calls the agent again that has used a page; of several agents, the fewest
    victim   most steps first; what no call is expected to use goes before all others; then the least recently used

    A workflow is a ``session``, an agent a ``kind`` of request within it, and a step is a request. KVFlow is told the graph of
    its steps by the application; here the trace says who is called when. What an agent's next call then does not use, such as
    the task of the call before, is not expected to be used. Prefetching agents to the GPU before their step is not part of it.

    A page remembers the call that is due first. One whose first request has not finished leaves last. Needs the whole trace in
    advance, with a ``session`` and a ``kind`` of each request.
    """

    def __post_init__(self) -> None:
        self._place: dict[int, tuple[int, int]] = {}
        """By the index of a request: its step, and the step that calls the same agent next."""
        self._step: dict[int, int] = {}
        """By session: the step that it has reached."""
        self._calls: dict[int, list[Call]] = {}
        """By session: calls that are expected."""

    @property
    def needs_future(self) -> bool:
        return True

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        context.require("session", "the session of each request")
        context.require("kind", "the agent that makes each request")
        steps: dict[int, int] = {}
        last: dict[tuple[int, str], tuple[int, int]] = {}
        for request in context.requests:
            if request.session < 0:
                continue
            step = steps[request.session] = steps.get(request.session, NEVER) + 1
            before, number = last.get((request.session, request.kind), (NEVER, 0))
            if before != NEVER:
                self._place[before] = number, step
            last[request.session, request.kind] = request.index, step
            self._place[request.index] = step, NEVER

    def on_request(self, request: Request, now: float) -> None:
        if request.index in self._place:
            step = self._place[request.index][0]
            self._step[request.session] = max(step, self._step.get(request.session, NEVER))

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        step, due = self._place.get(request.index, (NEVER, NEVER))
        call = Call(request.session, due)
        path: Node = node
        while path.parent is not None:
            self._note(path, call)
            path = path.parent
        for state in self.request_states:
            self._note(state, call)
        if step != NEVER:
            self._pass(request.session, step)
        if not call.is_over:
            call.ends.append(node)
            call.states += self.request_states
            self._calls.setdefault(request.session, []).append(call)

    def _note(self, node: Node, call: Call) -> None:
        """Note a call, unless another one is due before it."""
        before: Call | None = node.notes[self.tier]
        if before is None or before.session == call.session or self._steps(before) >= self._steps(call):
            node.note(self.tier, call)
            if node.is_evictable(self.tier):
                self.on_evictable(node)

    def _pass(self, session: int, step: int) -> None:
        """End the calls that were due by this step: what they have used and nobody since is not expected any more."""
        tier, expected = self.tier, self._calls.pop(session, [])
        over = [call for call in expected if call.due <= step]
        if len(over) < len(expected):
            self._calls[session] = [call for call in expected if call.due > step]
        for call in over:
            call.is_over = True
            for end in [*call.ends, *call.states]:
                node: Node | None = end
                while node is not None:
                    if node.notes[tier] is call and node.is_evictable(tier):
                        self.on_evictable(node)
                    node = None if node.is_state else node.parent

    def _steps(self, call: Call) -> float:
        return inf if call.is_over else max(call.due - self._step[call.session], 0)

    def rank(self, node: Node) -> tuple[float, float]:
        call: Call | None = node.notes[self.tier]
        return inf if call is None else -self._steps(call), node.last_used_in(self.tier)
