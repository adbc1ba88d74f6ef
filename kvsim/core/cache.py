"""The cache core: remembers where pages are, decides by its policies, never waits and never moves a byte."""

from math import inf, nextafter
from typing import Any

from kvsim.core.movement import CPU, DISK, GPU, Movement
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.runs import Run, count_pages, split_runs
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.core.tree import ABSENT, INCOMING, LEAVING, READY, Node

NO_TRANSFERS: list[Transfer] = []


class Lease:
    """What a request can reuse and, once it is admitted, what it holds of the GPU until it is released.

    match    ``path``: ``gpu_pages`` that are on the GPU or arriving there, then ``cpu_pages`` and ``disk_pages`` that only
             lower tiers have (``disk_pages``: only the disk)
    admit    the path is pinned down to ``node``; ``slots`` (or a promise of ``owed_pages`` of them) for all other pages
    load     ``loaded_pages`` come from lower tiers, ``loaded_disk_pages`` of them straight from disk
    insert   computed pages are in the tree and pinned too: ``slots`` keeps the partial page's and the answer's
    """

    __slots__ = (
        "request", "path", "gpu_nodes", "gpu_pages", "cpu_pages", "disk_pages", "leading_cpu_pages", "rest", "node", "slots",
        "owed_pages", "loading", "loaded_pages", "loaded_disk_pages", "waits", "epoch", "hits",
        "is_finishing", "is_resumed", "is_known_prompt",
    )  # fmt: skip
    node: Node
    """The deepest node of the pinned path, after admission."""
    epoch: int
    """How often the cache had been reset at admission."""
    hits: tuple[int, int, int]
    """Hit pages by tier (gpu, cpu, disk), for replay."""

    def __init__(self, request: Request, path: list[Node], pages: int, rest: tuple[Run, ...]) -> None:
        self.request = request
        self.path = path
        self.gpu_nodes = len(path)
        """So many nodes of ``path`` are on the GPU."""
        self.gpu_pages = pages
        self.cpu_pages = self.disk_pages = self.leading_cpu_pages = 0
        self.rest = rest
        """The prompt's pages after the path; after admission, after the pinned path."""
        self.slots: Any = None
        self.owed_pages = self.loaded_pages = self.loaded_disk_pages = 0
        self.loading: Node | None = None
        """The last node to be loaded, until the load is made."""
        self.is_finishing = False
        """The answer is there: what is inserted now is no prompt."""
        self.is_resumed = False
        """The request was admitted before and gave everything back: what it finds again is used no further time."""
        self.is_known_prompt = False
        """The prompt was computed before, by the same request: policies that count prompts have heard of it."""
        self.waits = NO_TRANSFERS
        """Write-downs that make room for this request."""

    @property
    def has_load(self) -> bool:
        """Whether something is to be loaded, and has not been started."""
        return self.loading is not None

    @property
    def lower_pages(self) -> int:
        """Pages that would have to be loaded."""
        return self.cpu_pages + self.disk_pages


