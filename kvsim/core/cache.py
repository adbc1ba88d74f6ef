"""The cache core: remembers where pages are, decides by its policies, never waits and never moves a byte."""

from math import inf
from typing import NamedTuple

from kvsim.core.edge import Edge
from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.residency import Counts, Residency
from kvsim.core.rules import Rules
from kvsim.core.runs import Run, count_pages, split_runs
from kvsim.core.tier import CPU, DISK, Tier
from kvsim.core.transfer import Transfer
from kvsim.core.transfers import NO_TRANSFERS, Begin, Transfers, is_arriving
from kvsim.core.tree import ABSENT, INCOMING, LEAVING, READY, Node, RadixTree


class Claim(NamedTuple):
    """What became of promised slots: the request has them, they are lost, or ``waits`` have to end before it asks again."""

    waits: list[Transfer]
    is_lost: bool = False


CLAIMED = Claim(NO_TRANSFERS)
LOST = Claim(NO_TRANSFERS, is_lost=True)


class Growth(NamedTuple):
    """Whether requests get more slots, and the write-downs that make room for them."""

    has_room: bool
    transfers: list[Transfer]


class Fetch(NamedTuple):
    """What is to be carried out, in order, and the read ahead itself; None if there was no room for a single page."""

    transfers: list[Transfer]
    fetch: Transfer | None


class Load(NamedTuple):
    """What is to be carried out, in order, and those of it that bring pages to the GPU."""

    transfers: list[Transfer]
    loads: list[Transfer]


NO_LOAD = Load(NO_TRANSFERS, NO_TRANSFERS)


class View:
    """The graph of tiers as a GPU tier sees it."""

    def __init__(self, gpu: Tier) -> None:
        self.gpu = gpu
        self.edges: list[Edge] = list(gpu.below)
        """From the top down."""
        for edge in self.edges:
            self.edges += [below for below in edge.lower.below if below not in self.edges]
        self.sources: list[tuple[Tier, Tier | None]] = [(edge.lower, None) for edge in gpu.below]
        """(tier, the tier between), the ones that are read first at the front: None stands for straight to the GPU."""
        for edge in gpu.below:
            self.sources += [(below.lower, edge.lower) for below in edge.lower.below]
        self.lower: list[Tier] = list(dict.fromkeys([tier for tier, _ in self.sources]))
        between = [tier for _, tier in self.sources if tier is not None]
        self.fetches_to: Tier | None = between[0] if between else None
        """The tier into which pages are read ahead of need; None if there is none."""


