"""Eviction by the priority of requests."""

from dataclasses import dataclass
from math import inf

from kvsim.core.request import Request
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import RankedEviction


@dataclass(kw_only=True, eq=False)
class Priority(RankedEviction):
    """Keeps what important requests have used. SGLang's ``priority``; TensorRT-LLM orders blocks so, too.

    highest priority of its finished requests is lower   leaves first
    the same                                             least recently used first

    A node whose first request has not finished leaves last. Needs requests with a ``priority``.
    """

    def __post_init__(self) -> None:
        super().__init__()

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        context.require("priority", "the priority of each request")

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        tier, priority = self.tier, request.priority
        while node.parent is not None:
            noted = node.notes[tier]
            if noted is None or noted < priority:
                node.note(tier, priority)
                if node.is_evictable(tier):
                    self.on_evictable(node)
            node = node.parent

    def rank(self, node: Node) -> tuple[float, float]:
        noted = node.notes[self.tier]
        return inf if noted is None else noted, node.last_used
