"""Requests of a long trace, in a file."""

import gc
import json
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.cli import main
from kvsim.core.request import Request, Reset, RetentionRange
from kvsim.core.requests import fixed, values_of
from kvsim.errors import UsageError
from kvsim.plans.plan import Plan
from kvsim.run import assembly, play, shares
from kvsim.trace import stored
from kvsim.trace.auto import Auto
from kvsim.trace.base import TraceSource, in_order_of_arrival
from kvsim.trace.lmcache import LMCache
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.stored import FIELDS, StoredRequests, from_first_arrival, gathered
from tests.composing import plan
from tests.workloads import conversations, make_request

SMALL = {"PART": 4, "PARTS_KEPT": 2, "SORTED_AT_ONCE": 6, "MOST_IN_MEMORY": -1}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of few requests, and no room for any trace in memory."""
    for name, size in SMALL.items():
        monkeypatch.setattr(stored, name, size)


def described(requests: Any) -> list[dict[str, str]]:
    return [{field.name: repr(getattr(request, field.name)) for field in fields(Request)} for request in requests]


extents = st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 9)), max_size=3).map(tuple)
drawn_requests = st.lists(
    st.builds(
        Request,
        index=st.just(0),
        arrival_s=st.floats(0, 1e6),
        prompt_tokens=st.integers(1, 99),
        output_tokens=st.integers(0, 2**24),
        runs=extents,
        prompt_pages=st.integers(0, 9),
        after=st.integers(-1, 20),
        delay_s=st.floats(0, 10),
        session=st.integers(-1, 2**70),
        kind=st.text(max_size=3),
        priority=st.integers(-5, 5),
        retention=st.lists(
            st.builds(RetentionRange, st.integers(0, 9), st.integers(10, 2**60), st.integers(0, 100), st.floats(0)), max_size=2
        ).map(tuple),
        tenant=st.text(max_size=3),
        output_runs=st.none() | extents,
        own_path=st.none() | extents,
        persistent=st.booleans(),
        samples=st.integers(1, 3),
        sample_output_runs=st.lists(extents, max_size=2).map(tuple),
        images=st.lists(st.tuples(st.integers(0, 9), st.integers(10, 20)), max_size=2).map(tuple),
        resets=st.lists(st.builds(Reset, st.sampled_from(("drain", "now")), st.floats(0, 9) | st.just(float("nan")))).map(tuple),
    ),
    max_size=30,
)


def numbered(requests: list[Request]) -> list[Request]:
    return [replace(request, index=index) for index, request in enumerate(requests)]


@given(drawn_requests)
def test_what_is_read_is_what_was_stored(requests: list[Request]) -> None:
    known, found = numbered(requests), StoredRequests(requests)
    assert len(found) == len(known)
    assert described(found) == described(known) == described(found), "twice"
    assert described(found[3:15:2]) == described(known[3:15:2])
    for cut in (slice(None), slice(3, 9), slice(-5, None), slice(7, 2), slice(0, 4), slice(50, 60)):
        assert described(found[cut]) == described(known[cut])
    assert [described([found[at]]) for at in range(-len(known), len(known))] == [described([one]) for one in known + known]
    for name in (*FIELDS, "index"):
        assert list(map(repr, values_of(found, name))) == list(map(repr, values_of(known, name)))
    assert all(type(reset) is Reset for request in found for reset in request.resets)
    assert all(type(one) is RetentionRange for request in found for one in request.retention)


def test_values_that_are_equal_but_differ_stay_apart() -> None:
    requests = [make_request((1, 2), index=at, arrival_s=arrival_s) for at, arrival_s in enumerate([0.0, 0, -0.0])]
    assert [repr(value) for value in StoredRequests(requests).values("arrival_s")] == [repr(one.arrival_s) for one in requests]
    assert [str(one.arrival_s) for one in requests[::2]] == ["0.0", "-0.0"], "compiled, 0 is 0.0"


def test_positions_beyond_the_end_are_refused() -> None:
    found = StoredRequests(conversations(requests=5))
    for at in (5, -6):
        with pytest.raises(IndexError):
            found[at]
    with pytest.raises(ValueError, match="not in tuple"):
        list(found.values("nonsense"))


def test_a_copy_in_another_process_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    known, changed = conversations(requests=9), conversations(requests=9)
    for request in changed:
        request.tenant = "other"
    monkeypatch.setattr(stored, "AT_ONCE", 100)
    first = StoredRequests(known)
    copied = pickle.loads(pickle.dumps(first))
    assert type(copied) is StoredRequests and described(copied) == described(known)
    assert described(copied.changed(lambda request: setattr(request, "tenant", "other"))) == described(changed)
    del first
    assert described(copied) == described(known)
    assert described(pickle.loads(pickle.dumps(StoredRequests([])))) == []


def test_changes_to_requests_that_were_read_are_lost_in_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that is still in memory would count where requests are read, and not where a field of all is."""
    monkeypatch.setattr(stored, "PARTS_KEPT", 9)
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": at * 100, "input_length": 32, "output_length": 4, "hash_ids": [at % 3, 9 + at]} for at in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = kvsim.load_trace(path, block_tokens=16)
    assert isinstance(trace.requests, StoredRequests)
    before = kvsim.replay(trace, "tiers.gpu.capacity=8pages").record["hit_tokens"]
    for request in trace.requests:
        request.runs = ((0, 2),)
        request.prompt_tokens = 33
    assert kvsim.replay(trace, "tiers.gpu.capacity=8pages").record["hit_tokens"] == before
    assert trace.requests[0].prompt_tokens == 32


