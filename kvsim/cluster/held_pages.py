"""Which pages an engine holds, as a router learns it from the engine's reports of pages stored and dropped."""

from collections import deque
from collections.abc import Callable, Iterable

from kvsim.core.tier import Tier
from kvsim.core.watch import Watch
from kvsim.pages.extent_counts import PageCounts
from kvsim.pages.extents import Extent


class HeldPages(Watch):
    """The pages ready in one tier, as they were ``staleness_s`` seconds ago.

    One of a tier's ``watches``. Reports arrive in the order in which they were sent, so what is known is always what the tier
    held at one moment.
    """

    def __init__(self, staleness_s: float = 0.0, clock: Callable[[], float] = lambda: 0.0) -> None:
        """``clock`` returns the time in seconds; it is not read if ``staleness_s`` is 0."""
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
        if self._staleness_s:
            self._expect(True, extents)
        else:
            self._held.add(extents)

    def dropped(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        if self._staleness_s:
            self._expect(False, extents)
        else:
            self._held.remove(extents)

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
            if is_stored:
                self._held.add(extents)
            else:
                self._held.remove(extents)

    def leading_pages(self, extents: Iterable[Extent]) -> int:
        """Return how many pages of a path, from its first on, are known to be held, as of the last ``receive``."""
        return self._held.leading(extents)
