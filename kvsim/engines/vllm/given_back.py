"""Blocks of the groups with a window that were given back together, and the order in which they leave."""

from kvsim.core.tree import Node
from kvsim.engines.vllm.window_runs import BlockRun, RunList, WindowIndex


class GivenBack(RunList):
    """Runs that became evictable together: their blocks leave group by group and tail before head or, of pages that a growing
    answer has left behind one after another, page by page from the first one on.

    For the eviction policy they are one node, whose pages are their blocks.
    """

    __slots__ = ("by_page", "node")

    def __init__(self, *, by_page: bool = False) -> None:
        super().__init__()
        self.by_page = by_page
        self.node: Node | None = None

    @property
    def blocks(self) -> int:
        """Number of their blocks."""
        return sum([run.blocks for run in self.runs])

    def next_to_leave(self, index: WindowIndex, blocks: int) -> tuple[BlockRun, int]:
        """Return the run, and the groups of it, whose blocks leave next, ``blocks`` at most; cut as needed."""
        return self._first_pages(index, blocks) if self.by_page else self._last_pages(index, blocks)

    def _last_pages(self, index: WindowIndex, blocks: int) -> tuple[BlockRun, int]:
        runs = self.runs
        if len(runs) == 1 and runs[0].segment.pages <= blocks:
            return runs[0], lowest(runs[0].groups, blocks // runs[0].segment.pages)
        group = min([run.groups & -run.groups for run in runs])
        last = next(run for run in reversed(runs) if run.groups & group)
        if last.segment.pages > blocks:
            index.cut(last.segment, last.segment.pages - blocks)
            return self._last_pages(index, blocks)
        return last, group

    def _first_pages(self, index: WindowIndex, blocks: int) -> tuple[BlockRun, int]:
        first = self.runs[0]
        segment = first.segment
        others = [run for run in self.runs if run.segment is segment and run is not first]
        whole = 1 if others else max(1, blocks // first.width)
        if segment.pages > whole:
            index.cut(segment, whole)
        if others:
            page = min([first, *others], key=lowest_group)
            return page, lowest(page.groups, 1)
        return first, lowest(first.groups, blocks)


def lowest_group(run: BlockRun) -> int:
    """Return the bit of a run's first group."""
    return run.groups & -run.groups


def lowest(groups: int, count: int) -> int:
    """Return the bits of the first ``count`` of these groups."""
    rest = groups
    while count > 0 and rest:
        rest &= rest - 1
        count -= 1
    return groups & ~rest
