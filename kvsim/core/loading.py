"""Reads from the tiers below: loads to the GPU for running requests, fetches ahead of them for waiting ones."""

from kvsim.core.lease import Lease
from kvsim.core.residency import Residency
from kvsim.core.serving import NO_LOAD, Fetch, Load, Lower
from kvsim.core.tier import Edge, Tier
from kvsim.core.transfer import NO_TRANSFERS, FetchPin, Transfer
from kvsim.core.transfers import Transfers, is_arriving, is_gap
from kvsim.core.tree import ABSENT, READY, Node
from kvsim.core.view import Source, View
from kvsim.pages.extents import split_extents


class LowerTiers(Transfers, Lower):
    """Everything below the GPU tiers of a cache."""

    def __init__(self, residency: Residency, edges: list[Edge]) -> None:
        super().__init__(residency, edges)
        self.views = {tier.index: View(tier) for tier in residency.tiers if not tier.above}

    # --- loads ---------------------------------------------------------------------------------------------------------------

    def load(self, lease: Lease, now: float, short: Transfer | None = None) -> Load:
        load = NO_LOAD if lease.loading is None else self.start_loads(lease, lease.loading, now)
        lost = self._shorten(lease, short)
        return Load(load.transfers, load.loads, lost) if lost else load

    def start_loads(self, lease: Lease, last: Node, now: float) -> Load:
        """Start the loads of a request whose matched path in tiers below ends with ``last``."""
        lease.loading = None
        lease.loaded_pages = 0
        view = self.views[lease.gpu.index]
        load = NO_LOAD
        if lease.epoch == self.residency.epoch:
            nodes = self._share_loaded(lease, path_between(lease.node, last))
            load = self._start(lease, nodes, view, now)
            lease.rest = split_extents(lease.request.runs, lease.gpu_pages + lease.loaded_pages)[1]
        for tier in view.lower:
            self.residency.unpin(last, tier)
        return load

    def _share_loaded(self, lease: Lease, nodes: list[Node]) -> list[Node]:
        """Pin the first nodes if they have come to the GPU, or begun to, since the match, and give back the slots for them.

        Returns the nodes still to be loaded.
        """
        gpu, residency = lease.gpu, self.residency
        index = gpu.index
        for at, node in enumerate(nodes):
            if node.state[index] != READY and not is_arriving(node, gpu):
                return nodes[at:] if node.state[index] == ABSENT else []
            mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
            residency.give(gpu, mine)
            residency.pin(node, gpu)
            residency.unpin(lease.node, gpu)
            lease.node = node
            lease.gpu_pages += node.pages
        return []

    def _start(self, lease: Lease, nodes: list[Node], view: View, now: float) -> Load:
        """Start reads into the tiers between, and one load from each tier next to the GPU that has or gets nodes."""
        sources = self._plan_reads(nodes, view)
        reads = self._make_room_between(nodes, sources, now)
        transfers = self.under_way.flush()
        fetches: dict[Tier, list[Transfer]] = {}
        for edge, read in reads.items():
            fetches.setdefault(edge.upper, []).append(self._read(edge, read))
        for into in fetches.values():
            transfers = transfers + into
        lease.loaded = [0] * view.levels
        for at, source in enumerate(sources):
            if source.tier.level > 1:
                lease.loaded[source.tier.level] += nodes[at].pages
            self._take_request_slots(lease, nodes[at])
        loads: list[Transfer] = []
        for edge in view.gpu.below:
            loaded = [nodes[at] for at, source in enumerate(sources) if source.load is edge]
            if loaded:
                load = Transfer(edge, loaded, goes_down=False, after=fetches.get(edge.lower))
                load.begun = not load.after
                loads.append(self.under_way.start(load))
        return Load(transfers + loads, loads, 0)

    def _make_room_between(self, nodes: list[Node], sources: list[Source], now: float) -> dict[Edge, list[Node]]:
        """Reserve slots in the tiers between, and make room there, for nodes that pass through them. Returns these by the edge
        over which they are read."""
        reads: dict[Edge, list[Node]] = {}
        for at, source in enumerate(sources):
            if source.read is not None:
                reads.setdefault(source.read, []).append(nodes[at])
        for edge, read in reads.items():
            for node in read:
                self.residency.reserve_copy(node, edge.upper)
            self.eviction.make_room(edge.upper, 0, now)
        return reads

    def _plan_reads(self, nodes: list[Node], view: View) -> list[Source]:
        """Return where each node is read from; shorten ``nodes`` to those that have room on the way."""
        sources: list[Source] = []
        room: dict[Tier, int] = {}
        for at, node in enumerate(nodes):
            source = view.source_of(node)
            if source is None:
                del nodes[at:]
                break
            between = source.between
            if between is not None:
                left = room.setdefault(between, max(0, between.available_pages))
                if node.pages > left:
                    del nodes[at:]
                    if left:
                        nodes.append(self.residency.cut(node, left))
                        sources.append(source)
                    break
                room[between] = left - node.pages
            sources.append(source)
        return sources

    def _read(self, edge: Edge, nodes: list[Node]) -> Transfer:
        """Start reading nodes from a lower tier into the one above, where their slots are reserved already."""
        return self.under_way.start(Transfer(edge, nodes.copy(), goes_down=False))

    def _take_request_slots(self, lease: Lease, node: Node) -> None:
        """Give a node that is about to be loaded the request's slots, and extend the request's pinned path by it."""
        gpu = lease.gpu
        mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
        self.residency.add_incoming(node, gpu, mine)
        lease.node = node
        lease.loaded_pages += node.pages

    def _shorten(self, lease: Lease, short: Transfer | None) -> int:
        """Shorten what a request reuses by what no load brings any more of its path, whatever the load that has come short."""
        lost, node, gpu = -lease.missing_pages, lease.node, lease.gpu
        while node.parent is not None:
            if is_gap(node, gpu):
                lost += node.pages
            node = node.parent
        if lost <= 0:
            return 0
        lease.missing_pages += lost
        loaded = min(lost, lease.loaded_pages) if short is not None else 0
        lease.loaded_pages -= loaded
        lease.lose_far(loaded)
        lease.gpu_pages -= lost - loaded
        return lost

    def fill_gaps(self, lease: Lease, now: float) -> None:
        """Make pages ready that a load failed to bring: they have been computed in the slots reserved for them."""
        for node in gaps_of(lease):
            self.residency.set_ready(node, lease.gpu, now)

    # --- fetches -------------------------------------------------------------------------------------------------------------

    def fetch(self, lease: Lease, pages: int, now: float) -> Fetch:
        residency, view = self.residency, self.views[lease.gpu.index]
        into, end = view.fetches_to, lease.path[-1]
        assert into is not None
        pinned = [view.gpu, *view.lower]
        for tier in pinned:
            residency.pin(end, tier)
        reads = self._first_to_fetch(lease, min(pages, into.available_pages), view)
        result = Fetch(NO_TRANSFERS, None, None)
        if reads:
            nodes = [node for node, _ in reads]
            now = residency.tick(now)
            path = nodes[-1].path()
            for node in nodes:
                residency.reserve_copy(node, into)
            self.eviction.make_room(into, 0, now)
            transfers = self.under_way.flush()
            fetch = self._read(reads[0][1], nodes)
            self.under_way.keep(fetch, nodes[-1], view.gpu)
            residency.reannounce(path, now, view.gpu)
            fetch.fetch_pin = FetchPin(nodes[-1], into, residency, self.fetch_pins)
            result = Fetch([*transfers, fetch], fetch, fetch.fetch_pin)
        for tier in pinned:
            residency.unpin(end, tier)
        return result

    def _first_to_fetch(self, lease: Lease, pages: int, view: View) -> list[tuple[Node, Edge]]:
        """Return the first pages of a match, at most ``pages``, that one tier can give to the one that prefetch reads into, with
        the edge between them."""
        reads: list[tuple[Node, Edge]] = []
        for node in lease.path[lease.gpu_nodes :]:
            if pages <= 0:
                break
            source = view.source_of(node)
            if source is not None and source.between is not None and source.between is view.fetches_to:
                edge = source.read
                assert edge is not None
                if reads and edge is not reads[0][1]:
                    break
                if node.pages > pages:
                    node = self.residency.cut(node, pages)
                reads.append((node, edge))
                pages -= node.pages
        return reads


def path_between(upper: Node, node: Node) -> list[Node]:
    """Return the nodes from below ``upper`` down to ``node``, top to bottom."""
    path: list[Node] = []
    while node is not upper:
        path.append(node)
        assert node.parent is not None
        node = node.parent
    path.reverse()
    return path


def gaps_of(lease: Lease) -> list[Node]:
    """Return the nodes that loads have failed to bring to a running request, deepest first: it computes them in their slots."""
    gaps: list[Node] = []
    node, gpu = lease.node, lease.gpu
    first_page = 0 if lease.missing_pages else lease.gpu_pages
    while node.depth >= first_page and node.parent is not None:
        if is_gap(node, gpu):
            gaps.append(node)
        node = node.parent
    return gaps
