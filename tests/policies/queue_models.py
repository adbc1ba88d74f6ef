"""What the policies with several queues do, page by page: slow, obvious, and nothing in common with them but the rules.

One tier. A page is a leaf if it is not pinned and none of its children is there. Room is made for all pages of a request before
they enter. A leaf that moves takes along the pages above it that have the same mark.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any


class Page:
    def __init__(self, number: int, parent: "Page | None") -> None:
        self.number = number
        self.parent = parent
        self.children_in = 0
        self.pins = 0
        self.queue = self.place = 0
        self.value: Any = None
        self.leaf_since = 0

    @property
    def mark(self) -> tuple[int, int, Any]:
        return self.queue, self.place, self.value

    @mark.setter
    def mark(self, mark: tuple[int, int, Any]) -> None:
        self.queue, self.place, self.value = mark


class Model:
    """The tier, and what all these policies share."""

    def __init__(self, capacity: int, in_flight: int = 1) -> None:
        self.capacity = capacity
        self.in_flight = in_flight
        self.pages: dict[int, Page] = {}
        self.live: list[list[Page]] = []
        self.ghosts: OrderedDict[int, Any] = OrderedDict()
        self.clock = 0
        self.left = 0
        self.leaves: dict[Page, int] = {}
        self.events = 0

    # --- the tier ---

    def serve(self, numbers: list[int]) -> int | None:
        """Hit pages; None if the request can never run."""
        if len(self.live) == self.in_flight:
            self.retire()
        path: list[Page] = []
        for number in numbers:
            if number not in self.pages:
                break
            path.append(self.pages[number])
        new = len(numbers) - len(path)
        while new > self.capacity - sum(bool(page.pins) or page in path for page in self.pages.values()):
            if not self.live:
                return None
            self.retire()
        self.clock += self.tick(len(numbers))
        self.arrives()
        for page in path:
            page.pins += 1
            page.mark = self.hit(page.mark)
        self.note_leaves()
        hits, self.left = len(path), 0
        if new:
            self.expect(numbers[hits:])
        while len(self.pages) + new > self.capacity:
            victim = self.choose()
            del self.pages[victim.number]
            if victim.parent:
                victim.parent.children_in -= 1
            self.left += 1
            self.evicted(victim)
            self.note_leaves()
        for number in numbers[hits:]:
            page = Page(number, path[-1] if path else None)
            page.pins = 1
            page.mark = self.enter(self.ghosts.pop(number, None))
            if page.parent:
                page.parent.children_in += 1
            self.pages[number] = page
            path.append(page)
        self.note_leaves()
        if new:
            self.entered()
        self.live.append(path)
        return hits

    def retire(self) -> None:
        for page in self.live.pop(0):
            page.pins -= 1
        self.note_leaves()

    def note_leaves(self) -> None:
        """Among equals, the first to become a leaf leaves."""
        now = [page for page in self.pages.values() if not page.pins and not page.children_in]
        for page in now:
            if page not in self.leaves:
                self.events += 1
                page.leaf_since = self.events
        self.leaves = dict.fromkeys(now, 0)

    def first(self, queue: int) -> Page | None:
        return min((page for page in self.leaves if page.queue == queue), key=lambda p: (p.place, p.leaf_since), default=None)

    def first_of(self, *queues: int) -> Page:
        return next(page for queue in (*queues, 0, 1, 2) if (page := self.first(queue)))

    def size(self, queue: int) -> int:
        return Counter(page.queue for page in self.pages.values())[queue]

    def move(self, leaf: Page, mark: tuple[int, int, Any]) -> None:
        old, page = leaf.mark, leaf
        while page and page.mark == old:
            page.mark = mark
            page = page.parent  # type: ignore[assignment]
        self.events += 1
        leaf.leaf_since = self.events

    def end(self) -> int:
        """A place after all others, and before what comes next."""
        self.clock += 2
        return self.clock - 1

    def demote(self, upper: int, lower: int, most: float) -> None:
        while self.size(upper) > most and (leaf := self.first(upper)):
            self.move(leaf, (lower, self.end(), leaf.value))

    # --- what a policy is ---

    def tick(self, pages: int) -> int:
        return 1

    def expect(self, numbers: list[int]) -> None:
        self.keep(self.ghosts, numbers)

    @staticmethod
    def keep(ghosts: OrderedDict[int, Any], numbers: Iterable[int]) -> None:
        for number in sorted(numbers, reverse=True):
            if number in ghosts:
                ghosts.move_to_end(number)

    @staticmethod
    def remember(ghosts: OrderedDict[int, Any], page: Page, most: float, value: Any = True) -> None:
        ghosts[page.number] = value
        while len(ghosts) > most:
            ghosts.popitem(last=False)

    def arrives(self) -> None:
        """A request comes; ``left`` is still the last one's."""

    def hit(self, mark: Any) -> Any:
        raise NotImplementedError

    def enter(self, ghost: Any) -> Any:
        raise NotImplementedError

    def choose(self) -> Page:
        raise NotImplementedError

    def evicted(self, page: Page) -> None:
        pass

    def entered(self) -> None:
        pass


class TwoQModel(Model):
    def hit(self, mark: Any) -> Any:
        return mark if mark[0] == 0 else (1, self.clock, None)

    def enter(self, ghost: Any) -> Any:
        return int(ghost is not None), self.clock, None

    def choose(self) -> Page:
        return self.first_of(0 if self.size(0) + self.left > self.capacity / 4 else 1)

    def evicted(self, page: Page) -> None:
        if page.queue == 0:
            self.remember(self.ghosts, page, self.capacity / 2)


