"""SGLang's hierarchical radix cache, whose nodes move as a whole between GPU and host memory."""

from kvsim.core.request import Request
from kvsim.core.tier import CPU, GPU, Edge, Tier
from kvsim.core.tree import READY, Node
from kvsim.core.victims import check_enough, victim, victims
from kvsim.engines.sglang.whole_nodes import NodeLease, WholeNodeCache
from kvsim.pages.extents import Run, split_runs


class HostedNodeCache(WholeNodeCache):
    """``WholeNodeCache`` with a second tier: a node is on the GPU, on the host or on both.

    load           everything that only the host has of a prompt, if that is at least ``load_min_tokens``, or else nothing;
                   placement decides whether the host copies stay; if less than the size of the load is free on the GPU, that
                   whole size is evicted
    write          after a use, if placement wants it and the parent is on the host; or at eviction, whatever the parent
    GPU eviction   leaves among the nodes on the GPU: a node with a host copy stays on the host; one without is written if
                   placement wants it, or else removed with everything below it
    host eviction  leaves that are not on the GPU; if less than a new copy needs is free, its whole size is evicted; evicted
                   nodes stay gone even if that was not enough
    hits           counted only if placement is asked after a use, and not for nodes that only the host has
    room           free + evictable pages of the GPU; copies on the host do not lower the need

    A node's host copy is pinned while the node is on the GPU or being loaded. A copy that a GPU eviction has written is pinned
    until that eviction ends or first finds no room on the host.
    """

    def __init__(
        self, tiers: list[Tier], edge: Edge, page_tokens: int, *, recompute_last_token: bool = True, load_min_tokens: int = 10
    ) -> None:
        super().__init__(tiers, page_tokens, recompute_last_token=recompute_last_token)
        self.cpu = tiers[CPU]
        self._edge = edge
        self._copies_after_use = edge.copies_nodes
        self._load_min_tokens = load_min_tokens

    def serve(self, request: Request, pages: int, now: float) -> NodeLease | None:
        pool = self.gpu.pool
        path, rest, now = self.look_up(request, now)
        on_gpu = [node for node in path if node.state[GPU]]
        hosted = path[len(on_gpu) :]
        gpu_pages = on_gpu[-1].depth + on_gpu[-1].pages if on_gpu else 0
        missing = pages - gpu_pages - pool.free
        if missing > 0 and not self.can_evict(missing, on_gpu, gpu_pages):
            self.touch(path, now)
            return None
        self.residency.notices.request(request, now)
        lease = NodeLease(request, self.tree.root, (gpu_pages, 0, 0), None)
        for node in on_gpu:
            self.pin_known(lease, node, now)
        cpu_pages = sum([node.pages for node in hosted])
        if cpu_pages * self.page_tokens < self._load_min_tokens:
            if hosted:
                self.touch(hosted, now)
                rest = split_runs(request.runs, gpu_pages)[1]
            path, cpu_pages = on_gpu, 0
        elif hosted:
            self._load(lease, hosted, cpu_pages, now)
        missing = pages - gpu_pages - cpu_pages - pool.free
        if missing > 0:
            self.evict(missing, now)
        lease.hits = gpu_pages, cpu_pages, 0
        lease.slots = self.residency.take(self.gpu, pages - gpu_pages - cpu_pages)
        now = self.residency.tick(now)
        for node in path:
            node.last_used = now
            self._use(node, now)
        if rest:
            rest = self._insert_known(lease, rest, now)
        if rest:
            self.add_leaf(lease, rest, now)
            self._offer(lease.node, now)
        return lease

    def _insert_known(self, lease: NodeLease, runs: tuple[Run, ...], now: float) -> tuple[Run, ...]:
        """Use computed pages as the GPU copy of nodes that only the host has; give back those of nodes on the GPU."""
        gpu = self.gpu
        path, partial, agreed, rest = self.tree.walk(lease.node, runs)
        if partial is not None:
            path.append(self.cut_at(partial, agreed, now))
        for node in path:
            mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
            if node.state[GPU] == READY:
                self.residency.give(gpu, mine)
                self.pin_known(lease, node, now)
                self._use(node, now)
            else:
                node.last_used = now
                self._pin_host(node)
                self._arrive(lease, node, mine, now)
        return rest

    # --- up ----------------------------------------------------------------------------------------------------------

    def _load(self, lease: NodeLease, nodes: list[Node], pages: int, now: float) -> None:
        gpu = self.gpu
        for node in nodes:
            self._pin_host(node)
        if gpu.pool.free < pages:
            self.evict(pages, now)
        for node in nodes:
            self._arrive(lease, node, self.residency.take(gpu, node.pages), now)
        self.counts.loaded_pages += pages
        if not self._edge.keeps_loaded():
            for node in reversed(nodes):
                self._unpin_host(node)
                self.residency.free(node, self.cpu)

    def _arrive(self, lease: NodeLease, node: Node, slots: object, now: float) -> None:
        """Add a GPU copy of a node that only the host has; its host copy and the path above it are pinned already."""
        gpu = self.gpu
        self.residency.reserve_copy(node, gpu, slots)
        lease.node = node
        self.residency.set_ready(node, gpu, now)

    def _pin_host(self, node: Node) -> None:
        """Pin a host copy; copies above it need no pin, since only leaves are evicted."""
        self.residency.pin_alone(node, self.cpu)

    def _unpin_host(self, node: Node) -> None:
        """Take back one ``_pin_host``."""
        self.residency.unpin_alone(node, self.cpu)

    # --- down --------------------------------------------------------------------------------------------------------

    def _use(self, node: Node, now: float) -> None:
        """Record that an insert has passed a node on the GPU."""
        if self._copies_after_use:
            node.hits += 1
        self.residency.notices.hits((node,), now)
        self._offer(node, now)

    def _offer(self, node: Node, now: float) -> None:
        parent = node.parent
        if not self._copies_after_use or node.state[CPU] == READY:
            return
        assert parent is not None
        if (parent is self.tree.root or parent.state[CPU] == READY) and self._edge.wants_used(node, now):
            self._write(node, now)

    def _write(self, node: Node, now: float) -> bool:
        """Copy a node on the GPU to the host. Returns False if there is no room, even after evicting."""
        cpu, pages = self.cpu, node.pages
        if cpu.pool.free < pages:
            self._evict_host(pages, now)
        if cpu.pool.free < pages:
            self.counts.no_room_pages += pages
            return False
        self.residency.reserve_copy(node, cpu, self.residency.take(cpu, pages))
        self.counts.written_pages += pages
        self.residency.set_ready(node, cpu, now)
        return True

    def evict(self, pages: int, now: float) -> None:
        gpu, edge = self.gpu, self._edge
        written: list[Node] = []
        for offered in victims(gpu, now):
            node = victim(offered, self.tree, gpu)
            gpu.eviction.cut_offered(node)
            pages -= node.pages
            if node.state[CPU] == READY:
                self.residency.free(node, gpu)
                self._unpin_host(node)
            elif edge.wants_evicted(node, now) and self._write(node, now):
                self.residency.free(node, gpu)
                written.append(node)
            else:
                self._unpin_all(written)
                self._remove(node)
            if pages <= 0:
                break
        check_enough(gpu, min(pages, gpu.evictable_pages))
        self._unpin_all(written)

    def _unpin_all(self, nodes: list[Node]) -> None:
        for node in nodes:
            self._unpin_host(node)
        nodes.clear()

    def _remove(self, node: Node) -> None:
        """Remove a GPU leaf without a host copy, with everything that the host has below it."""
        for below in reversed(list(node.descendants())):
            self.counts.dropped_pages += below.pages
            self.residency.free(below, self.cpu)
        self.counts.dropped_pages += node.pages
        self.residency.free(node, self.gpu)

    def _evict_host(self, pages: int, now: float) -> None:
        cpu, counts = self.cpu, self.counts
        for offered in victims(cpu, now):
            node = victim(offered, self.tree, cpu)
            cpu.eviction.cut_offered(node)
            pages -= node.pages
            counts.dropped_pages += node.pages
            self.residency.free(node, cpu)
            if pages <= 0:
                break
        if pages > 0 and cpu.evictable_pages and any(node.is_evictable(CPU) for node in self.tree.root.descendants()):
            check_enough(cpu, pages)
