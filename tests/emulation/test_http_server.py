"""HTTP as the emulated server speaks it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvsim.emulation import http_server
from kvsim.emulation.http_server import HttpRequest, HttpServer, Reply
from tests.waiting import LONG_S

HOST = b"Host: a\r\n"
LAST = HOST + b"Connection: close\r\n"


async def echo(request: HttpRequest, reply: Reply) -> None:
    """Tell what was asked for."""
    await reply.whole(200, {"path": request.path, "body": request.body.decode(), "kind": request.headers.get("content-type")})


Sent = bytes | float
"""Bytes for a server, or seconds to wait."""


def spoken_to(*sent: Sent, handler: Callable[[HttpRequest, Reply], Awaitable[None]] = echo) -> bytes:
    """All that the emulated server's HTTP answers until it closes the connection."""

    async def speak() -> bytes:
        server = HttpServer(handler)
        port = await server.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in sent:
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                writer.write(part)
                await writer.drain()
        answer = await asyncio.wait_for(reader.read(), LONG_S)
        writer.close()
        await server.close()
        assert not server.answering
        return answer

    return asyncio.run(speak())


def test_requests_of_a_connection_are_answered_one_after_another() -> None:
    answer = spoken_to(
        b"GET /a?b=c HTTP/1.1\r\n" + HOST + b"\r\n"
        b"POST /d HTTP/1.1\r\n" + LAST + b"content-type: text/x\r\nContent-Length: 2\r\n\r\nxy"
    )
    first, second = (
        answer.index(b'{"path":"/a","body":"","kind":null}'),
        answer.index(b'{"path":"/d","body":"xy","kind":"text/x"}'),
    )
    assert first < second and answer.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    "parts",
    [
        [b"2\r\nxy\r\n3\r\nabc\r\n0\r\n\r\n"],
        [b"2\r\nx", 0.01, b"y\r\n3;name=value\r\nab", 0.01, b"c\r\n0", 0.01, b"\r\nTrailer: b\r\n\r\n"],
    ],
)
def test_a_body_may_come_in_chunks(parts: list[Sent]) -> None:
    answer = spoken_to(b"POST /d HTTP/1.1\r\n" + LAST + b"Transfer-Encoding: chunked\r\n\r\n", *parts)
    assert b" 200 OK" in answer and b'"body":"xyabc"' in answer


async def two_events(request: HttpRequest, reply: Reply) -> None:
    """Answer with a stream."""
    await reply.event({"a": 1})
    await reply.event("[DONE]")
    await reply.end()


def test_a_stream_comes_in_chunks() -> None:
    head, _, content = spoken_to(b"GET / HTTP/1.1\r\n" + LAST + b"\r\n", handler=two_events).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"Transfer-Encoding: chunked" in head
    assert content == b'f\r\ndata: {"a":1}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'


@pytest.mark.parametrize("asked", [b"", b"Connection: keep-alive\r\n"])
def test_a_stream_to_a_client_of_http_1_0_ends_with_the_connection(asked: bytes) -> None:
    head, _, content = spoken_to(b"GET / HTTP/1.0\r\n" + asked + b"\r\n", handler=two_events).partition(b"\r\n\r\n")
    assert b" 200 OK\r\n" in head and b"Transfer-Encoding" not in head and b"keep-alive" not in head.lower()
    assert content == b'data: {"a":1}\n\ndata: [DONE]\n\n'


def test_a_client_of_http_1_0_has_its_connection_kept_if_it_asks_for_that() -> None:
    one, kept = b"GET /a HTTP/1.0\r\n", b"Connection: keep-alive\r\n"
    assert spoken_to(one + b"\r\n").count(b" 200 OK") == 1
    answer = spoken_to(one + kept + b"\r\n" + one + b"\r\n")
    assert answer.count(b" 200 OK") == 2 and answer.lower().count(kept.strip().lower()) == 1


def test_a_client_of_http_1_0_knows_no_sign() -> None:
    answer = spoken_to(b"POST /d HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nxy")
    assert b" 200 OK" in answer and b" 100 " not in answer and b'"body":"xy"' in answer


def test_a_client_that_waits_for_a_sign_gets_it() -> None:
    answer = spoken_to(b"POST /d HTTP/1.1\r\n" + LAST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n", 0.01, b"xy")
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK") and b'"body":"xy"' in answer


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: many\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: " + b"9" * 5_000 + b"\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 999999999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"y" * 70_000 + b"\r\n\r\n", 400),
        (b"CONNECT b:443 HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    ],
)
def test_what_is_no_request_is_answered_and_ends_the_connection(text: bytes, status: int) -> None:
    assert spoken_to(text).split(b" ")[1] == b"%d" % status


@pytest.mark.parametrize("length", ["Content-Length: 11\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\nb\r\n"])
def test_a_body_that_is_too_long_is_refused_and_ends_the_connection(length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LONGEST_BODY_BYTES", 10)
    answer = spoken_to(b"POST / HTTP/1.1\r\n" + HOST + length.encode() + b"x" * 11)
    assert b" 413 " in answer and b"a body may have 10 bytes" in answer


def test_a_head_has_no_body() -> None:
    answer = spoken_to(b"HEAD / HTTP/1.1\r\n" + LAST + b"\r\n")
    assert b" 200 OK" in answer and answer.endswith(b"\r\n\r\n")


def test_an_error_is_told_to_the_client_and_to_the_loop() -> None:
    told: list[dict[str, Any]] = []

    async def fails(request: HttpRequest, reply: Reply) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, problem: told.append(problem))
        raise KeyError("broken")

    assert b" 500 " in spoken_to(b"GET /a HTTP/1.1\r\n" + LAST + b"\r\n", handler=fails)
    assert [(problem["message"], str(problem["exception"])) for problem in told] == [("GET /a cannot be answered", "'broken'")]


def test_an_answer_is_given_up_when_its_client_has_gone() -> None:
    async def leave() -> None:
        begun, given_up = asyncio.Event(), asyncio.Event()

        async def endless(request: HttpRequest, reply: Reply) -> None:
            await reply.event("a")
            begun.set()
            try:
                await asyncio.sleep(1000)
            finally:
                given_up.set()

        server = HttpServer(endless)
        port = await server.start("127.0.0.1", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        await asyncio.wait_for(begun.wait(), LONG_S)
        assert server.answering == 1
        writer.close()
        await asyncio.wait_for(given_up.wait(), LONG_S)
        await server.close()
        assert not server.answering

    asyncio.run(leave())
