"""HTTP/1.1 over asyncio's streams: as much of it as clients of LLM servers use."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec

LONGEST_HEAD_BYTES = 1 << 16
LONGEST_BODY_BYTES = 1 << 28
MOST_DIGITS = 20
"""Of a body's length, zeros in front included."""
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    503: "Service Unavailable",
}
JSON, TEXT = "application/json", "text/plain; charset=utf-8"


class HttpRequest(NamedTuple):
    """What a client asks for."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """With names in lower case."""
    body: bytes


class BadRequest(Exception):
    """A request that is none; the message says why, and ``status`` answers it."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class Reply:
    """The answer to a request: as a whole, or event by event."""

    def __init__(self, writer: asyncio.StreamWriter, *, has_body: bool = True) -> None:
        """Without a body, as HEAD wants it, only ``whole`` answers."""
        self._writer = writer
        self._has_body = has_body
        self.has_begun = False

    async def whole(self, status: int, content: object = b"", kind: str = JSON) -> None:
        """Answer with bytes, text or, as JSON, anything else."""
        body = content if isinstance(content, bytes) else content.encode() if isinstance(content, str) else encoded(content)
        await self._begin(status, kind, f"Content-Length: {len(body)}")
        if self._has_body:
            await self._send(body)

    async def event(self, content: object) -> None:
        """Send an event of a stream: text as it is, anything else as JSON. The first one begins the answer."""
        if not self.has_begun:
            await self._begin(200, "text/event-stream; charset=utf-8", "Transfer-Encoding: chunked")
        data = content.encode() if isinstance(content, str) else encoded(content)
        await self._chunk(b"data: " + data + b"\n\n")

    async def end(self) -> None:
        """End a stream of events."""
        await self._send(b"0\r\n\r\n")

    def cut(self) -> None:
        """Break the connection."""
        self._writer.transport.abort()

    async def _begin(self, status: int, kind: str, length: str) -> None:
        self.has_begun = True
        await self._send(f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}\r\nContent-Type: {kind}\r\n{length}\r\n\r\n".encode())

    async def _chunk(self, data: bytes) -> None:
        await self._send(b"%x\r\n%b\r\n" % (len(data), data))

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


Handler = Callable[[HttpRequest, Reply], Awaitable[None]]
"""Answers a request."""


def encoded(content: object) -> bytes:
    """Return anything as JSON."""
    return msgspec.json.encode(content)


class ClientReader(asyncio.StreamReader):
    """What comes from a client, which knows when the client is gone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=LONGEST_HEAD_BYTES, loop=loop)
        self.gone = asyncio.Event()
        """Set when nothing more can come."""

    def feed_eof(self) -> None:
        super().feed_eof()
        self.gone.set()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.gone.set()


class HttpServer:
    """Listens on one port, and has each request answered. Connections stay open until the client closes them.

    A handler is cancelled when its client has gone.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self.answering = 0
        """Requests that are being answered."""
        self.port = 0
        """The one that it listens on."""
        self._is_closing = False

    async def start(self, host: str, port: int) -> int:
        """Begin to listen. Returns the port, a free one for port 0. Raises OSError."""
        loop = asyncio.get_running_loop()

        def connection() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(ClientReader(loop), self._accept, loop=loop)

        self._server = await loop.create_server(connection, host, port, backlog=4096)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    def stop_listening(self) -> None:
        """Take no further requests; those that are being answered go on."""
        self._is_closing = True
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Stop to listen, and break all connections."""
        self.stop_listening()
        await asyncio.sleep(0)  # a connection that has just been accepted is known from now on
        for connection, writer in self._connections.items():
            writer.transport.abort()
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections[connection] = writer
        connection.add_done_callback(self._connections.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection, one after another."""
        assert isinstance(reader, ClientReader)
        try:
            while (request := await _read(reader, writer)) is not None:
                if self._is_closing:
                    await Reply(writer).whole(503, error_of(503, "the server is shutting down"))
                    break
                reply = Reply(writer, has_body=request.method != "HEAD")
                if not await self._answered(request, reply, reader.gone):
                    break
                if request.headers.get("connection", "").lower() == "close":
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _answered(self, request: HttpRequest, reply: Reply, gone: asyncio.Event) -> bool:
        """Answer a request, unless the client goes before. Returns whether it has been answered."""
        answer, leaves = asyncio.create_task(self._answer(request, reply)), asyncio.create_task(gone.wait())
        self.answering += 1
        try:
            await asyncio.wait([answer, leaves], return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
            return answer.done()
        finally:
            self.answering -= 1
            for task in (answer, leaves):
                task.cancel()
            await asyncio.gather(answer, leaves, return_exceptions=True)

    async def _answer(self, request: HttpRequest, reply: Reply) -> None:
        try:
            await self._handler(request, reply)
        except BadRequest as error:
            await reply.whole(error.status, error_of(error.status, str(error)))


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpRequest | None:
    """Read the next request of a connection; None at its end. One that is none is answered, and ends it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        return await _parsed(head, reader)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise
    except asyncio.LimitOverrunError:
        problem = BadRequest(413, f"the head of a request may have {LONGEST_HEAD_BYTES} bytes")
    except BadRequest as error:
        problem = error
    await Reply(writer).whole(problem.status, error_of(problem.status, str(problem)))
    return None


async def _parsed(head: bytes, reader: asyncio.StreamReader) -> HttpRequest:
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest(400, "not a request of HTTP/1.1")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isdecimal():
        raise BadRequest(400, "a body needs its length: Content-Length")
    if len(length) > MOST_DIGITS or int(length) > LONGEST_BODY_BYTES:
        raise BadRequest(413, f"a body may have {LONGEST_BODY_BYTES} bytes")
    try:
        target = urlsplit(words[1])
    except ValueError as error:
        raise BadRequest(400, f"not an address: {error}") from None
    return HttpRequest(words[0], target.path, dict(parse_qsl(target.query)), headers, await reader.readexactly(int(length)))


def error_of(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error, as OpenAI's interface has it."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": status}}
