"""What a router believes is cached on each engine: the prompts that it has sent there."""

from collections.abc import Sequence

from kvsim.core.cache import Cache
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import Tier
from kvsim.core.tree import READY, Node
from kvsim.pages.extents import Extent
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
class LastSent(RankedEviction):
    """Forgets first what its engine has not been sent for longest, by notes of (first sent, last sent) with the nodes.

    A node's own ``last_used`` would count what other engines were sent, too.
    """

    def rank(self, node: Node) -> float:
        last: float = node.notes[self.tier][1]
        return last


class PrefixTree:
    """One radix tree of prompts over all engines: a cache with a tier for each engine, in which nothing is ever pinned.

    A path is remembered for each engine that it was sent to. Beyond ``max_pages`` pages of an engine, those sent least recently
    are forgotten, ends of prompts first.
    """

    def __init__(self, engines: Sequence[int], max_pages: int, page_tokens: int) -> None:
        self._engines = list(engines)
        self._tiers: dict[int, Tier] = {}
        for index, engine in enumerate(engines):
            eviction = LastSent()
            eviction.bind(PolicyContext(tier=index, level=0, capacity_pages=max_pages, page_tokens=page_tokens))
            self._tiers[engine] = Tier(f"engine {engine}", index, Pool(max_pages), eviction, 0)
        self._cache = Cache(list(self._tiers.values()), [], Rules(recompute_last_token=False), page_tokens)

    def pages(self, engine: int) -> int:
        """Return how many pages are remembered for an engine."""
        return self._tiers[engine].held_pages

    def longest(self, extents: tuple[Extent, ...]) -> tuple[int, int]:
        """Return how many leading pages of a path were sent to some engine, and that engine; (0, -1) if none were sent.

        Of several engines, the one that has had these pages longest.
        """
        tree = self._cache.tree
        path, partial, agreed, _ = tree.walk(tree.root, extents)
        if partial is not None and agreed:
            return partial.depth + agreed, self._first_owner(partial)
        if path:
            return path[-1].depth + path[-1].pages, self._first_owner(path[-1])
        return 0, -1

    def _first_owner(self, node: Node) -> int:
        """Return the engine that has had a node longest."""
        owners = [(node.notes[index][0], index) for index in range(len(self._engines)) if node.state[index] == READY]
        return self._engines[min(owners)[1]]

    def add(self, request: Request, engine: int, now: float) -> None:
        """Remember that a prompt was sent to an engine. A prompt of more than ``max_pages`` pages is not remembered."""
        cache, tier, pages = self._cache, self._tiers[engine], request.prompt_pages
        prompt = Request(
            index=request.index,
            arrival_s=request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=0,
            runs=request.runs,
            prompt_pages=pages,
        )
        lease = cache.match(prompt, tier)
        if not pages or not cache.admit(lease, pages, now):
            return
        known = lease.gpu_pages
        cache.insert(lease, now)
        self._note_sent(lease.node, tier.index, known)
        cache.release(lease)

    def _note_sent(self, node: Node, index: int, known: int) -> None:
        """Note the use of a path with all its nodes; those after ``known`` pages are new for the engine."""
        now = self._cache.residency.now
        while node.parent is not None:
            first = node.notes[index][0] if node.depth < known else now
            node.note(index, (first, now))
            node = node.parent

    def forget(self, engine: int, now: float) -> None:
        """Forget all prompts of an engine."""
        tier = self._tiers[engine]
        self._cache.transfers.eviction.make_room(tier, tier.pool.free + tier.evictable_pages, now)