def test_processes_that_simulate_engines_apart_read_requests_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    given_to: list[Any] = []

    def noted(one: Plan, requests: Any, pool: Any) -> Any:
        given_to.append(requests)
        return assembly.build_graphs(one, requests, pool)

    monkeypatch.setattr(shares, "build_graphs", noted)
    settings = "cluster.engines=2", "routing=round_robin", "tiers.gpu.capacity=100pages", "page_tokens=4"
    known = [replace(one, index=at, arrival_s=float(at)) for at, one in enumerate(conversations(requests=12))]
    found = StoredRequests(known)
    two = play.simulate(plan(*settings, "cluster.workers=2", command="simulate"), found)
    one = play.simulate(plan(*settings, command="simulate"), known)
    assert given_to == [found]
    assert (two.hit_pages == one.hit_pages).all()


def test_nobody_can_add_requests() -> None:
    known = conversations(requests=9)
    found = StoredRequests(known)
    assert fixed(found) is found and fixed(known) == tuple(known)
    assert not hasattr(found, "append")


@given(drawn_requests)
def test_the_order_of_arrival_is_that_of_a_list(requests: list[Request]) -> None:
    requests = [replace(one, after=min(one.after, at - 1)) for at, one in enumerate(requests)]
    found = in_order_of_arrival(StoredRequests(requests))
    assert isinstance(found, StoredRequests)
    assert described(found) == described(in_order_of_arrival([replace(one) for one in requests]))


@given(drawn_requests.filter(bool), st.floats(0.5, 4))
def test_arrivals_count_from_the_first(requests: list[Request], rate: float) -> None:
    source = StoredRequests(requests)
    before = described(source)
    found = from_first_arrival(source, rate)
    assert described(source) == before, "the other file is as it was"
    assert list(values_of(found, "arrival_s")) == list(values_of(from_first_arrival(requests, rate), "arrival_s"))


def test_few_requests_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    known = conversations(requests=20)
    extents = sum(len(request.runs) + len(request.output_runs or ()) + stored.OF_A_REQUEST for request in known)
    monkeypatch.setattr(stored, "MOST_IN_MEMORY", extents)
    assert gathered(iter(known)) == known
    monkeypatch.setattr(stored, "MOST_IN_MEMORY", extents - 1)
    found = gathered(iter(known))
    assert isinstance(found, StoredRequests) and gathered(found) is found
    assert described(found) == described(known)


def test_a_folder_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored, "TemporaryFile", no_room)
    with pytest.raises(UsageError, match=r"cannot be stored in .*: No space left on device; set TMPDIR"):
        StoredRequests(conversations(requests=3))


def test_where_no_folder_can_be_written_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: object) -> Any:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(stored, "TemporaryFile", none)
    monkeypatch.setattr(stored, "gettempdir", none)
    with pytest.raises(UsageError, match=r"cannot be stored in a folder for temporary files: No usable .*; set TMPDIR"):
        StoredRequests(conversations(requests=3))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_is_one_line(monkeypatch: pytest.MonkeyPatch, write: Callable[..., str], capsys: Any) -> None:
    monkeypatch.setattr(stored, "TemporaryFile", lambda **_: open("/dev/full", "r+b"))  # noqa: SIM115
    path = write(*HASHED)
    assert main(["replay", "trace=mooncake", f"trace.path={path}", "trace.block_tokens=16", "tiers.gpu.capacity=99pages"]) == 2
    gc.collect()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "No space left on device; set TMPDIR" in lines[0]


# --- readers ---

