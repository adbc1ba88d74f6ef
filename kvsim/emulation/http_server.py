"""A server of HTTP: aiohttp's, with whole answers and streams of events as servers of LLMs give them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvsim.errors import UsageError

if TYPE_CHECKING:
    from aiohttp import web

LONGEST_LINE_BYTES = 1 << 16
"""Of a request's first line and of each header."""
LONGEST_BODY_BYTES = 1 << 28
KEEP_S = 3600.0
"""How long a connection may wait for its next request."""
LINGER_S = 1.0
"""How long the rest of a body is read that has been refused, so that its sender can read why."""
CUT_S = 0.01
"""How long answers that are cut may still take: the library takes 0 for no limit."""
JSON, TEXT = "application/json", "text/plain; charset=utf-8"


class HttpRequest(NamedTuple):
    """What a client asks for."""

    method: str
    path: str
    headers: Mapping[str, str]
    """By names in any case."""
    body: bytes


class BadRequest(Exception):
    """A request that is none; the message says why, and ``status`` answers it."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class Reply:
    """The answer to a request: as a whole, or event by event."""

    def __init__(self, request: "web.BaseRequest") -> None:
        self.request = request
        self.response: web.StreamResponse | None = None
        """The answer as far as it has been given."""

    @property
    def has_begun(self) -> bool:
        return self.response is not None

    async def whole(self, status: int, content: object = b"", kind: str = JSON, *, is_last: bool = False) -> None:
        """Answer with bytes, text or, as JSON, anything else; ``is_last`` closes the connection after that."""
        from aiohttp import web

        body = content if isinstance(content, bytes) else content.encode() if isinstance(content, str) else encoded(content)
        self.response = response = web.Response(status=status, body=body, headers={"Content-Type": kind})
        if is_last:
            response.force_close()
        await response.prepare(self.request)
        await response.write_eof()

    async def event(self, content: object) -> None:
        """Send an event of a stream: text as it is, anything else as JSON. The first one begins the answer.

        They come in chunks; to a client of HTTP/1.0, which knows none, as they are, and the connection ends with the last one.
        """
        if self.response is None:
            await self._begin_stream()
        assert self.response is not None
        data = content.encode() if isinstance(content, str) else encoded(content)
        await self.response.write(b"data: " + data + b"\n\n")

    async def end(self) -> None:
        """End a stream of events."""
        assert self.response is not None
        await self.response.write_eof()

    def cut(self) -> None:
        """Break the connection."""
        if self.request.transport is not None:
            self.request.transport.abort()

    async def _begin_stream(self) -> None:
        from aiohttp import web

        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if self.request.version >= (1, 1):
            self.response.enable_chunked_encoding()
        else:
            self.response.force_close()
        await self.response.prepare(self.request)


Handler = Callable[[HttpRequest, Reply], Awaitable[None]]
"""Answers a request."""


def encoded(content: object) -> bytes:
    """Return anything as JSON."""
    return msgspec.json.encode(content)


class HttpServer:
    """Listens on one port, and has each request answered. Connections stay open until the client closes them.

    A handler is cancelled when its client has gone. What it raises besides ``BadRequest`` goes to the loop's handler of
    exceptions, and the client gets status 500.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._listening: asyncio.Server | None = None
        self._connections: web.Server | None = None
        self.answering = 0
        """Requests that are being answered."""
        self.port = 0
        """The one that it listens on."""
        self._is_closing = False

    async def start(self, host: str, port: int) -> int:
        """Begin to listen. Returns the port, a free one for port 0. Raises OSError, and UsageError without aiohttp."""
        try:
            from aiohttp import web
        except ImportError:
            raise UsageError("a server needs the package aiohttp: pip install kvsim[servers]") from None
        self._connections = web.Server(
            self._answered,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            logger=_quiet(),
            keepalive_timeout=KEEP_S,
            lingering_time=LINGER_S,
            max_line_size=LONGEST_LINE_BYTES,
            max_field_size=LONGEST_LINE_BYTES,
        )
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._connections, host, port, backlog=4096)
        self.port = int(self._listening.sockets[0].getsockname()[1])
        return self.port

    def stop_listening(self) -> None:
        """Take no further requests; those that are being answered go on."""
        self._is_closing = True
        if self._listening is not None:
            self._listening.close()

    async def close(self) -> None:
        """Stop to listen, and break all connections."""
        self.stop_listening()
        await asyncio.sleep(0)  # a connection that has just been accepted is known from now on
        if self._connections is not None:
            await self._connections.shutdown(CUT_S)

    async def _answered(self, request: "web.BaseRequest") -> "web.StreamResponse":
        """Answer a request. Returns what the library shall end: the answer, or nothing to a client that has gone."""
        from aiohttp import web

        reply = Reply(request)
        self.answering += 1
        try:
            if self._is_closing:
                await reply.whole(503, error_of(503, "the server is shutting down"), is_last=True)
            else:
                await self._handle(request, reply)
        finally:
            self.answering -= 1
        return reply.response or web.Response()

    async def _handle(self, request: "web.BaseRequest", reply: Reply) -> None:
        body: bytes | None = None
        try:
            body = await _body(request)
            await self._handler(HttpRequest(request.method, request.path, request.headers, body), reply)
        except BadRequest as error:
            await reply.whole(error.status, error_of(error.status, str(error)), is_last=body is None)
        except OSError:
            raise  # the client has gone
        except Exception as error:
            problem = {"message": f"{request.method} {request.path} cannot be answered", "exception": error}
            asyncio.get_running_loop().call_exception_handler(problem)
            raise


async def _body(request: "web.BaseRequest") -> bytes:
    """Return the body of a request, of a known length or in chunks. Raises BadRequest."""
    if request.method == "CONNECT":  # what follows it has no end
        raise BadRequest(405, "Method Not Allowed")
    too_long = BadRequest(413, f"a body may have {LONGEST_BODY_BYTES} bytes")
    if (request.content_length or 0) > LONGEST_BODY_BYTES:
        raise too_long
    expected = request.headers.get("Expect", "").lower() if request.version >= (1, 1) else ""  # RFC 9110, 10.1.1
    if expected == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts, size = [], 0
    async for part in request.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > LONGEST_BODY_BYTES:
            raise too_long
    return b"".join(parts)


def error_of(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error, as OpenAI's interface has it."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": status}}


def _quiet() -> logging.Logger:
    """Return a logger that says nothing of what clients do."""
    logger = logging.getLogger("kvsim.emulation.http_server")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    return logger
