"""Publishes an engine's KV events as vLLM and SGLang do: numbered messages, and a replay of the last ones."""

import asyncio
from collections import deque
from types import TracebackType
from typing import Any, Self

from kvsim.errors import UsageError
from kvsim.kv_events.dialects import Dialect, encode
from kvsim.kv_events.messages import EventBatch
from kvsim.kv_events.wire import END, SEQUENCE_BYTES, endpoint_of, zmq_module

BUFFER_STEPS, HIGH_WATER_MARK = 10_000, 100_000
"""The engines' own defaults."""


class Publisher:
    """The events of one engine, or of one data-parallel rank. An asynchronous context manager: it listens while the block runs.

    A message is (topic, sequence number, payload). Subscribers that do not keep up lose messages beyond ``high_water_mark``; who
    asks the replay endpoint for a sequence number gets those of the last ``buffer_steps`` messages that have it or a later one,
    then one with the number -1.
    """

    def __init__(
        self,
        dialect: Dialect,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        rank: int = 0,
        buffer_steps: int = BUFFER_STEPS,
        high_water_mark: int = HIGH_WATER_MARK,
    ) -> None:
        """``rank`` is added to the ports, and to each batch that tells none. Raises UsageError for what is no endpoint."""
        self.endpoint = endpoint_of(endpoint, rank)
        """Where it publishes; with the port that the system chose, once it has been entered."""
        self.replay_endpoint = None if replay_endpoint is None else endpoint_of(replay_endpoint, rank)
        self.published = 0
        """The sequence number of the next message."""
        self._dialect, self._topic, self._rank = dialect, topic.encode(), rank
        self._high_water_mark, self._buffer_steps = high_water_mark, buffer_steps
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._pub: Any = None
        self._replays: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to listen. Raises UsageError if an endpoint cannot be had, and without pyzmq."""
        zmq = zmq_module()
        self._context = zmq.asyncio.Context()
        try:
            self._pub = zmq.Socket(self._context, zmq.PUB)
            self._pub.set_hwm(self._high_water_mark)
            self.endpoint = self._bound(self._pub, self.endpoint)
            if self.replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                router.sndhwm = 2 * (self._buffer_steps + 1)  # a whole replay, of which the other side acknowledges only halves
                self.replay_endpoint = self._bound(router, self.replay_endpoint)
                self._replays = asyncio.get_running_loop().create_task(self._serve_replays(router))
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._replays is not None:
            self._replays.cancel()
            await asyncio.gather(self._replays, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        if self._pub is not None:
            self._pub.close(linger=0)
            self._pub = None
        self._context.destroy(linger=0)

    def _bound(self, socket: Any, endpoint: str) -> str:
        zmq = zmq_module()
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise UsageError(f"cannot publish KV events at {endpoint}: {error.strerror or error}") from None
        return str(socket.get_string(zmq.LAST_ENDPOINT))

    def publish(self, batch: EventBatch) -> None:
        """Send a batch. Never waits."""
        if batch.rank is None:
            batch = batch._replace(rank=self._rank)
        payload = encode(batch, self._dialect)
        sequence, self.published = self.published, self.published + 1
        self._sent.append((sequence, payload))
        self._pub.send_multipart((self._topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload))

    async def _serve_replays(self, router: Any) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == SEQUENCE_BYTES:  # who asks, nothing, from where on
                await self._replay(router, frames[0], int.from_bytes(frames[2], "big"))

    async def _replay(self, router: Any, peer: bytes, first: int) -> None:
        for sequence, payload in [sent for sent in self._sent if sent[0] >= first]:
            await self._answer(router, peer, self._topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload)
        await self._answer(router, peer, b"", END, b"")

    async def _answer(self, router: Any, peer: bytes, topic: bytes, sequence: bytes, payload: bytes) -> None:
        frames = (topic, sequence, payload) if self._dialect.replays_topic else (sequence, payload)
        await router.send_multipart((peer, b"", *frames))
