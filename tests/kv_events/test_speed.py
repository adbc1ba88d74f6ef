"""A reader of events has time for other things."""

import asyncio
from collections.abc import AsyncIterator
from time import process_time

import pytest

from kvsim.kv_events.dialects import DIALECTS
from kvsim.kv_events.messages import BlockRemoved, BlockStored, EventBatch
from kvsim.kv_events.publisher import Publisher
from kvsim.kv_events.subscriber import Received, Subscriber

pytest.importorskip("zmq.asyncio", reason="pyzmq comes with the extra servers")

ANY, MESSAGES, LEAST_PER_S = "tcp://127.0.0.1:*", 5_000, 10_000


def batch(number: int) -> EventBatch:
    """What a step tells: a block of 16 tokens is stored for another that leaves."""
    stored = BlockStored((number + 1,), number, tuple(range(1000, 1016)), 16, medium="GPU", extra_keys=(None,), group_idx=0)
    return EventBatch(float(number), (BlockRemoved((number,), "GPU", 0), stored))


async def events_per_s(dialect: str) -> float:
    """Events that are published, received and decoded in a second of this process's time, two to a message."""
    async with (
        Publisher(DIALECTS[dialect], ANY, ANY) as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint, high_water_mark=2 * MESSAGES) as subscriber,
    ):
        stream = aiter(subscriber)
        await met(publisher, stream)
        began_s, first = process_time(), publisher.published
        for number in range(MESSAGES):
            publisher.publish(batch(number))
        events = 0
        while (received := await anext(stream)).sequence < first + MESSAGES - 1:
            events += len(received.batch.events)
        assert subscriber.missed == 0
        return events / (process_time() - began_s)


async def met(publisher: Publisher, stream: AsyncIterator[Received]) -> None:
    arrived = asyncio.ensure_future(anext(stream))
    while not arrived.done():
        publisher.publish(batch(0))
        await asyncio.wait([arrived], timeout=0.005)


@pytest.mark.parametrize("dialect", ["vllm", "vllm_arrays", "sglang", "sglang_arrays"])
def test_ten_thousand_events_a_second_leave_time_for_more(dialect: str) -> None:
    assert asyncio.run(asyncio.wait_for(events_per_s(dialect), 20)) > 2 * LEAST_PER_S
