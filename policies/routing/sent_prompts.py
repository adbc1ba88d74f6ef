"""What a router without reports believes that each engine has cached: the prompts that it has sent there lately."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

from kvsim.pages.extent_counts import PageCounts
from kvsim.pages.extents import Extent, count_pages, drop_last_pages, last_pages

NOBODY: Final[dict[int, int]] = {}


class Believed:
    """The prompts of one engine, the one sent there least recently first."""

    def __init__(self) -> None:
        self.prompts: OrderedDict[int, tuple[float, tuple[Extent, ...]]] = OrderedDict()
        """By last page, which stands for all of a prompt: when it was last sent, and its pages."""
        self.counts = PageCounts()
        """How many of these prompts have each page."""


class SentPrompts:
    """Prompts by engine, of which the least recently sent are forgotten: page by page from their ends when an engine has too many
    pages, as a whole after some time.

    A page is remembered as long as any prompt with it. To remember a prompt takes time in proportion to its extents, on average.
    """

    def __init__(self, engines: Sequence[int], max_pages: "Mapping[int, int | None]", ttl_s: float = inf) -> None:
        """``max_pages`` are the most pages of each engine; None: unlimited. A prompt is forgotten after ``ttl_s`` seconds."""
        self._max_pages = max_pages
        self._ttl_s = ttl_s
        self._believed = {engine: Believed() for engine in engines}
        self._first: dict[int, dict[int, int]] = {}
        """By first page: of how many prompts each engine has that begin with it."""

    def pages(self, engine: int) -> int:
        """Return how many pages are remembered of an engine."""
        return self._believed[engine].counts.pages

    def matches(self, extents: tuple[Extent, ...], now: float) -> dict[int, int]:
        """Return how many leading pages of a path have been sent to each engine that has any of them."""
        found: dict[int, int] = {}
        for engine in list(self._first.get(extents[0][0], NOBODY)) if extents else []:
            self._expire(engine, now)
            pages = self._believed[engine].counts.leading(extents)
            if pages:
                found[engine] = pages
        return found

    def add(self, extents: tuple[Extent, ...], engine: int, now: float) -> None:
        """Remember that a path was sent to an engine, as much of its beginning as there is room for."""
        if not extents:
            return
        most = self._max_pages[engine]
        if most is not None and (surplus := count_pages(extents) - most) > 0:
            extents = drop_last_pages(extents, surplus)
        self._expire(engine, now)
        believed = self._believed[engine]
        last = sum(extents[-1]) - 1
        if last in believed.prompts:
            believed.prompts[last] = now, extents
            believed.prompts.move_to_end(last)
            return
        self._remember(engine, extents, now)
        if most is not None:
            while believed.counts.pages > most:
                self._shorten(engine, believed.counts.pages - most)

    def victims(self, engine: int, pages: int) -> list[tuple[int, tuple[Extent, ...]]]:
        """Return what would be forgotten to make room for ``pages`` pages more, as (pages before it in its prompt, its pages)."""
        most, believed = self._max_pages[engine], self._believed[engine]
        missing = 0 if most is None else believed.counts.pages + pages - most
        found: list[tuple[int, tuple[Extent, ...]]] = []
        passed: list[tuple[int, tuple[float, tuple[Extent, ...]]]] = []
        while missing > 0 and believed.prompts:
            last, entry = believed.prompts.popitem(last=False)
            passed.append((last, entry))
            gone = min(missing, believed.counts.remove(entry[1]))
            if gone:
                found.append((count_pages(entry[1]) - gone, last_pages(entry[1], gone)))
                missing -= gone
        for last, entry in reversed(passed):
            believed.counts.add(entry[1])
            believed.prompts[last] = entry
            believed.prompts.move_to_end(last, last=False)
        return found

    def forget(self, engine: int) -> None:
        """Forget all prompts of an engine."""
        believed = self._believed[engine]
        while believed.prompts:
            self._drop_oldest(engine)

    def _expire(self, engine: int, now: float) -> None:
        prompts = self._believed[engine].prompts
        while prompts and next(iter(prompts.values()))[0] + self._ttl_s <= now:
            self._drop_oldest(engine)

    def _shorten(self, engine: int, missing: int) -> None:
        """Forget the oldest prompt, or as much of its end as leaves ``missing`` pages less."""
        believed = self._believed[engine]
        before = believed.counts.pages
        sent_s, extents = self._drop_oldest(engine)
        if before - believed.counts.pages > missing:
            kept = drop_last_pages(extents, missing)
            last = sum(kept[-1]) - 1
            if last not in believed.prompts:
                self._remember(engine, kept, sent_s)
                believed.prompts.move_to_end(last, last=False)

    def _remember(self, engine: int, extents: tuple[Extent, ...], now: float) -> None:
        believed = self._believed[engine]
        believed.prompts[sum(extents[-1]) - 1] = now, extents
        believed.counts.add(extents)
        engines = self._first.setdefault(extents[0][0], {})
        engines[engine] = engines.get(engine, 0) + 1

    def _drop_oldest(self, engine: int) -> tuple[float, tuple[Extent, ...]]:
        believed = self._believed[engine]
        _, (sent_s, extents) = believed.prompts.popitem(last=False)
        believed.counts.remove(extents)
        first = extents[0][0]
        engines = self._first[first]
        engines[engine] -= 1
        if not engines[engine]:
            del engines[engine]
            if not engines:
                del self._first[first]
        return sent_s, extents
