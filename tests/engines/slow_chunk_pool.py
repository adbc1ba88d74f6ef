"""The CPU pool of vLLM's offloading, chunk by chunk, for requests that run beside each other: obvious and slow.

A chunk is named by a number. It is idle if nobody writes, reads or offers it; only idle chunks may be evicted.
"""

from collections import OrderedDict


class SlowUse:
    """What one request has been to the pool. ``places`` are the chunks it has touched, with their place in its path."""

    def __init__(self) -> None:
        self.number = 0
        self.places: dict[int, int] = {}
        self.reused: set[int] = set()
        self.stored: set[int] = set()
        self.adapted: set[int] = set()


class SlowChunkPool:
    """Who is where, and the table of offers. Subclasses say which chunks leave first."""

    def __init__(self, capacity: int, threshold: int = 0, tracked: int = 64_000) -> None:
        self.capacity, self.threshold, self.tracked = capacity, threshold, tracked
        self.writing: set[int] = set()
        self.readers: dict[int, int] = {}
        self.offers: OrderedDict[int, int] = OrderedDict()

    # What subclasses do.

    def has(self, chunk: int) -> bool:
        raise NotImplementedError

    def count(self) -> int:
        raise NotImplementedError

    def touch(self, use: SlowUse, chunk: int, place: int, *, is_here: bool) -> None:
        """A request loads a chunk, is offered one that is ready, or wants to store one."""
        raise NotImplementedError

    def prepare(self, use: SlowUse, wanted: list[int]) -> None:
        """Chunks are about to be stored, if there is room."""

    def victims(self, number: int, kept: set[int]) -> list[int] | None:
        raise NotImplementedError

    def evict(self, victims: list[int]) -> None:
        raise NotImplementedError

    def insert(self, use: SlowUse, chunk: int) -> None:
        raise NotImplementedError

    def finish(self, use: SlowUse) -> None:
        """The request has finished, and everything of its pass has been offered."""
        raise NotImplementedError

    # What requests do.

    def is_kept(self, chunk: int) -> bool:
        return chunk in self.writing or bool(self.readers.get(chunk))

    def read(self, use: SlowUse, chunks: list[tuple[int, int]]) -> None:
        """Begin to load chunks, given with their places."""
        for chunk, place in chunks:
            self.touch(use, chunk, place, is_here=True)
            self.readers[chunk] = self.readers.get(chunk, 0) + 1

    def offer(self, use: SlowUse, offered: list[tuple[int, int]]) -> list[int] | None:
        """Return the chunks, of those offered with their places, that are stored now. None: there is no room for them."""
        admitted = self.admitted([chunk for chunk, _ in offered])
        wanted = [chunk for chunk, _ in offered if not self.has(chunk) and chunk in admitted]
        for chunk, place in offered:
            if self.has(chunk):
                if chunk not in self.writing:
                    self.touch(use, chunk, place, is_here=True)
            elif chunk in admitted:
                self.touch(use, chunk, place, is_here=False)
        self.prepare(use, wanted)
        missing = len(wanted) - (self.capacity - self.count())
        if missing > 0:
            victims = self.victims(missing, {chunk for chunk, _ in offered})
            if victims is None:
                return None
            self.evict(victims)
        for chunk in wanted:
            self.insert(use, chunk)
            self.writing.add(chunk)
        return wanted

    def admitted(self, offered: list[int]) -> set[int]:
        """Count an offer. Known chunks become the most recent first, then new ones as far as the table has room beside them."""
        if self.threshold < 2:
            return set(offered)
        known = [chunk for chunk in offered if chunk in self.offers]
        new = [chunk for chunk in offered if chunk not in self.offers]
        for chunk in known:
            self.offers[chunk] += 1
            self.offers.move_to_end(chunk)
        for chunk in new[: max(0, self.tracked - len(known))]:
            self.offers[chunk] = 1
        while len(self.offers) > self.tracked:
            self.offers.popitem(last=False)
        return {chunk for chunk in offered if self.offers.get(chunk, 0) >= self.threshold}


