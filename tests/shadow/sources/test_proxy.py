"""A proxy changes nothing between client and server, and the shadow behind it sees what the server did."""

import json
import re
import socket
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kvsim.emulation.apis.base import ApiSettings
from kvsim.emulation.text import Texts
from kvsim.trace.mooncake import Mooncake
from tests.servers.emulated import Faults, emulated
from tests.shadow.sources.shadowing import ASKED, DOC, PLAIN, STREAM, chunk, event, proxy, raw, request_of, scripted, shadowing
from tests.trace.models import make_model
from tests.waiting import LONG_S, join, wait_until

CACHED = re.compile(r'"cached_tokens":(\d+)')
USAGE = {"prompt_tokens": 64, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}


def test_a_request_and_its_answer_pass_unchanged() -> None:
    got: list[bytes] = []

    def script(connection: socket.socket) -> None:
        got.append(request_of(connection))
        connection.sendall(
            b"HTTP/1.1 418 Short And Stout\r\nContent-Type: text/x; a=b\r\nContent-Length: 5\r\nX-Own: one\r\nSet-Cookie: a=1\r\n"
            b"Set-Cookie: b=2\r\nServer: mine\r\nDate: never\r\nConnection: close\r\n\r\n\x00\xffabc"
        )

    body = b'{"prompt": "\xff not UTF-8'
    with scripted(script) as server, shadowing(proxy(server)) as shadow:
        answer = raw(
            shadow.url,
            b"POST /v1/completions?a=%%20b&c HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nX-Mine: two\r\nX-Mine: three\r\n"
            b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n%b" % (len(body), body),
        )
    head, _, sent = got[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/completions?a=%20b&c HTTP/1.1" and sent == body
    assert sorted(lines[1:]) == sorted(
        [b"Host: " + server.removeprefix("http://").encode(), b"Content-Length: %d" % len(body), b"X-Mine: two", b"X-Mine: three",
         b"Content-Encoding: gzip"]
    )  # fmt: skip
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"HTTP/1.1 418 Short And Stout" and content == b"\x00\xffabc"
    assert sorted(head.split(b"\r\n")[1:]) == [
        b"Connection: close", b"Content-Length: 5", b"Content-Type: text/x; a=b", b"Date: never", b"Server: mine",
        b"Set-Cookie: a=1", b"Set-Cookie: b=2", b"X-Own: one",
    ]  # fmt: skip
    assert shadow.shadow.requests == 0 and shadow.lines == []


def test_a_stream_passes_event_by_event() -> None:
    goes_on = Event()

    def script(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(STREAM + chunk(event({"choices": [{"index": 0, "text": " a"}]})))
        assert goes_on.wait(LONG_S)
        connection.sendall(chunk(event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n") + b"0\r\n\r\n")

    with (
        scripted(script) as server,
        shadowing(proxy(server)) as shadow,
        httpx.stream("POST", shadow.url + "/v1/completions", json=ASKED, timeout=LONG_S) as answer,
    ):
        parts = answer.iter_raw()
        assert next(parts) == event({"choices": [{"index": 0, "text": " a"}]})  # before the server has sent the next
        goes_on.set()
        assert b"".join(parts).endswith(b"data: [DONE]\n\n")
    assert shadow.shadow.requests == 1 and shadow.observed.hit_rate == 16 / 64


def test_a_stream_passes_to_a_client_of_http_1_0_without_chunks() -> None:
    told = event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"

    def script(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(STREAM + chunk(told) + b"0\r\n\r\n")

    body = json.dumps(ASKED).encode()
    with scripted(script) as server, shadowing(proxy(server)) as shadow:
        asked = b"Connection: keep-alive\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
        answer = raw(shadow.url, b"POST /v1/completions HTTP/1.0\r\n" + asked + body)
    assert answer.split(b"\r\n")[0].endswith(b" 200 OK") and b"Transfer-Encoding" not in answer
    assert answer.partition(b"\r\n\r\n")[2] == told and shadow.shadow.requests == 1


@pytest.mark.parametrize(
    ("dialect", "path"), [("vllm", "/v1/completions"), ("sglang", "/generate"), ("openai", "/v1/completions")]
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_ghost_with_the_servers_settings_finds_what_the_server_found(
    dialect: str, path: str, stream: bool, tmp_path: Path
) -> None:
    record = tmp_path / "trace.jsonl"
    prompts, cached = [DOC, [*DOC, *range(40)], [*DOC, *range(40), 7, 8], [5] * 33, DOC], list[int]()
    with emulated(PLAIN, dialect=dialect, speed=1000.0) as server, shadowing(proxy(server.url), record=record) as shadow:
        for prompt in prompts:
            if path == "/generate":
                body: dict[str, Any] = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 3}, "stream": stream}
            else:
                body = {"prompt": prompt, "max_tokens": 3, "stream": stream}
                body |= {"stream_options": {"include_usage": True}} if stream else {}
            answer = httpx.post(shadow.url + path, json=body, timeout=LONG_S)
            assert answer.status_code == 200 and (answer.text.startswith("data: ") == stream)
            cached += [int(found) for found in CACHED.findall(answer.text)[-1:]]
    (ghost,) = shadow.shadow.snapshot().ghosts
    assert (ghost.requests, ghost.checked_requests, ghost.alike_requests) == (5, 5, 5) and shadow.lines == []
    assert len(cached) == 5 and sum(cached) > 0 and ghost.hit_rate == sum(cached) / sum(map(len, prompts))
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["input_length"], line["output_length"]) for line in lines] == [(len(prompt), 3) for prompt in prompts]
    assert len(Mooncake(path=str(record), block_tokens=16).load(16).requests) == 5


def test_a_chat_is_known_with_its_answer_and_nothing_of_it_is_recorded(tmp_path: Path) -> None:
    record, messages = tmp_path / "trace.jsonl", [{"role": "user", "content": "my secret question " * 20}]
    said = {"role": "assistant", "content": "my secret answer " * 20}

    def script(connection: socket.socket) -> None:
        request_of(connection)
        body = json.dumps({"choices": [{"index": 0, "message": said}], "usage": USAGE}).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\n\r\n" + body)

    with scripted(script) as server, shadowing(proxy(server), record=record) as shadow:
        for asked in (messages, [*messages, said, {"role": "user", "content": "and more"}]):
            body = {"model": "m", "messages": asked}
            answer = httpx.post(shadow.url + "/v1/chat/completions", json=body, timeout=LONG_S)
            assert answer.json()["usage"] == USAGE
    first, second = [json.loads(line) for line in record.read_text().splitlines()]
    whole = first["hash_ids"] + first["output_hash_ids"]
    assert len(whole) > len(first["hash_ids"]) > 3 and second["hash_ids"][: len(whole)] == whole
    assert "secret" not in record.read_text() and shadow.prompts.read_bytes


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_chat_is_the_tokens_that_the_server_makes_of_it(dialect: str, stream: bool, tmp_path: Path) -> None:
    """With the model's tokenizer and template, each turn hits as much as in the server, the answers before it included."""
    model = make_model(tmp_path / "model")
    overrides = (f"preset={dialect}", "page_tokens=16", "model=tiny", "tiers.gpu.capacity=100pages")
    settings, messages = ApiSettings(texts=Texts(model)), list[dict[str, str]]()
    with (
        emulated(overrides, dialect=dialect, speed=1000.0, settings=settings) as server,
        shadowing(proxy(server.url), overrides, tokenizer=model) as shadow,
    ):
        for question in ("What is the weather like today? " * 8, "It rains. " * 5, "Why?"):
            messages.append({"role": "user", "content": question})
            body: dict[str, Any] = {"messages": messages, "max_tokens": 40, "stream": stream}
            body |= {"stream_options": {"include_usage": True}} if stream else {}
            answer = httpx.post(shadow.url + "/v1/chat/completions", json=body, timeout=LONG_S)
            assert answer.status_code == 200, answer.text
            texts = re.findall(r'"content": ?"([^"]*)"', answer.text)
            messages.append({"role": "assistant", "content": "".join(texts)})
    (ghost,) = shadow.shadow.snapshot().ghosts
    assert (ghost.requests, ghost.checked_requests, ghost.alike_requests) == (3, 3, 3) and ghost.hit_rate > 0.5
    assert shadow.prompts.other_lengths == 0 and not shadow.prompts.read_bytes


@pytest.mark.parametrize("status", [400, 429, 503])
def test_a_refusal_passes_and_is_no_request(status: int) -> None:
    with emulated(PLAIN, faults=Faults(status={0: status})) as server, shadowing(proxy(server.url)) as shadow:
        answer = httpx.post(shadow.url + "/v1/completions", json=ASKED, timeout=LONG_S)
        assert answer.status_code == status and answer.json() == {"error": {"message": "not now"}}
        assert httpx.post(shadow.url + "/v1/completions", json=ASKED, timeout=LONG_S).status_code == 200
    assert shadow.shadow.requests == 1 and shadow.lines == []


@pytest.mark.parametrize(("dialect", "path"), [("vllm", "/reset_prefix_cache"), ("sglang", "/flush_cache")])
def test_a_cache_that_is_emptied_empties_the_ghosts(dialect: str, path: str, tmp_path: Path) -> None:
    record = tmp_path / "trace.jsonl"
    asked = {"input_ids": DOC, "sampling_params": {"max_new_tokens": 3}} if dialect == "sglang" else ASKED
    where = "/generate" if dialect == "sglang" else "/v1/completions"
    with emulated(PLAIN, dialect=dialect, speed=1000.0) as server, shadowing(proxy(server.url), record=record) as shadow:
        for number in range(3):
            assert httpx.post(shadow.url + where, json=asked, timeout=LONG_S).status_code == 200
            if number == 1:
                assert httpx.post(shadow.url + path, timeout=LONG_S).status_code == 200
    (ghost,) = shadow.shadow.snapshot().ghosts
    assert ghost.hit_rate == 48 / 192 and ghost.alike_requests == 3
    assert [name for line in record.read_text().splitlines() for name in json.loads(line) if name == "reset"] == ["reset"]
    requests = Mooncake(path=str(record), block_tokens=16).load(16).requests
    assert [bool(request.resets) for request in requests] == [False, False, True]


def test_what_has_no_prompt_passes_too() -> None:
    with emulated(PLAIN) as server, shadowing(proxy(server.url)) as shadow:
        for path in ("/health", "/v1/models", "/metrics", "/nothing"):
            straight, passed = (httpx.get(url + path, timeout=LONG_S) for url in (server.url, shadow.url))
            assert (passed.status_code, passed.content) == (straight.status_code, straight.content)
    assert shadow.shadow.requests == 0


def test_an_answer_without_a_body_passes() -> None:
    def script(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nConnection: close\r\n\r\n")

    with scripted(script) as server, shadowing(proxy(server)) as shadow:
        answer = httpx.head(shadow.url + "/health", timeout=LONG_S)
    assert (answer.status_code, answer.headers["Content-Length"], answer.content) == (200, "1000", b"")


def test_a_server_that_is_gone_breaks_the_clients_connection_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with shadowing(proxy(url)) as shadow:
        for _ in range(3):
            with pytest.raises(httpx.RemoteProtocolError):
                httpx.post(shadow.url + "/v1/completions", json=ASKED, timeout=LONG_S)
    assert shadow.lines == [f"{url}: connection refused; the client's connection is broken, too"]
    assert shadow.feed.problems == {"server": 3} and shadow.shadow.requests == 0


def test_a_server_that_dies_in_the_middle_of_a_stream_ends_it_in_the_middle() -> None:
    with emulated(PLAIN, faults=Faults(cut=frozenset({0}))) as server, shadowing(proxy(server.url)) as shadow:
        with httpx.stream("POST", shadow.url + "/v1/completions", json={**ASKED, "stream": True}, timeout=LONG_S) as answer:
            parts = answer.iter_raw()
            assert next(parts).startswith(b"data: {")
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                list(parts)
        assert httpx.get(shadow.url + "/health", timeout=LONG_S).status_code == 200
    assert shadow.shadow.requests == 1 and len(shadow.lines) == 1 and "broken, too" in shadow.lines[0]


def test_a_client_that_leaves_lets_the_server_know() -> None:
    left = Event()

    def script(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(STREAM + chunk(event({"choices": [{"index": 0, "text": " a"}]})))
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        left.set()

    with scripted(script) as server, shadowing(proxy(server)) as shadow:
        with httpx.stream("POST", shadow.url + "/v1/completions", json=ASKED, timeout=LONG_S) as answer:
            next(answer.iter_raw())
        assert left.wait(LONG_S)
    assert shadow.shadow.requests == 1 and shadow.lines == []


def test_a_client_that_does_not_read_holds_the_server_back() -> None:
    sent, part, is_held = [0], chunk(b"x" * 65536), Event()

    def script(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(STREAM)
        connection.settimeout(0.3)
        try:
            for _ in range(2000):
                connection.sendall(part)
                sent[0] += 65536
        finally:
            is_held.set()

    with scripted(script) as server, shadowing(proxy(server, drain_s=0.0)) as shadow:
        parts = urlsplit(shadow.url)
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            connection.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
            assert is_held.wait(LONG_S)
    assert 0 < sent[0] < 2000 * 65536 / 2


@pytest.mark.parametrize("is_hurried", [False, True])
def test_answers_under_way_may_end_when_it_stops(is_hurried: bool) -> None:
    begun, goes_on = Event(), Event()

    def script(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(STREAM + chunk(event({"choices": [{"index": 0, "text": " a"}]})))
        begun.set()
        if not is_hurried:
            assert goes_on.wait(LONG_S)
            connection.sendall(chunk(event({"choices": [], "usage": USAGE})) + b"0\r\n\r\n")
        else:
            connection.recv(1)

    with scripted(script) as server, shadowing(proxy(server, drain_s=0.0 if is_hurried else 10.0)) as shadow:
        with httpx.stream("POST", shadow.url + "/v1/completions", json=ASKED, timeout=LONG_S) as answer:
            parts = answer.iter_raw()
            next(parts)
            assert begun.wait(LONG_S)
            shadow.feed.on_stop()
            goes_on.set()
            if is_hurried:
                with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                    list(parts)
            else:
                assert b"usage" in b"".join(parts)
        shadow.join()
        with pytest.raises(httpx.ConnectError):
            httpx.get(shadow.url + "/health", timeout=LONG_S)
    assert shadow.shadow.requests == 1
    assert shadow.observed.hit_rate == (None if is_hurried else 16 / 64)


def test_a_long_answer_does_not_hold_up_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsim.shadow.sources.proxy.LOOK_S", 0.02)
    goes_on = Event()

    def script(connection: socket.socket) -> None:
        is_first = b"[7,7]" in request_of(connection)
        connection.sendall(STREAM + chunk(event({"choices": [{"index": 0, "text": " a"}]})))
        if is_first:
            assert goes_on.wait(LONG_S)
        connection.sendall(b"0\r\n\r\n")

    with (
        scripted(script) as server,
        shadowing(proxy(server, patience_s=0.1)) as shadow,
        httpx.stream("POST", shadow.url + "/v1/completions", json={"prompt": [7, 7], "stream": True}, timeout=LONG_S) as slow,
    ):
        parts = slow.iter_raw()
        next(parts)
        assert httpx.post(shadow.url + "/v1/completions", content=json.dumps(ASKED), timeout=LONG_S).status_code == 200
        wait_until(lambda: shadow.shadow.requests >= 2)
        assert shadow.shadow.requests == 2
        goes_on.set()
        list(parts)
    assert shadow.shadow.requests == 2


@pytest.mark.parametrize(
    ("path", "asked", "answer", "encoding"),
    [
        ("/generate", {"input_ids": [DOC, [5] * 33]}, [{"text": "a", "meta_info": {"prompt_tokens": 64}}] * 2, ""),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Why?"}]},
            {"choices": [{"message": {"content": None, "tool_calls": [{"id": "a"}]}}]},
            "",
        ),
        ("/v1/completions", ASKED, "packed", "br"),
        ("/v1/completions", ASKED, "packed", "zstd"),
    ],
    ids=["list", "tools", "br", "zstd"],
)
def test_what_was_answered_is_a_request_whatever_the_answer(path: str, asked: Any, answer: Any, encoding: str) -> None:
    def script(connection: socket.socket) -> None:
        request_of(connection)
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Encoding: %b\r\n\r\n" % encoding.encode()
        connection.sendall(head + json.dumps(answer).encode())

    with scripted(script) as server, shadowing(proxy(server)) as shadow:
        body = json.dumps(asked).encode()
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
        assert raw(shadow.url, head + body).startswith(b"HTTP/1.1 200")
    assert shadow.shadow.requests == (2 if path == "/generate" else 1) and shadow.lines == []


def test_an_error_in_an_answer_is_no_request() -> None:
    def script(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(STREAM + chunk(event({"error": {"message": "too long"}})) + b"0\r\n\r\n")

    with scripted(script) as server, shadowing(proxy(server)) as shadow:
        assert httpx.post(shadow.url + "/v1/completions", json=ASKED, timeout=LONG_S).status_code == 200
    assert shadow.shadow.requests == 0


def test_a_request_counts_though_its_answer_takes_longer_than_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsim.shadow.sources.proxy.LOOK_S", 0.02)
    goes_on = Event()

    def script(connection: socket.socket) -> None:
        request_of(connection)
        assert goes_on.wait(LONG_S)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

    with scripted(script) as server, shadowing(proxy(server, patience_s=0.1)) as shadow:
        asking = Thread(target=lambda: httpx.post(shadow.url + "/v1/completions", json=ASKED, timeout=LONG_S))
        asking.start()
        wait_until(lambda: shadow.shadow.requests >= 1)
        goes_on.set()
        join(asking)
    assert shadow.shadow.requests == 1 and shadow.feed.problems == {"patience": 1}
    assert "shadow.patience_s=0.1" in shadow.lines[0]