class TieredCache(Movement):
    """Radix tree, tiers and policies behind one face. Methods take ``now``, in seconds, where time matters."""

    lease_type: type[Lease] = Lease

    def __init__(self, tiers: list[Tier], rules: Rules, page_tokens: int) -> None:
        super().__init__(tiers, rules)
        self.page_tokens = page_tokens
        self.leases: dict[Any, None] = {}
        """Of running requests; ``single.py`` has a smaller kind."""
        self.epoch = 0
        self._recompute_last_token = rules.recompute_last_token
        self.persistent: dict[Node, None] = {}
        """Ends of paths that never leave the GPU."""

    # --- match and admit ---------------------------------------------------------------------------------------------

    def match(self, request: Request) -> Any:
        """The longest reusable prefix, by tier. Changes nothing but the cut that it needs."""
        runs = request.runs
        if self._recompute_last_token and (usable := (request.prompt_tokens - 1) // self.page_tokens) < request.prompt_pages:
            runs = split_runs(runs, usable)[0]
        return self.match_runs(request, runs)

    def match_runs(self, request: Request, runs: tuple[Run, ...]) -> Any:
        """As ``match``, within ``runs``, with which the prompt begins."""
        path, partial, agreed, rest = self.tree.walk(self.tree.root, runs)
        if partial is not None:
            path.append(self.cut(partial, agreed))
        pages = path[-1].depth + path[-1].pages if path else 0
        if runs is not request.runs:
            rest = split_runs(request.runs, pages)[1]
        return self.lease(request, path, pages, rest)

    def lease(self, request: Request, path: list[Node], pages: int, rest: tuple[Run, ...]) -> Lease:
        """A match of which the tree has so many pages, by tier."""
        lease = self.lease_type(request, path, pages, rest)
        if not self._single:
            self._sort_by_tier(lease)
        return lease

    def _sort_by_tier(self, lease: Lease) -> None:
        """Split the path into what is on the GPU and what is below; drop what cannot be used now."""
        path, at, disk = lease.path, 0, len(self.tiers) > DISK
        for node in path:
            state = node.state[GPU]
            if state == ABSENT or state == INCOMING and not self.is_arriving(node):
                break
            at += 1
        else:
            return
        lease.gpu_nodes = at
        lease.gpu_pages = path[at - 1].depth + path[at - 1].pages if at else 0
        for node in path[at:]:
            states = node.state
            if states[GPU]:
                break
            if states[CPU] == READY:
                lease.cpu_pages += node.pages
            elif disk and states[DISK] == READY and not states[CPU]:
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

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0) -> bool:
        """Let a request run that needs ``pages`` GPU pages in all, of which ``load_pages`` are to come from lower tiers.

        Pins what is reused and reserves slots for everything else, evicting as needed. False, and nothing changed, if that
        is not possible now. The slots are there once ``claim`` returns []. The lease must be fresh from ``match``.
        """
        gpu = self.gpu
        new_pages = pages - lease.gpu_pages
        missing = new_pages - gpu.pool.free - gpu.coming_pages + gpu.owed_pages
        evictable = gpu.evictable_pages
        if missing > 0 and missing + lease.gpu_pages > evictable and missing + self._idle_pages(lease) > evictable:
            return False
        if now <= self.now:
            now = nextafter(self.now, inf)
        self.now = now
        for announce in self.announced:
            announce(lease.request, now)
        self._pin_path(lease, load_pages, now)
        if self._single:
            if missing > 0:
                self.make_room(gpu, new_pages, now)
        else:
            self.make_room(gpu, new_pages, now)
            lease.waits = self.flush()
        self._promise(lease, new_pages)
        self.leases[lease] = None
        return True

    def _idle_pages(self, lease: Lease) -> int:
        """Pages of the match that count as evictable, or as about to leave, until they are pinned."""
        path = lease.path[: lease.gpu_nodes]
        return sum(node.pages for node in path if node.state[GPU] == LEAVING or not node.pins[GPU])

    def _pin_path(self, lease: Lease, load_pages: int, now: float) -> None:
        lease.epoch = self.epoch
        reused, gpu, node, evictable = lease.path, self.gpu, self.tree.root, 0
        loading: list[Node] = []
        if not self._single:
            loading = self._first_pages(lease, load_pages)
            reused = reused[: lease.gpu_nodes]
            self._revive(reused, now)
        for node in reused:
            pins = node.pins
            if not pins[GPU]:
                evictable += node.pages
            pins[GPU] += 1
            node.last_used = now
        gpu.evictable_pages -= evictable
        lease.node = node
        self._count_uses(lease, reused, now)
        if loading:
            self._pin_loading(lease, loading, now)
        if lease.loaded_pages < lease.cpu_pages + lease.disk_pages:
            lease.rest = split_runs(lease.request.runs, lease.gpu_pages + lease.loaded_pages)[1]

    def _revive(self, nodes: list[Node], now: float) -> None:
        """Pages that are leaving the GPU are used again: they stay, and their copies below are completed all the same."""
        for node in nodes:
            if node.state[GPU] == LEAVING:
                self.stay(node, self.gpu, now)
                self.counts.revived_pages += node.pages

    def _first_pages(self, lease: Lease, pages: int) -> list[Node]:
        """The nodes that hold the first ``pages`` pages below the GPU's part; the last one is cut if need be."""
        nodes: list[Node] = []
        for node in lease.path[lease.gpu_nodes :] if pages else ():
            if pages <= 0:
                break
            if node.pages > pages:
                node = self.cut(node, pages)
            nodes.append(node)
            pages -= node.pages
        return nodes

    def _pin_loading(self, lease: Lease, nodes: list[Node], now: float) -> None:
        lease.loading = nodes[-1]
        for tier in self.tiers[CPU:]:
            self.pin(nodes[-1], tier.index)
        for node in nodes:
            node.last_used = now
            lease.loaded_pages += node.pages
        self._count_uses(lease, nodes, now)

    def _count_uses(self, lease: Lease, nodes: list[Node], now: float) -> None:
        """A request uses each page once, however often it is admitted."""
        if lease.is_resumed:
            return
        for node in nodes:
            node.hits += 1
        if self.listeners:
            self.tell_hits(nodes, now)

    # --- slots -------------------------------------------------------------------------------------------------------

    def _promise(self, lease: Lease, pages: int) -> None:
        """Give the request slots that are free and promised to nobody else; otherwise it is owed them."""
        gpu = self.gpu
        pool = gpu.pool
        if pool.free - gpu.owed_pages >= pages:
            slots = pool.take(pages)
            lease.slots = slots if lease.slots is None else pool.join(lease.slots, slots)
        else:
            if lease.slots is None:
                lease.slots = pool.take(0)
            lease.owed_pages += pages
            gpu.owed_pages += pages

    def claim(self, lease: Lease, now: float) -> list[Transfer] | None:
        """Take the slots that were promised. Returns [] when the request has them, or transfers to wait for before asking again.

        None if they cannot be had any more (pages about to leave were used again): ``release``, and try later.
        """
        gpu, pages = self.gpu, lease.owed_pages
        while gpu.pool.free < pages:
            if not gpu.coming_pages and not self.make_room(gpu, 0, now):
                return None
            if waits := self.departing(gpu):
                return waits
        if pages:
            gpu.owed_pages -= pages
            lease.owed_pages = 0
            lease.slots = gpu.pool.join(lease.slots, gpu.pool.take(pages))
        return []

    def grow(self, lease: Lease, pages: int, now: float) -> list[Transfer] | None:
        """Promise more slots to a request that decodes; ``claim`` gets those that are not free at once.

        Returns the write-downs that make room; None, and nothing changed, if there is no room to be had.
        """
        return self.grow_all([(lease, pages)], now)

    def grow_all(self, needs: list[tuple[Lease, int]], now: float) -> list[Transfer] | None:
        """As ``grow``, for several requests at once: all get what they need, or none."""
        gpu = self.gpu
        wanted = sum([pages for _, pages in needs])
        if not self.make_room(gpu, wanted, now):
            return None
        if gpu.pool.free - gpu.owed_pages >= wanted:
            take, join = gpu.pool.take, gpu.pool.join
            for lease, pages in needs:
                lease.slots = join(lease.slots, take(pages))
        else:
            for lease, pages in needs:
                self._promise(lease, pages)
        return self.flush()

    def finish_request(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        """The request has its answer: as ``release``, and the policies hear of it. Without a clock that is when it began.

        Returns the write-downs that follow.
        """
        transfers = NO_TRANSFERS
        if self.rules.cache_output and lease.request.output_runs:
            lease.is_finishing = True
            lease.rest = lease.request.output_runs
            transfers = self.insert(lease, max(now, self.now))
        if self.finished and lease.epoch == self.epoch:
            for finish in self.finished:
                finish(lease.request, lease.node, max(now, self.now))
        self.release(lease)
        if not self.early:
            return transfers
        self.write_early(self.now)
        return transfers + self.flush()

    def persist(self, node: Node) -> None:
        """The node and all before it, which are on the GPU, do not leave it any more until ``reset``."""
        if node not in self.persistent:
            self.persistent[node] = None
            self.pin(node, GPU)

    def release(self, lease: Lease) -> None:
        """The request is over, or retracted: its path is unpinned, its slots and what it was promised are given back."""
        gpu = self.gpu
        gpu.pool.give(lease.slots)
        gpu.owed_pages -= lease.owed_pages
        del self.leases[lease]
        if lease.loading is not None:
            for tier in self.tiers[CPU:]:
                self.unpin(lease.loading, tier.index)
        self.unpin(lease.node, GPU)

    # --- reads from below --------------------------------------------------------------------------------------------

    def load(self, lease: Lease, now: float) -> list[Transfer]:
        """Start to bring the matched pages of lower tiers to the GPU; the request must have claimed its slots.

        Pages that only the disk has pass through the CPU tier. If that has no room for them the load ends before them,
        and they are computed. The last transfer returned is the load itself, if any page is loaded.
        """
        last, lease.loading = lease.loading, None
        if last is None:
            return []
        lease.loaded_pages = 0
        transfers: list[Transfer] = []
        if lease.epoch == self.epoch:
            nodes = self._share_loaded(lease, self._path_between(lease.node, last))
            transfers, fetch = self._fetch_missing(nodes, now)
            if nodes:
                transfers.append(self._start_load(lease, nodes, fetch))
            lease.rest = split_runs(lease.request.runs, lease.gpu_pages + lease.loaded_pages)[1]
        for tier in self.tiers[CPU:]:
            self.unpin(last, tier.index)
        return transfers

    def _share_loaded(self, lease: Lease, nodes: list[Node]) -> list[Node]:
        """Pin the first nodes if another request has begun to load them since the match, and give back the room for them.

        Returns the nodes that are left to load.
        """
        for at, node in enumerate(nodes):
            if node.state[GPU] != READY and not self.is_arriving(node):
                return nodes[at:] if node.state[GPU] == ABSENT else []
            mine, lease.slots = self.gpu.pool.split(lease.slots, node.pages)
            self.gpu.pool.give(mine)
            self.pin(node, GPU)
            self.unpin(lease.node, GPU)
            lease.node = node
            lease.gpu_pages += node.pages
        return []

    @staticmethod
    def _path_between(upper: Node, node: Node) -> list[Node]:
        """The nodes below ``upper`` down to ``node``, top to bottom."""
        path = []
        while node is not upper:
            path.append(node)
            node = node.parent  # type: ignore[assignment]
        return path[::-1]

    def _fetch_missing(self, nodes: list[Node], now: float) -> tuple[list[Transfer], list[Transfer]]:
        """Transfers that bring to the CPU what only the disk has: all of them, and those that read the disk.

        ``nodes`` is cut short where the CPU has no room.
        """
        cpu, fetched, pages = self.tiers[CPU], [], 0
        room = cpu.available_pages
        for at, node in enumerate(nodes):
            if node.state[CPU] == READY:
                continue
            if node.state[CPU] or pages + node.pages > room:
                del nodes[at:]
                break
            pages += node.pages
            fetched.append(node)
        if fetched:
            self.make_room(cpu, pages, now)
            for node in fetched:
                self.add_incoming(node, cpu)
        transfers = self.flush()
        fetch = [self._read_disk(fetched)] if fetched else []
        return transfers + fetch, fetch

    def _read_disk(self, nodes: list[Node]) -> Transfer:
        return self.start(Transfer(self.tiers[DISK], self.tiers[CPU], nodes))

    def _start_load(self, lease: Lease, nodes: list[Node], after: list[Transfer]) -> Transfer:
        gpu = self.gpu
        load = Transfer(self.tiers[CPU], gpu, nodes, after=after, begun=not after)
        for node in nodes:
            mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
            self.add_copy(node, gpu, INCOMING, mine)
            node.pins[GPU] += 1
        lease.node = nodes[-1]
        lease.loaded_pages = load.pages
        lease.loaded_disk_pages = sum([fetch.pages for fetch in after])
        return self.start(load)

    def arriving(self, lease: Lease) -> list[Transfer]:
        """The loads, its own and others', that a request's pinned path waits for."""
        loads: dict[Transfer, None] = {}
        node = lease.node
        while node.parent is not None and not self._single:
            for transfer in node.transfers:
                if transfer.target is self.gpu:
                    loads[transfer] = None
            node = node.parent
        return list(loads)

    def fetch(self, lease: Lease, pages: int, now: float) -> list[Transfer]:
        """Start to read the first ``pages`` pages that only the disk has into the CPU tier, for a request that still waits.

        The last transfer returned is the fetch itself; [] if the CPU tier cannot hold the pages. Until it ends, the path
        from which it goes on stays where it is; from then on it is as recent as if it had been used now. The lease is fresh
        from ``match`` and is not used up.
        """
        nodes = self._first_on_disk(lease, pages)
        if not nodes:
            return []
        last, transfers = nodes[-1], NO_TRANSFERS
        for tier in self.tiers:
            self.pin(last, tier.index)
        self.expect(last, now)
        if self.make_room(self.tiers[CPU], sum([node.pages for node in nodes]), now):
            for node in nodes:
                self.add_incoming(node, self.tiers[CPU])
            transfers = [*self.flush(), self._read_disk(nodes)]
            self.keep(transfers[-1], last, self.gpu)
        for tier in self.tiers:
            self.unpin(last, tier.index)
        return transfers

    def expect(self, last: Node, now: float) -> None:
        """A path, pinned, is about to be used: what was used between its last use and now leaves before it."""
        now, node = self.tick(now), last
        while node.parent is not None:
            node.last_used = now
            node = node.parent

    def _first_on_disk(self, lease: Lease, pages: int) -> list[Node]:
        nodes: list[Node] = []
        for node in lease.path[lease.gpu_nodes :]:
            if pages <= 0:
                break
            if node.state[CPU] != READY:
                if node.pages > pages:
                    node = self.cut(node, pages)
                nodes.append(node)
                pages -= node.pages
        return nodes

    # --- computed pages ----------------------------------------------------------------------------------------------

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        """The whole prompt has been computed: its pages become nodes. Returns the write-downs that follow."""
        if lease.epoch != self.epoch:
            return []
        if now <= self.now:
            now = nextafter(self.now, inf)
        self.now = now
        for announce in self.announced:
            announce(lease.request, now)
        if lease.loaded_pages:
            self._fill_gaps(lease, now)
        rest = lease.rest
        if rest:
            if rest[0][0] in lease.node.children:
                rest = self.join_known(lease, now)
            if rest:
                self.add_leaf(lease, rest, now)
            lease.rest = ()
        if lease.request.persistent:
            self.persist(lease.node)
        if self._single:
            return NO_TRANSFERS
        for offer in self.offering if not (lease.is_finishing or lease.is_known_prompt) else ():
            offer(lease.request, now)
        prompt = None if lease.is_finishing else lease.request
        for tier in self.tiers[:-1]:
            self.offer_path(lease.node, tier, now, prompt)
        transfers = self.flush()
        for transfer in transfers:
            transfer.request = prompt
        return transfers

    def add_leaf(self, lease: Lease, runs: tuple[Run, ...], now: float) -> None:
        gpu, parent = self.gpu, lease.node
        pages = runs[0][1] if len(runs) == 1 else count_pages(runs)
        node = lease.node = self.tree.add(parent, runs, pages, now)
        node.slots[GPU], lease.slots = gpu.pool.split(lease.slots, pages)
        node.state[GPU] = READY
        node.pins[GPU] = 1
        parent.kids[GPU] += 1
        gpu.inserted_pages += pages
        if gpu.on_insert:
            gpu.on_insert(node, now)

    def join_known(self, lease: Lease, now: float) -> tuple[Run, ...]:
        """Pin the nodes that others, or lower tiers, have of what the request computed. Returns what nobody has."""
        path, partial, agreed, rest = self.tree.walk(lease.node, lease.rest)
        if partial is not None:
            path.append(self.cut(partial, agreed))
        for node in path:
            self._take_computed(lease, node, now)
            lease.node = node
        return rest

    def _take_computed(self, lease: Lease, node: Node, now: float) -> None:
        """Computed pages of a known node fill the GPU's gap, or are given back."""
        gpu, state = self.gpu, node.state[GPU]
        mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
        node.last_used = now
        if state == ABSENT:
            self.add_copy(node, gpu, READY, mine)
            self._note_computed(node, now)
        else:
            gpu.pool.give(mine)
            if state == LEAVING:
                self._revive([node], now)
            elif state == INCOMING and not self.is_arriving(node):
                node.state[GPU] = READY
                self._note_computed(node, now)
            if not node.pins[GPU]:
                gpu.evictable_pages -= node.pages
        node.pins[GPU] += 1
        for tier in self.tiers[CPU:]:  # nothing pins it there, and it has been used: its place may be an earlier one now
            if node.is_evictable(tier.index):
                tier.on_evictable(node)

    def _fill_gaps(self, lease: Lease, now: float) -> None:
        """Pages that a load failed to bring have been computed in the slots that were waiting for them."""
        node = lease.node
        while node.depth >= lease.gpu_pages and node.parent is not None:
            if node.state[GPU] == INCOMING and not self.is_arriving(node):
                node.state[GPU] = READY
                self._note_computed(node, now)
            node = node.parent

    def _note_computed(self, node: Node, now: float) -> None:
        gpu = self.gpu
        gpu.inserted_pages += node.pages
        if gpu.on_insert:
            gpu.on_insert(node, now)

    # --- everything --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self.epoch += 1
        for node in self.persistent:
            self.unpin(node, GPU)
        self.persistent.clear()

    def describe_checkpoints(self) -> dict[str, int]:
        """What became of recurrent states, by name; nothing without them."""
        return {}

    def check(self) -> None:
        """Recount everything; raises AssertionError where a count or an invariant does not hold."""
        from kvsim.core.check import Held, check

        check(
            self,
            Held(pins=self.pinned(), slots=[x.slots for x in self.leases], owed_pages=sum(x.owed_pages for x in self.leases)),
        )

    def pinned(self) -> list[tuple[Node, int]]:
        """(node, tier) for everything that running requests keep in place."""
        pins = [(node, GPU) for node in [*self.persistent, *(lease.node for lease in self.leases)]]
        for lease in self.leases:
            if lease.loading is not None:
                pins += [(lease.loading, tier.index) for tier in self.tiers[CPU:]]
        return pins
