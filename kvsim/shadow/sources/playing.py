"""Runs sources until they end, a signal comes, or the shadow has enough; what was acknowledged is delivered in any case."""

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvsim.shadow.sources.base import Source
from kvsim.shadow.sources.feed import Feed

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def play(sources: Sequence[Source], feed: Feed, say: Callable[[str], None]) -> signal.Signals | None:
    """Run sources to their end. Returns the signal that has ended them, if one has.

    After a signal nothing new is taken, and what is under way may end; a second one cuts it. Raises UsageError, and what a
    source or the shadow has failed with.
    """
    return asyncio.run(Playing(sources, feed, say).run())


class Playing:
    """Sources at work."""

    def __init__(self, sources: Sequence[Source], feed: Feed, say: Callable[[str], None]) -> None:
        self._sources = sources
        self._feed = feed
        self._say = say
        self._signals: list[signal.Signals] = []
        self._stopped, self._interrupted = asyncio.Event(), asyncio.Event()

    async def run(self) -> signal.Signals | None:
        loop, feed = asyncio.get_running_loop(), self._feed
        feed.on_stop = lambda: loop.call_soon_threadsafe(self._stopped.set)
        tasks: list[asyncio.Task[None]] = []
        with _signals(loop, self.interrupt):
            try:
                for source in self._sources:
                    self._say(await source.start(feed))
                feed.start()
                tasks = [asyncio.create_task(source.run()) for source in self._sources]
                await self._until_end(tasks)
            finally:
                await _ended(tasks)
                for source in self._sources:
                    await source.close()
                await loop.run_in_executor(None, feed.finish)
        if feed.error is not None:
            raise feed.error
        return self._signals[0] if self._signals else None

    async def _until_end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until all tasks have ended or something has stopped them. Raises what a task has failed with."""
        stopped = asyncio.create_task(self._stopped.wait())
        pending = {stopped, *tasks}
        while stopped in pending and len(pending) > 1:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        stopped.cancel()
        if self._feed.error is not None and any(source.carries_clients for source in self._sources):
            self._feed.tell("failed", "the shadow has failed and sees nothing any more; requests still pass, until Ctrl+C")
            await self._interrupted.wait()

    def interrupt(self, number: signal.Signals) -> None:
        """Take a signal. Call it in the loop."""
        if self._signals:
            for source in self._sources:
                source.hurry()
        self._signals.append(number)
        self._interrupted.set()
        self._stopped.set()


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _signals(loop: asyncio.AbstractEventLoop, take: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Let the loop take interrupts during the block; one that is ignored stays so. Only the main thread has any."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in taken:
            loop.add_signal_handler(number, take, number)
    except RuntimeError:  # not the main thread
        taken = []
    try:
        yield
    finally:
        for number in taken:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
