"""The policies' rules again, for single pages: each is a line or two, and shares nothing with the policies themselves.

An eviction rule gives a page's rank in a tier: the least rank leaves first. A placement rule says what one edge copies down.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from kvsim.core.request import Request


class Page:
    """A page that some tier has, or is about to get. Facts without a tier are shared by all tiers."""

    def __init__(self, number: int, parent: "Page | None", now: float, tiers: int) -> None:
        self.number = number
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 1
        """Pages of the prompt up to and including this one."""
        self.children: set[Page] = set()
        self.hits = 1
        self.created = self.used = now
        self.finished: tuple[Request, float] | None = None
        """The last finished request that used the page, and when it finished."""
        self.priority = -inf
        """The highest priority of its finished requests."""
        self.here = [False] * tiers
        """Whether each tier has the page."""
        self.coming = [False] * tiers
        """Whether the page is on its way down to each tier."""
        self.uses: list[list[float]] = [[] for _ in range(tiers)]
        """For each tier, when the page was used since it came there; first of all, its last use before it came."""
        self.level = [0.0] * tiers
        """For each tier, the level that its victims had reached when the page came there or was last used there."""

    def is_due(self, tier: int) -> bool:
        """Whether the tier has the page or is about to get it."""
        return self.here[tier] or self.coming[tier]


# --- eviction --------------------------------------------------------------------------------------------------------


class Ranking(NamedTuple):
    """Which pages leave a tier first: those of the least rank. With ``ages`` it begins with H, which sets the tier's level."""

    rank: Callable[[Page, int, float], Any]
    """Called with a page, the index of its tier, and the time."""
    ages: bool = False
    finished: Callable[[Request, Sequence[Page], float], None] = lambda request, path, now: None
    """Told of each request that has finished, before its pages are free to go."""


LRU = Ranking(lambda page, tier, now: page.used)
MRU = Ranking(lambda page, tier, now: -page.used)
FIFO = Ranking(lambda page, tier, now: page.created)
FILO = Ranking(lambda page, tier, now: -page.created)
LFU = Ranking(lambda page, tier, now: (page.hits, page.used))
SLRU = Ranking(lambda page, tier, now: (page.hits >= 2, page.used))
LENGTH_AWARE = Ranking(lambda page, tier, now: (page.hits, -page.depth, page.used))
LFU_DA = Ranking(lambda page, tier, now: (page.level[tier] + page.hits, page.used), ages=True)
PRIORITY = Ranking(lambda page, tier, now: (page.priority if page.finished else inf, page.used))


def lru_k(k: int) -> Ranking:
    return Ranking(lambda page, tier, now: (page.uses[tier][-k] if len(page.uses[tier]) >= k else -inf, page.used))


def gdsf(s_per_byte: Callable[[int], float]) -> Ranking:
    """``s_per_byte``: seconds per byte to compute the page that ends at the given depth."""
    return Ranking(lambda page, tier, now: (page.level[tier] + page.hits * s_per_byte(page.depth), page.used), ages=True)


def tail_latency(threshold: int, estimate: int, page_tokens: int) -> Ranking:
    def rank(page: Page, tier: int, now: float) -> tuple[bool, float]:
        if not page.finished:
            return True, page.used
        request, _ = page.finished
        needed = max(request.prompt_tokens + request.output_tokens + estimate - threshold, 0)
        return (page.depth - 1) * page_tokens < needed, page.used

    return Ranking(rank)


def ttl(ttl_s: float) -> Ranking:
    def rank(page: Page, tier: int, now: float) -> tuple[bool, float]:
        if not page.finished:
            return True, page.used
        request, finished_s = page.finished
        return request.session >= 0 and finished_s + ttl_s > now, page.used

    return Ranking(rank)


