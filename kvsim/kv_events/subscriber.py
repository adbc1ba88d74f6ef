"""Receives an engine's KV events, asks for those that it has missed, and says which are lost."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvsim.errors import UsageError
from kvsim.kv_events.codec import decode
from kvsim.kv_events.messages import EventBatch, EventError
from kvsim.kv_events.wire import END, SEQUENCE_BYTES, endpoint_of, is_wildcard, zmq_module

BURST = 256
"""Messages that are handed over from one engine before another one's are looked at."""
REPLAY_TIMEOUT_S = 5.0
KINDS = RESTARTED, LOST, MALFORMED, NO_REPLAY = ("restarted", "lost", "malformed", "no replay")
"""Of things that can be wrong."""
_log = logging.getLogger(__name__)
Frames = list[bytes]


class Received(NamedTuple):
    """A batch, and what has happened since the one before it from the same publisher."""

    rank: int
    """Which of the subscriber's endpoints it came from."""
    topic: str
    sequence: int
    batch: EventBatch
    missed: int = 0
    """Messages before it that are lost, or that nobody could read: what is known of the engine's cache is uncertain from here."""
    restarted: bool = False
    """Whether the engine has begun anew: nothing is left of what it had."""
    payload: bytes = b""
    """The batch as it came."""


class _Source:
    """What is known of a publisher: a topic at an endpoint."""

    __slots__ = ("has_restarted", "last", "missed", "rank", "topic")

    def __init__(self, rank: int, topic: bytes) -> None:
        self.rank = rank
        self.topic = topic.decode(errors="replace")
        self.last = -1
        """The sequence number of its last message."""
        self.missed = 0
        """Messages lost or malformed since its last batch."""
        self.has_restarted = False
        """Whether it has since then."""

    def begin_anew(self) -> None:
        self.last, self.missed, self.has_restarted = -1, 0, True


