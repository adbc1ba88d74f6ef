"""A pool of blocks like vLLM's for models with sliding windows: a page takes one for full attention, one for each other group."""

from typing import Any, cast

from kvsim.core.lease import FIRST
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.tier import Tier
from kvsim.core.tree import READY, Node
from kvsim.engines.vllm.block_numbers import BlockNumbers
from kvsim.engines.vllm.block_pool import BlockLease
from kvsim.engines.vllm.state_blocks import StateBlockPool
from kvsim.engines.vllm.window_groups import WindowGroups
from kvsim.pages.extents import Extent, count_pages, split_extents
from kvsim.states.store import places_after


class WindowLease(BlockLease):
    """What an admitted request holds: a path of pages for full attention and, in the groups with a window, its last pages."""

    __slots__ = ("behind", "computed_tokens", "extents", "junction", "named", "named_upto", "run", "turn", "window_slots")

    def __init__(self, request: Request, gpu: Tier, root: Node, extents: tuple[Extent, ...], why: int = FIRST) -> None:
        super().__init__(request, gpu, root, why)
        self.extents = extents
        """The pages that can get names."""
        self.run: list[list[Node]] = []
        """The blocks of the windows before its beginning, as found: by page, a block for each group."""
        self.junction = 0
        """Pages that full attention alone could reuse, if the windows cannot follow; otherwise 0."""
        self.behind = 0
        """Pages from the first on whose blocks it does not hold in the groups with a window: all of them are behind it."""
        self.named: dict[int, list[Node]] = {}
        """The blocks with names that it holds in these groups, by number of the page; ascending."""
        self.window_slots: Any = None
        """The slots of those without names."""
        self.named_upto = 0
        """Number of pages that were full when names were last given."""
        self.computed_tokens = 0
        """Tokens of its prompt that have been computed when the next chunk begins, by an engine in time."""
        self.turn = 0
        """Its number among the admissions of an engine in time."""

    @property
    def hit_pages(self) -> int:
        """Pages that it found."""
        return self.gpu_pages

    def boundaries(self, page_tokens: int) -> tuple[int, int]:
        """Return the numbers of pages up to which others may find its prompt: without its last token, and the junction."""
        return (self.request.prompt_tokens - 1) // page_tokens, self.junction


