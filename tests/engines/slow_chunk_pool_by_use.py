"""The CPU pool of vLLM 0.25's offloading, chunk by chunk: obvious and slow. Look-ups, stores and ends of copies are uses.

The order in which the chunks of one copy become idle is arbitrary in vLLM. Here the tail goes before the head.
"""

from collections import OrderedDict

from tests.engines.slow_chunk_pool import SlowChunkPool, SlowUse


class SlowPoolByUse(SlowChunkPool):
    """Look-ups count for the threshold, not offers."""

    def look_up(self, path: list[int]) -> None:
        """A request has been looked up, or has begun a store; the names of its chunks, head to tail."""
        raise NotImplementedError

    def begin_read(self, chunks: list[int]) -> None:
        """A load begins."""

    def end_read(self, chunks: list[int]) -> None:
        """A load has ended."""

    def end_write(self, chunks: list[int]) -> None:
        """A store has ended."""

    def count_look_up(self, chunk: int) -> None:
        if self.threshold < 2:
            return
        if chunk in self.offers:
            self.offers.move_to_end(chunk)
            self.offers[chunk] += 1
            return
        if len(self.offers) >= self.tracked:
            self.offers.popitem(last=False)
        self.offers[chunk] = 1

    def admitted(self, offered: list[int]) -> set[int]:
        return {chunk for chunk in offered if self.threshold < 2 or self.offers.get(chunk, 0) >= self.threshold}

    def touch(self, use: SlowUse, chunk: int, place: int, *, is_here: bool) -> None:
        """Nothing: the look-up counts."""

    def finish(self, use: SlowUse) -> None:
        """Nothing."""


class SlowLruByUse(SlowPoolByUse):
    """``idle`` has the chunks that nobody reads or writes, the least recent first."""

    def __init__(self, capacity: int, threshold: int = 0, tracked: int = 64_000) -> None:
        super().__init__(capacity, threshold, tracked)
        self.idle = OrderedDict[int, None]()
        self.all = set[int]()

    def has(self, chunk: int) -> bool:
        return chunk in self.all

    def count(self) -> int:
        return len(self.all)

    def look_up(self, path: list[int]) -> None:
        for chunk in reversed(path):
            if chunk in self.idle:
                self.idle.move_to_end(chunk)

    def begin_read(self, chunks: list[int]) -> None:
        for chunk in chunks:
            del self.idle[chunk]

    def end_read(self, chunks: list[int]) -> None:
        for chunk in reversed(chunks):
            self.idle[chunk] = None

    def end_write(self, chunks: list[int]) -> None:
        self.end_read(chunks)

    def victims(self, number: int, kept: set[int]) -> list[int] | None:
        found = [chunk for chunk in self.idle if chunk not in kept][:number]
        return found if len(found) == number else None

    def evict(self, victims: list[int]) -> None:
        for chunk in victims:
            del self.idle[chunk]
            self.all.remove(chunk)

    def insert(self, use: SlowUse, chunk: int) -> None:
        self.all.add(chunk)


class SlowArcByUse(SlowPoolByUse):
    """ARC: ``once`` and ``again`` and the ghosts of each, the least recent first. Copies do not move chunks."""

    def __init__(self, capacity: int, threshold: int = 0, tracked: int = 64_000) -> None:
        super().__init__(capacity, threshold, tracked)
        self.once, self.again, self.once_ghosts, self.again_ghosts = (OrderedDict[int, None]() for _ in range(4))
        self.target = 0.0

    def has(self, chunk: int) -> bool:
        return chunk in self.once or chunk in self.again

    def count(self) -> int:
        return len(self.once) + len(self.again)

    def look_up(self, path: list[int]) -> None:
        for chunk in reversed(path):
            if chunk in self.once and chunk in self.writing:
                self.once.move_to_end(chunk)
            elif chunk in self.once:
                del self.once[chunk]
                self.again[chunk] = None
            elif chunk in self.again:
                self.again.move_to_end(chunk)
            elif chunk in self.once_ghosts:
                more = max(1.0, len(self.again_ghosts) / len(self.once_ghosts))
                self.target = min(self.target + more, self.capacity)
                self.once_ghosts.move_to_end(chunk)
            elif chunk in self.again_ghosts:
                less = max(1.0, len(self.once_ghosts) / len(self.again_ghosts))
                self.target = max(self.target - less, 0.0)
                self.again_ghosts.move_to_end(chunk)

    def victims(self, number: int, kept: set[int]) -> list[int] | None:
        once, again = ([one for one in part if one not in kept and not self.is_kept(one)] for part in (self.once, self.again))
        taken: list[int] = []
        size = len(self.once)
        for _ in range(number):
            if size >= int(self.target) and once:
                taken.append(once.pop(0))
                size -= 1
            elif again:
                taken.append(again.pop(0))
            else:
                return None
        return taken

    def evict(self, victims: list[int]) -> None:
        for chunk in victims:
            part, ghosts = (self.once, self.once_ghosts) if chunk in self.once else (self.again, self.again_ghosts)
            del part[chunk]
            ghosts[chunk] = None
        for ghosts in (self.once_ghosts, self.again_ghosts):
            while len(ghosts) > self.capacity:
                ghosts.popitem(last=False)

    def insert(self, use: SlowUse, chunk: int) -> None:
        self.once[chunk] = None
        self.once_ghosts.pop(chunk, None)
        self.again_ghosts.pop(chunk, None)
