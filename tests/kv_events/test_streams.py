"""Publisher and subscriber over ZMQ on loopback: gaps, replays, restarts, ranks, malformed messages, slow readers."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Self

import pytest

from kvsim.errors import UsageError
from kvsim.kv_events.dialects import DIALECTS, encode
from kvsim.kv_events.messages import BlockRemoved, EventBatch
from kvsim.kv_events.publisher import Publisher
from kvsim.kv_events.subscriber import Received, Subscriber
from kvsim.kv_events.wire import END

zmq = pytest.importorskip("zmq", reason="pyzmq comes with the extra servers")
pytest.importorskip("zmq.asyncio")

ANY = "tcp://127.0.0.1:*"
LIMIT_S = 20.0


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LIMIT_S))


def batch(number: int) -> EventBatch:
    return EventBatch(float(number), (BlockRemoved((number,)),))


def numbers(received: list[Received]) -> list[int]:
    return [int(one.batch.ts_s) for one in received]


async def take(stream: AsyncIterator[Received], count: int) -> list[Received]:
    return [await anext(stream) for _ in range(count)]


class Raw:
    """A publisher of whatever messages, which first waits for its subscriber."""

    def __init__(self, endpoint: str = ANY) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.sndhwm = 0
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)

    async def joined(self) -> None:
        assert (await self._socket.recv())[:1] == b"\x01"

    async def send(self, sequence: int, payload: bytes | None = None, topic: bytes = b"") -> None:
        data = encode(batch(sequence), DIALECTS["vllm"]) if payload is None else payload
        await self._socket.send_multipart((topic, sequence.to_bytes(8, "big"), data))

    async def send_frames(self, *frames: bytes) -> None:
        await self._socket.send_multipart(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@asynccontextmanager
async def raw(**settings: Any) -> AsyncIterator[tuple[Raw, Subscriber, AsyncIterator[Received], list[str]]]:
    """A publisher by hand, its subscriber, what arrives, and the lines that the subscriber tells."""
    lines = list[str]()
    with Raw() as source:
        async with Subscriber(source.endpoint, tell=lambda _, line: lines.append(line), **settings) as subscriber:
            await source.joined()
            yield source, subscriber, aiter(subscriber), lines


async def met(publisher: Publisher, stream: AsyncIterator[Received]) -> int:
    """Publish until the subscriber receives something. Returns the last number that was published by then."""
    arrived = asyncio.ensure_future(anext(stream))
    while not arrived.done():
        publisher.publish(batch(publisher.published))
        await asyncio.wait([arrived], timeout=0.005)
    return publisher.published - 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_late_subscriber_gets_everything_from_the_replay(dialect: str) -> None:
    async def test() -> None:
        async with Publisher(DIALECTS[dialect], ANY, ANY) as publisher:
            for number in range(5):
                publisher.publish(batch(number))
            async with Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
                stream = aiter(subscriber)
                first = asyncio.ensure_future(anext(stream))
                while not first.done():
                    publisher.publish(batch(publisher.published))
                    await asyncio.wait([first], timeout=0.005)
                last = publisher.published - 1
                received = [await first, *await take(stream, last)]
                assert numbers(received) == [one.sequence for one in received] == list(range(last + 1))
                assert subscriber.replayed >= 5 and subscriber.missed == 0
                assert not any(one.missed or one.restarted for one in received)
                assert {one.batch.rank for one in received} == ({0} if DIALECTS[dialect].has_rank else {None})

    run(test())


def test_a_gap_is_replayed_as_far_as_the_engine_has_it() -> None:
    """The engine keeps 3 messages: of 0 ... 9, it has 7, 8 and 9 when 10 arrives."""

    async def test() -> None:
        async with (
            Publisher(DIALECTS["vllm"], ANY, ANY, buffer_steps=3) as publisher,
            raw(replay_endpoint=publisher.replay_endpoint) as (source, subscriber, stream, lines),
        ):
            for number in range(10):
                publisher.publish(batch(number))
            for number in (0, 1, 10):
                await source.send(number)
            received = await take(stream, 6)
            assert numbers(received) == [0, 1, 7, 8, 9, 10]
            assert [one.missed for one in received] == [0, 0, 5, 0, 0, 0]
            assert (subscriber.replayed, subscriber.missed) == (3, 5)
            assert lines == [f"{source.endpoint}: 5 messages before sequence number 7 are lost"]

    run(test())


def test_without_a_replay_a_gap_is_told_with_the_next_batch() -> None:
    async def test() -> None:
        async with raw() as (source, subscriber, stream, lines):
            for number in (0, 1, 5, 6):
                await source.send(number)
            received = await take(stream, 4)
            assert [(one.sequence, one.missed) for one in received] == [(0, 0), (1, 0), (5, 3), (6, 0)]
            assert subscriber.missed == 3
            assert lines == [f"{source.endpoint}: 3 messages before sequence number 5 are lost"]

    run(test())


def test_a_replay_endpoint_that_does_not_answer_is_not_waited_for_long() -> None:
    async def test() -> None:
        async with raw(replay_endpoint="tcp://127.0.0.1:9", replay_timeout_s=0.05) as (source, _, stream, lines):
            await source.send(2)
            assert (await anext(stream)).missed == 2
            assert lines[0] == "tcp://127.0.0.1:9: no complete replay of sequence numbers 0 to 1"

    run(test())


def test_a_sequence_number_that_falls_back_is_a_restart() -> None:
    async def test() -> None:
        async with raw() as (source, subscriber, stream, lines):
            for number in (0, 1, 0, 1, 2, 1):
                await source.send(number)
            received = await take(stream, 6)
            assert [one.restarted for one in received] == [False, False, True, False, False, True]
            assert [one.missed for one in received] == [0, 0, 0, 0, 0, 1]
            assert subscriber.restarts == 2
            assert lines[0] == f"{source.endpoint}: the engine has restarted: sequence number 0 after 1"

    run(test())


async def again(endpoint: str) -> Raw:
    """A publisher at an endpoint that another one has just left, once the system has it back."""
    while True:
        try:
            return Raw(endpoint)
        except zmq.ZMQError:
            await asyncio.sleep(0)


def test_an_engine_that_comes_back_at_its_port_is_heard_again() -> None:
    async def test() -> None:
        with Raw() as source:
            async with Subscriber(source.endpoint, tell=lambda *_: None) as subscriber:
                stream = aiter(subscriber)
                await source.joined()
                for number in (0, 1):
                    await source.send(number)
                assert numbers(await take(stream, 2)) == [0, 1]
                source.close()
                with await again(source.endpoint) as anew:
                    arrived = asyncio.ensure_future(anext(stream))
                    await anew.joined()
                    await anew.send(0)
                    received = await arrived
                    assert received.restarted and received.sequence == 0

    run(test())


def test_malformed_messages_are_counted_and_skipped() -> None:
    async def test() -> None:
        async with raw() as (source, subscriber, stream, lines):
            await source.send(0)
            await source.send(1, b"\xc1")
            await source.send_frames(b"", b"short", b"")
            await source.send_frames(b"alone")
            await source.send(2)
            await source.send(1, b"no batch")  # after a restart, which the next batch tells
            await source.send(2)
            received = await take(stream, 3)
            assert [(one.sequence, one.missed, one.restarted) for one in received] == [(0, 0, False), (2, 1, False), (2, 2, True)]
            assert subscriber.malformed == 4
            assert lines[0].startswith(f"{source.endpoint}: malformed message number 1 is skipped: not a batch of KV events: ")

    run(test())


def test_a_flood_of_malformed_messages_makes_few_lines() -> None:
    async def test() -> None:
        async with raw() as (source, subscriber, stream, lines):
            for number in range(1200):
                await source.send(number, b"")
            await source.send(1200)
            assert (await anext(stream)).missed == 1200
            assert subscriber.malformed == 1200 and len(lines) == 4

    run(test())


def neighbours() -> tuple[Raw, Raw]:
    """Two publishers whose ports follow each other."""
    while True:
        first = Raw()
        host, _, port = first.endpoint.rpartition(":")
        try:
            return first, Raw(f"{host}:{int(port) + 1}")
        except zmq.ZMQError:
            first.close()


def test_two_ranks_and_topics_are_kept_apart() -> None:
    async def test() -> None:
        first, second = neighbours()
        with first, second:
            async with Subscriber(first.endpoint, ranks=2, topic="kv@") as subscriber:
                stream = aiter(subscriber)
                for source in (first, second):
                    await source.joined()
                for number in (0, 1):
                    await first.send(number, topic=b"kv@a")
                    await first.send(number, topic=b"kv@b")
                    await first.send(number, topic=b"other")
                    await second.send(number, topic=b"kv@a")
                received = await take(stream, 6)
                assert subscriber.missed == subscriber.restarts == 0
                for rank, topic in ((0, "kv@a"), (0, "kv@b"), (1, "kv@a")):
                    assert [one.sequence for one in received if (one.rank, one.topic) == (rank, topic)] == [0, 1]

    run(test())


def test_a_reader_that_is_too_slow_loses_messages_and_is_told() -> None:
    """ZMQ keeps the high-water mark at each end, and what the system's buffers take. What is lost and what arrives is all."""

    async def test() -> None:
        large = BlockRemoved(tuple(range(1 << 40, (1 << 40) + 1000)))
        async with (
            Publisher(DIALECTS["vllm"], ANY, high_water_mark=10) as publisher,
            Subscriber(publisher.endpoint, high_water_mark=10, tell=lambda *_: None) as subscriber,
        ):
            stream = aiter(subscriber)
            await met(publisher, stream)
            for number in range(2000):
                publisher.publish(EventBatch(float(number), (large,)))
            seen, before = 0, publisher.published
            while subscriber.missed < 10 or seen + subscriber.missed < before:
                arrived = asyncio.ensure_future(anext(stream))
                while not arrived.done():  # the reader is quick now
                    publisher.publish(batch(publisher.published))
                    await asyncio.wait([arrived], timeout=0.005)
                seen += 1
            assert arrived.result().sequence == seen + subscriber.missed

    run(test())


