"""Orders of single chunks for the CPU offloading tier of vLLM 0.25, which go by each use of a chunk.

A use is a look-up, whether it admits its request or not, the beginning of a store, or the end of a copy. 0.33 has orders of
requests instead (``offload_order``).
"""

from collections.abc import Iterable, Sequence

from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent
from kvsim.policies.eviction.offload_order import (
    ArcOffload,
    OffloadOrder,
    OffloadUse,
    Placed,
    Seen,
    add_repeatedly,
    pieces_of_two,
)  # fmt: skip


class LruByUse(OffloadOrder):
    """LRU over the idle chunks, those that no copy reads or writes.

    look_up    the idle chunks of the path become the most recent, tail before head
    end_read,  chunks become idle, and the most recent. In vLLM those of one copy have an arbitrary order (that of a Python
    end_write  set); here the tail goes before the head
    """

    def __init__(self) -> None:
        self._all, self._idle = ExtentOrder(), ExtentOrder()

    @property
    def pages(self) -> int:
        return self._all.pages

    def held(self) -> list[Extent]:
        return [run for run, _, _ in self._all.oldest_first()]

    def find(self, runs: Iterable[Extent]) -> Seen:
        return [(run, here is not None) for run, here in self._all.pieces(runs)]

    def leading(self, runs: Iterable[Extent]) -> list[Extent]:
        return self._all.leading(runs)

    def look_up(self, path: Sequence[Extent]) -> None:
        self._idle.touch(path)

    def begin_read(self, chunks: Sequence[Extent]) -> None:
        self._idle.remove(chunks)

    def end_read(self, chunks: Sequence[Extent]) -> None:
        self._idle.append(chunks)

    def end_write(self, chunks: Sequence[Extent]) -> None:
        self._idle.append(chunks)

    def store(self, use: OffloadUse, chunks: Placed) -> None:
        self._all.append([run for run, _ in chunks])

    def evict(self, pages: int, keep: list[Extent]) -> list[Extent]:
        evicted = self._idle.move_oldest(pages, ExtentOrder(), keep=keep)
        self._all.remove(evicted)
        return evicted


class ArcByUse(ArcOffload):
    """ARC as ``ArcOffload``, with chunks that move, and ghosts that count, at each use.

    look_up   tail before head: chunks that are still being written become the most recent of ``once``, all others of ``again``;
              each ghost adapts the target, by as much as for a chunk to be stored, and becomes the most recent one
    evict     nothing, so that nothing is stored, if ``again`` has too few chunks beside what must be taken from ``once``
    """

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self._writing = ExtentOrder()

    def look_up(self, path: Sequence[Extent]) -> None:
        once_ghosts, again_ghosts = self.once_ghosts.pages, self.again_ghosts.pages
        for run, _, is_once in reversed(pieces_of_two(self.once, self.again, path)):
            self._use(run, is_once=is_once)
        for run, ghost, is_once in reversed(pieces_of_two(self.once_ghosts, self.again_ghosts, path)):
            if ghost is not None:
                ratio = again_ghosts / once_ghosts if is_once else once_ghosts / again_ghosts
                step = max(1.0, ratio) if is_once else -max(1.0, ratio)
                self.target = add_repeatedly(self.target, step, run[1], most=self._capacity)
        self.once_ghosts.touch(path)
        self.again_ghosts.touch(path)

    def _use(self, run: Extent, *, is_once: bool) -> None:
        """Move chunks of one list, or chunks that are missing."""
        if not is_once:
            self.again.touch((run,))
            return
        parts = self._writing.pieces((run,))
        parts.reverse()
        for part, is_written in parts:
            if is_written is None:
                self.once.remove((part,))
                self.again.append((part,))
            else:
                self.once.touch((part,))

    def store(self, use: OffloadUse, chunks: Placed) -> None:
        super().store(use, chunks)
        self._writing.append([run for run, _ in chunks])

    def end_write(self, chunks: Sequence[Extent]) -> None:
        self._writing.remove(chunks)

    def may_evict(self, pages: int, keep: list[Extent]) -> bool:
        from_once = min(pages, self.surplus, self.once.pages - self.once.count(keep))
        return pages - from_once <= self.again.pages - self.again.count(keep)

    def touch(self, use: OffloadUse, chunks: Placed) -> None:
        """Do nothing: it is the look-up that counts."""

    def want(self, use: OffloadUse, chunks: Placed) -> None:
        """Do nothing."""

    def finish(self, use: OffloadUse) -> None:
        """Do nothing."""
