"""A router's index is the cache's over real sockets, too: messages lost on the way are asked for again, or said."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from kvsim.emulation.emulator import Emulator
from kvsim.emulation.events import EventFeed
from kvsim.emulation.tellers import TELLERS
from kvsim.kv_events.dialects import DIALECTS, encode
from kvsim.kv_events.messages import AllBlocksCleared, EventBatch
from kvsim.kv_events.publisher import Publisher
from kvsim.kv_events.subscriber import Received, Subscriber
from tests.emulation.test_events import CACHES, SIZE, plan_named
from tests.emulation.told_index import Index, held_blocks

zmq = pytest.importorskip("zmq", reason="pyzmq comes with the extra servers")
pytest.importorskip("zmq.asyncio")

ANY, LIMIT_S = "tcp://127.0.0.1:*", 20.0
PROMPTS = [
    [first * 100 + at for first in pieces for at in range(SIZE + 1)] for pieces in ([1, 2, 3], [1, 2], [4, 5, 6, 7], [1, 2, 3])
]


class Lossy:
    """Publishes on a socket of its own what an engine publishes, without every third message."""

    def __init__(self, publisher: Publisher, dialect: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.sndhwm = 0
        self._socket.bind(ANY)
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._publisher, self._dialect = publisher, DIALECTS[dialect]
        self._waiting: list[tuple[int, EventBatch]] = []
        self.dropped = 0

    def publish(self, batch: EventBatch) -> None:
        self._waiting.append((self._publisher.published, batch))
        self._publisher.publish(batch)

    async def joined(self) -> None:
        assert (await self._socket.recv())[:1] == b"\x01"

    async def send(self, *, all_of_them: bool = False) -> None:
        for sequence, batch in self._waiting:
            if sequence % 3 == 1 and not all_of_them:
                self.dropped += 1
            else:
                await self._socket.send_multipart((b"", sequence.to_bytes(8, "big"), encode(batch, self._dialect)))
        self._waiting.clear()

    def close(self) -> None:
        self._context.destroy(linger=0)


def serve_all(emulator: Emulator, prompts: Sequence[list[int]]) -> None:
    env = emulator.cluster.env
    for prompt in prompts:
        emulator.submit(prompt, 2 * SIZE)
        while env.peek() < float("inf"):
            env.step()


async def upto(stream: AsyncIterator[Received], last: int) -> list[Received]:
    received = [await anext(stream)]
    while received[-1].sequence < last:
        received.append(await anext(stream))
    return received


async def heard(name: str, dialect: str, *, replays: bool) -> tuple[Lossy, Subscriber, list[Received], bool]:
    """Serve prompts, a reset and prompts; return what the subscriber got, and whether the index is the cache's at the end."""
    async with Publisher(DIALECTS[dialect], ANY, ANY) as publisher:
        lossy = Lossy(publisher, dialect)
        emulator = Emulator(plan_named(name), 1e-9)
        feed = EventFeed(emulator, TELLERS[CACHES[name][0]], lossy.publish, lambda: float(emulator.cluster.env.now))
        replay = publisher.replay_endpoint if replays else None
        async with Subscriber(lossy.endpoint, replay, tell=lambda *_: None) as subscriber:
            stream = aiter(subscriber)
            await lossy.joined()
            serve_all(emulator, PROMPTS)
            await lossy.send()
            assert emulator.empty()
            serve_all(emulator, PROMPTS)
            await lossy.send()
            serve_all(emulator, [[9] * 5 * SIZE])
            await lossy.send(all_of_them=True)
            received = await upto(stream, publisher.published - 1)
        index, (cache,) = Index(), emulator.cluster.caches
        is_same = False
        if not any(one.missed for one in received):
            for one in received:
                index.apply(one.batch)
            is_same = all(
                index.held(tier.name) == held_blocks(cache, tier, emulator.pages.next_id, feed.blocks, last_only=True)
                for tier in cache.tiers
            )
        lossy.close()
        return lossy, subscriber, received, is_same


@pytest.mark.parametrize("dialect", ["vllm", "vllm_arrays", "sglang", "sglang_arrays"])
def test_lost_messages_are_replayed_and_the_index_is_the_cache(dialect: str) -> None:
    name = "vllm_offload" if dialect.startswith("vllm") else "sglang_hicache, storage"
    lossy, subscriber, received, is_same = asyncio.run(asyncio.wait_for(heard(name, dialect, replays=True), LIMIT_S))
    assert [one.sequence for one in received] == list(range(len(received)))
    assert subscriber.replayed == lossy.dropped > 2 and subscriber.missed == 0
    assert any(AllBlocksCleared() in one.batch.events for one in received)
    assert is_same


def test_messages_that_are_lost_for_good_are_said() -> None:
    lossy, subscriber, received, _ = asyncio.run(asyncio.wait_for(heard("vllm", "vllm", replays=False), LIMIT_S))
    assert sum(one.missed for one in received) == subscriber.missed == lossy.dropped > 2