TOKENS = [
    {"token_ids": [*range(40 + at), *range(at)], "output_length": 3, "timestamp": 10 * at, "session_id": str(at % 3)}
    for at in range(12)
]
HASHED = [
    {"timestamp": 10 * at, "input_length": 64 + 16 * at, "output_length": at, "hash_ids": [1, 2, 3, 4, *range(50, 50 + at)],
     "session_id": at % 3, "type": "x" * (at % 2)}
    for at in range(12)
]  # fmt: skip
CLOSED = [line | ({"delay": 500} if at > 2 else {}) for at, line in enumerate(HASHED)]
RESET = [*HASHED[:4], {"reset": "now"}, *HASHED[4:]]
BAILIAN = [
    {"chat_id": at, "parent_chat_id": at - 3, "timestamp": (7 * at) % 12 + 100.0, "type": "text", "turn": 1 + at // 3,
     "input_length": 48, "output_length": 5, "hash_ids": [1, 2, at]}
    for at in range(12)
]  # fmt: skip
LOOKUPS = [
    {"timestamp": 100.0 + (5 * at) % 12, "request_id": str(at // 2 * 2 if at < 4 else at), "model_name": "m", "chunk_size": 16,
     "seq_len": 48, "chunk_hashes": ["0x1", "0x2", hex(at + 3)]}
    for at in range(12)
]  # fmt: skip


SOURCES: dict[str, tuple[list[Any], Callable[[str], TraceSource]]] = {
    "tokens": (TOKENS, lambda path: Auto(path=path)),
    "mooncake": (HASHED, lambda path: Mooncake(path=path, block_tokens=16)),
    "closed_loop": (CLOSED, lambda path: Mooncake(path=path, block_tokens=16)),
    "resets": (RESET, lambda path: Mooncake(path=path, block_tokens=16)),
    "deltas": (HASHED, lambda path: Mooncake(path=path, block_tokens=16, turns="deltas")),
    "unique": (HASHED, lambda path: Mooncake(path=path, block_tokens=16, answers="unique")),
    "bailian": (BAILIAN, lambda path: Auto(path=path)),
    "lmcache": (LOOKUPS, lambda path: LMCache(path=path, block_tokens=16)),
    "limited": (LOOKUPS, lambda path: LMCache(path=path, block_tokens=16, limit=5, rate=2.0)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_reader_gives_the_same_requests(name: str, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines, source = SOURCES[name]
    path = write(*lines)
    found = source(path).load(16)
    assert isinstance(found.requests, StoredRequests)
    monkeypatch.setattr(stored, "MOST_IN_MEMORY", 10_000)
    known = source(path).load(16)
    assert isinstance(known.requests, list)
    assert described(found.requests) == described(known.requests)
    assert repr(found) == repr(known) and found._repr_html_() == known._repr_html_()


@pytest.mark.parametrize("choice", [{"answers": "inferred"}, {"spread": True}])
def test_what_needs_all_requests_has_them_in_memory(
    choice: dict[str, Any], write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(*[line | {"timestamp": at // 2} for at, line in enumerate(HASHED)])
    found = Mooncake(path=path, block_tokens=16, **choice).load(16).requests
    monkeypatch.setattr(stored, "MOST_IN_MEMORY", 10_000)
    known = Mooncake(path=path, block_tokens=16, **choice).load(16).requests
    assert isinstance(found, list) and described(found) == described(known)


def test_an_error_in_a_late_line_is_that_of_the_line(write: Callable[..., str]) -> None:
    path = write(*HASHED, {"timestamp": 999, "input_length": 5, "output_length": 1, "hash_ids": [1, 2, 3, 4]})
    with pytest.raises(UsageError, match=r"trace.jsonl:13: hash_ids has 4 ids"):
        Mooncake(path=path, block_tokens=16).load(16)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 400))
def test_a_damaged_file_is_refused_however_far_it_was_read(cut: int, tmp_path: Path) -> None:
    import zstandard

    packed = zstandard.compress("".join(f"{json.dumps(line)}\n" for line in HASHED).encode())
    path = tmp_path / "trace.jsonl.zst"
    path.write_bytes(packed[: max(1, len(packed) - cut)])
    with pytest.raises(UsageError, match=r"Zstandard file is|not valid"):
        Mooncake(path=str(path), block_tokens=16).load(16)


def test_memory_does_not_grow_with_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 20 extents takes 3 KB as an object."""
    monkeypatch.setattr(stored, "PART", 256)
    monkeypatch.setattr(stored, "MOST_IN_MEMORY", 6_000)

    def requests(number: int) -> Iterator[Request]:
        for at in range(number):
            runs = tuple((1_000 * at + 10 * place, 5) for place in range(20))
            yield Request(index=0, arrival_s=float(at), prompt_tokens=1_600, output_tokens=at, runs=runs, prompt_pages=100)

    tracemalloc.start()
    try:
        assert sum(request.prompt_pages for request in gathered(requests(4_000))) == 400_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000 < 4_000 * 3_000
