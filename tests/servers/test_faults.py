"""What goes wrong with a server or between it and the client: one clear line, and what came until then is kept."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvsim.core.request import Request
from kvsim.emulation.apis.base import ApiSettings
from kvsim.errors import UsageError
from kvsim.results.observed import ObservedRun
from kvsim.servers.play import client_notes, play_server, read_facts
from kvsim.servers.settings import ServerSettings
from tests.results.test_observed import RUN
from tests.reused_compositions import compositions_are_reused
from tests.servers.emulated import Emulated, Faults, emulated
from tests.workloads import Words

VLLM = ("preset=vllm", "tiers.gpu.capacity=100pages")
SGLANG = ("preset=sglang", "tiers.gpu.capacity=1600pages")
DIALECTS = pytest.mark.parametrize(("dialect", "overrides"), [("vllm", VLLM), ("sglang", SGLANG)], ids=["vllm", "sglang"])


@pytest.fixture(autouse=True, scope="module")
def compositions() -> Iterator[None]:
    with compositions_are_reused():
        yield


def requests_of(words: str = "abcde") -> list[Request]:
    """Prompts of 16 tokens that share nothing, with answers of 20 tokens."""
    index = Words()
    return [index.request(word, index=number, page_tokens=16, output=20) for number, word in enumerate(words)]


def play(server: Emulated, requests: list[Request] | None = None, **settings: object) -> ObservedRun:
    asked = ServerSettings(url=server.url, **{"concurrency": 1, **settings})
    return play_server(requests or requests_of(), 16, asked)


def check_kept(run: ObservedRun, failed: int, error: str) -> None:
    """Request ``failed`` of five has this error, the others are complete."""
    assert [one is not None for one in run.errors] == [number == failed for number in range(5)]
    found = run.errors[failed]
    assert found is not None and error in found and "\n" not in found
    assert np.isnan(run.end_s).tolist() == [number == failed for number in range(5)]
    assert not np.isnan(run.sent_s).any()
    assert run.failures() == f"1 of 5 requests failed: 1 x {found}"
    assert failed not in run.admitted()


@DIALECTS
@pytest.mark.parametrize("status", [429, 500])
def test_an_error_status_fails_its_request(dialect: str, overrides: tuple[str, ...], status: int) -> None:
    with emulated(overrides, dialect=dialect, speed=300.0, faults=Faults(status={2: status})) as server:
        run = play(server)
    check_kept(run, 2, f"HTTP {status}: not now")
    assert np.isnan(run.first_token_s[2])


@DIALECTS
def test_a_cut_stream_keeps_its_first_token(dialect: str, overrides: tuple[str, ...]) -> None:
    with emulated(overrides, dialect=dialect, speed=300.0, faults=Faults(cut=frozenset({3}))) as server:
        run = play(server)
    check_kept(run, 3, "the connection broke: ")
    assert run.first_token_s[3] > run.sent_s[3] and run.output_tokens[3] > 0


@DIALECTS
def test_a_stream_that_ends_early_is_no_answer(dialect: str, overrides: tuple[str, ...]) -> None:
    with emulated(overrides, dialect=dialect, speed=300.0, faults=Faults(ended_early=frozenset({0}))) as server:
        run = play(server)
    check_kept(run, 0, "the server ended its answer early")


@DIALECTS
def test_a_failure_within_a_stream_is_told(dialect: str, overrides: tuple[str, ...]) -> None:
    with emulated(overrides, dialect=dialect, speed=300.0, faults=Faults(failing=frozenset({1}))) as server:
        run = play(server)
    check_kept(run, 1, "the server failed: out of memory")


@DIALECTS
def test_an_event_that_is_none_fails_its_request(dialect: str, overrides: tuple[str, ...]) -> None:
    with emulated(overrides, dialect=dialect, speed=300.0, faults=Faults(garbled=frozenset({4}))) as server:
        run = play(server)
    check_kept(run, 4, "the server's answer cannot be read: ")


def test_a_request_that_is_never_answered_times_out() -> None:
    with emulated(VLLM, speed=300.0, faults=Faults(silent=frozenset({1}))) as server:
        run = play(server, timeout_s=4.0)
    check_kept(run, 1, "no complete answer within 4 s")


@pytest.mark.parametrize("concurrency", [1, None], ids=["closed loop", "by time"])
def test_a_server_that_dies_ends_the_run(concurrency: int | None) -> None:
    """What follows a request that has failed, and what arrives later, is not waited for until it would be due, in an hour."""
    first, second, third, fourth, fifth = requests_of()
    requests = [
        first,
        replace(second, after=0),
        replace(third, after=1),
        replace(fourth, after=2, delay_s=0.5),
        replace(fifth, after=2, delay_s=3600.0),
        *[replace(first, index=number, arrival_s=3700.0) for number in (5, 6)],
    ]
    with emulated(VLLM, speed=300.0, faults=Faults(dies_after=2)) as server:
        run = play(server, requests, concurrency=concurrency)
    assert run.errors[:2] == [None, None] and run.errors[2] is not None and "the connection broke" in run.errors[2]
    assert all(error is not None for error in run.errors[2:])
    assert set(run.errors[4:]) <= {
        f"not sent: {server.url} did not answer any more",
        run.errors[3],
    }
    assert run.counters == {} and any("the counters are lost" in note for note in run.notes)


def test_prompts_longer_than_the_model_takes_are_not_sent() -> None:
    with emulated(VLLM, speed=300.0, settings=ApiSettings(longest_tokens=40)) as server:
        run = play(server, [*requests_of()[:4], replace(requests_of()[4], output_tokens=25)])
        assert len(server.served) == 4
    assert run.errors[:4] == [None] * 4
    assert run.errors[4] == "not sent: prompt and answer are longer than the server's 40 tokens (max_model_len)"
    assert np.isnan(run.sent_s[4])


def test_a_request_that_does_not_fit_is_refused_by_the_server() -> None:
    """The emulated server says no word of its limit here: it answers as for any request that it cannot serve."""
    with emulated(("page_tokens=16", "tiers.gpu.capacity=3pages"), dialect="openai", speed=300.0) as server:
        server.forget_limit()
        run = play(server, [*requests_of()[:4], replace(requests_of()[4], output_tokens=90)], reset=False)
    check_kept(run, 4, "HTTP 400: the request does not fit the server's memory even alone")


def test_a_wrong_model_is_refused() -> None:
    with emulated(VLLM) as server, pytest.raises(UsageError, match=r"has no model llama, but emulated$"):
        play(server, model="llama")


@pytest.mark.parametrize(
    ("dialect", "overrides", "problem"),
    [
        ("vllm", VLLM, r"cannot be told to empty its cache \(HTTP 404\): start vLLM with VLLM_SERVER_DEV_MODE=1"),
        ("sglang", SGLANG, r"has not emptied its cache \(HTTP 404\)"),
        ("openai", VLLM, "cannot be told to empty its cache: restart it before each run, and set reset=false"),
    ],
)
def test_a_server_without_a_reset_is_refused(dialect: str, overrides: tuple[str, ...], problem: str) -> None:
    with emulated(overrides, dialect=dialect, settings=ApiSettings(has_reset=False)) as server:
        with pytest.raises(UsageError, match=problem):
            play(server)
        assert server.served == [], "nothing has been sent"


def test_a_server_that_still_loads_is_refused() -> None:
    with emulated(VLLM, faults=Faults(health=503)) as server, pytest.raises(UsageError, match=r"is not ready \(HTTP 503\)"):
        play(server)


def test_no_server_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"^http://127.0.0.1:1 does not answer: ") as raised:
        read_facts(ServerSettings(url="http://127.0.0.1:1"))
    assert "\n" not in str(raised.value)


def test_a_warm_up_that_fails_ends_the_run() -> None:
    failed = pytest.raises(UsageError, match="the warm-up failed: HTTP 500: not now")
    with emulated(VLLM, speed=300.0, faults=Faults(status={1: 500})) as server, failed:
        play(server, warmup_requests=2)


def test_without_httpx_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UsageError, match=r"httpx is missing, which talks to servers: pip install kvsim\[servers\]"):
        read_facts(ServerSettings(url="http://127.0.0.1:1"))


def test_a_client_that_was_too_slow_is_marked() -> None:
    quick = replace(RUN, due_s=np.zeros(200), sent_s=np.full(200, 0.001), stall_s=0.01)
    assert client_notes(quick, 0.05) == []
    late = replace(quick, sent_s=np.where(np.arange(200) < 4, 0.2, 0.001))
    assert client_notes(late, 0.05) == ["the client was too slow: 1 of 100 requests was sent 200 ms late or more"]
    assert client_notes(replace(quick, stall_s=0.3), 0.05) == ["the client was too slow: it stood still for 300 ms"]


def test_a_client_that_stands_still_notices() -> None:
    """A block of 0.3 s between two sends is seen, and makes the second one late."""

    def block(done: int) -> None:
        if done == 1:
            asyncio.get_running_loop().call_later(0.0, lambda: __import__("time").sleep(0.3))

    with emulated(VLLM, speed=300.0) as server:
        requests = [requests_of()[0], replace(requests_of()[1], arrival_s=0.15)]
        run = play_server(requests, 16, ServerSettings(url=server.url), block)
    assert run.stall_s > 0.25 and run.is_client_bound and "the client was too slow" in run.notes[0]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"url": "http://me:secret@localhost:8000"}, "url has a user or password"),
        ({"url": "localhost:8000"}, "url must be an address such as"),
        ({"url": "http://127.0.0.1:99999"}, "url must be an address such as"),
        ({"url": "http://127.0.0.1:port"}, "url must be an address such as"),
        ({"url": "http://[::1"}, "url must be an address such as"),
        ({"engine": "tgi"}, "engine must be one of auto, vllm, sglang, openai"),
        ({"speed": 0.0}, "speed must be above 0"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"concurrency": 4, "speed": 2.0}, "speed has no effect with concurrency"),
        ({"timeout_s": 0.0}, "timeout_s must be above 0"),
        ({"warmup_requests": 1, "reset": False}, "warmup_requests needs reset=true"),
        ({"token_ids": 1}, "token_ids must be"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ServerSettings(**{"url": "http://localhost:8000", **settings})
