"""A stream of KV event messages in a file, as it came, so that it can be looked at again without its engine.

The file is gzip of b"KVEVENTS1\\n", then of one record for each message:

    f8  when it was received, in seconds since 1970
    u8  its sequence number
    u2  its data-parallel rank, or which of several endpoints it came from
    u2  bytes of its topic
    u4  bytes of its payload
    the topic, the payload

Numbers are big-endian, without padding: struct's ``>dQHHI``. Messages of one rank and topic are in the order in which they came.
A file that ends within a record, since its writer was killed, has all records before it. To write one beside an engine takes no
more than ZMQ and the standard library:

    import gzip, struct, time, zmq
    socket = zmq.Context().socket(zmq.SUB)
    socket.connect("tcp://127.0.0.1:5557")
    socket.subscribe(b"")
    with gzip.open("events.kvev.gz", "wb") as file:
        file.write(b"KVEVENTS1\\n")
        while True:
            topic, number, payload = socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            file.write(struct.pack(">dQHHI", time.time(), sequence, 0, len(topic), len(payload)) + topic + payload)
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from os import PathLike
from struct import Struct
from typing import BinaryIO, NamedTuple

from kvsim.errors import UsageError

MAGIC = b"KVEVENTS1\n"
HEAD = Struct(">dQHHI")
LONGEST_PAYLOAD_BYTES = 1 << 28


class Message(NamedTuple):
    """A message as it came."""

    received_s: float
    """In seconds since 1970."""
    sequence: int
    rank: int
    topic: bytes
    payload: bytes


class RecordedWriter:
    """Writes messages to an open file. ``flush`` after whatever must not be lost."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = gzip.GzipFile(fileobj=file, mode="wb", mtime=0)
        self._file.write(MAGIC)

    def write(self, message: Message) -> None:
        """Write a message."""
        head = HEAD.pack(message.received_s, message.sequence, message.rank, len(message.topic), len(message.payload))
        self._file.write(head + message.topic + message.payload)

    def flush(self) -> None:
        """Let what has been written be readable, whatever happens to this process."""
        self._file.flush(zlib.Z_SYNC_FLUSH)

    def close(self) -> None:
        """End the stream; the file stays open."""
        self._file.close()


def write_recorded(path: str | PathLike[str], messages: Iterable[Message]) -> None:
    """Write messages to a file."""
    with open(path, "wb") as file:
        writer = RecordedWriter(file)
        for message in messages:
            writer.write(message)
        writer.close()


def read_recorded(path: str | PathLike[str]) -> Iterator[Message]:
    """Yield the messages of a file, up to where it ends or was cut off. Raises UsageError for what is no such file."""
    try:
        with gzip.open(path, "rb") as file:
            if (begins := _read(file, len(MAGIC))) is None:
                return
            if begins != MAGIC:
                raise UsageError(f"{path}: not a recorded stream of KV events: it must begin with {MAGIC!r}, compressed by gzip")
            while len(head := _read(file, HEAD.size) or b"") == HEAD.size:
                received_s, sequence, rank, topic_bytes, payload_bytes = HEAD.unpack(head)
                if payload_bytes > LONGEST_PAYLOAD_BYTES:
                    raise UsageError(f"{path}: a message of {payload_bytes} bytes, after sequence number {sequence}: damaged")
                text = _read(file, topic_bytes + payload_bytes) or b""
                if len(text) < topic_bytes + payload_bytes:
                    return
                yield Message(received_s, sequence, rank, text[:topic_bytes], text[topic_bytes:])
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except zlib.error as error:
        raise UsageError(f"{path}: damaged: {error}") from None


def _read(file: gzip.GzipFile, size: int) -> bytes | None:
    """Return so many bytes, or what there is up to the end; None if what gzip has packed was cut off."""
    try:
        return file.read(size)
    except EOFError:
        return None
