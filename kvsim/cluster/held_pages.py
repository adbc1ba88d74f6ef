"""Which pages an engine holds, as a router learns it from the engine's reports of pages stored and dropped."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from kvsim.core.request import Request
from kvsim.core.tier import Tier
from kvsim.core.watch import Watch
from kvsim.pages.extents import Extent, page_at, split_extents
from kvsim.pages.page_owners import Leading, OwnCounts, PageOwners


class Holders:
    """What all engines hold, as they have reported: one index for them all."""

    def __init__(self, engines: Sequence[int] = (0,), clock: Callable[[], float] = lambda: 0.0) -> None:
        """``engines`` are their numbers, ascending; ``clock`` returns the time in seconds."""
        self._engines = list(engines)
        self._clock = clock
        self.places = {engine: place for place, engine in enumerate(engines)}
        """The position of each engine among all, by which ``owners`` knows it."""
        self.owners = PageOwners(len(engines))
        self._late: deque[tuple[float, HeldPages]] = deque()
        """Times at which reports arrive, with those to whom; all are under way equally long."""
        self._lower: Holders | None = None
        self._above: list[tuple[int, ...]] = []
        """The engines above each tier below the GPUs."""
        self._always: dict[int, None] = {}
        """Engines above tiers that do not tell of the first page of a path."""

    def share(self, above: Sequence[tuple[Sequence[int], bool]]) -> "Holders":
        """Return an index of what the tiers below the GPUs hold, by their positions in ``above``.

        That has the engines above each tier, and whether the tier tells of every page.
        """
        self._lower = Holders(range(len(above)), self._clock)
        self._above = [tuple(engines) for engines, _ in above]
        self._always = dict.fromkeys([engine for engines, tells_all in above if not tells_all for engine in engines])
        return self._lower

    def expect(self, arrives_s: float, held: "HeldPages") -> None:
        """A report will arrive at a time, after all others that are under way."""
        self._receive()
        self._late.append((arrives_s, held))

    def _receive(self) -> None:
        """Have all reports that have arrived taken in."""
        late = self._late
        if late:
            now = self._clock()
            while late and late[0][0] <= now:
                late.popleft()[1].receive(now)

    def of(self, request: Request) -> Collection[int]:
        """Return the numbers of the engines that hold the first page of a prompt, or are above a tier that may have it."""
        if not request.runs:
            return ()
        self._receive()
        found = [self._engines[place] for place in self.owners.of(request.runs[0][0])]
        if self._lower is None:
            return found
        engines = dict.fromkeys([*self._always, *found])
        for place in self._lower.of(request):
            engines.update(dict.fromkeys(self._above[place]))
        return engines

    def leading(self, request: Request) -> Leading:
        """Return how many leading pages of a prompt each engine holds, by its place among all."""
        self._receive()
        return self.owners.leading(request.runs)


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
        """``clock`` returns the time in seconds; it is not read if ``staleness_s`` is 0.

        ``holders`` know what the ``engine`` holds.
        """
        self._holders = holders
        self._staleness_s = staleness_s
        self._clock = clock
        self._held = OwnCounts() if holders is None else OwnCounts(holders.owners, holders.places[engine])
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
        self.sent(now, is_stored, extents)

    def sent(self, at_s: float, is_stored: bool, extents: tuple[Extent, ...]) -> None:
        """A report was sent at a time: after those before it, and less than ``staleness_s`` ago."""
        self._under_way.append((at_s + self._staleness_s, is_stored, extents))
        if self._holders is not None:
            self._holders.expect(at_s + self._staleness_s, self)

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
