"""Tail-optimised LRU (Zhang et al.: Tail-optimized caching for LLM inference, arXiv:2510.15152, 2025)."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.numbers import Whole, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import RankedEviction

MOST_PAGES = 1 << 60
"""More pages than any prompt has."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class TailLatency(RankedEviction):
    """T-LRU: evicts first what a conversation can lose and still answer its next prompt within a TTFT budget.

    cached_prefix - own >= max(history + next_prompt_estimate - threshold, 0)   safe: leave first, least recently used first
    the others                                                                  leave after them, least recently used first

    All in tokens: ``cached_prefix`` ends with the page, ``own`` is the page itself, ``history`` is prompt plus answer of the
    last finished request that used it, ``threshold`` is what the budget allows to be computed. Needs requests with a
    ``session``.
    """

    threshold: int = 0
    next_prompt_estimate: int = 0

    def __post_init__(self) -> None:
        check_settings(self, Whole(), "threshold", "next_prompt_estimate", hint="it is a number of tokens")

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        context.require("session", "the session of each request")
        self._page_tokens = context.page_tokens

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        history = request.prompt_tokens + request.output_tokens
        self.note_path(node, max(history + self.next_prompt_estimate - self.threshold, 0))

    def rank(self, node: Node) -> tuple[bool, float]:
        return node.depth + node.pages - 1 < self._kept_pages(node), node.last_used_in(self.tier)

    def pages_before(self, node: Node, next_rank: tuple[bool, float]) -> int:
        safe = node.depth + node.pages - self._kept_pages(node)
        return node.pages if safe <= 0 or (True, node.last_used_in(self.tier)) < next_rank else min(safe, node.pages)

    def _kept_pages(self, node: Node) -> int:
        """Return how many leading pages of the prompt the budget requires; the pages after them are safe to evict."""
        needed = node.notes[self.tier]
        return MOST_PAGES if needed is None else -(-needed // self._page_tokens)
