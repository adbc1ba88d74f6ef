"""Requests from a log that grows."""

import asyncio
import time
from collections.abc import Iterator
from functools import partial

from kvsim.shadow.live import LiveRequest
from kvsim.shadow.sources.base import Source
from kvsim.shadow.sources.feed import Feed
from kvsim.shadow.sources.following import Folder, Tail, follower
from kvsim.shadow.sources.lines import Line, Lines

LOOK_S = 0.2
"""How often a log is asked for more. Files on every kind of file system can be asked; not all of them tell."""
WAIT_S = 0.005
LINES_AT_ONCE = 100


class Log(Source):
    """Reads a log, or a folder of logs, from its beginning, and then what is appended."""

    def __init__(self, name: str, lines: Lines, *, follow: bool) -> None:
        self.name = name
        self._lines = lines
        self._follow = follow
        self._follower: Tail | Folder | None = None
        self._feed: Feed | None = None

    async def start(self, feed: Feed) -> str:
        self._feed = feed
        self._follower = follower(self.name, feed.tell)
        return f"{'follows' if self._follow else 'reads'} {self.name}"

    async def run(self) -> None:
        assert self._follower is not None
        while True:
            for number, line in enumerate(self._follower.lines()):
                await self._deliver(line)
                if number % LINES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            if not self._follow:
                return
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.close()

    async def _deliver(self, line: Line) -> None:
        """Give the shadow a line when it has room for it."""
        assert self._feed is not None
        while not self._feed.put(partial(self._read, self._feed, line), len(line.text)):
            await asyncio.sleep(WAIT_S)

    def _read(self, feed: Feed, line: Line) -> None:
        feed.requests(self._requests(line))

    def _requests(self, line: Line) -> Iterator[LiveRequest]:
        yield from self._lines.read(line, time.time())
