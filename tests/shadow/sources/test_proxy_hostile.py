"""Whatever clients send and whatever fails, a proxy passes on what is a request, and the shadow survives."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from kvsim.errors import UsageError
from kvsim.shadow.sources.proxy import Proxy
from tests.servers.emulated import emulated
from tests.shadow.sources.shadowing import (
    ASKED,
    PLAIN,
    STREAM,
    Shadowing,
    chunk,
    event,
    proxy,
    raw,
    request_of,
    scripted,
    shadowing,
)
from tests.waiting import LONG_S, wait_until

BODIES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "no JSON": lambda: b"\xff{{{",
    "deep": lambda: b"[" * 50_000,
    "no prompt": lambda: b"{}",
    "wrong types": lambda: json.dumps({"prompt": {"a": 1}, "messages": 5, "text": 1.5, "input_ids": "x"}).encode(),
    "negative tokens": lambda: json.dumps({"prompt": [-1] * 20, "input_ids": [2**70]}).encode(),
    "mixed": lambda: json.dumps({"prompt": [[1, 2], "a", None], "text": ["a", 1], "messages": [None]}).encode(),
    "odd messages": lambda: json.dumps(
        {"prompt": "\ud800", "text": "", "messages": [{"role": "user", "content": [{}]}]}
    ).encode(),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_cannot_be_read_pass_and_are_counted(name: str) -> None:
    got: list[bytes] = []

    def script(connection: socket.socket) -> None:
        got.append(request_of(connection).partition(b"\r\n\r\n")[2])
        connection.sendall(
            STREAM
            + chunk(b'data: {"choices": [{"text": 5}]}\n\ndata: nonsense\n\n')
            + chunk(event({"text": "a", "meta_info": {}}))
        )
        connection.sendall(b"0\r\n\r\n")

    body = BODIES[name]()
    with scripted(script) as server, shadowing(proxy(server)) as shadow:
        for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
            assert httpx.post(shadow.url + path, content=body, timeout=LONG_S).status_code == 200
    assert got == [body] * 3 and len(shadow.lines) <= 1 and shadow.error is None
    assert all("left out" in line and "nonsense" not in line for line in shadow.lines)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\xff\xfe garbage\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["garbage", "no target", "long header", "negative length", "two lengths", "no chunk"],
)
def test_what_is_no_request_reaches_nobody(request_bytes: bytes) -> None:
    with emulated(PLAIN) as server, shadowing(proxy(server.url)) as shadow:
        answer = raw(shadow.url, request_bytes)
        assert answer == b"" or b" 400 " in answer.split(b"\r\n")[0]
        assert httpx.get(shadow.url + "/health", timeout=LONG_S).status_code == 200
    assert server.served == [] and shadow.shadow.requests == 0


@pytest.mark.parametrize(
    "line", [b"CONNECT @127.0.0.1:9", b"CONNECT 127.0.0.1:443", b"OPTIONS *", b"GET http://127.0.0.1:9/y", b"GET @127.0.0.1:9/y"]
)
def test_what_names_another_server_reaches_nobody(line: bytes) -> None:
    with emulated(PLAIN) as server, shadowing(proxy(server.url)) as shadow:
        answer = raw(shadow.url, line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b" 400 " in answer.split(b"\r\n")[0]
        assert httpx.post(shadow.url + "/v1/completions", json=ASKED, timeout=LONG_S).status_code == 200
    assert len(server.served) == 1 and shadow.shadow.requests == 1 and shadow.lines == [] and shadow.error is None


def test_a_session_that_is_no_text_is_a_session(tmp_path: Path) -> None:
    record = tmp_path / "trace.jsonl"
    body = json.dumps({**ASKED, "session_id": "\ud800", "cache_salt": "\udfff"}).encode()
    with emulated(PLAIN, speed=1000.0) as server, shadowing(proxy(server.url), record=record) as shadow:
        httpx.post(shadow.url + "/v1/completions", content=body, timeout=LONG_S)
        httpx.post(shadow.url + "/v1/completions", json=ASKED, headers={b"X-Session-ID": b"\xff"}, timeout=LONG_S)
    assert shadow.error is None and shadow.lines == []
    assert "session_id" in record.read_text().splitlines()[-1]


def test_a_client_that_leaves_within_its_request_reaches_nobody() -> None:
    with emulated(PLAIN) as server, shadowing(proxy(server.url)) as shadow:
        parts = urlsplit(shadow.url)
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        assert httpx.get(shadow.url + "/health", timeout=LONG_S).status_code == 200
    assert server.served == [] and shadow.lines == []


def test_a_body_in_chunks_and_one_that_waits_for_a_sign_arrive_whole() -> None:
    body = json.dumps(ASKED).encode()
    with emulated(PLAIN, speed=1000.0) as server, shadowing(proxy(server.url)) as shadow:
        assert httpx.post(shadow.url + "/v1/completions", content=iter([body[:9], body[9:]]), timeout=LONG_S).status_code == 200
        parts = urlsplit(shadow.url)
        with socket.create_connection((parts.hostname, parts.port), timeout=LONG_S) as connection:
            head = b"Host: x\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: %d" % len(body)
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head + b"\r\n\r\n")
            assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
            while connection.recv(65536):
                pass
    assert shadow.shadow.requests == 2 and [one.request.prompt_tokens for one in server.served] == [64, 64]


def test_requests_pass_while_the_shadow_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsim.shadow.sources.feed.MOST_BYTES", 10)
    with emulated(PLAIN, speed=1000.0) as server, shadowing(proxy(server.url)) as shadow:
        for _ in range(2):
            assert httpx.post(shadow.url + "/v1/completions", json=ASKED, timeout=LONG_S).status_code == 200
    assert shadow.lines == ["the shadow is behind: requests pass without being seen"] and shadow.feed.problems == {"behind": 2}
    assert shadow.shadow.requests == 0


def test_requests_pass_after_the_shadow_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: object) -> None:
        raise ZeroDivisionError

    with emulated(PLAIN, speed=1000.0) as server:
        shadow = Shadowing(proxy(server.url))
        monkeypatch.setattr(shadow.shadow, "request", fail)
        for _ in range(3):
            assert httpx.post(shadow.url + "/v1/completions", json=ASKED, timeout=LONG_S).status_code == 200
        wait_until(lambda: shadow.lines)
        assert "the shadow has failed and sees nothing any more; requests still pass" in shadow.lines[0]
        assert httpx.post(shadow.url + "/v1/completions", json=ASKED, timeout=LONG_S).status_code == 200
        shadow.interrupt()
        shadow.join()
    assert isinstance(shadow.error, ZeroDivisionError)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UsageError, match=rf"listen: cannot listen on 127.0.0.1:{port}: .*address already in use"),
            shadowing(lambda prompts: Proxy("http://127.0.0.1:1", "127.0.0.1", port, prompts, patience_s=1, drain_s=1)) as shadow,
        ):
            shadow.join()