class WindowBlockPool(StateBlockPool):
    """Full attention's pages as in ``BlockPool``; the blocks of the groups with a window age and leave one by one.

    match   the longest prefix of full attention's pages that ends with a run of pages which all groups with a window have:
            as many as a window needs, or fewer from the beginning of the prompt
    give    ``drop_behind`` gives back blocks that are behind the window: those with names become the most recent, the last
            page of each group first; the others are free at once
    name    of the groups with a window, only pages from which a prompt may begin again (``WindowGroups.named``)
    free    group by group, tail before head

    vLLM 0.33.0: ``SlidingWindowManager``, ``HybridKVCacheCoordinator``. A place of the index of states is a page here, and a
    state its blocks.
    """

    def __init__(self, gpu: Tier, windows: WindowGroups) -> None:
        super().__init__(gpu, windows.groups)
        self.windows = windows

    # --- look-up ---------------------------------------------------------------------------------------------------------

    def find(self, lease: WindowLease, limit: int) -> None:
        """Look up a request's pages, at most ``limit`` of them, and note in its lease what it can reuse."""
        extents = lease.extents
        path, rest = self.match(extents, limit)
        known = path[-1].depth + path[-1].pages if path else 0
        hit, run = self.deepest_run(extents, known)
        if hit < known:
            path = self.first_pages(path, hit)
            rest = after(extents, hit)
        lease.set_match(path, hit, rest)
        lease.run = run
        lease.junction = known if hit < known else 0

    def deepest_run(self, extents: tuple[Extent, ...], limit: int) -> tuple[int, list[list[Node]]]:
        """Return (pages, the blocks before that) of the deepest place within ``limit`` pages that the windows can follow."""
        run_pages = self.windows.run_pages
        run: list[list[Node]] = []
        end, following = 0, -1
        for depth, blocks in self.states.deepest_first(extents, limit):
            if not all(blocks):
                following = -1
                continue
            if depth != following:
                run, end = [], depth
            run.append([copies[0] for copies in blocks])
            following = depth - 1
            if len(run) >= run_pages:
                break
        if len(run) < run_pages and following:
            return 0, []
        run.reverse()
        return end, run

    # --- requests --------------------------------------------------------------------------------------------------------

    def idle_blocks(self, lease: WindowLease) -> tuple[int, list[int]]:
        """Return how many blocks that a request has found are held by none: for full attention, and by page of the windows."""
        idle = sum([node.pages for node in lease.path if not node.pins[0]])
        return idle, [sum([not node.pins[0] for node in nodes]) for nodes in lease.run]

    def hold_found(self, lease: WindowLease, now: float) -> None:
        """Hold what a request has found."""
        hit = lease.hit_pages
        self.hold(lease, lease.path, now)
        lease.window_slots = self.residency.take(self.gpu, 0)
        lease.behind, lease.named_upto = hit - len(lease.run), hit
        for page, nodes in enumerate(lease.run, lease.behind):
            self.hold_state(nodes)
            lease.named[page] = nodes

    def take(self, lease: BlockLease, pages: int) -> bool:
        own = cast(WindowLease, lease)
        blocks = pages * (1 + self.groups)
        if blocks > self.gpu.pool.free and not self.make_room(blocks):
            return False
        super().take(lease, pages)
        own.window_slots = self.gpu.pool.join(own.window_slots, self.residency.take(self.gpu, pages * self.groups))
        return True

    def drop_behind(self, lease: WindowLease, tokens: int) -> None:
        """Give back the blocks that are behind the window when a request's first ``tokens`` tokens have been computed."""
        behind = min(self.windows.pages_behind(tokens), lease.held_pages)
        if behind <= lease.behind:
            return
        named = [lease.named.pop(page) for page in range(behind - 1, lease.behind - 1, -1) if page in lease.named]
        self._give_back(named)
        plain = (behind - lease.behind - len(named)) * self.groups
        slots, lease.window_slots = self.gpu.pool.split(lease.window_slots, plain)
        self.residency.give(self.gpu, slots)
        lease.behind = behind

    def left_behind(self, lease: WindowLease, tokens: int) -> int:
        """Return how many blocks ``drop_behind`` would make free or evictable."""
        behind = min(self.windows.pages_behind(tokens), lease.held_pages)
        blocks = 0
        for page in range(lease.behind, behind):
            nodes = lease.named.get(page)
            blocks += self.groups if nodes is None else sum([node.pins[0] == 1 for node in nodes])
        return blocks

    def name_windows(self, lease: WindowLease, pages: int) -> None:
        """Name blocks of the groups with a window: those of the first ``pages`` pages are full."""
        pages = min(pages, count_pages(lease.extents))
        if pages <= lease.named_upto:
            return
        first, lease.named_upto = max(lease.named_upto, lease.behind), pages
        kept = self.windows.named(first, pages, lease.boundaries(self.windows.page_tokens))
        pool, now = self.gpu.pool, self.residency.now
        for page, place in zip(kept, places_after(lease.extents, [page + 1 for page in kept]), strict=True):
            slots, lease.window_slots = pool.split(lease.window_slots, self.groups)
            lease.named[page] = self.add_state(place, slots, now)

    def free(self, lease: BlockLease) -> None:
        own = cast(WindowLease, lease)
        if self.windows.full_first:
            super().free(lease)
        self._give_back(list(own.named.values())[::-1])
        self.residency.give(self.gpu, own.window_slots)
        own.named.clear()
        if not self.windows.full_first:
            super().free(lease)

    def _give_back(self, blocks: list[list[Node]]) -> None:
        """Give back blocks with names, group by group; the first to leave comes first."""
        residency = self.residency
        for group in range(self.groups):
            for nodes in blocks:
                self.give_back_state(nodes[group], residency.tick(residency.now))

    def reset(self) -> None:
        nodes = [node for blocks in self.states.values() for copies in blocks for node in copies]
        for page in self.states.pages():
            self.states.pop(page)
        younger = [copy for copies in self._copies.values() for copy in copies[1:]]
        self._copies.clear()
        self._owners.clear()
        self.residency.clear([*younger, *nodes])
        self._aside = Node((), 0, 0, None, self.tree, 0.0)

    # --- recount ---------------------------------------------------------------------------------------------------------

    def check(self, leases: list[BlockLease]) -> None:
        gpu, own = self.gpu, [cast(WindowLease, lease) for lease in leases]
        pool = gpu.pool
        named = [node for blocks in self.states.values() for copies in blocks for node in copies]
        held: dict[Node, int] = {}
        for lease in own:
            assert list(lease.named) == sorted(lease.named), f"{lease}: order of named blocks"
            assert all(lease.behind <= page < lease.held_pages for page in lease.named), f"{lease}: named blocks"
            plain = (lease.held_pages - lease.behind - len(lease.named)) * self.groups
            assert pool.count(lease.window_slots) == plain, f"{lease}: blocks of the windows"
            for nodes in lease.named.values():
                for node in nodes:
                    held[node] = held.get(node, 0) + 1
        doomed = [node for node in self.residency.doomed if node.is_state]
        for node in [*named, *doomed]:
            assert node.pins[0] == held.get(node, 0) and node.pages == pool.count(node.slots[0]) == 1, (
                f"{node}: block of a window"
            )
        for node in named:
            assert node.state[0] == READY and not node.children_in[0], f"{node}: not ready"
        assert set(held) <= {*named, *doomed}, "a request holds a block that is not there"
        paths = [node for node in self.residency.doomed if not node.is_state]
        nodes = self.check_nodes(leases)
        assert gpu.evictable_pages == sum(node.pages for node in [*nodes, *named] if not node.pins[0]), "evictable pages"
        slots = [node.slots[0] for node in [*nodes, *named, *doomed, *paths]]
        slots += [some for lease in own for some in (lease.slots, lease.window_slots)]
        assert pool.free + sum(map(pool.count, slots)) == pool.capacity, "slots leaked"
        if isinstance(pool, (SlotPool, BlockNumbers)):
            numbers = {int(slot) for some in (*slots, pool.free_slots()) for slot in some}
            assert len(numbers) == pool.capacity, "a slot has two owners"


def after(extents: tuple[Extent, ...], pages: int) -> tuple[Extent, ...]:
    """Return what comes after the first ``pages`` pages of a path."""
    return split_extents(extents, pages)[1] if pages else extents
