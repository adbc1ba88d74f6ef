"""Eviction by directives of clients, as TensorRT-LLM does (KvCacheRetentionConfig; evictionPolicy.cpp in its batch manager)."""

from dataclasses import dataclass
from math import inf
from typing import Any, Final

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.numbers import Whole, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.expiring import ExpiringEviction

Band = tuple[int, int, float]
"""(depth at which it ends, in pages; priority, or UNSAID; when that ends, in seconds)."""

MOST_PAGES: Final = 1 << 60
UNSAID: Final = -1


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class RetentionPriority(ExpiringEviction):
    """Keeps what clients say should be kept: a priority for each range of tokens, and how long it lasts.

    lower priority    leaves first
    equal             least recently used first; what has lost its priority counts as used at that moment (of those that lost it
                      at the same moment, the least recently used one goes)

    A page has the priority of the range that its first token is in: that of the last finished request which says one, else
    ``default_priority``. A duration begins when the request finishes; then the priority is the default again. A request that
    says nothing of a page leaves its priority as it is, without an end. A page whose first request has not finished leaves last.

    Needs requests with ``retention`` (fields ``retention`` and ``decode_retention`` of a line).
    """

    default_priority: int = 35

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Whole(0, 100), "default_priority")

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        context.require("retention", "retention directives")
        self._page_tokens = context.page_tokens

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        said = self._bands_of(request, now)
        path: Node = node
        while path.parent is not None:
            self._note(path, said, now)
            path = path.parent
        for state in self.request_states:
            self._note(state, said, now)

    def _note(self, node: Node, said: tuple[Band, ...], now: float) -> None:
        node.note(self.tier, self._combined(node, said, now))
        if node.is_evictable(self.tier):
            self.on_evictable(node)

    def _bands_of(self, request: Request, now: float) -> tuple[Band, ...]:
        """Return what a request says of the pages of its path."""
        bands: list[Band] = []
        for one in request.retention:
            begin, end = -(-one.begin // self._page_tokens), -(-one.end // self._page_tokens)
            if begin > (bands[-1][0] if bands else 0):
                bands.append((begin, UNSAID, inf))
            if end > begin:
                bands.append((end, one.priority, now + one.duration_s))
        return (*bands, (MOST_PAGES, UNSAID, inf))

    def _combined(self, node: Node, said: tuple[Band, ...], now: float) -> tuple[Band, ...]:
        """Return the bands of a node that a request has used: what it says or, where it says nothing, what was said before."""
        before: tuple[Band, ...] | None = node.notes[self.tier]
        end = node.depth + node.pages
        bands: list[Band] = []
        depth = node.depth
        while depth < end:
            stop, priority, until_s = said[_place(said, depth)]
            if priority == UNSAID:
                until_s, priority = inf, self.default_priority
                if before is not None:
                    stop_before, said_before, until_before_s = before[_place(before, depth)]
                    stop = min(stop, stop_before)
                    priority = said_before if until_before_s > now else self.default_priority
            if bands and bands[-1][1:] == (priority, until_s):
                bands.pop()
            bands.append((stop, priority, until_s))
            depth = stop
        return tuple(bands)

    def rank(self, node: Node) -> tuple[float, float, float]:
        bands, used_s = node.notes[self.tier], node.last_used_in(self.tier)
        if bands is None:
            return inf, used_s, used_s
        _, priority, until_s = bands[_place(bands, node.depth + node.pages - 1)]
        if until_s > self._now:
            return float(priority), used_s, used_s
        return float(self.default_priority), max(until_s, used_s), used_s

    def pages_before(self, node: Node, next_rank: Any) -> int:
        bands = node.notes[self.tier]
        if bands is None or node.is_state:
            return node.pages
        end = node.depth + node.pages
        at = _place(bands, end - 1)
        return min(node.pages, end - bands[at - 1][0]) if at else node.pages

    def ends_s(self, node: Node) -> float:
        bands: tuple[Band, ...] | None = node.notes[self.tier]
        return inf if bands is None else bands[_place(bands, node.depth + node.pages - 1)][2]


def _place(bands: tuple[Band, ...], depth: int) -> int:
    """Return which band the page after ``depth`` others is in."""
    at = 0
    while at < len(bands) and bands[at][0] <= depth:
        at += 1
    return at