class Subscriber:
    """The events of an engine, rank by rank. An asynchronous context manager; iterate over it in its block.

    A gap in the sequence numbers, at the beginning too, is filled from the replay endpoint, if there is one, as far as the engine
    still has the messages. Sequence numbers that fall back tell of an engine that has started again. Malformed messages are
    counted and skipped. Nothing is kept here but what ZMQ holds, ``high_water_mark`` messages of a rank: who reads too slowly
    loses messages, and is told.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        ranks: int = 1,
        high_water_mark: int = 10_000,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
        tell: Callable[[str, str], None] = lambda kind, line: _log.warning(line),
    ) -> None:
        """``endpoint`` is that of rank 0; it is connected to, or, with a wildcard for the host, engines connect to it.
        ``replay_timeout_s`` is how long the next message of a replay may take. ``tell`` takes what kind of thing is
        wrong, one of ``KINDS``, and a line on it. Raises UsageError for what is no endpoint."""
        self.endpoints = [endpoint_of(endpoint, rank) for rank in range(ranks)]
        replays = [None if replay_endpoint is None else endpoint_of(replay_endpoint, rank) for rank in range(ranks)]
        self.listening: list[str] = []
        """Where engines can connect to it, if they do; with the port that the system chose."""
        self.malformed = 0
        """Messages that could not be read."""
        self.replayed = 0
        """Messages that came from a replay endpoint."""
        self.missed = 0
        """Messages that are lost."""
        self.restarts = 0
        self._topic, self._high_water_mark, self._tell = topic.encode(), high_water_mark, tell
        self._replays, self._replay_timeout_s = replays, replay_timeout_s
        self._streams: list[Any] = []
        self._context: Any = None
        self._sources: dict[tuple[int, bytes], _Source] = {}

    async def __aenter__(self) -> Self:
        """Begin to receive. Raises UsageError if an endpoint cannot be had, and without pyzmq."""
        zmq = zmq_module()
        self._context, self._poller, self._again = zmq.asyncio.Context(), zmq.asyncio.Poller(), zmq.Again
        try:
            for endpoint in self.endpoints:
                stream = zmq.Socket(self._context, zmq.SUB)
                self._streams.append(stream)
                stream.rcvhwm = self._high_water_mark
                stream.subscribe(self._topic)
                if is_wildcard(endpoint):
                    stream.bind(endpoint)
                    self.listening.append(stream.get_string(zmq.LAST_ENDPOINT))
                else:
                    stream.connect(endpoint)
                self._poller.register(stream, zmq.POLLIN)
        except zmq.ZMQError as error:
            self._close()
            raise UsageError(f"cannot receive KV events from {endpoint}: {error.strerror or error}") from None
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        for stream in self._streams:
            stream.close(linger=0)
        self._streams.clear()
        if self._context is not None:
            self._context.destroy(linger=0)

    async def __aiter__(self) -> AsyncIterator[Received]:
        """Yield batches as they come, each publisher's in order, without end."""
        while self._streams:
            is_idle = True
            for rank in range(len(self._streams)):
                for frames in self._waiting(rank):
                    is_idle = False
                    for received in await self._accepted(rank, frames):
                        yield received
            await (self._poller.poll() if is_idle else asyncio.sleep(0))

    def _waiting(self, rank: int) -> Iterator[Frames]:
        """Yield messages that have arrived."""
        zmq = zmq_module()
        for _ in range(BURST):
            try:
                yield self._streams[rank].recv_multipart(zmq.NOBLOCK)
            except self._again:
                return

    # --- messages ------------------------------------------------------------------------------------------------------------

    async def _accepted(self, rank: int, frames: Frames) -> list[Received]:
        """Return what comes of a message: itself, after those that were missing."""
        if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
            self._refuse(rank, "a message must have a topic, a sequence number of 8 bytes and a payload")
            return []
        topic, number, payload = frames
        sequence, source = int.from_bytes(number, "big"), self._sources.setdefault((rank, topic), _Source(rank, topic))
        if sequence <= source.last:
            self.restarts += 1
            self._tell(
                RESTARTED, f"{self.endpoints[rank]}: the engine has restarted: sequence number {sequence} after {source.last}"
            )
            source.begin_anew()
        messages = [(sequence, payload)]
        if sequence > source.last + 1:
            messages[:0] = await self._replay(rank, source.last + 1, sequence)
        return [received for message in messages if (received := self._read(source, *message)) is not None]

    def _read(self, source: "_Source", sequence: int, payload: bytes) -> Received | None:
        """Return the batch of a publisher's next message; None if it is malformed."""
        if missed := sequence - source.last - 1:
            self.missed += missed
            source.missed += missed
            self._tell(LOST, f"{self.endpoints[source.rank]}: {missed} messages before sequence number {sequence} are lost")
        source.last = sequence
        try:
            batch = decode(payload)
        except EventError as error:
            source.missed += 1
            self._refuse(source.rank, str(error))
            return None
        received = Received(source.rank, source.topic, sequence, batch, source.missed, source.has_restarted, payload)
        source.missed, source.has_restarted = 0, False
        return received

    def _refuse(self, rank: int, problem: str) -> None:
        """Count a malformed message. Says the first, the tenth, the hundredth, so that a flood of them makes few lines."""
        self.malformed += 1
        if str(self.malformed).strip("0") == "1":
            self._tell(MALFORMED, f"{self.endpoints[rank]}: malformed message number {self.malformed} is skipped: {problem}")

    # --- gaps ----------------------------------------------------------------------------------------------------------------

    async def _replay(self, rank: int, first: int, before: int) -> list[tuple[int, bytes]]:
        """Return the numbers and payloads of messages from ``first`` to before ``before`` that the engine still has, in order."""
        endpoint = self._replays[rank]
        if endpoint is None:
            return []
        zmq = zmq_module()
        asked = self._context.socket(zmq.DEALER)
        asked.rcvhwm = 0
        found: list[tuple[int, bytes]] = []
        try:
            async with asyncio.timeout(self._replay_timeout_s) as limit:
                asked.connect(endpoint)
                await asked.send_multipart((b"", first.to_bytes(SEQUENCE_BYTES, "big")))
                while (frames := await asked.recv_multipart())[-2:-1] != [END]:
                    limit.reschedule(asyncio.get_running_loop().time() + self._replay_timeout_s)
                    number, payload = frames[-2:]  # before them, nothing and, of newer engines, the topic
                    sequence = int.from_bytes(number, "big")
                    if (found[-1][0] + 1 if found else first) <= sequence < before:
                        found.append((sequence, payload))
        except (TimeoutError, ValueError, zmq.ZMQError):
            self._tell(NO_REPLAY, f"{endpoint}: no complete replay of sequence numbers {first} to {before - 1}")
        finally:
            asked.close(linger=0)
        self.replayed += len(found)
        return found