def test_a_subscriber_can_listen_where_engines_connect() -> None:
    async def test() -> None:
        async with Subscriber("tcp://*:*") as subscriber:
            context = zmq.asyncio.Context()
            engine = context.socket(zmq.PUB)
            engine.connect(subscriber.listening[0].replace("0.0.0.0", "127.0.0.1"))
            arrived = asyncio.ensure_future(anext(aiter(subscriber)))
            while not arrived.done():
                await engine.send_multipart((b"engine-1", bytes(8), encode(batch(0), DIALECTS["sglang"])))
                await asyncio.wait([arrived], timeout=0.005)
            context.destroy(linger=0)
            assert arrived.result().topic == "engine-1"

    run(test())


def test_a_replay_ends_with_minus_one() -> None:
    """As engines answer: since vLLM 0.33 with the topic, before without it."""

    async def test() -> None:
        for dialect, frames in (("vllm", 4), ("vllm_arrays", 3)):
            async with Publisher(DIALECTS[dialect], ANY, ANY, topic="kv", rank=0) as publisher:
                for number in range(3):
                    publisher.publish(batch(number))
                context = zmq.asyncio.Context()
                asking = context.socket(zmq.DEALER)
                asking.connect(publisher.replay_endpoint)
                await asking.send_multipart((b"", b"short"))
                await asking.send_multipart((b"", (1).to_bytes(8, "big")))
                answers = [await asking.recv_multipart() for _ in range(3)]
                context.destroy(linger=0)
                assert [answer[-2] for answer in answers] == [(1).to_bytes(8, "big"), (2).to_bytes(8, "big"), END]
                assert {len(answer) for answer in answers} == {frames}
                assert answers[-1][-1] == b""

    run(test())


def test_an_endpoint_that_cannot_be_had_is_said_in_one_line() -> None:
    async def test() -> None:
        with Raw() as source:
            with pytest.raises(UsageError, match=r"cannot publish KV events at .*: Address already in use"):
                async with Publisher(DIALECTS["vllm"], source.endpoint):
                    pass
            with pytest.raises(UsageError, match="cannot publish KV events at tcp://no-such-host"):
                async with Publisher(DIALECTS["vllm"], ANY, "tcp://no-such-host.invalid:1"):
                    pass

    run(test())
