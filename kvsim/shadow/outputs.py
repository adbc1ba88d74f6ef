"""Everything that shows what a shadow has found: terminal, page and metrics, refreshed together."""

import time
from pathlib import Path

from kvsim.errors import UsageError
from kvsim.report.shadow.live_table import LiveTable
from kvsim.report.shadow.page import LivePage, Occupancy, write_page
from kvsim.shadow.history import History, Observed, Stretches
from kvsim.shadow.metrics import Seen
from kvsim.shadow.recording import Recording
from kvsim.shadow.shadow import Shadow
from kvsim.shadow.snapshot import Snapshot
from kvsim.shadow.sources.byte_text import NOTE
from kvsim.shadow.sources.feed import Feed
from kvsim.shadow.sources.prompts import Prompts
from kvsim.shadow.summary import facts, headlines, in_short, tables


class Outputs:
    """Shows a shadow. ``refresh`` is called by the thread that also lets ghosts serve; only ``end`` comes after it."""

    def __init__(self, shadow: Shadow, prompts: Prompts, table: LiveTable, page: Path, command: str, every_s: float) -> None:
        self.shadow = shadow
        self.observed = Observed(shadow.settings.window_requests)
        self.latest: Seen | None = None
        """What was seen last, for metrics."""
        self.feed: Feed | None = None
        self.recording: Recording | None = None
        self._prompts = prompts
        self._table = table
        self._page = page
        self._command = command
        self._every_s = every_s
        self.history = History()
        self._stretches = Stretches(shadow.settings.window_requests)

    def refresh(self) -> None:
        """Show everything as it is now."""
        snapshot = self._look()
        engine = self.observed.hit_rate
        self._table.show(
            tables(snapshot, engine, self._stretches.noise()), self._notes(snapshot), in_short(snapshot, engine), time.monotonic()
        )
        self._write(snapshot, self._every_s)

    def end(self) -> Snapshot:
        """Show everything as it is at the end. Returns that."""
        snapshot = self._look()
        self._table.end(tables(snapshot, self.observed.hit_rate, self._stretches.noise()), self._notes(snapshot))
        self._write(snapshot, None)
        return snapshot

    def _look(self) -> Snapshot:
        snapshot, engine = self.shadow.snapshot(), self.observed.hit_rate
        self.history.add(snapshot, engine)
        self._stretches.add(snapshot)
        problems = {} if self.feed is None else dict(self.feed.problems)
        self.latest = Seen(snapshot, engine, None if self.recording is None else self.recording.lines, problems)
        return snapshot

    def _write(self, snapshot: Snapshot, every_s: float | None) -> None:
        """Write the page; if that fails, say so once and try again next time."""
        try:
            write_page(self._page, self._drawn(snapshot, every_s))
        except UsageError as error:
            if self.feed is not None:
                self.feed.tell("page", str(error))

    def _drawn(self, snapshot: Snapshot, every_s: float | None) -> LivePage:
        return LivePage(
            headlines=headlines(snapshot),
            facts=facts(snapshot, None if self.recording is None else self.recording.lines),
            warnings=self._notes(snapshot),
            tables=tables(snapshot, self.observed.hit_rate, self._stretches.noise()),
            lines=self.history.lines(),
            occupancy=[
                Occupancy(ghost.name, tier, pages, capacity)
                for ghost in snapshot.ghosts
                for tier, (pages, capacity) in ghost.occupancy.items()
            ],
            command=self._command,
            at_s=time.time(),
            every_s=every_s,
        )

    def _notes(self, snapshot: Snapshot) -> list[str]:
        """Return what makes the numbers worth less than they seem, and what went wrong."""
        notes = list(snapshot.notes)
        if self._prompts.read_bytes:
            notes.append(NOTE)
        if self._prompts.other_lengths:
            notes.append(
                f"{self._prompts.other_lengths:,} prompts do not have as many tokens as the server says: is shadow.tokenizer "
                "that of its model?"
            )
        for kind, first in ({} if self.feed is None else dict(self.feed.first)).items():
            number = self.feed.problems[kind] if self.feed is not None else 0
            notes.append(first if number == 1 else f"{number:,} times, first: {first}")
        return notes
