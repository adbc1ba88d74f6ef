"""The cache: tracks where pages are stored and decides by its policies. It never waits and never moves a byte."""

from math import inf

from kvsim.core.check import Held, check
from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.rules import Rules
from kvsim.core.serving import CLAIMED, LOST, NO_LOAD, Claim, Fetch, Growth, Load, ServedCache
from kvsim.core.tier import CPU, DISK, Edge, Tier
from kvsim.core.transfer import Hold, Transfer, transfers_of
from kvsim.core.transfers import NO_TRANSFERS, Begin, Transfers, is_arriving, is_gap
from kvsim.core.tree import ABSENT, INCOMING, LEAVING, READY, Node
from kvsim.core.view import View
from kvsim.pages.extents import Run, count_pages, split_runs


class Cache(ServedCache):
    """The tree, tiers, edges and policies behind one interface.

    Several GPU tiers may stand side by side: the ``gpu`` argument of ``match`` selects the one that serves a request.
    """

    def __init__(self, tiers: list[Tier], edges: list[Edge], rules: Rules, page_tokens: int) -> None:
        self.residency = Residency(tiers)
        self.transfers = Transfers(self.residency, edges)
        self.tiers = tiers
        self.edges = edges
        self.rules = rules
        self.page_tokens = page_tokens
        self.views = {tier.index: View(tier) for tier in tiers if not tier.above}
        self.gpu = tiers[0]
        self.leases = {}
        self.epoch = 0
        """Number of resets."""
        self.persistent: dict[tuple[Node, Tier], None] = {}
        """(last node, GPU tier) of paths that stay in that tier until ``reset``."""
        self._recomputes_last_token = rules.recompute_last_token
        self._is_single = len(tiers) == 1

    # --- match and admit ---------------------------------------------------------------------------------------------------

    def match(self, request: Request, gpu: Tier | None = None) -> Lease:
        lease = Lease(request, gpu or self.gpu, self.residency.tree.root)
        pages = request.prompt_pages
        if self._recomputes_last_token:
            pages = request.lookup_pages(self.page_tokens)
        self.rematch(lease, pages)
        if request.images:
            self._end_outside_images(lease, lease.gpu_pages + lease.lower_pages)
        return lease

    def cached_pages(self, request: Request, gpu: Tier | None = None) -> tuple[int, int]:
        return self.count_cached(request, gpu or self.gpu, lowest=CPU)

    def count_cached(self, request: Request, gpu: Tier, *, lowest: int) -> tuple[int, int]:
        """Return what ``cached_pages`` finds, with the pages in tiers from the CPU's level down to ``lowest``."""
        tree = self.residency.tree
        limit = request.prompt_pages
        if self._recomputes_last_token:
            limit = request.lookup_pages(self.page_tokens)
        path, partial, agreed, _ = tree.walk(tree.root, request.runs, limit)
        on_gpu, below = path[-1].depth + path[-1].pages if path else 0, 0
        if partial is not None:
            path.append(partial)
            on_gpu += agreed
        if not self._is_single:
            on_gpu, below = self._count_by_level(path, on_gpu, gpu, lowest)
        if request.images:
            kept = request.pages_outside_images(on_gpu + below, self.page_tokens)
            on_gpu = min(on_gpu, kept)
            below = kept - on_gpu
        return on_gpu, below

    def _count_by_level(self, path: list[Node], pages: int, gpu: Tier, lowest: int) -> tuple[int, int]:
        """Return how many of the ``pages`` pages of a path are on the GPU, and how many after them in tiers down to ``lowest``.

        The last node may have more pages than belong to the path.
        """
        index, on_gpu, at = gpu.index, 0, 0
        while at < len(path):
            state = path[at].state[index]
            if state == ABSENT or state == INCOMING and is_gap(path[at], gpu):
                break
            on_gpu = min(pages, path[at].depth + path[at].pages)
            at += 1
        found = on_gpu
        while at < len(path) and CPU <= self._level_below(path[at], gpu) <= lowest:
            found = min(pages, path[at].depth + path[at].pages)
            at += 1
        return on_gpu, found - on_gpu

    def _end_outside_images(self, lease: Lease, pages: int) -> bool:
        """Cut a match back before an image that its first ``pages`` pages end inside. Returns whether there is one."""
        limit = lease.request.pages_outside_images(pages, self.page_tokens)
        if limit < pages:
            self.rematch(lease, limit)
        return limit < pages

    def rematch(self, lease: Lease, limit: int) -> None:
        """Match a lease that has not been admitted against the first ``limit`` pages of its prompt only."""
        path, rest = self.residency.follow(lease.node, lease.request.runs, limit)
        pages = 0
        if path:
            last = path[-1]
            pages = last.depth + last.pages
        lease.set_match(path, pages, rest)
        if not self._is_single:
            self._sort_by_tier(lease)

    def _sort_by_tier(self, lease: Lease) -> None:
        """Split the path into pages on the GPU and pages below, and cut off what cannot be used now."""
        path, at, gpu = lease.path, 0, lease.gpu
        index = gpu.index
        for node in path:
            state = node.state[index]
            if state == ABSENT or state == INCOMING and is_gap(node, gpu):
                break
            at += 1
        if at == len(path):
            return
        lease.gpu_nodes = at
        lease.gpu_pages = path[at - 1].depth + path[at - 1].pages if at else 0
        while at < len(path):
            node = path[at]
            level = self._level_below(node, gpu)
            if level == CPU:
                lease.cpu_pages += node.pages
            elif level == DISK:
                if not lease.disk_pages:
                    lease.leading_cpu_pages = lease.cpu_pages
                lease.disk_pages += node.pages
            else:
                break
            at += 1
        if not lease.disk_pages:
            lease.leading_cpu_pages = lease.cpu_pages
        if at < len(path):
            del path[at:]
            lease.rest = split_runs(lease.request.runs, lease.gpu_pages + lease.lower_pages)[1]

    def _level_below(self, node: Node, gpu: Tier) -> int:
        """Return the level of the tier from which a GPU tier without the node would load it; -1 if there is none."""
        if not node.state[gpu.index]:
            for tier, between in self.views[gpu.index].sources:
                if node.state[tier.index] == READY and (between is None or not node.state[between.index]):
                    return tier.level
        return -1

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0) -> bool:
        gpu, residency = lease.gpu, self.residency
        if lease.request.images and self._end_outside_images(lease, lease.gpu_pages + load_pages):
            load_pages = lease.lower_pages
        new_pages = pages - lease.gpu_pages
        missing = new_pages - gpu.spare_pages
        if missing > 0 and not self._can_evict(lease, missing):
            return False
        now = residency.tick(now)
        residency.notify_request(lease.request, now, gpu, on_gpu_only=lease.is_reserved)
        self._pin(lease, load_pages, now)
        if missing > 0 or not self._is_single:
            self.transfers.make_room(gpu, new_pages, now)
            lease.waits = self.transfers.flush()
        self._promise(lease, new_pages)
        self.leases[lease] = None
        return True

    def can_admit(self, lease: Lease, pages: int) -> bool:
        return self._can_evict(lease, pages - lease.gpu_pages - lease.gpu.spare_pages)

    def _can_evict(self, lease: Lease, missing: int) -> bool:
        """Whether ``missing`` pages can be evicted from the GPU while the request's path stays."""
        evictable = lease.gpu.evictable_pages
        return missing + lease.gpu_pages <= evictable or missing + self._idle_pages(lease) <= evictable

    def _idle_pages(self, lease: Lease) -> int:
        """Count the matched GPU pages that are evictable or leaving now and will be pinned at admission."""
        index, pages = lease.gpu.index, 0
        for node in lease.path[: lease.gpu_nodes]:
            if node.state[index] == LEAVING or not node.pins[index]:
                pages += node.pages
        return pages

    def _pin(self, lease: Lease, load_pages: int, now: float) -> None:
        """Pin what the request reuses, and record the use."""
        lease.epoch = self.epoch
        residency, reused = self.residency, lease.path
        lower: list[Node] = []
        if not self._is_single:
            lower = residency.first_pages(reused[lease.gpu_nodes :], load_pages)
            reused = reused[: lease.gpu_nodes]
            self._revive(reused, lease.gpu, now)
            if lower:
                lease.loading = lower[-1]
                for tier in self.views[lease.gpu.index].lower:
                    residency.pin(lower[-1], tier)
                for node in lower:
                    lease.loaded_pages += node.pages
        residency.pin_path(reused, lease.gpu, lease.gpu_pages)
        residency.use(reused, now, is_first=not lease.is_resumed, gpu=lease.gpu)
        if reused:
            lease.node = reused[-1]
        if lease.loading is not None:
            residency.use(lower, now, is_first=not lease.is_resumed, gpu=lease.gpu)
        if lease.loaded_pages < lease.cpu_pages + lease.disk_pages:
            lease.rest = split_runs(lease.request.runs, lease.gpu_pages + lease.loaded_pages)[1]

    def _revive(self, nodes: list[Node], gpu: Tier, now: float) -> None:
        """Keep pages that are leaving the GPU, since they are used again; their copies below are completed nevertheless."""
        for node in nodes:
            if node.state[gpu.index] == LEAVING:
                self.transfers.stay(node, gpu, now)
                self.counts.revived_pages += node.pages

    # --- slots -------------------------------------------------------------------------------------------------------------

    def _promise(self, lease: Lease, pages: int) -> None:
        """Give the request ``pages`` slots if that many are free and not promised to others; otherwise promise them."""
        gpu = lease.gpu
        pool = gpu.pool
        if pool.free - gpu.promised_pages >= pages:
            slots = pool.take(pages)
            lease.slots = slots if lease.slots is None else pool.join(lease.slots, slots)
        else:
            if lease.slots is None:
                lease.slots = pool.take(0)
            lease.promised_pages += pages
            gpu.promised_pages += pages

    def claim(self, lease: Lease, now: float) -> Claim:
        gpu, pages = lease.gpu, lease.promised_pages
        while gpu.pool.free < pages:
            if not gpu.leaving_pages and not self.transfers.make_room(gpu, 0, now):
                return LOST
            waits = self.transfers.departing(gpu)
            if waits:
                return Claim(waits)
        if pages:
            gpu.promised_pages -= pages
            lease.promised_pages = 0
            lease.slots = gpu.pool.join(lease.slots, gpu.pool.take(pages))
        return CLAIMED

    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        if not needs:
            return Growth(True, NO_TRANSFERS)
        gpu, wanted = needs[0][0].gpu, 0
        for _, pages in needs:
            wanted += pages
        if not self.transfers.make_room(gpu, wanted, now):
            return Growth(False, NO_TRANSFERS)
        for lease, pages in needs:
            self._promise(lease, pages)
        return Growth(True, self.transfers.flush())

    # --- reads from below ----------------------------------------------------------------------------------------------------

    def load(self, lease: Lease, now: float) -> Load:
        last, lease.loading = lease.loading, None
        if last is None:
            return NO_LOAD
        lease.loaded_pages = 0
        view = self.views[lease.gpu.index]
        load = NO_LOAD
        if lease.epoch == self.epoch:
            nodes = self._share_loaded(lease, self._path_between(lease.node, last))
            load = self._start_loads(lease, nodes, view, now)
            lease.rest = split_runs(lease.request.runs, lease.gpu_pages + lease.loaded_pages)[1]
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
            gpu.pool.give(mine)
            residency.pin(node, gpu)
            residency.unpin(lease.node, gpu)
            lease.node = node
            lease.gpu_pages += node.pages
        return []

    @staticmethod
    def _path_between(upper: Node, node: Node) -> list[Node]:
        """Return the nodes from below ``upper`` down to ``node``, top to bottom."""
        path: list[Node] = []
        while node is not upper:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        path.reverse()
        return path

    def _start_loads(self, lease: Lease, nodes: list[Node], view: View, now: float) -> Load:
        """Start reads into the tiers between disk and GPU, and one load from each tier next to the GPU that has or gets nodes."""
        transfers, loads = list[Transfer](), list[Transfer]()
        by_source: dict[Edge, list[Node]] = {edge: [] for edge in view.gpu.below}
        reads = self._plan_reads(nodes, view)
        for edge, read in reads.items():
            for node in read:
                self.residency.promise_copy(node, edge.upper)
            self.transfers.make_room(edge.upper, 0, now)
        transfers += self.transfers.flush()
        fetches = {edge.upper: self._read(edge, read) for edge, read in reads.items()}
        transfers += fetches.values()
        for node in nodes:
            for edge in view.gpu.below:
                if node.state[edge.lower.index] == READY or node.state[edge.lower.index] == INCOMING and edge.lower in fetches:
                    by_source[edge].append(node)
                    break
            self._take_slots(lease, node)
        for edge, loaded in by_source.items():
            if loaded:
                after = [fetches[edge.lower]] if edge.lower in fetches else []
                load = Transfer(edge, loaded, goes_down=False, after=after)
                load.begun = not after
                loads.append(self.transfers.start(load))
                if edge.lower.level == DISK:
                    lease.loaded_disk_pages += load.pages
        for fetch in fetches.values():
            lease.loaded_disk_pages += fetch.pages
        return Load(transfers + loads, loads)

    def _plan_reads(self, nodes: list[Node], view: View) -> dict[Edge, list[Node]]:
        """Return the nodes to read into a tier between disk and GPU, by edge; shorten ``nodes`` to what has room there."""
        reads: dict[Edge, list[Node]] = {}
        room: dict[Edge, int] = {}
        for at, node in enumerate(nodes):
            edge = self._edge_to_read(node, view)
            if edge is None:
                if self._level_below(node, view.gpu) < 0:
                    del nodes[at:]
                    break
                continue
            left = room.setdefault(edge, max(0, edge.upper.available_pages))
            if node.pages > left:
                del nodes[at:]
                if left:
                    node = self.residency.cut(node, left)
                    nodes.append(node)
                    reads.setdefault(edge, []).append(node)
                break
            room[edge] = left - node.pages
            reads.setdefault(edge, []).append(node)
        return reads

    def _edge_to_read(self, node: Node, view: View) -> Edge | None:
        """Return the edge over which a node must be read before it can be loaded.

        None if a tier next to the GPU has it, or if no tier does.
        """
        for tier, between in view.sources:
            if node.state[tier.index] == READY:
                if between is None:
                    return None
                if not node.state[between.index]:
                    return between.edge_to(tier)
        return None

    def _read(self, edge: Edge, nodes: list[Node]) -> Transfer:
        """Start reading nodes from a lower tier into the one above, where their slots are promised already."""
        return self.transfers.start(Transfer(edge, nodes.copy(), goes_down=False))

    def _take_slots(self, lease: Lease, node: Node) -> None:
        """Give a node that is about to be loaded the request's slots, and extend the request's pinned path by it."""
        gpu = lease.gpu
        mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
        self.residency.add_copy(node, gpu, INCOMING, mine)
        node.pins[gpu.index] += 1
        lease.node = node
        lease.loaded_pages += node.pages

    def shorten_hit(self, lease: Lease, load: Transfer | None, now: float) -> int:
        """Shorten a request's hit, whatever the load, by the pages of its path that no load brings any more."""
        if self._is_single:
            return 0
        gaps = [node for node in lease.node.path() if is_gap(node, lease.gpu)]
        lost = max(0, sum([node.pages for node in gaps]) - lease.missing_pages)
        lease.missing_pages += lost
        loaded = min(lost, lease.loaded_pages) if load is not None else 0
        lease.loaded_pages -= loaded
        lease.loaded_disk_pages = max(0, lease.loaded_disk_pages - loaded)
        lease.gpu_pages -= lost - loaded
        return lost

    def arriving(self, lease: Lease) -> list[Transfer]:
        loads: dict[Transfer, None] = {}
        node = lease.node
        while node.parent is not None and not self._is_single:
            for transfer in transfers_of(node):
                if transfer.target is lease.gpu:
                    loads[transfer] = None
            node = node.parent
        return list(loads)

    def room_to_fetch(self, lease: Lease) -> int:
        cpu = self.views[lease.gpu.index].fetches_to
        if cpu is None:
            return 0
        index, room = cpu.index, cpu.available_pages
        for node in lease.path:
            if node.state[index] == READY and not node.pins[index]:
                room -= node.pages
        return max(0, room)

    def fetch(self, lease: Lease, pages: int, now: float) -> Fetch:
        residency, view = self.residency, self.views[lease.gpu.index]
        cpu, end = view.fetches_to, lease.path[-1]
        assert cpu is not None
        pinned = [view.gpu, *view.lower]
        for tier in pinned:
            residency.pin(end, tier)
        nodes = self._first_on_disk(lease, min(pages, cpu.available_pages), view)
        result = Fetch(NO_TRANSFERS, None)
        if nodes:
            now = residency.tick(now)
            path = self._path_between(residency.tree.root, nodes[-1])
            for node in nodes:
                residency.promise_copy(node, cpu)
            self.transfers.make_room(cpu, 0, now)
            transfers = self.transfers.flush()
            edge = self._edge_for(nodes[0], cpu)
            fetch = self._read(edge, nodes)
            self.transfers.keep(fetch, nodes[-1], view.gpu)
            residency.reannounce(path, now, view.gpu)
            result = Fetch([*transfers, fetch], fetch)
        for tier in pinned:
            residency.unpin(end, tier)
        return result

    def hold(self, fetch: Transfer) -> Hold:
        return self.transfers.hold(fetch)

    def let_go(self, hold: Hold) -> None:
        self.transfers.let_go(hold)

    def _first_on_disk(self, lease: Lease, pages: int, view: View) -> list[Node]:
        nodes: list[Node] = []
        for node in lease.path[lease.gpu_nodes :]:
            if pages <= 0:
                break
            edge = self._edge_to_read(node, view)
            if edge is not None and edge.upper is view.fetches_to:
                if node.pages > pages:
                    node = self.residency.cut(node, pages)
                nodes.append(node)
                pages -= node.pages
        return nodes

    @staticmethod
    def _edge_for(node: Node, upper: Tier) -> Edge:
        """Return the edge over which a tier can read a node from below."""
        for edge in upper.below:
            if node.state[edge.lower.index] == READY:
                return edge
        raise AssertionError(f"{node}: not below {upper.name}")

    # --- computed pages --------------------------------------------------------------------------------------------------------

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        if lease.epoch != self.epoch:
            return NO_TRANSFERS
        residency, request = self.residency, lease.request
        now = residency.tick(now)
        residency.notify_request(request, now, lease.gpu)
        if not self._is_single:
            self._fill_gaps(lease, now)
        rest = lease.rest
        if rest:
            if rest[0][0] in lease.node.children:
                rest = self._join_known(lease, now)
            if rest:
                gpu = lease.gpu
                pages = rest[0][1] if len(rest) == 1 else count_pages(rest)
                mine, lease.slots = gpu.pool.split(lease.slots, pages)
                lease.node = residency.add_leaf(lease.node, rest, pages, gpu, mine, now)
            lease.rest = ()
        return NO_TRANSFERS if self._is_single else self._offer(lease, now)

    def _offer(self, lease: Lease, now: float) -> list[Transfer]:
        """Offer the path that a request has used to the placement policies, edge by edge from the top."""
        edges = self.views[lease.gpu.index].edges
        if not (lease.is_finishing or lease.is_known_prompt):
            for edge in edges:
                if edge.wants_requests:
                    edge.placement.on_request(lease.request, now)
        prompt = None if lease.is_finishing else lease.request
        for edge in edges:
            self.transfers.offer_path(lease.node, edge, now, prompt)
        transfers = self.transfers.flush()
        for transfer in transfers:
            transfer.request = prompt
        return transfers

    def _join_known(self, lease: Lease, now: float) -> tuple[Run, ...]:
        """Pin the computed pages that the tree has already, from other requests or in tiers below. Returns the new pages."""
        path, rest = self.residency.follow(lease.node, lease.rest)
        for node in path:
            self._take_computed(lease, node, now)
            lease.node = node
        if not self._is_single:
            self.transfers.drop_duplicates_below(path, lease.gpu)
        return rest

    def _take_computed(self, lease: Lease, node: Node, now: float) -> None:
        """Use the computed pages of a known node as its GPU copy, or free their slots if it has one; pin the node."""
        gpu, residency = lease.gpu, self.residency
        index = gpu.index
        state = node.state[index]
        mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
        if state == ABSENT:
            residency.add_copy(node, gpu, INCOMING, mine)
        else:
            gpu.pool.give(mine)
            if state == LEAVING:
                self._revive([node], gpu, now)
        if node.state[index] == READY and not node.pins[index]:
            gpu.evictable_pages -= node.pages
        node.pins[index] += 1
        residency.reannounce((node,), now, gpu)
        if is_gap(node, gpu):
            residency.set_ready(node, gpu, now)

    def _fill_gaps(self, lease: Lease, now: float) -> None:
        """Make pages ready that a load failed to bring: they have been computed in the slots reserved for them."""
        node, gpu = lease.node, lease.gpu
        first_page = 0 if lease.missing_pages else lease.gpu_pages
        while node.depth >= first_page and node.parent is not None:
            if is_gap(node, gpu):
                self.residency.set_ready(node, gpu, now)
            node = node.parent

    # --- the end of a request --------------------------------------------------------------------------------------------------

    def finish_request(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        self.keep_prompt(lease)
        transfers = NO_TRANSFERS
        if self.begin_answer(lease):
            transfers = self.insert(lease, max(now, self.residency.now))
        self.end_request(lease, now)
        return transfers + self.write_early() if self.transfers.writes_early else transfers

    def begin_answer(self, lease: Lease) -> bool:
        """Whether the answer's full pages are to be inserted too; if so, prepare the lease for ``insert``."""
        if not (self.rules.cache_output and lease.request.output_runs):
            return False
        lease.is_finishing = True
        lease.rest = lease.request.output_runs
        return True

    def end_request(self, lease: Lease, now: float) -> None:
        """Notify policies that a request has finished, and release it."""
        if lease.epoch == self.epoch:
            self.residency.notify_finish(lease.request, lease.node, max(now, self.residency.now), lease.gpu)
        self.release(lease)

    def end_prefill(self, lease: Lease, now: float) -> list[Transfer]:
        self.keep_prompt(lease)
        self.end_request(lease, now)
        return self.write_early() if self.transfers.writes_early else NO_TRANSFERS

    def write_early(self) -> list[Transfer]:
        """Copy pages down where a watermark requires it. Returns the write-downs."""
        self.transfers.write_early(self.residency.now)
        return self.transfers.flush()

    def release(self, lease: Lease) -> None:
        gpu, residency = lease.gpu, self.residency
        gpu.pool.give(lease.slots)
        gpu.promised_pages -= lease.promised_pages
        del self.leases[lease]
        if lease.loading is not None:
            for tier in self.views[gpu.index].lower:
                residency.unpin(lease.loading, tier)
        residency.unpin(lease.node, gpu)

    def keep_prompt(self, lease: Lease) -> None:
        """Keep the prompt of a request that ends on its GPU until ``reset`` if it is persistent.

        A request that is retracted or fails keeps nothing: its pages may be what the others need.
        """
        key = lease.node, lease.gpu
        if lease.request.persistent and lease.epoch == self.epoch and key not in self.persistent:
            self.persistent[key] = None
            self.residency.pin(lease.node, lease.gpu)

    def kept_pages(self, lease: Lease) -> int:
        if not self.persistent:
            return 0
        kept: set[Node] = set()
        for last, gpu in self.persistent:
            node: Node | None = last if gpu is lease.gpu else None
            while node is not None and node not in kept:
                kept.add(node)
                node = node.parent
        kept.difference_update(lease.path[: lease.gpu_nodes])
        return sum([node.pages for node in kept])

    # --- transfers -------------------------------------------------------------------------------------------------------------

    def begin(self, transfer: Transfer, now: float) -> Begin:
        return self.transfers.begin(transfer, now)

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        return self.transfers.finish(transfer, now)

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        return self.transfers.abort(transfer, pages_arrived, now)

    # --- everything ------------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.residency.clear()
        self.epoch += 1
        for node, gpu in self.persistent:
            self.residency.unpin(node, gpu)
        self.persistent.clear()
        for hold in list(self.transfers.holds):
            self.let_go(hold)

    def lose(self, gpu: Tier, now: float) -> None:
        for node, tier in list(self.persistent):
            if tier is gpu:
                self.residency.unpin(node, gpu)
                del self.persistent[node, gpu]
        self.transfers.lose(gpu)

    def held(self) -> Held:
        """Return what leases, persistent paths and fetches for waiting requests hold."""
        held = Held()
        held.pins.extend(self.persistent)
        held.pins.extend([(hold.node, hold.tier) for hold in self.transfers.holds if hold.node is not None])
        for lease in self.leases:
            gpu = lease.gpu
            held.pins.append((lease.node, gpu))
            held.slots.setdefault(gpu, []).append(lease.slots)
            held.promised_pages[gpu] = held.promised_pages.get(gpu, 0) + lease.promised_pages
            if lease.loading is not None:
                held.pins.extend([(lease.loading, tier) for tier in self.views[gpu.index].lower])
        return held

    def check(self) -> None:
        check(self.residency, self.transfers, self.held())