def session_aware() -> Ranking:
    latest: dict[int, int] = {}

    def finished(request: Request, path: Sequence[Page], now: float) -> None:
        latest[request.session] = request.index

    def rank(page: Page, tier: int, now: float) -> tuple[bool, float]:
        if not page.finished:
            return True, page.used
        request, _ = page.finished
        return request.session >= 0 and latest[request.session] == request.index, page.used

    return Ranking(rank, finished=finished)


def retention(default: int, page_tokens: int) -> Ranking:
    said: dict[Page, tuple[float, float]] = {}

    def at(page: Page, now: float) -> tuple[float, float]:
        """Its priority, and since when that is the default again."""
        priority, until_s = said.get(page, (default, inf))
        return (priority, -inf) if until_s > now else (default, until_s)

    def finished(request: Request, path: Sequence[Page], now: float) -> None:
        for page in path:
            first = (page.depth - 1) * page_tokens
            found = [one for one in request.retention if one.begin <= first < one.end]
            said[page] = (found[0].priority, now + found[0].duration_s) if found else (at(page, now)[0], inf)

    def rank(page: Page, tier: int, now: float) -> tuple[float, float, float]:
        if page not in said:
            return inf, page.used, page.used
        priority, since_s = at(page, now)
        return priority, max(since_s, page.used), page.used

    return Ranking(rank, finished=finished)


# --- placement -------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Placement:
    """What one edge does; by default nothing. Each function is asked with the edge's lower tier."""

    after_eviction: Callable[[Page, int], bool] = lambda page, lower: False
    """Whether a page that leaves the upper tier, and that no other has, moves down."""
    after_use: Callable[[Page, int], bool] | None = None
    """Whether a page is copied down now that a request has used it or it has come to the upper tier from above."""
    wanted_pages: Callable[[Request, Sequence[Page], int], int] | None = None
    """How many pages of a computed prompt are copied down, instead of asking for each one."""
    on_request: Callable[[Sequence[Page]], None] = lambda path: None
    """Told of each prompt that has been computed."""
    keeps_loaded: bool = True
    """Whether a page that was brought up stays in the lower tier."""
    watermark: float = 0.0
    """Share of the upper tier that may be full of pages without a copy; 0: all of it."""


def write_back(watermark: float = 0.0) -> Placement:
    return Placement(after_eviction=lambda page, lower: True, watermark=watermark)


def exclusive() -> Placement:
    return Placement(after_eviction=lambda page, lower: True, keeps_loaded=False)


def write_through() -> Placement:
    return Placement(after_use=lambda page, lower: True)


def write_through_selective(hits: int) -> Placement:
    return Placement(after_use=lambda page, lower: page.hits >= hits)


def cost_aware(first_page: int) -> Placement:
    """Keeps pages that at least ``first_page`` others precede, and pages with something after them in the lower tier."""
    return Placement(
        after_eviction=lambda page, lower: page.depth > first_page or any(child.is_due(lower) for child in page.children)
    )


def by_length(min_tokens: int, page_tokens: int) -> Placement:
    return Placement(
        wanted_pages=lambda request, path, lower: (
            (request.prompt_tokens - 1) // page_tokens if request.prompt_tokens >= min_tokens else 0
        )
    )


def store_threshold(k: int, tracker_pages: int) -> Placement:
    offers: dict[int, int] = {}
    """How often pages were offered, by number; the page that was offered last stands last."""

    def count(path: Sequence[Page]) -> None:
        numbers = [page.number for page in path]
        known = [number for number in numbers if number in offers]
        new = [number for number in numbers if number not in offers][: max(0, tracker_pages - len(known))]
        for number in known + new:
            offers[number] = offers.pop(number, 0) + 1
        while len(offers) > tracker_pages:
            del offers[next(iter(offers))]

    def wanted(request: Request, path: Sequence[Page], lower: int) -> int:
        for at, page in enumerate(path):
            if not page.is_due(lower) and k >= 2 and offers.get(page.number, 0) < k:
                return at
        return len(path)

    return Placement(wanted_pages=wanted, on_request=count)
