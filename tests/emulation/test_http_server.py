"""HTTP as the emulated server speaks it."""

import asyncio

import pytest

from kvsim.emulation.http_server import HttpRequest, HttpServer, Reply


async def _spoken_to(text: bytes) -> bytes:
    """What the emulated server's HTTP answers to these bytes."""

    async def handler(request: HttpRequest, reply: Reply) -> None:
        await reply.whole(200, {"path": request.path, "body": len(request.body)})

    server = HttpServer(handler)
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    await server.close()
    return answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (b"GET /a?b=c HTTP/1.1\r\n\r\nPOST /d HTTP/1.1\r\nContent-Length: 2\r\n\r\nxy", b'{"path":"/d","body":2}'),
        (b"hello\r\n\r\n", b"400 Bad Request"),
        (b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n", b"400 Bad Request"),
        (b"POST / HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n", b"413 Content Too Large"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 70000 + b"\r\n\r\n", b"413 Content Too Large"),
    ],
)
def test_the_emulated_server_speaks_http(text: bytes, answer: bytes) -> None:
    assert answer in asyncio.run(_spoken_to(text))
