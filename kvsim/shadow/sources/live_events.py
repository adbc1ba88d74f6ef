"""Events of running engines, and of recordings."""

import asyncio
from functools import partial
from itertools import islice
from pathlib import Path

from kvsim.kv_events.codec import decode
from kvsim.kv_events.messages import EventBatch, EventError
from kvsim.kv_events.recorded import Message, read_recorded
from kvsim.kv_events.subscriber import LOST, MALFORMED, RESTARTED, Received, Subscriber
from kvsim.shadow.sources.base import Source
from kvsim.shadow.sources.feed import Feed, Job

WAIT_S = 0.002
TOGETHER = 32
"""Messages of a recording that are handed over at a time."""
IN_MEMORY = 8
"""How many times the bytes of its message a batch takes in memory, at most."""


class LiveEvents(Source):
    """Subscribes to the events of one engine. What comes too fast waits in ZMQ's queue; what that has no room for is missed."""

    def __init__(self, address: str, replay: str | None, topic: str, ranks: int) -> None:
        self.address = address
        self._replay = replay
        self._topic = topic
        self._ranks = ranks
        self._feed: Feed | None = None
        self._subscriber: Subscriber | None = None

    async def start(self, feed: Feed) -> str:
        self._feed = feed
        tell = partial(tell_of_events, feed, self.address)
        self._subscriber = Subscriber(self.address, self._replay, topic=self._topic, ranks=self._ranks, tell=tell)
        await self._subscriber.__aenter__()
        return f"listens to {', '.join(self._subscriber.endpoints)}"

    async def run(self) -> None:
        assert self._subscriber is not None
        async for received in self._subscriber:
            for job in self._jobs(received):
                await _deliver(self._feed, job, len(received.payload))

    async def close(self) -> None:
        if self._subscriber is not None:
            await self._subscriber.__aexit__(None, None, None)

    def _jobs(self, received: Received) -> list[Job]:
        """Return what the shadow is to know of a message, in order."""
        assert self._feed is not None
        batch = received.batch
        if batch.rank is None and self._ranks > 1:
            batch = batch._replace(rank=received.rank)
        return jobs_of(self._feed, self.address, batch, received.missed, restarted=received.restarted)


class RecordedEvents(Source):
    """Plays events that were recorded, as fast as they can be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._feed: Feed | None = None
        self._last: dict[tuple[int, bytes], int] = {}

    async def start(self, feed: Feed) -> str:
        self._feed = feed
        next(read_recorded(self.path), None)
        return f"reads {self.path}"

    async def run(self) -> None:
        messages = read_recorded(self.path)
        while some := list(islice(messages, TOGETHER)):
            jobs = [job for message in some for job in self._jobs(message)]
            await _deliver(self._feed, partial(_do, jobs), IN_MEMORY * sum(len(message.payload) for message in some))

    def _jobs(self, message: Message) -> list[Job]:
        assert self._feed is not None
        last = self._last.get((message.rank, message.topic), message.sequence - 1)
        try:
            batch = decode(message.payload)
        except EventError as error:
            self._tell(MALFORMED, f"a malformed message is skipped: {error}")
            return []
        self._last[message.rank, message.topic] = message.sequence
        restarted = message.sequence <= last
        missed = 0 if restarted else message.sequence - last - 1
        if restarted:
            self._tell(RESTARTED, f"the engine has restarted: sequence number {message.sequence} after {last}")
        if missed:
            self._tell(LOST, f"{missed} messages before sequence number {message.sequence} are lost")
        if batch.rank is None:
            batch = batch._replace(rank=message.rank)
        return jobs_of(self._feed, self.path.name, batch, missed, restarted=restarted)

    def _tell(self, kind: str, line: str) -> None:
        assert self._feed is not None
        tell_of_events(self._feed, str(self.path), kind, f"{self.path}: {line}")


def tell_of_events(feed: Feed, source: str, kind: str, line: str) -> None:
    """Say what is wrong with the events of a source, if it is the first of its kind there."""
    feed.tell(f"events of {source}: {kind}", line)


def jobs_of(feed: Feed, engine: str, batch: EventBatch, missed: int, *, restarted: bool) -> list[Job]:
    """Return what the shadow is to know of a batch and of what was lost before it."""
    jobs: list[Job] = []
    if restarted:
        jobs.append(partial(feed.restarted, engine, batch.rank))
    if missed:
        jobs.append(partial(feed.lost, engine, missed, batch.rank))
    return [*jobs, partial(feed.event, engine, batch)]


def _do(jobs: list[Job]) -> None:
    for job in jobs:
        job()


async def _deliver(feed: Feed | None, job: Job, n_bytes: int) -> None:
    """Give the shadow a job when it has room for it."""
    assert feed is not None
    while not feed.put(job, n_bytes):
        await asyncio.sleep(WAIT_S)
