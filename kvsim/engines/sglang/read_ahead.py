"""What SGLang's host reads from storage ahead of need: how much, and as which nodes it enters the tree."""

from typing import Any, NamedTuple

from kvsim.core.answers import whole_number
from kvsim.core.request import Request
from kvsim.core.tier import CPU
from kvsim.core.tree import Node
from kvsim.engines.sglang.moving_nodes import MovingNodeCache
from kvsim.pages.extents import Extent, count_pages, split_extents
from kvsim.policies.prefetch.base import Offer, Refusal


class Gap(NamedTuple):
    """What neither GPU nor host has of a prompt, behind the nodes that a look-up has found."""

    request: Request
    node: Node
    """The last one found, which the host has; or the root."""
    first: int
    """Position of the first page that is missing."""
    runs: tuple[Extent, ...]
    pages: int


class ReadAhead:
    """Decides what storage brings to the host, and enters it.

    gap      behind the deepest node found, if the host has that; nothing is read below a node that only the GPU has
    room     as many pages as the prefetch policy wants; the host evicts that many if too few are free, and gives what it has
    enter    a node for what the tree does not have by then. What it has is refreshed; if copies follow uses, what only the GPU
             has gets its host copy from storage
    """

    def __init__(self, cache: MovingNodeCache) -> None:
        self._cache = cache
        self._refills = cache.edge is not None and cache.edge.copies_nodes
        """Whether pages of storage become the host copy of a node on the GPU that has none."""

    def gap(self, request: Request, path: list[Node], runs: tuple[Extent, ...]) -> Gap | None:
        """Return what is missing of a request's pages ``runs`` behind the ``path`` found; None if nothing is to be read."""
        root = self._cache.tree.root
        node = path[-1] if path else root
        first = node.depth + node.pages
        rest = split_extents(runs, first)[1]
        if not rest or not (node is root or node.state[CPU]):
            return None
        return Gap(request, node, first, rest, count_pages(rest))

    def ask(
        self, gap: Gap, pages: int, available_pages: int, *, in_flight_pages: int = 0, queued_s: float = 0.0
    ) -> int | Refusal:
        """Ask the prefetch policy about the first ``pages`` pages of a gap."""
        cache = self._cache
        if cache.prefetch is None:
            return 0
        offer = Offer(
            request=gap.request,
            first_page=gap.first,
            stored_pages=pages,
            in_flight_pages=in_flight_pages,
            available_pages=available_pages,
            queued_s=queued_s,
        )
        answer: Any = cache.prefetch.fetch(offer)
        return answer if isinstance(answer, Refusal) else whole_number(cache.prefetch_name, "fetch()", answer, pages)

    def room(self, gap: Gap, pages: int, *, in_flight_pages: int = 0, queued_s: float = 0.0) -> int | Refusal:
        """Make room on the host for up to ``pages`` pages, as the policy wants. Returns how many of them have room."""
        cache = self._cache
        pool = cache.cpu.pool
        available = pool.free if pool.free >= pages else cache.host_room(gap.node)
        wanted = self.ask(gap, pages, available, in_flight_pages=in_flight_pages, queued_s=queued_s)
        if isinstance(wanted, Refusal) or not wanted:
            return wanted
        if pool.free < wanted:
            cache.make_host_room(wanted, cache.residency.now)
        return min(wanted, pool.free) or Refusal.MEMORY

    def enter(self, gap: Gap, pages: int, slots: Any) -> int:
        """Enter the first ``pages`` pages of a gap, in these slots of the host. Returns how many of them the tree had."""
        cache, root = self._cache, self._cache.tree.root
        residency, cpu = cache.residency, cache.cpu
        residency.reannounce([gap.node] if gap.node is not root else [], residency.tick(residency.now))
        runs = split_extents(gap.runs, pages)[0]
        path, partial, agreed, rest = cache.tree.walk(gap.node, runs)
        node, had = gap.node, 0
        for node in path:
            residency.reannounce([node], residency.tick(residency.now))
        if partial is not None:
            node = cache.cut_at(partial, agreed, residency.tick(residency.now))
            path.append(node)
        for known in path:
            mine, slots = cpu.pool.split(slots, known.pages)
            if self._refills and not known.state[CPU]:
                residency.add_incoming(known, cpu, mine)
                residency.set_ready(known, cpu, residency.now)
            else:
                residency.give(cpu, mine)
                had += known.pages
        if rest:
            now = residency.tick(residency.now)
            new = residency.add_leaf(node, rest, count_pages(rest), cpu, slots, now)
            residency.unpin_alone(new, cpu)
        cache.counts.fetched_pages += pages - had
        return had
