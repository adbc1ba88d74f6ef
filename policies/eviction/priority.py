"""Eviction by the priority of requests."""

from dataclasses import dataclass
from math import inf

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Priority(RankedEviction):
    """Keeps what important requests have used. SGLang's ``priority``; TensorRT-LLM orders its blocks this way too.

    highest priority of its finished requests is lower   leaves first
    equal                                                least recently used first

    A node whose first request has not finished leaves last. Needs requests with a ``priority``.
    """

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        context.require("priority", "the priority of each request")

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        while node.parent is not None:
            self._raise(node, request.priority)
            node = node.parent
        for state in self.request_states:
            self._raise(state, request.priority)

    def _raise(self, node: Node, priority: int) -> None:
        noted = node.notes[self.tier]
        if noted is None or noted < priority:
            node.note(self.tier, priority)
            if node.is_evictable(self.tier):
                self.on_evictable(node)

    def rank(self, node: Node) -> tuple[float, float]:
        noted = node.notes[self.tier]
        return inf if noted is None else noted, node.last_used_in(self.tier)