class Cache:
    """Tree, tiers, edges and policies behind one face. Methods take ``now``, in seconds, where time matters.

    Several GPU tiers may stand side by side: ``match`` says which of them serves a request.
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
        """The GPU tier, or the first of them."""
        self.leases: dict[Lease, None] = {}
        """Of running requests."""
        self.epoch = 0
        """How often the cache has been reset."""
        self.persistent: dict[tuple[Node, Tier], None] = {}
        """Ends of paths that never leave a GPU tier."""
        self._recomputes_last_token = rules.recompute_last_token
        self._is_single = len(tiers) == 1

    @property
    def tree(self) -> RadixTree:
        """Where pages are."""
        return self.residency.tree

    @property
    def counts(self) -> Counts:
        """What became of pages that were moved."""
        return self.residency.counts

    @property
    def now(self) -> float:
        """When the cache was last used."""
        return self.residency.now

    @property
    def in_flight(self) -> dict[Transfer, None]:
        """Transfers handed out and not yet ended, the oldest first."""
        return self.transfers.in_flight

    # --- match and admit ---------------------------------------------------------------------------------------------------

    def match(self, request: Request, gpu: Tier | None = None) -> Lease:
        """The longest reusable prefix as seen from a GPU tier. Changes nothing but the cut that it needs."""
        lease = Lease(request, gpu or self.gpu, self.residency.tree.root)
        pages = request.prompt_pages
        if self._recomputes_last_token:
            pages = min(pages, (request.prompt_tokens - 1) // self.page_tokens)
        self.rematch(lease, pages)
        return lease

    def rematch(self, lease: Lease, limit: int) -> None:
        """Let a lease that has not been admitted match within the first ``limit`` pages of its prompt."""
        path, rest = self.residency.follow(lease.node, lease.request.runs, limit)
        pages = 0
        if path:
            last = path[-1]
            pages = last.depth + last.pages
        lease.set_match(path, pages, rest)
        if not self._is_single:
            self._sort_by_tier(lease)

    def _sort_by_tier(self, lease: Lease) -> None:
        """Split the path into what is on the GPU and what is below; drop what cannot be used now."""
        path, at, gpu = lease.path, 0, lease.gpu
        index = gpu.index
        for node in path:
            state = node.state[index]
            if state == ABSENT or state == INCOMING and not is_arriving(node, gpu):
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
        """The level of the tier from which a page would be loaded to a GPU tier that lacks it; -1 if there is none."""
        if not node.state[gpu.index]:
            for tier, between in self.views[gpu.index].sources:
                if node.state[tier.index] == READY and (between is None or not node.state[between.index]):
                    return tier.level
        return -1

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0) -> bool:
        """Let a request run that needs ``pages`` GPU pages in all, of which ``load_pages`` are to come from tiers below.

        Pins what is reused and reserves slots for everything else, evicting as needed. False, and nothing changed, if that
        is not possible now. The slots are there once ``claim`` says so. The lease must be fresh from ``match``.
        """
        gpu, residency = lease.gpu, self.residency
        new_pages = pages - lease.gpu_pages
        missing = new_pages - gpu.spare_pages
        if missing > 0 and not self._can_evict(lease, missing):
            return False
        now = residency.tick(now)
        residency.tell_request(lease.request, now)
        self._pin(lease, load_pages, now)
        if missing > 0 or not self._is_single:
            self.transfers.make_room(gpu, new_pages, now)
            lease.waits = self.transfers.flush()
        self._promise(lease, new_pages)
        self.leases[lease] = None
        return True

    def can_admit(self, lease: Lease, pages: int) -> bool:
        """Whether a request can have ``pages`` GPU pages in all now. The lease must be fresh from ``match``."""
        return self._can_evict(lease, pages - lease.gpu_pages - lease.gpu.spare_pages)

    def _can_evict(self, lease: Lease, missing: int) -> bool:
        """Whether so many pages can leave the GPU while the request's path stays."""
        evictable = lease.gpu.evictable_pages
        return missing + lease.gpu_pages <= evictable or missing + self._idle_pages(lease) <= evictable

    def _idle_pages(self, lease: Lease) -> int:
        """Pages of the match that count as evictable, or as about to leave, until they are pinned."""
        index, pages = lease.gpu.index, 0
        for node in lease.path[: lease.gpu_nodes]:
            if node.state[index] == LEAVING or not node.pins[index]:
                pages += node.pages
        return pages

    def _pin(self, lease: Lease, load_pages: int, now: float) -> None:
        """Pin what the request reuses, and count its uses."""
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
        residency.use(reused, now, is_first=not lease.is_resumed)
        if reused:
            lease.node = reused[-1]
        if lease.loading is not None:
            residency.use(lower, now, is_first=not lease.is_resumed)
        if lease.loaded_pages < lease.cpu_pages + lease.disk_pages:
            lease.rest = split_runs(lease.request.runs, lease.gpu_pages + lease.loaded_pages)[1]

    def _revive(self, nodes: list[Node], gpu: Tier, now: float) -> None:
        """Pages that are leaving the GPU are used again: they stay, and their copies below are completed all the same."""
        for node in nodes:
            if node.state[gpu.index] == LEAVING:
                self.transfers.stay(node, gpu, now)
                self.counts.revived_pages += node.pages

    # --- slots -------------------------------------------------------------------------------------------------------------

    def _promise(self, lease: Lease, pages: int) -> None:
        """Give the request slots that are free and not promised to others; otherwise promise them."""
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
        """Take the slots that were promised.

        They are lost if pages about to leave were used again: ``release``, and try later.
        """
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
        """Promise more slots to requests of one GPU that decode: all get what they need, or none. ``claim`` gets those that are
        not free at once."""
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
        """Start to bring the matched pages of tiers below to the GPU; the request must have claimed its slots.

        Pages that only the disk has pass through the CPU tier if the disk is below it. As many as find room there are read;
        what follows on the first that does not is computed.
        """
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
        """Pin the first nodes if another request has begun to load them since the match, and give back the room for them.

        Returns the nodes that are left to load.
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
        """The nodes below ``upper`` down to ``node``, top to bottom."""
        path: list[Node] = []
        while node is not upper:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        path.reverse()
        return path

    def _start_loads(self, lease: Lease, nodes: list[Node], view: View, now: float) -> Load:
        """Start reads into the tiers between, and one load from each tier next to the GPU that has some of the nodes."""
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
                load = Transfer(edge.lower, view.gpu, loaded, goes_down=False, after=after)
                load.begun = not after
                loads.append(self.transfers.start(load))
                if edge.lower.level == DISK:
                    lease.loaded_disk_pages += load.pages
        for fetch in fetches.values():
            lease.loaded_disk_pages += fetch.pages
        return Load(transfers + loads, loads)

    def _plan_reads(self, nodes: list[Node], view: View) -> dict[Edge, list[Node]]:
        """What has to be read into a tier between disk and GPU, by edge. ``nodes`` is cut short where such a tier has no room."""
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
        """The edge over which a page has to come before it can be loaded; None if a tier next to the GPU has it, or none does."""
        for tier, between in view.sources:
            if node.state[tier.index] == READY:
                if between is None:
                    return None
                if not node.state[between.index]:
                    return self._edge(between, tier)
        return None

    @staticmethod
    def _edge(upper: Tier, lower: Tier) -> Edge:
        for edge in upper.below:
            if edge.lower is lower:
                return edge
        raise AssertionError(f"no edge joins {upper.name} and {lower.name}")

    def _read(self, edge: Edge, nodes: list[Node]) -> Transfer:
        """Start to read nodes from a lower tier into the one above; their room there is promised."""
        return self.transfers.start(Transfer(edge.lower, edge.upper, nodes.copy(), goes_down=False))

    def _take_slots(self, lease: Lease, node: Node) -> None:
        """A node is about to be loaded into slots of the request, whose path it lengthens."""
        gpu = lease.gpu
        mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
        self.residency.add_copy(node, gpu, INCOMING, mine)
        node.pins[gpu.index] += 1
        lease.node = node
        lease.loaded_pages += node.pages

    def arriving(self, lease: Lease) -> list[Transfer]:
        """The loads, its own and others', that a request's pinned path waits for."""
        loads: dict[Transfer, None] = {}
        node = lease.node
        while node.parent is not None and not self._is_single:
            for transfer in node.transfers:
                if transfer.target is lease.gpu:
                    loads[transfer] = None
            node = node.parent
        return list(loads)

    def fetch(self, lease: Lease, pages: int, now: float) -> Fetch:
        """Start to read the first ``pages`` pages that only the disk has into the CPU tier, or as many as find room, for a
        request that still waits.

        Until the fetch ends, the path from which it goes on stays where it is; from then on it is as recent as if it had been
        used now. The lease is fresh from ``match`` and is used up.
        """
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
            residency.reannounce(path, now)
            result = Fetch([*transfers, fetch], fetch)
        for tier in pinned:
            residency.unpin(end, tier)
        return result

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
        """The edge over which a tier can read a node."""
        for edge in upper.below:
            if node.state[edge.lower.index] == READY:
                return edge
        raise AssertionError(f"{node}: not below {upper.name}")

    # --- computed pages --------------------------------------------------------------------------------------------------------

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        """The whole prompt, or the answer, has been computed: its pages become nodes. Returns the write-downs that follow."""
        if lease.epoch != self.epoch:
            return NO_TRANSFERS
        residency, request = self.residency, lease.request
        now = residency.tick(now)
        residency.tell_request(request, now)
        if lease.loaded_pages:
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
        if request.persistent:
            self.persist(lease.node, lease.gpu)
        return NO_TRANSFERS if self._is_single else self._offer(lease, now)

    def _offer(self, lease: Lease, now: float) -> list[Transfer]:
        """Ask placement, edge by edge from the top, about the path that a request has used."""
        edges = self.views[lease.gpu.index].edges
        if not (lease.is_finishing or lease.is_known_prompt):
            for edge in edges:
                if edge.hears_requests:
                    edge.placement.on_request(lease.request, now)
        prompt = None if lease.is_finishing else lease.request
        for edge in edges:
            self.transfers.offer_path(lease.node, edge, now, prompt)
        transfers = self.transfers.flush()
        for transfer in transfers:
            transfer.request = prompt
        return transfers

    def _join_known(self, lease: Lease, now: float) -> tuple[Run, ...]:
        """Pin the nodes that others, or tiers below, have of what the request computed. Returns what is new."""
        path, rest = self.residency.follow(lease.node, lease.rest)
        for node in path:
            self._take_computed(lease, node, now)
            lease.node = node
        if not self._is_single:
            self.transfers.drop_duplicates_below(path, lease.gpu)
        return rest

    def _take_computed(self, lease: Lease, node: Node, now: float) -> None:
        """Computed pages of a known node fill the GPU's gap, or are given back."""
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
        residency.reannounce((node,), now)
        if node.state[index] == INCOMING and not is_arriving(node, gpu):
            residency.set_ready(node, gpu, now)

    def _fill_gaps(self, lease: Lease, now: float) -> None:
        """Pages that a load failed to bring have been computed in the slots that were waiting for them."""
        node, gpu = lease.node, lease.gpu
        while node.depth >= lease.gpu_pages and node.parent is not None:
            if node.state[gpu.index] == INCOMING and not is_arriving(node, gpu):
                self.residency.set_ready(node, gpu, now)
            node = node.parent

    # --- the end of a request --------------------------------------------------------------------------------------------------

    def finish_request(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        """The request has its answer: as ``release``, and policies are told. Without a clock, ``now`` is when it began.

        Returns the write-downs that follow.
        """
        transfers = NO_TRANSFERS
        if self.begin_answer(lease):
            transfers = self.insert(lease, max(now, self.residency.now))
        self.end_request(lease, now)
        return transfers + self.write_early() if self.transfers.writes_early else transfers

    def begin_answer(self, lease: Lease) -> bool:
        """Whether the answer's full pages are to be inserted, too; if so, the lease is ready for that."""
        if not (self.rules.cache_output and lease.request.output_runs):
            return False
        lease.is_finishing = True
        lease.rest = lease.request.output_runs
        return True

    def end_request(self, lease: Lease, now: float) -> None:
        """Tell policies of the end of a request, and release it."""
        if lease.epoch == self.epoch:
            self.residency.tell_finish(lease.request, lease.node, max(now, self.residency.now))
        self.release(lease)

    def write_early(self) -> list[Transfer]:
        """Copy down what a watermark asks for."""
        self.transfers.write_early(self.residency.now)
        return self.transfers.flush()

    def release(self, lease: Lease) -> None:
        """The request is over, or retracted: its path is unpinned, its slots and what it was promised are given back."""
        gpu, residency = lease.gpu, self.residency
        gpu.pool.give(lease.slots)
        gpu.promised_pages -= lease.promised_pages
        del self.leases[lease]
        if lease.loading is not None:
            for tier in self.views[gpu.index].lower:
                residency.unpin(lease.loading, tier)
        residency.unpin(lease.node, gpu)

    def persist(self, node: Node, gpu: Tier) -> None:
        """The node and all before it, which a GPU tier has, do not leave it any more until ``reset``."""
        if (node, gpu) not in self.persistent:
            self.persistent[node, gpu] = None
            self.residency.pin(node, gpu)

    # --- transfers -------------------------------------------------------------------------------------------------------------

    def begin(self, transfer: Transfer, now: float) -> Begin:
        """Give a transfer its target slots, or say what has to end first."""
        return self.transfers.begin(transfer, now)

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        """A transfer has brought everything. Returns the write-downs that follow."""
        return self.transfers.finish(transfer, now)

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        """A transfer has brought its first ``pages_arrived`` pages only. Returns the write-downs that follow."""
        return self.transfers.abort(transfer, pages_arrived, now)

    # --- everything ------------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every page (the model's weights changed). Slots in use by requests and transfers return when these end."""
        self.residency.clear()
        self.epoch += 1
        for node, gpu in self.persistent:
            self.residency.unpin(node, gpu)
        self.persistent.clear()

    def check(self) -> None:
        """Recount everything; raises AssertionError where a count or an invariant does not hold."""
        from kvsim.core.check import check, held_by_requests

        check(self.residency, self.transfers, held_by_requests(self))
