"""A pool of blocks like vLLM's for models with sliding windows: a page takes one for full attention, one for each other group."""

from collections.abc import Iterator
from typing import Any, cast

from kvsim.core.lease import FIRST
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.tier import Tier
from kvsim.core.tree import Node
from kvsim.engines.vllm.block_numbers import BlockNumbers
from kvsim.engines.vllm.block_pool import BlockLease, BlockPool
from kvsim.engines.vllm.given_back import GivenBack
from kvsim.engines.vllm.window_groups import WindowGroups
from kvsim.engines.vllm.window_runs import BlockRun, Found, RunList, Segment, WindowIndex
from kvsim.pages.extents import Extent, count_pages, split_extents


class WindowLease(BlockLease):
    """What an admitted request holds: a path of pages for full attention and, in the groups with a window, its last pages."""

    __slots__ = ("behind", "computed_tokens", "extents", "found", "junction", "named_upto", "turn", "window_slots", "windows")

    def __init__(self, request: Request, gpu: Tier, root: Node, extents: tuple[Extent, ...], why: int = FIRST) -> None:
        super().__init__(request, gpu, root, why)
        self.extents = extents
        """The pages that can get names."""
        self.found: list[Found] = []
        """The pages in the window before its beginning, which all groups have."""
        self.junction = 0
        """Pages that full attention alone could reuse, if the windows cannot follow; otherwise 0."""
        self.behind = 0
        """Pages from the first on whose blocks it does not hold in the groups with a window: all of them are behind it."""
        self.windows = RunList()
        """The blocks with names that it holds in these groups."""
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


