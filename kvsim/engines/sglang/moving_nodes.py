"""How nodes move between the GPU, host memory and storage in SGLang's unified cache, step by step of its scheduler."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from kvsim.core.answers import whole_number
from kvsim.core.lease import Holder
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup
from kvsim.core.serving import RulesError
from kvsim.core.tier import CPU, DISK, GPU
from kvsim.core.tree import READY, Carrier, Node
from kvsim.core.victims import check_enough, victim, victims
from kvsim.engines.sglang.carriers import Batch, Copying, Loading, Storing
from kvsim.engines.sglang.storage import Storage
from kvsim.engines.sglang.whole_nodes import WholeNodeCache
from kvsim.pages.extents import Extent, split_extents


class MovingNodeCache(WholeNodeCache):
    """``WholeNodeCache`` with a host and, below it, storage. A node is on the GPU, on the host or on both.

    step            a copy or a load is acknowledged ``copy_steps`` steps of the scheduler after it began, at the earliest in the
                    next one; with ``UNTIL_LANDED``, in the first step after its batch has landed
    copy            after a use, if placement wants it: the node and all above it that the host lacks, topmost first, up to the
                    first without room. Until it is acknowledged, the node and all above it stay on the GPU
    load            everything that only the host has of a path, or nothing if the GPU has no room. It stays until acknowledged
    GPU eviction    unpinned leaves among the nodes on the GPU, until there is room. A node with a host copy stays on the host;
                    one without is copied if placement wants it after an eviction, and is usable there at once. Otherwise it is
                    removed with everything below it, unless some of that must stay
    host eviction   nodes that only the host has and that have no children, until what is lacking is free; evicted nodes stay
                    gone even if that was not enough
    write-back      if placement copies nothing after a use, a host eviction first drops host copies of nodes that are on the
                    GPU too, in the order in which they came to be on both: first passing over those that the GPU could evict
                    now, then not. What is being loaded or stored stays
    storage         has what the host has from the step after the acknowledgement of its copy on; until then the copy stays

    A node's host copy is pinned while the node is on the GPU.
    """

    def __init__(
        self, setup: CacheSetup, *, recompute_last_token: bool = True, copy_steps: int = 0, load_min_tokens: int = 10
    ) -> None:
        """The first edge joins GPU and host; there is no host without one. Storage, if there is any, is the tier below the host.

        ``copy_steps`` is ``UNTIL_LANDED`` where someone else makes the copies. ``load_min_tokens``: the shortest load.
        """
        tiers, edge = setup.tiers, setup.edges[0] if setup.edges else None
        super().__init__(tiers, setup.page_tokens, recompute_last_token=recompute_last_token)
        self.edge = edge
        self.cpu = tiers[CPU] if edge else tiers[GPU]
        self.storage = Storage(tiers[DISK]) if len(tiers) > DISK else None
        self._writes_back = edge is not None and not edge.copies_nodes
        self._copy_steps = copy_steps
        self._load_min_tokens = load_min_tokens
        self.prefetch = setup.prefetch
        self.prefetch_name = f"the prefetch policy {type(setup.prefetch).__name__}"
        self._step = 0
        self._unsent: list[Copying] = []
        """Copies that begin when the current request is computed or finished."""
        self._unloaded: list[Loading] = []
        """Loads that begin when the current request is admitted."""
        self._copies: deque[Batch] = deque()
        """Copies under way."""
        self._loads: deque[Batch] = deque()
        self._to_store: list[Storing] = []
        self._held: dict[Storing, None] = {}
        """What stays on the host for now."""
        self._on_both: dict[Node, None] = {}
        """With write-back: nodes on GPU and host, in the order in which they came to be on both. One that has left the GPU or
        the host keeps its place until a host eviction sees it, and has it again if it returns before."""

    # --- steps ---------------------------------------------------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        """Whether copies or loads are under way."""
        return bool(self._copies or self._loads)

    def under_way(self) -> tuple[list[Carrier], list[Carrier], list[Storing]]:
        """Return what is decided or under way: copies to the host, loads to the GPU, and what stays on the host."""
        copies = [copy for batch in self._copies for copy in batch.carriers]
        loads = [load for batch in self._loads for load in batch.carriers]
        return [*copies, *self._unsent], [*loads, *self._unloaded], list(self._held)

    def take_step(self) -> None:
        """Carry out a step of the scheduler: acknowledge copies and loads, and store what was copied in the steps before."""
        self._step += 1
        self.store_copied()
        while self._copies and self._copies[0].due_step <= self._step:
            for copy in self._copies.popleft().carriers:
                self._detach(copy)
                self._copied(copy.nodes)
                self.residency.unpin(copy.nodes[-1], self.gpu)
        while self._loads and self._loads[0].due_step <= self._step:
            for load in self._loads.popleft().carriers:
                self._end_load(load)

    def _end_load(self, load: Carrier) -> None:
        self._detach(load)
        self.residency.unpin(load.nodes[-1], self.gpu)
        for node in reversed(load.nodes):
            self._unpin_host(node)
            self._register(node)

    def settle(self) -> None:
        """Before everything is given up: acknowledge all that is under way, and let the GPU keep nothing on the host."""
        self.send_copies()
        self.send_loads()
        for batch in (*self._copies, *self._loads):
            batch.land()
        self.take_step()
        self.store_copied()
        self._on_both.clear()
        for node in self.tree.root.descendants():
            if node.state[GPU] and node.state[CPU]:
                self._unpin_host(node)

    def send_copies(self) -> Batch | None:
        """Begin the copies that were decided on. Returns them, if there are any."""
        decided, self._unsent = self._unsent, []
        return self._send(decided, self._copies)

    def send_loads(self) -> Batch | None:
        """Begin the loads that were decided on. Returns them, if there are any."""
        decided, self._unloaded = self._unloaded, []
        return self._send(decided, self._loads)

    def _send(self, decided: Sequence[Carrier], line: deque[Batch]) -> Batch | None:
        if not decided:
            return None
        batch = Batch(decided, self._step + self._copy_steps)
        line.append(batch)
        return batch

    def store_copied(self) -> None:
        """Store what has been copied to the host; from now on it may leave the host."""
        assert self.storage is not None or not self._to_store
        for hold in self._to_store:
            for node in hold.nodes:
                self.storage.store(node.runs)  # type: ignore[union-attr]
            self.let_go(hold)
        self._to_store.clear()

    def hold_on_host(self, node: Node) -> Storing:
        """Keep a node's host copy until ``let_go``."""
        hold = Storing([node])
        self._held[hold] = None
        self._attach(hold)
        self._pin_host(node)
        return hold

    def let_go(self, hold: Storing) -> None:
        """Take back a ``hold_on_host``."""
        del self._held[hold]
        self._detach(hold)
        for node in reversed(hold.nodes):
            self._unpin_host(node)

    @staticmethod
    def _attach(carrier: Carrier) -> None:
        for node in carrier.nodes:
            node.transfers = (*node.transfers, carrier)

    @staticmethod
    def _detach(carrier: Carrier) -> None:
        for node in carrier.nodes:
            node.transfers = tuple([other for other in node.transfers if other is not carrier])

    def _pin_host(self, node: Node) -> None:
        self.residency.pin_alone(node, self.cpu)

    def _unpin_host(self, node: Node) -> None:
        self.residency.unpin_alone(node, self.cpu)

    def cut_at(self, node: Node, pages: int, now: float) -> Node:
        upper = super().cut_at(node, pages, now)
        self._register(upper)
        return upper

    def _register(self, node: Node) -> None:
        """With write-back, note whether a node is on both GPU and host, and not being loaded."""
        if not self._writes_back:
            return
        is_loading = any(isinstance(carrier, Loading) for carrier in node.transfers)
        if node.state[GPU] and node.state[CPU] == READY and not is_loading:
            self._on_both.setdefault(node)
        else:
            self._on_both.pop(node, None)

    # --- paths ---------------------------------------------------------------------------------------------------------------

    def enter(self, lease: Holder, runs: tuple[Extent, ...], counted: int) -> None:
        """Extend a request's path to these pages, which it has computed or loaded.

        Nodes that end within its first ``counted`` pages have had its hit.
        """
        residency = self.residency
        now, at = residency.tick(residency.now), 0
        path, partial, agreed, _ = self.tree.walk(self.tree.root, runs)
        for node in path:
            if not node.copies:
                break  # evicted from the host, to make room for a copy of a node above it
            at = self._pass(lease, node, now, counted)
        if partial is not None and partial.copies:
            now = residency.tick(now)
            at = self._pass(lease, self.cut_at(partial, agreed, now), now, counted)
        rest = split_extents(runs, at)[1]
        if rest:
            now = residency.tick(now)
            self.add_leaf(lease, rest, now)
            self.offer(lease.node, now)

    def _pass(self, lease: Holder, node: Node, now: float, counted: int) -> int:
        """Let an insert pass a node. Returns the pages up to its end."""
        gpu, held = self.gpu, lease.node
        if node.depth >= held.depth + held.pages:
            mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
            if node.state[GPU]:
                self.residency.give(gpu, mine)
                self.pin_known(lease, node, now)
            else:
                self.arrive(lease, node, mine, now)
                self._register(node)
        node.last_used = now
        end = node.depth + node.pages
        if end > counted:
            self.use(node, now)
        return end

    # --- down ----------------------------------------------------------------------------------------------------------------

    def use(self, node: Node, now: float) -> None:
        """Count a hit of a node on the GPU, and copy it to the host if that is wanted."""
        if self._writes_back:
            return
        node.hits += 1
        self.residency.notices.hits((node,), now)
        self.offer(node, now)

    def offer(self, node: Node, now: float) -> None:
        """Copy a node on the GPU, and all above it that the host lacks, if placement wants it after a use."""
        edge = self.edge
        if edge is None or not edge.copies_nodes or node.state[CPU] or not edge.wants_used(node, now):
            return
        chain = [node]
        while (parent := chain[-1].parent) is not None and parent is not self.tree.root and not parent.state[CPU]:
            chain.append(parent)
        for above in reversed(chain):
            if not self._copy(above, now):
                return
            copy = Copying([above])
            self._attach(copy)
            self.residency.pin(above, self.gpu)
            self._unsent.append(copy)

    def _copy(self, node: Node, now: float) -> bool:
        """Give a node on the GPU a host copy. Returns False if there is no room, even after evicting."""
        cpu, pages = self.cpu, node.pages
        self.make_host_room(pages - cpu.pool.free, now)
        if cpu.pool.free < pages:
            self.counts.no_room_pages += pages
            return False
        self.residency.add_incoming(node, cpu, self.residency.take(cpu, pages))
        self.counts.written_pages += pages
        return True

    def _copied(self, nodes: list[Node]) -> None:
        """Make host copies usable, and store them from the next step on."""
        now = self.residency.now
        for node in nodes:
            self.residency.set_ready(node, self.cpu, now)
            self._register(node)
        if self.storage is not None:
            self._to_store += [self.hold_on_host(node) for node in nodes]

    # --- up ------------------------------------------------------------------------------------------------------------------

    def load_back(self, lease: Holder, request: Request, hosted: list[Node]) -> int:
        """Load what only the host has of the path that a request has found, if that is wanted. Returns the number of pages."""
        gpu_pages = lease.node.depth + lease.node.pages
        pages = sum([node.pages for node in hosted])
        if not pages or pages * self.page_tokens < self._load_min_tokens:
            return 0
        if self.prefetch is not None:
            answer: Any = self.prefetch.load(request, gpu_pages, pages, 0)
            if whole_number(self.prefetch_name, "load()", answer, pages) < pages:
                return 0
        return pages if self.load(lease, hosted, pages) else 0

    def load(self, lease: Holder, nodes: list[Node], pages: int) -> bool:
        """Load nodes that only the host has, ``pages`` pages in all, and extend the request's path by them.

        ``send_loads`` begins the load. Returns False if the GPU has no room for all of them.
        """
        gpu, now = self.gpu, self.residency.now
        for node in nodes:
            self._pin_host(node)
        self.make_room(pages, now)
        if gpu.pool.free < pages:
            for node in reversed(nodes):
                self._unpin_host(node)
            return False
        for node in nodes:
            self.arrive(lease, node, self.residency.take(gpu, node.pages), now)
        self.counts.loaded_pages += pages
        load = Loading(list(nodes))
        self._attach(load)
        self.residency.pin(lease.node, gpu)
        self._unloaded.append(load)
        return True

    def arrive(self, lease: Holder, node: Node, slots: object, now: float) -> None:
        """Give a node that only the host has a GPU copy, and extend the request's path by it."""
        self._pin_host(node)
        self.residency.add_incoming(node, self.gpu, slots)
        self.residency.set_ready(node, self.gpu, now)
        lease.node = node

    # --- room ----------------------------------------------------------------------------------------------------------------

    def make_room(self, pages: int, now: float) -> None:
        """Evict from the GPU until ``pages`` pages are free, or nothing more can leave."""
        gpu, edge, pool = self.gpu, self.edge, self.gpu.pool
        if pool.free >= pages:
            return
        kept: list[Node] = []
        for offered in victims(gpu, now):
            node = victim(offered, self.tree, gpu)
            gpu.eviction.cut_offered(node)
            if edge is None:
                self._remove(node)
            elif node.state[CPU]:
                self._demote(node)
            elif edge.wants_evicted(node, now) and self._copy(node, now):
                self._copied([node])
                self.wrote_back(node)
                self._demote(node)
            elif any(below.pins[CPU] for below in node.descendants()):
                kept.append(node)
            else:
                self._remove(node)
            if pool.free >= pages:
                break
        for node in kept:
            gpu.eviction.on_evictable(node)
        if not kept:
            check_enough(gpu, min(pages - pool.free, gpu.evictable_pages))

    def take(self, pages: int, now: float) -> object:
        """Take GPU slots for a request whose admission has found that there is room."""
        gpu = self.gpu
        self.make_room(pages, now)
        self.check_room(pages)
        return self.residency.take(gpu, pages)

    def check_room(self, pages: int) -> None:
        """Raise RulesError if so many pages are not free after ``make_room``."""
        if self.gpu.pool.free < pages:
            raise RulesError(
                f"tiers.cpu.capacity: {self.gpu.evictable_pages:,} pages cannot leave the GPU: host memory has no room for them, "
                "and what follows on them is being stored; increase it"
            )

    def wrote_back(self, node: Node) -> None:
        """A node has been copied to the host at its eviction. A hook for those that make the copies."""

    def _demote(self, node: Node) -> None:
        """Let a node leave the GPU that stays on the host."""
        self.residency.free(node, self.gpu)
        self._unpin_host(node)

    def _remove(self, node: Node) -> None:
        """Remove a GPU leaf without a host copy, with everything that the host has below it."""
        for below in reversed(list(node.descendants())):
            self._drop_from_host(below)
        self.counts.dropped_pages += node.pages
        self._on_both.pop(node, None)
        self.residency.free(node, self.gpu)

    def _drop_from_host(self, node: Node) -> None:
        """Remove a node that only the host has."""
        self.counts.dropped_pages += node.pages
        self._on_both.pop(node, None)
        self.residency.free(node, self.cpu)

    def make_host_room(self, pages: int, now: float) -> None:
        """Evict at least ``pages`` pages from the host, or all that can leave."""
        if pages <= 0:
            return
        cpu = self.cpu
        if self._writes_back:
            pages -= self._drop_doubles(pages)
            if pages <= 0:
                return
        for offered in victims(cpu, now):
            node = victim(offered, self.tree, cpu)
            cpu.eviction.cut_offered(node)
            pages -= node.pages
            self._drop_from_host(node)
            if pages <= 0:
                return
        if cpu.evictable_pages and any(node.is_evictable(CPU) for node in self.tree.root.descendants()):
            check_enough(cpu, pages)

    def _drop_doubles(self, pages: int) -> int:
        """Drop at least ``pages`` pages of host copies of nodes that are on the GPU, if there are so many. Returns how many."""
        freed = 0
        for spares_leaves in (True, False):
            seen: list[Node] = []
            for node in self._on_both:
                if freed >= pages:
                    break
                if not (node.state[GPU] and node.state[CPU]):
                    seen.append(node)
                elif self.is_double(node) and not (spares_leaves and node.is_evictable(GPU)):
                    self._unpin_host(node)
                    self.residency.free(node, self.cpu)
                    freed += node.pages
                    seen.append(node)
            for node in seen:
                del self._on_both[node]
        return freed

    def is_double(self, node: Node) -> bool:
        """Whether the host could drop its copy of a node on the GPU, since nothing but that needs it."""
        return node.state[GPU] == READY and node.state[CPU] == READY and node.pins[CPU] == 1

    def host_room(self, below: Node) -> int:
        """Return the pages that the host could take after evicting all that can leave while ``below`` stays."""
        room = self.cpu.pool.free + self.cpu.evictable_pages
        node = below.parent
        while node is not None and node is not self.tree.root:
            if not node.state[GPU] and not node.pins[CPU]:
                room -= node.pages
            node = node.parent
        return room + sum([node.pages for node in self._on_both if self.is_double(node)])
