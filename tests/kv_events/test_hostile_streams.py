"""Whatever a recorded stream of KV events contains: messages that are read or refused, or one line that names the file."""

from functools import partial
from pathlib import Path

from hypothesis import given

from kvsim.kv_events.codec import decode
from kvsim.kv_events.dialects import DIALECTS, encode
from kvsim.kv_events.messages import EventError
from kvsim.kv_events.recorded import HEAD, MAGIC, read_recorded
from tests.kv_events.written import EXAMPLE
from tests.mutations import bomb, changed_bytes, few, gzipped, packed, refusal

PAYLOADS = [encode(EXAMPLE, dialect) for dialect in DIALECTS.values()]
PLAIN = MAGIC + b"".join(
    HEAD.pack(1.5 + number, number, 0, 2, len(payload)) + b"kv" + payload for number, payload in enumerate(PAYLOADS)
)


def messages_in(path: Path, content: bytes) -> int | None:
    """The messages that are read of a file; None if it is refused."""
    path.write_bytes(content)
    found = 0

    def read() -> None:
        nonlocal found
        for message in read_recorded(path):
            found += 1
            refusal(partial(decode, message.payload), "", EventError)

    return None if refusal(read, f"{path}") else found


def test_a_changed_stream_is_read_up_to_its_damage_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "stream.kvev.gz"

    @few(cost=1)
    @given(gzipped(changed_bytes(PLAIN), PLAIN))
    def run(content: bytes) -> None:
        found = messages_in(path, content)
        assert found is None or found < 100_000

    run()
    assert messages_in(path, packed(PLAIN)) == len(PAYLOADS)


def test_a_stream_that_unpacks_to_more_than_memory_is_refused(tmp_path: Path) -> None:
    """Nothing of it is kept: what says that it is too long is refused, and the rest is read in pieces."""
    path = tmp_path / "stream.kvev.gz"
    head = HEAD.pack(0.0, 0, 0, 0, (1 << 28) + 1)
    assert messages_in(path, bomb(MAGIC + head)) is None
