"""Eviction from several tiers at once, where policies rank nodes and slots are only counted.

``InstantCache.make_room`` and what it calls, in line: victims are taken from the policies' heaps, and what a pass changes in a
tier's counts is added up and written once. Decisions are the same (tests play both). What is rare is left to the cache's own
methods. It exists for speed: most of a replay's time with several tiers goes into moving victims down.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf, nextafter
from typing import TYPE_CHECKING, Any

from kvsim.core.pool import Pool
from kvsim.core.runs import Run, split_runs
from kvsim.core.tier import Tier
from kvsim.core.tree import ABSENT, LEAVING, NO_NOTES, READY, Node

if TYPE_CHECKING:
    from kvsim.core.instant import InstantCache


def as_heap(tier: Tier) -> Any:
    """The tier's policy, which keeps a heap."""
    return tier.eviction


class Sinking:
    """Moves what leaves a tier to the one below, or drops it."""

    def __init__(self, cache: "InstantCache") -> None:
        self.cache = cache
        self.moving = cache.moving
        self._adds_answers = cache.rules.cache_output
        """Answers are: long after the pages above them were used."""
        tiers = cache.tiers
        self._alone = [[READY if at is tier else ABSENT for at in tiers] for tier in tiers]
        """By tier, the states of a node that has a copy there only."""
        self._levels: list[tuple[Any, ...]] = [
            (
                as_heap(tier).heap,
                as_heap(tier).line,
                as_heap(tier).rank,
                tier.on_evictable,
                tier.pool,
                self._alone[tier.index],
                tier.lower and tier.lower.placement and tier.lower.placement.after_eviction,
            )
            for tier in tiers
        ]
        """What an eviction needs of each tier, looked up once."""

    @staticmethod
    def suits(tiers: list[Tier]) -> bool:
        """Whether every tier only counts its slots, and its policy keeps a heap and hears of no cut, insert or removal."""
        return len(tiers) > 1 and all(
            type(tier.pool) is Pool
            and getattr(tier.eviction, "plain_heap", None) is not None
            and not (tier.on_insert or tier.on_split or tier.on_merge or tier.on_remove)
            for tier in tiers
        )

    def make_room(self, tier: Tier, pages: int, now: float, arriving: Sequence[Node] = ()) -> bool:
        """As ``InstantCache.make_room``."""
        missing = pages - tier.pool.free
        return missing <= 0 or self._evict(
            tier, missing, now, arriving, sum([node.depth for node in arriving]) if arriving else 0
        )

    def _evict(self, tier: Tier, wanted: int, now: float, arriving: Sequence[Node], pages_above: int) -> bool:
        """Evict so many pages, but nothing above nodes that are about to arrive, above which are at most ``pages_above``."""
        evictable, missing = tier.evictable_pages, wanted
        if missing > evictable:
            return False
        cache, index, lower = self.cache, tier.index, tier.lower
        fixed: set[Node] | None = None
        oldest: Any = None
        if evictable - missing < pages_above:
            fixed = set(cache.idle_above(arriving, index))
            if missing > evictable - sum([node.pages for node in fixed]):
                return False
        heap, line, rank, on_evictable, pool, alone, sinks = self._levels[index]
        moving, below = self.moving[index], index + 1
        refused: Sequence[tuple[Any, int, Node]] = ()
        dropped = sunk = depths = tail = elsewhere = 0
        while missing:
            if line and not (heap and heap[0] < line[0]):
                entry, stands = line[0], True
            elif heap:
                entry, stands = heap[0], False
            else:
                break
            then, number, node = entry
            state = node.state
            if state[index] != READY or node.pins[index] or node.kids[index]:
                line.popleft() if stands else heappop(heap)
                continue
            if (now_rank := rank(node)) != then:
                line.popleft() if stands else heappop(heap)
                heappush(heap, (now_rank, number, node))
                continue
            children = node.children
            if arriving and children:
                if fixed is None and oldest is None:
                    oldest = -inf if self._adds_answers else nextafter(min([other.last_used for other in arriving]), -inf)
                if fixed is None and node.last_used >= oldest:  # a prompt's pages are added a tick after those above are used
                    fixed = set(cache.idle_above(arriving, index))
                if fixed and node in fixed:
                    refused = (*refused, line.popleft() if stands else heappop(heap))
                    continue
            size, parent = node.pages, node.parent
            is_alone = state == alone
            if is_alone and sinks is not None and sinks(node, now):
                depths += node.depth
                if size > missing:
                    tail, missing = missing, 0
                    break
                state[index] = LEAVING
                moving.append(node)
                sunk += size
                parent.kids[below] += 1
            elif is_alone and not children:
                if size > missing:
                    self._trim(node, index, size - missing)
                    dropped += missing
                    missing = 0
                    break
                state[index] = ABSENT
                dropped += size
                del parent.children[node.runs[0][0]]
            elif is_alone or size > missing:
                gone = cache.drop(node, tier, missing) if is_alone else cache.evict_copy(node, tier, missing)
                missing -= gone
                elsewhere += gone
                continue
            else:
                state[index] = ABSENT
            line.popleft() if stands else heappop(heap)
            missing -= size
            kids = parent.kids
            left = kids[index] = kids[index] - 1
            if not left and parent.state[index] == READY and not parent.pins[index]:
                on_evictable(parent)
            if children and not is_alone and len(children) == 1 and not cache.is_offering:
                (child,) = children.values()
                if child.last_used == node.last_used and not any(node.pins):
                    cache.merge(node)
        for entry in refused:
            heappush(heap, entry)
        counted = wanted - missing - elsewhere
        tier.evictable_pages -= counted
        tier.evicted_pages += counted
        pool.free += counted
        if dropped:
            cache.counts.dropped_pages += dropped
        if tail or moving:
            if elsewhere:
                sunk = sum([other.pages for other in moving])
            self._sink(tier, lower, sunk, node, tail, depths, now)  # type: ignore[arg-type]
        return not missing

    @staticmethod
    def _trim(node: Node, index: int, pages: int) -> None:
        """Keep the first pages of a leaf that is in one tier only."""
        runs = node.runs
        node.pages = node.slots[index] = pages
        node.runs = ((runs[0][0], pages),) if len(runs) == 1 else split_runs(runs, pages)[0]

    def _sink(self, tier: Tier, lower: Tier, pages: int, last: Node, tail: int, pages_above: int, now: float) -> None:
        """Bring the victims of a pass, which have ``pages`` pages, and the last ``tail`` pages of ``last`` to the tier below."""
        index, below, nodes = tier.index, lower.index, self.moving[tier.index]
        missing = pages + tail - lower.pool.free
        if (
            self.cache.held is not None
            or lower.lower is not None
            and lower.lower.after_use
            or missing > 0
            and not self._evict(lower, missing, now, [*nodes, last] if tail else nodes, pages_above)
        ):
            if tail:
                self._leave_tail(last, tail, tier)
            self.cache.sink(tier, lower, now)
            return
        if nodes:
            self.moving[index] = []
            self._arrive(nodes, index, lower)
        if not tail:
            return
        children = last.children
        if not children and not any(last.pins):
            self._split_off(last, tail, index, lower)
        else:
            if len(children) == 1:
                (heir,) = children.values()
                if (
                    heir.state == self._alone[below]
                    and heir.last_used == last.last_used
                    and heir.hits == last.hits
                    and heir.created == last.created
                    and not any(last.pins)
                    and not any(heir.pins)
                ):
                    last.slots[index] -= tail
                    heir.slots[below] += tail
                    self.cache.tree.shift(last, heir, tail)
                    self._count_arrived(lower, tail, tail)
                    return
            self._leave_tail(last, tail, tier)
            self._arrive([self.moving[index].pop()], index, lower)

    def _leave_tail(self, node: Node, pages: int, tier: Tier) -> None:
        """Let the last pages of an evictable node move as a node of their own; the tier's counts know of it."""
        index = tier.index
        upper = self.cache.cut(node, node.pages - pages)
        node.state[index] = LEAVING
        upper.kids[index] = 0
        upper.kids[index + 1] += 1
        tier.on_evictable(upper)
        self.moving[index].append(node)

    def _split_off(self, node: Node, pages: int, index: int, lower: Tier) -> None:
        """The last pages of a leaf become a leaf of the tier below. The node keeps its place in the order of its tier."""
        tree, below, runs, kept = self.cache.tree, lower.index, node.runs, node.pages - pages
        tail: tuple[Run, ...]
        if len(runs) == 1:
            start = runs[0][0]
            node.runs, tail = ((start, kept),), ((start + kept, pages),)
        else:
            node.runs, tail = split_runs(runs, kept)
        leaf = Node(tail, pages, node.depth + kept, node, tree.tiers, node.created)
        leaf.last_used, leaf.hits = node.last_used, node.hits
        if node.notes is not NO_NOTES:
            leaf.notes = node.notes.copy()
        leaf.state[below] = READY
        leaf.slots[below] = pages
        node.children = {tail[0][0]: leaf}
        node.kids[below] = 1
        node.pages = node.slots[index] = kept
        self._count_arrived(lower, pages, pages)
        as_heap(lower).line_up(leaf)

    def _arrive(self, nodes: list[Node], index: int, lower: Tier) -> None:
        """Nodes that have left a tier are ready in the one below, and become one with a child that nothing distinguishes."""
        below, line_up = lower.index, as_heap(lower).line_up
        pages = evictable = 0
        for node in nodes:
            state, size, children = node.state, node.pages, node.children
            state[index] = ABSENT
            state[below] = READY
            node.slots[below] = size
            pages += size
            if not node.pins[below]:
                evictable += size
                if not node.kids[below]:
                    line_up(node)
            if len(children) == 1:
                (child,) = children.values()
                if (
                    child.last_used == node.last_used
                    and child.hits == node.hits
                    and child.created == node.created
                    and child.state == state
                    and child.pins == node.pins
                ):
                    child.slots[below] += size
                    self.cache.tree.join(node, child)
        self._count_arrived(lower, pages, evictable)

    def _count_arrived(self, tier: Tier, pages: int, evictable_pages: int) -> None:
        pool = tier.pool
        pool.free -= pages
        if pool.free < pool.least_free:
            pool.least_free = pool.free
        tier.evictable_pages += evictable_pages
        tier.inserted_pages += pages
        self.cache.counts.written_pages += pages