class ARCModel(Model):
    def __init__(self, capacity: int, in_flight: int = 1) -> None:
        super().__init__(capacity, in_flight)
        self.p = 0.0
        self.b1: OrderedDict[int, Any] = OrderedDict()
        self.b2: OrderedDict[int, Any] = OrderedDict()

    def expect(self, numbers: list[int]) -> None:
        b1, b2 = len(self.b1), len(self.b2)
        m, n = (sum(number in ghosts for number in numbers) for ghosts in (self.b1, self.b2))
        self.p += m * max(1, b2 / b1) if m else 0
        self.p -= n * max(1, b1 / b2) if n else 0
        self.p = min(max(self.p, 0), self.capacity)
        self.keep(self.b1, numbers)
        self.keep(self.b2, numbers)
        self.known = {number for number in numbers if number in self.b1 or number in self.b2}
        self.ghosts = OrderedDict.fromkeys(self.known, True)

    def hit(self, mark: Any) -> Any:
        return 1, self.clock, None

    def enter(self, ghost: Any) -> Any:
        return int(ghost is not None), self.clock, None

    def choose(self) -> Page:
        return self.first_of(0 if self.size(0) + self.left > self.p else 1)

    def evicted(self, page: Page) -> None:
        (self.b2 if page.queue else self.b1)[page.number] = True

    def entered(self) -> None:
        for number in self.pages:
            self.b1.pop(number, None)
            self.b2.pop(number, None)
        while self.b1 and self.size(0) + len(self.b1) > self.capacity:
            self.b1.popitem(last=False)
        while self.b2 and len(self.pages) + len(self.b1) + len(self.b2) > 2 * self.capacity:
            self.b2.popitem(last=False)


class S3FIFOModel(Model):
    filling = True

    def hit(self, mark: Any) -> Any:
        return mark[0], mark[1], min(mark[2] + 1, 3)

    def enter(self, ghost: Any) -> Any:
        full = self.filling and self.size(0) >= self.capacity // 10
        return int(ghost is not None or full), self.clock, 0

    def choose(self) -> Page:
        self.filling = False
        while True:
            page = self.first_of(1 if self.size(1) > self.capacity - self.capacity // 10 else 0)
            if page.value < (1 if page.queue else 2):
                return page
            self.move(page, (1, self.end(), page.value - 1 if page.queue else 0))

    def evicted(self, page: Page) -> None:
        if page.queue == 0:
            self.remember(self.ghosts, page, 0.9 * self.capacity)


class SieveModel(Model):
    hand, lap = 0, 1

    def hit(self, mark: Any) -> Any:
        return 0, mark[1], (True, mark[2][1])

    def enter(self, ghost: Any) -> Any:
        return 0, self.clock, (False, 0)

    def choose(self) -> Page:
        while True:
            ahead = [
                page for page in self.leaves if page.place > self.hand or page.place == self.hand and page.value[1] != self.lap
            ]
            if not ahead:
                self.hand, self.lap = 0, self.lap + 1
                continue
            page = min(ahead, key=lambda page: page.place)
            self.hand = page.place
            if not page.value[0]:
                return page
            self.move(page, (0, page.place, (False, self.lap)))


class MQModel(Model):
    def tick(self, pages: int) -> int:
        return 3 * pages

    def mark(self, uses: int) -> Any:
        return min(len(f"{uses:b}") - 1, 2), self.clock, uses

    def hit(self, mark: Any) -> Any:
        return self.mark(mark[2] + 1)

    def enter(self, ghost: Any) -> Any:
        return self.mark(1 + (ghost or 0))

    def choose(self) -> Page:
        for queue in (2, 1):
            while (page := self.first(queue)) and page.place + 27 < self.clock:
                self.move(page, (queue - 1, page.place + 28, page.value))
        return self.first_of(0)

    def evicted(self, page: Page) -> None:
        self.remember(self.ghosts, page, 4 * self.capacity, page.value)


class WTinyLFUModel(Model):
    requested = epoch = 0

    def tick(self, pages: int) -> int:
        self.requested += pages
        self.epoch = self.requested // (10 * self.capacity)
        return 1

    def frequency(self, value: Any) -> int:
        uses: int = value[0] // 2 ** (self.epoch - value[1])
        return uses

    def hit(self, mark: Any) -> Any:
        return 2 if mark[0] else 0, self.clock, (min(self.frequency(mark[2]) + 1, 15), self.epoch)

    def enter(self, ghost: Any) -> Any:
        return self.hit((0, 0, ghost or (0, self.epoch)))

    def choose(self) -> Page:
        window = max(1, self.capacity // 4)
        while True:
            self.demote(2, 1, 0.8 * (self.capacity - window))
            candidate = self.first(0) if self.size(0) + self.left + 1 > window else None
            best = self.first(1) or self.first(2)
            if candidate is None:
                return best or self.first_of(0)
            if best is None or self.frequency(candidate.value) <= self.frequency(best.value):
                return candidate
            self.move(candidate, (1, self.end(), candidate.value))

    def evicted(self, page: Page) -> None:
        self.remember(self.ghosts, page, 10 * self.capacity, page.value)

    def arrives(self) -> None:
        if not self.left:
            self.demote(0, 1, max(1, self.capacity // 4))


class SizedSLRUModel(Model):
    def hit(self, mark: Any) -> Any:
        return 1, self.clock, mark[2] + 1

    def enter(self, ghost: Any) -> Any:
        return 0, self.clock, 1

    def choose(self) -> Page:
        self.demote(1, 0, 0.5 * self.capacity)
        return self.first_of(0)