class WindowBlockPool(BlockPool):
    """Full attention's pages as in ``BlockPool``; the blocks of the groups with a window age and leave one by one.

    match   the longest prefix of full attention's pages that ends with a run of pages which all groups with a window have:
            as many as a window needs, or fewer from the beginning of the prompt
    give    ``drop_behind`` gives back blocks that are behind the window: those with names become the most recent, group by
            group, the last page first; the others are free at once
    name    of the groups with a window, only pages from which a prompt may begin again (``WindowGroups.named``)
    free    group by group, tail before head

    vLLM 0.33.0: ``SlidingWindowManager``, ``HybridKVCacheCoordinator``. Nothing loops over blocks: those with one history are a
    ``BlockRun``, and what is given back together is one node for the eviction policy (``GivenBack``).
    """

    def __init__(self, gpu: Tier, windows: WindowGroups) -> None:
        super().__init__(gpu)
        self.windows = windows
        self.groups = windows.groups
        self.index = WindowIndex(windows.groups, gpu.pool)
        self._all_groups = (1 << windows.groups) - 1
        self._given_back: dict[Node, GivenBack] = {}

    # --- look-up ---------------------------------------------------------------------------------------------------------

    def find(self, lease: WindowLease, limit: int) -> None:
        """Look up a request's pages, at most ``limit`` of them, and note in its lease what it can reuse."""
        extents = lease.extents
        path, rest = self.match(extents, limit)
        known = path[-1].depth + path[-1].pages if path else 0
        hit, lease.found = self.index.deepest(extents, known, self.windows.run_pages)
        if hit < known:
            path = self.first_pages(path, hit)
            rest = split_extents(extents, hit)[1] if hit else extents
        lease.set_match(path, hit, rest)
        lease.junction = known if hit < known else 0

    def held_extents(self) -> list[Extent]:
        """Return the pages of which a group with a window has a block with a name."""
        return [(segment.start, segment.pages) for segment in self.index.segments()]

    # --- requests --------------------------------------------------------------------------------------------------------

    def idle_pages(self, lease: WindowLease) -> int:
        """Return how many pages of full attention that a request has found are held by none."""
        return sum([node.pages for node in lease.path if not node.pins[0]])

    def idle_blocks(self, lease: WindowLease, first: int = 0) -> int:
        """Return how many blocks of the windows it has found that are held by none, of pages from number ``first`` on."""
        blocks = 0
        for segment, skipped, pages in lease.found:
            wanted = min(pages, segment.depth + skipped + pages - first)
            if wanted > 0:
                idle = [groups.bit_count() for run, groups in self._oldest_runs(segment) if run.idle_in is not None]
                blocks += wanted * sum(idle)
        return blocks

    def _oldest_runs(self, segment: Segment) -> list[tuple[BlockRun, int]]:
        """Return the runs of a segment that have the oldest block of some groups, with these groups."""
        left, found = self._all_groups, []
        for run in segment.runs:
            if groups := run.groups & left:
                found.append((run, groups))
                left &= ~groups
        return found

    def hold_found(self, lease: WindowLease, now: float) -> None:
        """Hold what a request has found."""
        hit = lease.hit_pages
        self.hold(lease, lease.path, now)
        lease.window_slots = self.residency.take(self.gpu, 0)
        lease.behind, lease.named_upto = hit - sum([pages for _, _, pages in lease.found]), hit
        for segment, skipped, pages in lease.found:
            held = self.index.cut(segment, skipped) if skipped else segment
            if pages < held.pages:
                self.index.cut(held, pages)
            for run, groups in self._oldest_runs(held):
                if groups != run.groups:
                    self.index.cut_groups(run, groups)
                self._hold_run(run, lease.windows)

    def _hold_run(self, run: BlockRun, windows: RunList) -> None:
        if run.idle_in is not None:
            idle = cast(GivenBack, run.idle_in)
            assert idle.node is not None
            idle.runs.remove(run)
            run.idle_in = None
            self.residency.keep(idle.node, self.gpu, run.blocks)
            if not idle.runs:
                del self._given_back[idle.node]
        run.users[windows] = None
        windows.runs.append(run)
        if len(windows.runs) > 1:
            self.index.join(windows.runs[-2], run)

    def take(self, lease: BlockLease, pages: int) -> bool:
        own = cast(WindowLease, lease)
        in_window = pages - max(0, own.behind - own.held_pages)
        blocks = pages + in_window * self.groups
        if blocks > self.gpu.pool.free and not self.make_room(blocks):
            return False
        super().take(lease, pages)
        own.window_slots = self.gpu.pool.join(own.window_slots, self.residency.take(self.gpu, in_window * self.groups))
        return True

    def drop_behind(self, lease: WindowLease, tokens: int) -> None:
        """Give back the blocks that are behind the window when a request's first ``tokens`` tokens have been computed."""
        self._leave(lease, min(self.windows.pages_behind(tokens), lease.held_pages), GivenBack())

    def slide(self, lease: WindowLease, tokens: int) -> None:
        """Give them back page by page, as in steps of one token each. Pages that it takes only then may be behind, too."""
        self._leave(lease, self.windows.pages_behind(tokens), GivenBack(by_page=True))

    def _leave(self, lease: WindowLease, behind: int, left: GivenBack) -> None:
        if behind <= lease.behind:
            return
        runs, named = lease.windows.runs, 0
        while runs and runs[0].segment.depth < behind:
            run = runs[0]
            if run.segment.depth + run.segment.pages > behind:
                self.index.cut(run.segment, behind - run.segment.depth)
            del runs[0]
            named += run.blocks
            self._let_go(run, lease.windows, left)
        self._give_back(left)
        plain = max(0, min(behind, lease.held_pages) - lease.behind) * self.groups - named
        slots, lease.window_slots = self.gpu.pool.split(lease.window_slots, plain)
        self.residency.give(self.gpu, slots)
        lease.behind = behind

    def left_behind(self, lease: WindowLease, tokens: int) -> int:
        """Return how many blocks ``drop_behind`` would make free or evictable."""
        behind = min(self.windows.pages_behind(tokens), lease.held_pages)
        blocks = max(0, behind - lease.behind) * self.groups
        for run in lease.windows.runs:
            if run.segment.depth < behind and len(run.users) > 1:
                blocks -= min(run.segment.pages, behind - run.segment.depth) * run.width
        return blocks

    def name_windows(self, lease: WindowLease, pages: int) -> None:
        """Name blocks of the groups with a window: those of the first ``pages`` pages are full."""
        pages = min(pages, count_pages(lease.extents))
        if pages <= lease.named_upto:
            return
        first, lease.named_upto = max(lease.named_upto, lease.behind), pages
        for named in self.windows.named(first, pages, lease.boundaries(self.windows.page_tokens)):
            for extent, before, start, count in parts_of(lease.extents, *named):
                for segment in self.index.segments_of(extent, before, start, count):
                    self._name_run(segment, lease)

    def _name_run(self, segment: Segment, lease: WindowLease) -> None:
        blocks = segment.pages * self.groups
        slots, lease.window_slots = self.gpu.pool.split(lease.window_slots, blocks)
        run = BlockRun(segment, self._all_groups, slots)
        segment.runs.append(run)
        run.users[lease.windows] = None
        lease.windows.runs.append(run)
        self.residency.add_blocks(self.gpu, blocks, (segment.start, segment.pages))

    def free(self, lease: BlockLease) -> None:
        own = cast(WindowLease, lease)
        if self.windows.full_first:
            super().free(lease)
        left = GivenBack()
        for run in own.windows.runs:
            self._let_go(run, own.windows, left)
        own.windows.runs.clear()
        self._give_back(left)
        self.residency.give(self.gpu, own.window_slots)
        if not self.windows.full_first:
            super().free(lease)

    def _let_go(self, run: BlockRun, windows: RunList, left: GivenBack) -> None:
        """Take a run from what a request holds. If no other holds it, it is ``left``, or freed if the cache has been emptied."""
        del run.users[windows]
        if run.users:
            return
        if run.is_doomed:
            self.residency.give(self.gpu, run.slots)
        else:
            run.idle_in = left
            left.runs.append(run)

    def _give_back(self, left: GivenBack) -> None:
        """Let blocks leave from now on, in their order; they are the most recent."""
        if left.runs:
            left.node = self.residency.add_idle(self.gpu, left.blocks)
            self._given_back[left.node] = left

    # --- eviction --------------------------------------------------------------------------------------------------------

    def _shorten(self, node: Node, pages: int) -> bool:
        if not node.is_state:
            return super()._shorten(node, pages)
        self._evict(self._given_back[node], pages)
        self.gpu.eviction.on_evictable(node)
        return True

    def _remove(self, node: Node) -> None:
        if not node.is_state:
            super()._remove(node)
            return
        left = self._given_back.pop(node)
        for run in left.runs:
            self._drop(run, run.groups, node)

    def _evict(self, left: GivenBack, blocks: int) -> None:
        """Evict the first ``blocks`` of these blocks to leave; others stay."""
        node = left.node
        assert node is not None
        while blocks:
            run, groups = left.next_to_leave(self.index, blocks)
            blocks -= run.segment.pages * groups.bit_count()
            if groups == run.groups:
                left.runs.remove(run)
            self._drop(run, groups, node)

    def _drop(self, run: BlockRun, groups: int, node: Node) -> None:
        """Evict some groups of a run, or all, that have left with a node."""
        blocks, segment = run.segment.pages * groups.bit_count(), run.segment
        if groups == run.groups:
            slots = run.slots
            self.index.remove(run)
        else:
            slots, run.slots = self.gpu.pool.split(run.slots, blocks)
            run.groups &= ~groups
            run.width = run.groups.bit_count()
        self.residency.evict_blocks(node, self.gpu, blocks, slots, (segment.start, segment.pages))

    def reset(self) -> None:
        for segment in self.index.segments():
            for run in segment.runs:
                run.is_doomed = True
                idle = cast(GivenBack, run.idle_in).node if run.idle_in is not None else None
                self.residency.doom_blocks(self.gpu, run.blocks, run.slots, idle)
        self.index.clear()
        self._given_back.clear()
        super().reset()

    # --- recount ---------------------------------------------------------------------------------------------------------

    def check(self, leases: list[BlockLease]) -> None:
        gpu, own = self.gpu, [cast(WindowLease, lease) for lease in leases]
        pool = gpu.pool
        self._check_leases(own)
        self._check_segments()
        nodes = self.check_nodes(leases)
        idle = [node.pages for node in self._given_back]
        assert gpu.evictable_pages == sum([node.pages for node in nodes if not node.pins[0]] + idle), "evictable pages"
        slots = [node.slots[0] for node in [*nodes, *self.residency.doomed]] + [run.slots for run in self._runs(own)]
        slots += [some for lease in own for some in (lease.slots, lease.window_slots)]
        assert pool.free + sum(map(pool.count, slots)) == pool.capacity, "slots leaked"
        if isinstance(pool, (SlotPool, BlockNumbers)):
            numbers = {int(slot) for some in (*slots, pool.free_slots()) for slot in some}
            assert len(numbers) == pool.capacity, "a slot has two owners"

    def _runs(self, leases: list[WindowLease]) -> Iterator[BlockRun]:
        """Iterate over all runs, with those that are doomed."""
        for segment in self.index.segments():
            yield from segment.runs
        yield from dict.fromkeys([run for lease in leases for run in lease.windows.runs if run.is_doomed])

    def _check_leases(self, leases: list[WindowLease]) -> None:
        held = {lease.windows for lease in leases}
        for run in self._runs(leases):
            assert set(run.users) <= held and bool(run.users) == (run.idle_in is None), f"{run.segment}: users"
            assert run.width == run.groups.bit_count() and self.gpu.pool.count(run.slots) == run.blocks, f"{run.segment}: blocks"
        for lease in leases:
            runs = lease.windows.runs
            depths = [run.segment.depth for run in runs]
            assert depths == sorted(depths), f"{lease}: order of runs"
            assert all(lease.windows in run.users for run in runs), f"{lease}: runs"
            assert all(lease.behind <= run.segment.depth < lease.held_pages for run in runs), f"{lease}: pages"
            plain = (lease.held_pages - lease.behind) * self.groups - sum([run.blocks for run in runs])
            assert self.gpu.pool.count(lease.window_slots) == plain, f"{lease}: blocks without names"

    def _check_segments(self) -> None:
        for node, left in self._given_back.items():
            assert left.node is node and node.pages == left.blocks and node.is_evictable(0), f"{node}: blocks"
            assert all(run.idle_in is left for run in left.runs), f"{node}: runs"
        idle = {run for left in self._given_back.values() for run in left.runs}
        upto: dict[int, int] = {}
        for segment in self.index.segments():
            along = segment.along
            assert upto.get(along.start, along.start) <= segment.start, f"{segment}: overlaps"
            upto[along.start] = segment.start + segment.pages
            assert segment.depth == along.before + segment.start - along.start and segment.runs, f"{segment}: depth"
            for run in segment.runs:
                assert run.segment is segment and (run in idle) == (run.idle_in is not None), f"{segment}: runs"


def parts_of(extents: tuple[Extent, ...], first: int, end: int) -> list[tuple[Extent, int, int, int]]:
    """Return the pages from number ``first`` up to ``end`` of a path, by extents: (the whole extent, pages before it, first page,
    number of pages)."""
    parts, before = [], 0
    for extent in extents:
        start, pages = extent
        begin, stop = max(first, before), min(end, before + pages)
        if begin < stop:
            parts.append((extent, before, start + begin - before, stop - begin))
        before += pages
        if before >= end:
            break
    return parts
