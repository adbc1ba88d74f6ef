"""FLOP-aware eviction (Pan et al.: Marconi: Prefix caching for the era of hybrid LLMs, MLSys 2025)."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

import numpy as np

from kvsim.core.request import Request
from kvsim.core.tree import READY, Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.flop_tuning import Tuning

TUNED = "tuned"
BINS = 1024
LEAST_AGE_S = 1e-3
"""Requests of one moment are this far apart: 1 / age has no bound otherwise."""


@dataclass(kw_only=True, eq=False)
class FlopAware(EvictionPolicy):
    """Keeps what saves many FLOPs for its bytes: deep ends of long prompts, whose attention costs most. Marconi's rule.

    eff       FLOPs that the leaf saves / its bytes; (F(S) - F(p)) / bytes for tokens p ... S - 1 of a prompt
    utility   alpha * minmax(eff) + minmax(1 / (now - last used)), each scaled to 0 ... 1 over all leaves; the least leaves first

    ``alpha: tuned`` is 0 until the first eviction, at request N, and while the next 5 N requests are collected; these are
    replayed from a snapshot of that moment with 0, 0.1 ... 2, and the alpha that saves most FLOPs stays (see flop_tuning.py).

    F is linear in tokens plus attention in pairs of them, so eff grows with p + S alone, that is with 2 depth + pages, and its
    scale cancels. Leaves of one such value stand in one bin, least recently used first, and only the heads of bins compete. The
    victim is that of comparing all leaves while no path exceeds 512 pages; for each doubling beyond, a bin takes in twice as
    many values, which then count as equal: at most 1 / 512 of the greatest.
    """

    alpha: int | float | str = TUNED

    def __post_init__(self) -> None:
        if self.alpha != TUNED and (isinstance(self.alpha, str) or not 0 <= self.alpha < inf):
            raise ValueError(f"alpha must be 0 or more, or {TUNED}, not {self.alpha}")
        self._alpha = 0.0 if isinstance(self.alpha, str) else float(self.alpha)
        self._tuning: Tuning | None = None
        self._width = 1
        self._heaps: list[list[tuple[float, int, Node]]] = [[] for _ in range(BINS)]
        """Of each bin: (last use, number of the entry, leaf)."""
        self._used_s = [inf] * BINS
        """Last use of each bin's head; infinite without one."""
        self._used_s_array = np.full(BINS, inf)
        """The same."""
        self._efficiencies = np.full(BINS, inf)
        """The number of each bin; infinite for an empty one."""
        self._low, self._high = BINS, -1
        """All bins before and behind are empty."""
        self._newest: list[tuple[float, int, Node]] = []
        self._entries = 0
        self._compact_at = 1024
        self._offered: dict[Node, None] = {}

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        if self.alpha == TUNED:
            self._tuning = Tuning(context, lambda alpha: FlopAware(alpha=alpha))

    def on_request(self, request: Request, now: float) -> None:
        if self._tuning is not None and (alpha := self._tuning.observe(request, now)) is not None:
            self._alpha, self._tuning = alpha, None

    def on_split(self, upper: Node, lower: Node) -> None:
        """The lower part begins later: it has become more efficient."""
        if lower.is_evictable(self.tier):
            self.on_evictable(lower)

    def on_merge(self, upper: Node, lower: Node) -> None:
        """The whole begins earlier than its lower part: it is less efficient."""
        if lower.is_evictable(self.tier):
            self._add(lower, 2 * upper.depth + upper.pages + lower.pages)

    def on_evictable(self, node: Node) -> None:
        self._add(node, 2 * node.depth + node.pages)

    def _add(self, node: Node, efficiency: int) -> None:
        """Enter a leaf into its bin."""
        place, used_s = efficiency // self._width, node.last_used
        while place >= BINS:
            self._widen()
            place = efficiency // self._width
        self._entries = number = self._entries + 1
        heappush(self._heaps[place], (used_s, number, node))
        heappush(self._newest, (-used_s, number, node))
        if used_s < self._used_s[place]:
            self._set_head(place, used_s)
        if len(self._newest) > self._compact_at:
            self._compact()

    def _widen(self) -> None:
        """Join bins in pairs."""
        self._width *= 2
        self._fill([left + right for left, right in zip(self._heaps[::2], self._heaps[1::2], strict=True)])

    def _compact(self) -> None:
        """Forget entries that do not count any more."""
        tier = self.tier
        self._newest = [entry for entry in self._newest if entry[2].is_evictable(tier) and -entry[0] == entry[2].last_used]
        heapify(self._newest)
        self._compact_at = max(1024, 2 * len(self._newest))
        latest = ({entry[2]: entry for entry in sorted(heap) if entry[2].is_evictable(tier)} for heap in self._heaps)
        self._fill([list(entries.values()) for entries in latest])

    def _fill(self, heaps: list[list[tuple[float, int, Node]]]) -> None:
        """Put the entries into the first bins; the rest is empty."""
        self._heaps = heaps + [[] for _ in range(BINS - len(heaps))]
        for place, heap in enumerate(self._heaps):
            heapify(heap)
            self._set_head(place, heap[0][0] if heap else inf)

    def _set_head(self, place: int, used_s: float) -> None:
        if used_s == inf:
            self._efficiencies[place] = inf
        elif self._used_s[place] == inf:
            self._efficiencies[place] = place
            if place < self._low:
                self._low = place
            if place > self._high:
                self._high = place
        self._used_s[place] = self._used_s_array[place] = used_s

    def victims(self, now: float) -> Iterator[Node]:
        offered = self._offered
        try:
            while (place := self._least(now)) is not None:
                heap = self._heaps[place]
                node = heappop(heap)[2]
                offered[node] = None
                self._set_head(place, heap[0][0] if heap else inf)
                if self._tuning is not None:
                    self._tuning.begin(node)
                yield node
        finally:
            nodes = list(offered)
            offered.clear()
            for node in nodes:
                if node.is_evictable(self.tier):
                    self.on_evictable(node)

    def _least(self, now: float) -> int | None:
        """The bin whose head has the least utility."""
        used_s, is_current = self._used_s, self._is_current
        while True:
            low, high = self._low, self._high
            if low > high:
                return None
            if used_s[low] == inf or used_s[high] == inf:
                self._find_ends()
                continue
            heads_s = self._used_s_array[low : high + 1]
            place = oldest = low + int(heads_s.argmin())
            if self._alpha:
                if not is_current(oldest) or low != oldest and not is_current(low) or high != oldest and not is_current(high):
                    continue
                utilities = self._efficiencies[low : high + 1] * (self._alpha / (high - low) if high > low else 1.0)
                newest_age_s, oldest_age_s = max(now - self._newest_use_s(), LEAST_AGE_S), now - used_s[oldest]
                if oldest_age_s > newest_age_s:
                    ages_s = now - heads_s
                    np.maximum(ages_s, LEAST_AGE_S, out=ages_s)
                    utilities += 1 / (1 / newest_age_s - 1 / oldest_age_s) / ages_s
                place = low + int(utilities.argmin())
            if place == oldest and self._alpha or is_current(place):
                return place

    def _find_ends(self) -> None:
        """Put ``_low`` and ``_high`` to the first and the last bin that is not empty, or past all if none is."""
        used_s, low, high = self._used_s, self._low, self._high
        while low <= high and used_s[low] == inf:
            low += 1
        while low <= high and used_s[high] == inf:
            high -= 1
        self._low, self._high = (low, high) if low <= high else (BINS, -1)

    def _is_current(self, place: int) -> bool:
        """Whether the bin's head is as it was entered; if not, it is put right."""
        heap, tier, before = self._heaps[place], self.tier, self._used_s[place]
        offered, width = self._offered, self._width
        while heap:
            used_s, number, node = heap[0]
            if node.state[tier] != READY or node.pins[tier] or node.kids[tier] or node in offered:
                heappop(heap)
            elif (efficiency := 2 * node.depth + node.pages) // width != place:
                heappop(heap)
                self._add(node, efficiency)
                if self._width != width:
                    return False
            elif node.last_used != used_s:
                heapreplace(heap, (node.last_used, number, node))
            else:
                break
        after = heap[0][0] if heap else inf
        if after != before:
            self._set_head(place, after)
        return after == before

    def _newest_use_s(self) -> float:
        """The latest use of a leaf; there is one."""
        newest, tier = self._newest, self.tier
        while True:
            used_s, number, node = newest[0]
            if not node.is_evictable(tier) or node in self._offered:
                heappop(newest)
            elif node.last_used != -used_s:
                heapreplace(newest, (-node.last_used, number, node))
            else:
                return -used_s