class SlowLruPool(SlowChunkPool):
    """The lowest rank leaves first. A request ranks by when it began to touch chunks, and again by when it finished."""

    def __init__(self, capacity: int, threshold: int = 0, tracked: int = 64_000) -> None:
        super().__init__(capacity, threshold, tracked)
        self.ranks: dict[int, tuple[int, int]] = {}
        self.counter = 0

    def draw(self) -> int:
        self.counter += 1
        return self.counter

    def has(self, chunk: int) -> bool:
        return chunk in self.ranks

    def count(self) -> int:
        return len(self.ranks)

    def touch(self, use: SlowUse, chunk: int, place: int, *, is_here: bool) -> None:
        use.number = use.number or self.draw()
        if chunk not in use.places:
            use.places[chunk] = place
            if is_here:
                self.ranks[chunk] = max(self.ranks[chunk], (use.number, -place))

    def victims(self, number: int, kept: set[int]) -> list[int] | None:
        idle = sorted(rank for chunk, rank in self.ranks.items() if chunk not in kept and not self.is_kept(chunk))
        if len(idle) < number:
            return None
        lowest = set(idle[:number])
        return [chunk for chunk, rank in self.ranks.items() if rank in lowest]

    def evict(self, victims: list[int]) -> None:
        for chunk in victims:
            del self.ranks[chunk]

    def insert(self, use: SlowUse, chunk: int) -> None:
        self.ranks[chunk] = use.number, -use.places[chunk]

    def finish(self, use: SlowUse) -> None:
        for chunk in sorted(use.places, key=use.places.__getitem__, reverse=True):
            if chunk in self.ranks:
                self.ranks[chunk] = self.draw(), 0


class SlowArcPool(SlowChunkPool):
    """ARC: ``once`` and ``again`` and the ghosts of each, the least recent first."""

    def __init__(self, capacity: int, threshold: int = 0, tracked: int = 64_000) -> None:
        super().__init__(capacity, threshold, tracked)
        self.once, self.again, self.once_ghosts, self.again_ghosts = (OrderedDict[int, None]() for _ in range(4))
        self.target = 0.0

    def has(self, chunk: int) -> bool:
        return chunk in self.once or chunk in self.again

    def count(self) -> int:
        return len(self.once) + len(self.again)

    def touch(self, use: SlowUse, chunk: int, place: int, *, is_here: bool) -> None:
        use.places.setdefault(chunk, place)
        if is_here:
            use.reused.add(chunk)

    def prepare(self, use: SlowUse, wanted: list[int]) -> None:
        once, again = len(self.once_ghosts), len(self.again_ghosts)
        for chunk in reversed(wanted):
            if chunk in use.adapted:
                continue
            use.adapted.add(chunk)
            if chunk in self.once_ghosts:
                self.target = min(self.target + max(1.0, again / once), self.capacity)
                self.once_ghosts.move_to_end(chunk)
            elif chunk in self.again_ghosts:
                self.target = max(self.target - max(1.0, once / again), 0.0)
                self.again_ghosts.move_to_end(chunk)

    def victims(self, number: int, kept: set[int]) -> list[int] | None:
        once, again = ([one for one in part if one not in kept and not self.is_kept(one)] for part in (self.once, self.again))
        taken: list[int] = []
        size = len(self.once)
        for _ in range(number):
            if once and (size >= int(self.target) or not again):
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
        self.once_ghosts.pop(chunk, None)
        self.again_ghosts.pop(chunk, None)
        self.once[chunk] = None
        use.stored.add(chunk)

    def finish(self, use: SlowUse) -> None:
        for chunk in sorted(use.places, key=use.places.__getitem__, reverse=True):
            if chunk in use.stored:
                part = self.once if chunk in self.once else self.again
                if chunk in part:
                    part.move_to_end(chunk)
            elif chunk in use.reused and self.has(chunk):
                self.once.pop(chunk, None)
                self.again.pop(chunk, None)
                self.again[chunk] = None
