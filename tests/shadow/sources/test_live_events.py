"""Events of engines and of recordings reach the shadow in order, with what was lost between them."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from kvsim.errors import UsageError
from kvsim.kv_events.dialects import DIALECTS, encode
from kvsim.kv_events.messages import EventBatch
from kvsim.kv_events.publisher import Publisher
from kvsim.kv_events.recorded import Message, write_recorded
from kvsim.shadow.sources.base import Source
from kvsim.shadow.sources.live_events import LiveEvents, RecordedEvents
from kvsim.shadow.sources.prompts import Prompts
from tests.shadow.sources.shadowing import shadowing
from tests.shadow.written import CLEARED, PAGE_TOKENS, batch, removed, stored
from tests.waiting import LONG_S, join, wait_until

PLAN = ("model=tiny", f"page_tokens={PAGE_TOKENS}", "rules=vllm", "tiers.gpu.capacity=8pages")
BATCHES = [batch(100.0, stored("abcd")), batch(101.0, stored("abxy", 2)), batch(102.0, removed("abcd", "abc"))]


def recorded(
    path: Path, messages: Sequence[tuple[int, EventBatch | bytes]], dialect: str = "vllm"
) -> Callable[[Prompts], Source]:
    """Write messages by their sequence numbers, and return what reads them."""
    payloads = [(number, one if isinstance(one, bytes) else encode(one, DIALECTS[dialect])) for number, one in messages]
    write_recorded(path, [Message(100.0, number, 0, b"", payload) for number, payload in payloads])
    return lambda prompts: RecordedEvents(path)


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_a_recording_of_events_is_played_to_its_end(dialect: str, tmp_path: Path) -> None:
    make = recorded(tmp_path / "events.gz", list(enumerate(BATCHES)), dialect)
    with shadowing(make, PLAN, record=tmp_path / "trace.jsonl") as shadow:
        shadow.join()
    seen = shadow.shadow.snapshot()
    (engine,) = seen.engines
    assert (engine.name, engine.pages, engine.stored, engine.removed, engine.known) == ("events.gz", {"gpu": 4}, 6, 2, True)
    assert (seen.requests, seen.ghosts[0].alike_requests, shadow.lines) == (2, 2, [])
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [len(line["hash_ids"]) for line in lines] == [4, 4] and lines[0]["hash_ids"][:2] == lines[1]["hash_ids"][:2]


def test_gaps_restarts_and_malformed_messages_of_a_recording_are_told(tmp_path: Path) -> None:
    messages = [
        (0, BATCHES[0]),
        (5, BATCHES[1]),
        (6, b"\xc1 nonsense"),
        (0, batch(103.0, stored("xy"))),
        (1, batch(104.0, CLEARED)),
    ]
    with shadowing(recorded(tmp_path / "events.gz", messages), PLAN) as shadow:
        shadow.join()
    seen = shadow.shadow.snapshot()
    assert seen.gaps == 1 and seen.engines[0].lost_batches == 4 and seen.engines[0].pages == {} and seen.engines[0].known
    lost, malformed, restarted = shadow.lines
    assert "4 messages before sequence number 5 are lost" in lost and "a malformed message is skipped" in malformed
    assert "the engine has restarted: sequence number 0 after 5" in restarted
    assert sorted(shadow.feed.problems.values()) == [1, 1, 1]


def test_no_more_requests_are_taken_from_events_than_wanted(tmp_path: Path) -> None:
    many = [batch(100.0 + number, stored(text)) for number, text in enumerate(("abcd", "efgh", "ijkl", "mnop"))]
    for batches in (many, [batch(100.0, *(event for one in many for event in one.events))]):  # all at once, and at the end
        record = tmp_path / f"{len(batches)}.jsonl"
        with shadowing(recorded(tmp_path / "events.gz", list(enumerate(batches))), PLAN, record=record, most=2) as shadow:
            shadow.join()
        assert shadow.shadow.requests == shadow.feed.seen == len(record.read_text().splitlines()) == 2


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.gz"
    path.write_bytes(b"text")
    with pytest.raises(UsageError), shadowing(lambda prompts: RecordedEvents(path), PLAN) as shadow:
        shadow.join()


@contextmanager
def publishing(batches: Sequence[EventBatch], ranks: int = 1) -> Iterator[list[tuple[str, str]]]:
    """Publish batches from each rank, and go on with the last one until the end of the block. Yields addresses and replays."""
    loop, addresses, is_up, stopped = asyncio.new_event_loop(), list[tuple[str, str]](), Event(), asyncio.Event()

    async def run() -> None:
        async with Publisher(DIALECTS["vllm"], "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
            for one in batches:
                publisher.publish(one)
            assert publisher.replay_endpoint is not None
            addresses.append((publisher.endpoint, publisher.replay_endpoint))
            is_up.set()
            while not stopped.is_set():
                publisher.publish(batch(200.0))
                await asyncio.sleep(0.02)

    thread = Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert is_up.wait(LONG_S)
    try:
        yield addresses
    finally:
        loop.call_soon_threadsafe(stopped.set)
        join(thread)
        loop.close()


@pytest.mark.parametrize("has_replay", [True, False])
def test_a_subscriber_that_comes_late_gets_a_replay_or_says_what_it_missed(has_replay: bool) -> None:
    with publishing(BATCHES) as ((address, replay),):
        make = lambda prompts: LiveEvents(address, replay if has_replay else None, "", 1)  # noqa: E731
        with shadowing(make, PLAN) as shadow:
            wait_until(lambda: shadow.shadow.snapshot().engines)
    (engine,) = shadow.shadow.snapshot().engines
    assert engine.name == address
    if has_replay:
        assert (engine.pages, engine.known, shadow.lines) == ({"gpu": 4}, True, [])
    else:
        assert engine.lost_batches >= 3 and not engine.known
        assert len(shadow.lines) == 1 and "are lost" in shadow.lines[0]


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError), shadowing(lambda prompts: LiveEvents("nowhere", None, "", 1), PLAN) as shadow:
        shadow.join()
