"""Tail-optimised LRU (Zhang et al.: Tail-optimized caching for LLM inference, arXiv:2510.15152, 2025)."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import RankedEviction


@dataclass(kw_only=True, eq=False)
class TailLatency(RankedEviction):
    """T-LRU: gives up first what a conversation can lose and still answer its next prompt within a TTFT budget.

    cached_prefix - own >= max(history + next_prompt_estimate - threshold, 0)   safe: leave first, least recently used first
    the others                                                                  leave after them, least recently used first

    In tokens: ``cached_prefix`` ends with the node, ``own`` is the node itself, ``history`` is prompt and answer of the last
    finished request that used it. ``threshold`` is what the budget allows to compute. Needs requests with a ``session``.
    """

    threshold: int = 0
    next_prompt_estimate: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        for name in ("threshold", "next_prompt_estimate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more tokens, not {getattr(self, name)}")

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        context.require("session", "the session of each request")
        self._page_tokens = context.page_tokens

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        history = request.prompt_tokens + request.output_tokens
        self.note_path(node, max(history + self.next_prompt_estimate - self.threshold, 0))

    def on_split(self, upper: Node, lower: Node) -> None:
        """The lower part begins later and may have become safe."""
        if lower.is_evictable(self.tier):
            self.on_evictable(lower)

    def rank(self, node: Node) -> tuple[bool, float]:
        needed = node.notes[self.tier]
        return needed is None or node.depth * self._page_tokens < needed, node.last_used
