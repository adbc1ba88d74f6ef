"""What a replay hits, page by page: slow, obvious, and nothing in common with the core but the rules.

A page is a leaf of a tier if it is there and none of its children is. Only leaves that nothing pins leave, the least by rank
first and among equals the deepest. Pinning a page in a tier also pins all pages before it there. What is decided to move
down takes its room at once, but arrives, and can be evicted again, only when the operation that decided it ends (``land``).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from heapq import heapify, heappop, heappush
from math import inf, nextafter
from typing import Any, NamedTuple

from kvsim.core.request import Request
from kvsim.engine.job import LEAP_STEPS
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy
from tests.core.page_rules import Page, Placement, Ranking
from tests.workloads import pages_of

GPU, CPU, DISK = range(3)
Hits = tuple[int, int, int]


class Edge(NamedTuple):
    """A tier and one below it."""

    upper: int
    lower: int
    placement: Placement


class Held:
    """An unfinished request: its path, which it pins on the GPU, and how many slots it holds there beside it."""

    def __init__(self, request: Request, path: list[Page], slots: int) -> None:
        self.request = request
        self.path = path
        self.slots = slots


class PageModel:
    """Serves requests; the oldest of ``in_flight`` unfinished ones ends when another one comes, or for its room.

    Tiers are numbered as GPU, CPU and DISK; one of capacity 0 does not exist. ``edges`` stand from the top down, and if one
    tier has two below it, in the order in which its victims are offered to them.
    """

    def __init__(
        self, capacities: Sequence[float], rankings: Sequence[Ranking], edges: Sequence[Edge], *, prefetch: PrefetchPolicy,
        page_tokens: int = 1, recompute_last_token: bool = False, in_flight: int = 1, hold_output: bool = False,
    ) -> None:  # fmt: skip
        self.capacities = capacities
        self.rankings = rankings
        self.edges = edges
        self.edge_above = {edge.lower: edge for edge in edges}
        self.prefetch = prefetch
        self.page_tokens = page_tokens
        self.recompute_last_token = recompute_last_token
        self.in_flight = in_flight
        self.hold_output = hold_output
        self.now = -inf
        self.pages: dict[int, Page] = {}
        tiers = range(len(capacities))
        self.on: list[dict[Page, None]] = [{} for _ in tiers]
        """The pages that each tier has."""
        self.coming: list[list[Page]] = [[] for _ in tiers]
        """What has its room in each tier and arrives when the operation ends, in the order of arrival."""
        self.for_prompt: set[Page] = set()
        """Those of ``coming`` that were offered as a request's prompt, not sent by a watermark or to make room for an answer."""
        self.leaving: list[list[Page]] = [[] for _ in tiers]
        """By the tier below: what has left a tier in the pass under way, first the one that left first."""
        self.kept: list[list[Page]] = [[] for _ in tiers]
        """What is pinned in each tier for the moment."""
        self.fetched: list[Page] = []
        """What was fetched into the CPU tier for a request that has not been admitted yet."""
        self.live: list[Held] = []
        self.landing: Held | None = None
        """The request that brought about what is on its way down between two operations: it has no answer to compute."""
        self.level = [0.0 for _ in tiers]
        """The H of each tier's last victim."""
        self.inserted = [0 for _ in tiers]
        self.evicted = [0 for _ in tiers]
        self.inserted_when_looked = [0 for _ in edges]
        self.dropped_pages = self.no_room_pages = 0

    # --- requests ----------------------------------------------------------------------------------------------------

    def play(self, requests: Iterable[Request]) -> list[Hits | None]:
        """Serve all requests and finish them. None for one that can never run."""
        rows = [self.serve(request) for request in requests]
        while self.live:
            self.finish_oldest()
        return rows

    def serve(self, request: Request) -> Hits | None:
        """The request's hit pages by the tier that they came from."""
        if len(self.live) == self.in_flight:
            self.finish_oldest()
        numbers = pages_of(request.runs)
        if self.pages_of(request, request.prompt_tokens + request.output_tokens) > self.capacities[GPU]:
            while self.live:
                self.finish_oldest()
            return None
        self.land_prompt()
        fetched = self.fetch(request, numbers)
        while (hits := self.run(request, numbers, *fetched)) is None and self.live:
            self.finish_oldest()
        self.fetched = []
        return hits

    def pages_of(self, request: Request, tokens: int) -> int:
        """Pages that a request holds on the GPU with ``tokens`` tokens there."""
        return max(request.prompt_pages, -(-tokens // self.page_tokens)) if self.hold_output else request.prompt_pages

    def finish_oldest(self) -> None:
        held = self.live.pop(0)
        for page in held.path:
            page.finished = held.request, self.now
            page.priority = max(page.priority, held.request.priority)
        for ranking in self.rankings:
            ranking.finished(held.request, held.path, self.now)
        for edge in self.edges:
            if edge.placement.watermark:
                self.copy_early(edge)
        self.land_prompt()

    def land_prompt(self) -> None:
        """End what was left to land."""
        held, self.landing = self.landing, None
        self.land(held)

    def match(self, request: Request, numbers: list[int]) -> tuple[list[Page], list[Page]]:
        """The longest prefix that can be reused: what is on the GPU, then what only lower tiers have."""
        if self.recompute_last_token:
            numbers = numbers[: (request.prompt_tokens - 1) // self.page_tokens]
        found: list[Page] = []
        for number in numbers:
            if number not in self.pages:
                break
            found.append(self.pages[number])
        return [page for page in found if page.here[GPU]], [page for page in found if not page.here[GPU]]

    @staticmethod
    def source(page: Page) -> int:
        """The tier from which a page would be loaded."""
        return page.here.index(True)

    def leading_cpu_pages(self, lower: list[Page]) -> int:
        """How many pages of the lower tiers' part of a match come before the first that only the disk has."""
        sources = [self.source(page) for page in lower]
        return sources.index(DISK) if DISK in sources else len(sources)

    def fetch(self, request: Request, numbers: list[int]) -> tuple[int, int]:
        """Read ahead for a request that arrives. Returns where in its prompt the fetch began, and how many pages came."""
        on_gpu, lower = self.match(request, numbers)
        stored = [page for page in lower if self.source(page) == DISK]
        if not stored or self.edge_above[DISK].upper != CPU:
            return 0, 0
        first_page = len(on_gpu) + self.leading_cpu_pages(lower)
        with self.keeping(CPU, on_gpu + lower):
            room = int(min(self.room(CPU), 1e9))
        offer = Offer(
            request=request,
            first_page=first_page,
            stored_pages=len(stored),
            in_flight_pages=0,
            available_pages=room,
            queued_s=0.0,
        )
        wanted = self.prefetch.fetch(offer)
        if not isinstance(wanted, int) or not wanted:
            return 0, 0
        with ExitStack() as pins:
            for tier in range(len(self.capacities)):
                pins.enter_context(self.keeping(tier, on_gpu + lower))
            fetched = stored[:wanted]
            if fetched:
                now = self.tick(request)
                for page in self.line(fetched[-1]):
                    page.used = now
                self.read_disk(fetched)
        for page in fetched:
            self.drop_copies_below(page, CPU)
        self.fetched = fetched
        return first_page, len(fetched)

    def run(self, request: Request, numbers: list[int], first_page: int, fetched_pages: int) -> Hits | None:
        """From admission to the last computed page. None, and nothing has changed, if the GPU has no room."""
        on_gpu, lower = self.match(request, numbers)
        load_pages = 0
        if lower:
            leading = self.leading_cpu_pages(lower)
            load_pages = self.prefetch.load(request, len(on_gpu), leading, len(lower) - leading)
        missing = self.pages_of(request, request.prompt_tokens) - len(on_gpu)
        with self.keeping(GPU, on_gpu):
            if self.pages_of(request, request.prompt_tokens + request.output_tokens) - len(on_gpu) > self.room(GPU):
                return None
        held = Held(request, list(on_gpu), 0)
        self.live.append(held)
        loaded = self.load(held, lower[:load_pages], missing)
        self.compute(held, numbers)
        disk_pages = loaded.count(DISK)
        if fetched_pages:
            cpu_end = len(on_gpu) + len(loaded) - disk_pages
            disk_pages += max(0, min(first_page + fetched_pages, cpu_end) - max(first_page, len(on_gpu)))
        return len(on_gpu), len(loaded) - disk_pages, disk_pages

    def load(self, held: Held, wanted: list[Page], missing: int) -> list[int]:
        """Admit a request: make room on the GPU, and load the first of the ``wanted`` pages. Returns their sources."""
        now = self.tick(held.request)
        for page in held.path + wanted:
            page.hits, page.used = page.hits + 1, now
            for tier in range(len(self.capacities)):
                if page.here[tier]:
                    page.uses[tier].append(now)
                    page.level[tier] = self.level[tier]
        with ExitStack() as pins:
            for edge in self.edges:
                pins.enter_context(self.keeping(edge.lower, wanted))
            self.make_room(GPU, missing)
            self.land_first()
            held.slots = missing
            sources = [self.source(page) for page in wanted]
            if DISK in sources and self.edge_above[DISK].upper == CPU:
                on_disk = [at for at, source in enumerate(sources) if source == DISK]
                fits = int(min(self.room(CPU), len(on_disk)))
                if fits < len(on_disk):
                    del wanted[on_disk[fits] :], sources[on_disk[fits] :]
                self.read_disk([wanted[at] for at in on_disk[:fits]])
            self.fetched = []
            self.land()
            for page in wanted:
                self.take_slot(held, page)
        for page, source in zip(wanted, sources, strict=True):
            if source == DISK and self.edge_above[DISK].upper == CPU:
                self.drop_copies_below(page, CPU)
            self.drop_copies_below(page, GPU)
        return sources

    def read_disk(self, pages: list[Page]) -> None:
        """Bring pages that only the disk has to the CPU tier, which can make room for them."""
        self.make_room(CPU, len(pages))
        self.land()
        for page in pages:
            self.put(page, CPU)

    def compute(self, held: Held, numbers: list[int]) -> None:
        """The rest of the prompt is computed. Then the tiers below are offered the whole of it."""
        now, path = self.tick(held.request), held.path
        for number in numbers[len(path) :]:
            page = self.pages.get(number)
            if page is None:
                page = self.pages[number] = Page(number, path[-1] if path else None, now, len(self.capacities))
                if page.parent:
                    page.parent.children.add(page)
            page.used = now
            self.take_slot(held, page)
            self.drop_copies_below(page, GPU)
        for edge in self.edges:
            edge.placement.on_request(path)
        for edge in self.edges:
            self.offer(edge, path, held)
        self.for_prompt = {page for tier in self.coming for page in tier}
        self.answer(held)

    def answer(self, held: Held) -> None:
        """Take the answer's pages, those of each leap as it begins; what is on its way down arrives during the first one.

        A request that runs alone decodes in one leap.
        """
        request = held.request
        if request.output_tokens < 2:
            self.landing = held if any(self.coming) else None
            return
        end = request.prompt_tokens + max(0, request.output_tokens - 1)
        pages = self.pages_of(request, request.prompt_tokens)
        leap = LEAP_STEPS if len(self.live) > 1 else end
        for tokens in (*range(request.prompt_tokens + leap, end, leap), end):
            more, pages = self.pages_of(request, tokens) - pages, self.pages_of(request, tokens)
            self.make_room(GPU, more)
            held.slots += more
            self.land(held)

    def take_slot(self, held: Held, page: Page) -> None:
        """The next page of a request's path is on the GPU now, in one of the request's slots unless it was there already."""
        held.slots -= 1
        held.path.append(page)
        if not page.here[GPU]:
            self.put(page, GPU)

    def drop_copies_below(self, page: Page, tier: int) -> None:
        """A page has come to a tier: tiers below that keep no second copy give theirs up."""
        for edge in self.edges:
            if edge.upper == tier and not edge.placement.keeps_loaded:
                if page.here[edge.lower] and page not in self.pinned(edge.lower):
                    self.take_away(page, edge.lower)
                self.drop_copies_below(page, edge.lower)

    def tick(self, request: Request) -> float:
        """The time of the request, or the next later moment if that has been used."""
        self.now = request.arrival_s if request.arrival_s > self.now else nextafter(self.now, inf)
        return self.now

    # --- room --------------------------------------------------------------------------------------------------------

    def put(self, page: Page, tier: int) -> None:
        """The page is in the tier from now on."""
        page.here[tier] = True
        page.uses[tier] = [page.used]
        page.level[tier] = self.level[tier]
        self.on[tier][page] = None
        self.inserted[tier] += 1

    def take_away(self, page: Page, tier: int) -> None:
        page.here[tier] = False
        del self.on[tier][page]
        self.evicted[tier] += 1

    def free(self, tier: int) -> float:
        """Free slots."""
        held = sum(held.slots for held in self.live) if tier == GPU else 0
        return self.capacities[tier] - len(self.on[tier]) - len(self.coming[tier]) - held

    def room(self, tier: int) -> float:
        """Slots that are free or can be freed."""
        pinned = self.pinned(tier)
        return self.free(tier) + sum(page not in pinned for page in self.on[tier])

    def pinned(self, tier: int) -> set[Page]:
        """What must stay in a tier: requests' paths, what was fetched for one that waits, what is kept for the moment, all above
        what is to arrive there, and what is being copied down from there."""
        pinned: set[Page] = set()
        running = [page for held in self.live for page in held.path] if tier == GPU else []
        running += self.fetched if tier == CPU else []
        copied = [page for edge in self.edges if edge.upper == tier for page in self.coming[edge.lower] if page.here[tier]]
        for page in (*running, *self.kept[tier], *self.coming[tier], *self.leaving[tier], *copied):
            for above in self.line(page):
                if above in pinned:
                    break
                pinned.add(above)
        return pinned

    @staticmethod
    def line(page: Page | None) -> Iterator[Page]:
        """A page and all above it, upwards."""
        while page is not None:
            yield page
            page = page.parent

    @contextmanager
    def keeping(self, tier: int, pages: Sequence[Page]) -> Iterator[None]:
        """Pin pages in a tier for the moment."""
        before = self.kept[tier]
        self.kept[tier] = [*before, *pages]
        yield
        self.kept[tier] = before

    def victims(self, tier: int) -> Iterator[Page]:
        """The pages of a tier in the order in which they leave if each one leaves when it is seen."""
        pinned, seen = self.pinned(tier), set()
        parents = {page.parent for page in (*self.on[tier], *self.coming[tier])}
        leaves = [self.place_in_line(page, tier) for page in self.on[tier] if page not in parents and page not in pinned]
        heapify(leaves)
        while leaves:
            page = heappop(leaves)[-1]
            if not page.here[tier]:
                continue
            seen.add(page)
            yield page
            above = page.parent
            if above is None or not above.here[tier] or above in pinned:
                continue
            if not any(child.is_due(tier) and child not in seen for child in above.children):
                heappush(leaves, self.place_in_line(above, tier))

    def place_in_line(self, page: Page, tier: int) -> tuple[Any, int, int, Page]:
        return self.rankings[tier].rank(page, tier, self.now), -page.depth, page.number, page

    def make_room(self, tier: int, wanted: float) -> None:
        """Evict until ``wanted`` slots are free, which must be possible. A victim without another copy moves down or is lost."""
        below = [edge for edge in self.edges if edge.upper == tier]
        victims = self.victims(tier)
        while self.free(tier) < wanted:
            page = next(victims)
            if self.rankings[tier].ages:
                self.level[tier] = self.rankings[tier].rank(page, tier, self.now)[0]
            edge = None
            if not any(there for other, there in enumerate(page.here) if other != tier) and not any(page.coming):
                edge = next((edge for edge in below if edge.placement.after_eviction(page, edge.lower)), None)
                if edge is None:
                    self.drop(page)
                    continue
            self.take_away(page, tier)
            if edge is not None:
                self.leaving[edge.lower].append(page)
                page.coming[edge.lower] = True
        for edge in below:
            self.place(edge)

    def place(self, edge: Edge) -> None:
        """Make room below for what leaves a tier; while there is none for all of it, drop what left first."""
        leaving, lower = self.leaving[edge.lower], edge.lower
        while len(leaving) > self.room(lower):
            self.no_room_pages += 1
            self.drop(leaving[0])
        if leaving:
            self.make_room(lower, len(leaving))
        self.coming[lower] += reversed(leaving)
        leaving.clear()

    def drop(self, page: Page) -> None:
        """The page and everything after it is nowhere from now on."""
        for child in list(page.children):
            self.drop(child)
        for tier in range(len(self.capacities)):
            if page.here[tier]:
                self.take_away(page, tier)
            if page.coming[tier]:
                (self.leaving[tier] if page in self.leaving[tier] else self.coming[tier]).remove(page)
        self.dropped_pages += 1
        del self.pages[page.number]
        if page.parent:
            page.parent.children.discard(page)

    # --- copies to the tiers below -----------------------------------------------------------------------------------

    def offer(self, edge: Edge, pages: Sequence[Page], held: Held | None) -> None:
        """Decide what of these pages, parents first, is copied down; ``held`` is the request whose prompt was computed."""
        placement, lower = edge.placement, edge.lower
        if placement.after_use:
            self.copy(edge, pages, self.pages_to_copy(edge, pages), in_part=True)
        elif placement.wanted_pages and held:
            wanted = placement.wanted_pages(held.request, held.path, lower)
            copies = []
            for page in held.path[:wanted]:
                if page.coming[edge.upper] and not page.is_due(lower):
                    break
                if page.here[edge.upper] and not page.is_due(lower):
                    copies.append(page)
            self.copy(edge, held.path, copies, in_part=False)

    def pages_to_copy(self, edge: Edge, pages: Sequence[Page]) -> list[Page]:
        """The pages that the placement wants below, except those that would overtake a parent that waits in the upper tier."""
        assert edge.placement.after_use is not None
        copies: list[Page] = []
        for page in pages:
            parent = page.parent
            if not page.here[edge.upper] or page.is_due(edge.lower) or not edge.placement.after_use(page, edge.lower):
                continue
            if parent and parent.here[edge.upper] and not parent.is_due(edge.lower) and parent not in copies:
                continue
            copies.append(page)
        return copies

    def copy(self, edge: Edge, path: Sequence[Page], copies: list[Page], *, in_part: bool) -> None:
        """Copy pages down, which leaves ``path`` where it is. Without room for all: the first into free slots, or none."""
        lower = edge.lower
        with self.keeping(lower, path):
            if len(copies) <= self.room(lower):
                self.make_room(lower, len(copies))
                fits = len(copies)
            else:
                fits = int(self.free(lower)) if in_part else 0
        self.no_room_pages += len(copies) - fits
        self.send(copies[:fits], lower)

    def send(self, pages: list[Page], tier: int) -> None:
        """Pages are on their way down."""
        for page in pages:
            page.coming[tier] = True
        self.coming[tier] += pages

    def copy_early(self, edge: Edge) -> None:
        """Look at pages as if they left, until the watermark's share would be free, and copy down those without a copy."""
        upper, lower, placement = edge.upper, edge.lower, edge.placement
        ready, wanted = self.free(upper), (1 - placement.watermark) * self.capacities[upper]
        at = self.edges.index(edge)
        if ready >= wanted or self.inserted[upper] - self.inserted_when_looked[at] < wanted / 2:
            return
        self.inserted_when_looked[at] = self.inserted[upper]
        copies: list[Page] = []
        for page in self.victims(upper):
            if ready >= wanted:
                break
            ready += 1
            if sum(page.here) + sum(page.coming) == 1 and placement.after_eviction(page, lower):
                copies.append(page)
        fits = len(copies)
        while fits:
            with self.keeping(lower, copies[:fits]):
                if fits <= self.room(lower):
                    self.make_room(lower, fits)
                    break
            fits -= 1
        self.no_room_pages += len(copies) - fits
        self.send(copies[:fits][::-1], lower)

    def land_first(self) -> None:
        """What is on its way down arrives, the lowest tier first; what follows from that is on its way then."""
        arriving, self.coming = self.coming, [[] for _ in self.capacities]
        for tier in reversed(range(len(self.capacities))):
            for page in arriving[tier]:
                page.coming[tier] = False
                self.put(page, tier)
            for edge in self.edges:
                if arriving[tier] and edge.upper == tier:
                    self.offer(edge, arriving[tier], None)

    def land(self, held: Held | None = None) -> None:
        """What is on its way down arrives, the lowest tier first, and is offered to the next tier below; then what follows from
        that. Pages that were copied for a prompt come first; only with them, the prompt is offered again."""
        for_prompt, self.for_prompt = self.for_prompt, set()
        for prompt, pages in ((held, for_prompt), (None, {page for tier in self.coming for page in tier} - for_prompt)):
            for tier in reversed(range(len(self.capacities))):
                arrived = [page for page in self.coming[tier] if page in pages]
                self.coming[tier] = [page for page in self.coming[tier] if page not in pages]
                for page in arrived:
                    page.coming[tier] = False
                    self.put(page, tier)
                for edge in self.edges:
                    if arrived and edge.upper == tier:
                        self.offer(edge, arrived, prompt)
        if any(self.coming):
            self.land()
