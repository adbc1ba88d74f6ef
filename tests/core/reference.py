"""What a cache of one or two tiers does, page by page: slow, obvious, and nothing in common with the core but the rules.

A page is a leaf of a tier if none of its children is there. Only unpinned leaves leave, the least by rank first, and among
equals the deepest. Nothing takes time. The CPU tier must be twice the GPU's size or more, so that what is written always fits.
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from kvsim.core.request import Request

GPU, CPU = 0, 1


class Page:
    """A page that is in some tier."""

    def __init__(self, parent: "Page | None", number: int) -> None:
        self.parent = parent
        self.number = number
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: set[Page] = set()
        self.tiers: set[int] = set()
        """Change it by ``SlowCache.put`` and ``take_away`` only."""
        self.pins = 0
        self.hits = 1
        self.created = self.used = 0

    def line(self) -> list["Page"]:
        """This page and all before it."""
        return [self, *self.parent.line()] if self.parent else [self]


RANKS: dict[str, Callable[[Page], Any]] = {
    "lru": lambda page: page.used,
    "fifo": lambda page: page.created,
    "lfu": lambda page: (page.hits, page.used),
    "slru": lambda page: (page.hits >= 2, page.used),
}


class SlowCache:
    """Serves requests one after another; the oldest of ``in_flight`` unfinished ones ends when another comes, or for its room."""

    def __init__(
        self, gpu: int, cpu: int = 0, *, policy: str = "lru", placement: str = "none", page_tokens: int = 1,
        recompute_last_token: bool = False, in_flight: int = 1, hold_output: bool = False,
    ) -> None:  # fmt: skip
        assert not cpu or cpu >= 2 * gpu
        self.capacities = (gpu, cpu)
        self.rank = RANKS[policy]
        self.placement = placement
        self.page_tokens = page_tokens
        self.recompute_last_token = recompute_last_token
        self.in_flight = in_flight
        self.hold_output = hold_output
        self.pages: dict[int, Page] = {}
        self.on: tuple[set[Page], set[Page]] = (set(), set())
        """The pages of each tier."""
        self.live: list[tuple[list[Page], int]] = []
        """Of each unfinished request, the pages that it pins and how many slots it holds besides."""
        self.clock = count(1)

    def serve(self, request: Request) -> tuple[int, int] | None:
        """Hit pages on the GPU and in the CPU tier; None if the request can never run."""
        if len(self.live) == self.in_flight:
            self.retire()
        numbers = [start + at for start, length in request.runs for at in range(length)]
        on_gpu, on_cpu = self.match(request, numbers)
        wanted = len(numbers)
        if self.hold_output:
            wanted = max(wanted, -(-(request.prompt_tokens + request.output_tokens) // self.page_tokens))
        while wanted - len(on_gpu) > self.obtainable(on_gpu):
            if not self.live:
                return None
            self.retire()
        now = next(self.clock)
        for page in on_gpu + on_cpu:
            page.hits, page.used, page.pins = page.hits + 1, now, page.pins + 1
        self.make_room_on_gpu(wanted - len(on_gpu), {above for page in on_cpu for above in page.line()})
        for page in on_cpu:
            self.put(page, GPU)
            if self.placement == "exclusive":
                self.take_away(page, CPU)
        computed = self.compute(numbers, len(on_gpu + on_cpu), next(self.clock))
        path = on_gpu + on_cpu + computed
        self.live.append((path, wanted - len(path)))
        if self.placement.startswith("write_through"):
            self.write_through(path)
        return len(on_gpu), len(on_cpu)

    def match(self, request: Request, numbers: list[int]) -> tuple[list[Page], list[Page]]:
        """The longest prefix that is somewhere: first what is on the GPU, then what only the CPU tier has."""
        if self.recompute_last_token:
            numbers = numbers[: (request.prompt_tokens - 1) // self.page_tokens]
        found: list[Page] = []
        for number in numbers:
            if number not in self.pages:
                break
            found.append(self.pages[number])
        return [page for page in found if GPU in page.tiers], [page for page in found if GPU not in page.tiers]

    def compute(self, numbers: list[int], done: int, now: int) -> list[Page]:
        """The pages after the first ``done`` are computed; those that are known get the time of it, but no hit."""
        computed = []
        for at in range(done, len(numbers)):
            page = self.pages.get(numbers[at])
            if page is None:
                parent = self.pages[numbers[at - 1]] if at else None
                page = self.pages[numbers[at]] = Page(parent, numbers[at])
                page.created = now
                if parent:
                    parent.children.add(page)
            self.put(page, GPU)
            page.used, page.pins = now, page.pins + 1
            computed.append(page)
        return computed

    def retire(self) -> None:
        """The oldest unfinished request ends."""
        path, _ = self.live.pop(0)
        for page in path:
            page.pins -= 1

    # --- room ---

    def put(self, page: Page, tier: int) -> None:
        page.tiers.add(tier)
        self.on[tier].add(page)

    def take_away(self, page: Page, tier: int) -> None:
        page.tiers.discard(tier)
        self.on[tier].discard(page)

    def free(self, tier: int) -> int:
        held = sum(held for _, held in self.live) if tier == GPU else 0
        return self.capacities[tier] - len(self.on[tier]) - held

    def obtainable(self, reused: list[Page]) -> int:
        """Slots that are free or could be freed for a request that reuses these pages."""
        return self.free(GPU) + sum(not page.pins for page in self.on[GPU].difference(reused))

    def leaving(self, tier: int, kept: Iterable[Page]) -> Iterable[Page]:
        """Pages of a tier in the order in which they leave, except those that are kept."""
        staying = set(kept) | {page for page in self.on[GPU] if tier == GPU and page.pins}
        kids = {page: sum(tier in child.tiers for child in page.children) for page in self.on[tier]}
        leaves = [self.entry(page) for page in kids if not kids[page] and page not in staying]
        heapify(leaves)
        while leaves:
            page = heappop(leaves)[-1]
            yield page
            parent = page.parent
            if parent in kids:
                kids[parent] -= 1
                if not kids[parent] and parent not in staying:
                    heappush(leaves, self.entry(parent))

    def entry(self, page: Page) -> tuple[Any, int, int, Page]:
        return self.rank(page), -page.depth, page.number, page

    def make_room_on_gpu(self, pages: int, loading: set[Page]) -> None:
        """Evict until so many slots are free; ``loading`` pages stay in the CPU tier."""
        missing = pages - self.free(GPU)
        written: list[Page] = []
        for page in self.leaving(GPU, ()) if missing > 0 else ():
            self.take_away(page, GPU)
            if not page.tiers and self.placement in ("write_back", "exclusive"):
                self.put(page, CPU)
                written.append(page)
            elif not page.tiers:
                self.forget(page)
            missing -= 1
            if not missing:
                break
        self.make_room_below(loading | {above for page in written for above in page.line()})

    def make_room_below(self, kept: set[Page]) -> None:
        """Bring the CPU tier back to its capacity."""
        if self.free(CPU) >= 0 or not self.capacities[CPU]:
            return
        for page in self.leaving(CPU, kept):
            self.take_away(page, CPU)
            if not page.tiers:
                self.forget(page)
            if self.free(CPU) >= 0:
                return
        raise AssertionError("the CPU tier is too small for this model")

    def forget(self, page: Page) -> None:
        """The page is nowhere: nothing after it can be used any more."""
        for child in list(page.children):
            for tier in tuple(child.tiers):
                self.take_away(child, tier)
            self.forget(child)
        del self.pages[page.number]
        if page.parent:
            page.parent.children.discard(page)

    def write_through(self, path: list[Page]) -> None:
        """Copy to the CPU tier what it lacks of a prompt, from the beginning on; what was written stays, and all above it."""
        least_hits = 2 if self.placement == "write_through_selective" else 1
        kept: set[Page] = set()
        for page, below in zip(path, [*path[1:], None], strict=True):
            if CPU not in page.tiers and page.hits >= least_hits and (page.parent is None or CPU in page.parent.tiers):
                self.put(page, CPU)
                kept |= set(page.line())
            if self.free(CPU) < 0 and (below is None or CPU in below.tiers):
                self.make_room_below(kept)
