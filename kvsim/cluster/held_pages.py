"""Which pages an engine holds, as a router learns it from the engine's reports of pages stored and dropped."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from kvsim.core.request import Request
from kvsim.core.tier import Tier
from kvsim.core.watch import Watch
from kvsim.pages.extent_counts import PageCounts
from kvsim.pages.extents import Extent, page_at, split_extents

NOBODY: Final[dict[int, None]] = {}


class Holders:
    """Which engines may hold the first page of a prompt.

    Every path that an engine stores belongs to a request that was sent to it, and a piece of a path that begins with its first
    page is the first of the path: whoever holds that page has reported such a piece.
    """

    def __init__(self) -> None:
        self._engines: dict[int, dict[int, None]] = {}
        """By first page of a path, of all requests that have been sent to an engine."""
        self._above: dict[int, tuple[int, ...]] = {}
        """By the number of a tier that engines share, these engines."""
        self._always: dict[int, None] = {}
        """Engines above tiers that do not tell of the first page of a path."""

    def share(self, number: int, engines: Sequence[int], *, tells_all: bool) -> None:
        """Let a number below 0 stand for a tier below the GPUs of these engines; whether that tells of every page."""
        self._above[number] = tuple(engines)
        if not tells_all:
            self._always.update(dict.fromkeys(engines))

    def expect(self, request: Request) -> None:
        """Heed reports of the first pages of what engines may store for a request, which is being sent to one of them.

        A path begins with the prompt or, if that has no full page, with an answer.
        """
        if request.runs:
            self._engines.setdefault(request.runs[0][0], {})
        if request.prompt_pages < 2:  # none of them full, or the only one may be partial
            for answer in (request.output_runs, *request.sample_output_runs):
                if answer:
                    self._engines.setdefault(answer[0][0], {})

    def of(self, request: Request) -> Collection[int]:
        """Return the numbers of the engines that hold the first page of a prompt, and of some that no longer do or will soon."""
        found = self._engines.get(request.runs[0][0], NOBODY) if request.runs else NOBODY
        if not self._above:
            return found
        engines = dict.fromkeys(self._always)
        for number in found:
            engines.update(dict.fromkeys(self._above[number] if number < 0 else (number,)))
        return engines

    def stored(self, engine: int, start: int) -> None:
        """An engine has stored a piece that begins with this page."""
        engines = self._engines.get(start)
        if engines is not None:
            engines[engine] = None

    def dropped(self, engine: int, start: int) -> None:
        """An engine does not hold this page any more."""
        engines = self._engines.get(start)
        if engines is not None:
            engines.pop(engine, None)


class HeldPages(Watch):
    """The pages ready in one tier, as they were ``staleness_s`` seconds ago.

    One of a tier's ``watches``. Reports arrive in the order in which they were sent, so what is known is always what the tier
    held at one moment.
    """

    def __init__(
        self,
        staleness_s: float = 0.0,
        clock: Callable[[], float] = lambda: 0.0,
        holders: Holders | None = None,
        engine: int = 0,
    ) -> None:
        """``clock`` returns the time in seconds; it is not read if ``staleness_s`` is 0. ``holders`` hear of the ``engine``."""
        self._holders = holders
        self._engine = engine
        self._staleness_s = staleness_s
        self._clock = clock
        self._held = PageCounts()
        self._under_way: deque[tuple[float, bool, tuple[Extent, ...]]] = deque()
        """Reports that have not arrived: (time of arrival, whether the pages are stored or dropped, the pages)."""

    @property
    def pages(self) -> int:
        """Pages known to be held, as of the last ``receive``."""
        return self._held.pages

    def extents(self) -> list[Extent]:
        """Return the pages known to be held, ascending, as of the last ``receive``."""
        return [(start, pages) for start, pages, _ in self._held.counted()]

    def stored(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        if self._holders is not None:
            self._holders.stored(self._engine, extents[0][0])
        if self._staleness_s:
            self._expect(True, extents)
        else:
            self._take(True, extents)

    def dropped(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        if self._staleness_s:
            self._expect(False, extents)
        else:
            self._take(False, extents)

    def _expect(self, is_stored: bool, extents: tuple[Extent, ...]) -> None:
        """Send a report; those that have arrived by now are taken in, so that none is kept for longer than it is under way."""
        now = self._clock()
        self.receive(now)
        self._under_way.append((now + self._staleness_s, is_stored, extents))

    def receive(self, now: float) -> None:
        """Take in the reports that have arrived by ``now``."""
        reports = self._under_way
        while reports and reports[0][0] <= now:
            _, is_stored, extents = reports.popleft()
            self._take(is_stored, extents)

    def _take(self, is_stored: bool, extents: tuple[Extent, ...]) -> None:
        """Take in a report that has arrived."""
        if is_stored:
            self._held.add(extents)
        else:
            self._held.remove(extents)
            if self._holders is not None and not (self._under_way or self._held.leading(extents)):
                self._holders.dropped(self._engine, extents[0][0])

    def following_pages(self, extents: tuple[Extent, ...], after: int, unit: int) -> int:
        """Return how many pages of a path are known to be held after its first ``after`` ones, as of the last ``receive``.

        In a tier that tells of the last one of every ``unit`` pages only, whole units count.
        """
        if unit == 1:
            return self._held.leading(split_extents(extents, after)[1] if after else extents)
        end = after // unit * unit
        while (last := page_at(extents, end + unit - 1)) is not None and self._held.leading(((last, 1),)):
            end += unit
        return max(0, end - after)

    def leading_pages(self, extents: Iterable[Extent]) -> int:
        """Return how many pages of a path, from its first on, are known to be held, as of the last ``receive``."""
        return self._held.leading(extents)
