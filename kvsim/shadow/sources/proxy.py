"""Passes requests on to a server and answers back, unchanged, and lets a shadow see them."""

import asyncio
import logging
import os
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kvsim.errors import UsageError
from kvsim.shadow.sources.answers import AnswerReader
from kvsim.shadow.sources.base import Source
from kvsim.shadow.sources.exchange import PATHS, Exchange, InOrder
from kvsim.shadow.sources.feed import Feed
from kvsim.shadow.sources.prompts import Prompts

if TYPE_CHECKING:
    from aiohttp import web

LONGEST_BODY_BYTES = 1 << 28
CONNECT_S = 30.0
KEEP_S = 2.0
"""How long a connection to the server is kept for the next request: less than servers keep it (uvicorn, 5 s), or it may be closed
just when it is used."""
RESETS = ("/reset_prefix_cache", "/flush_cache")
"""Paths that empty the cache of vLLM and SGLang."""
UNENDED = "the request counts, with as much of its answer as had come"
LOOK_S = 0.5
"""How often it is seen whether a request waits too long for an earlier one."""
CUT_S = 0.01
"""How long answers that are cut may still take: the library takes 0 for no limit."""
OF_CONNECTION = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "expect",
})  # fmt: skip
"""Headers of one connection (RFC 9110, 7.6.1), not of the request."""
AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that the client library would add."""


class Proxy(Source):
    """Listens on a port for clients of one server."""

    carries_clients = True

    def __init__(self, url: str, host: str, port: int, prompts: Prompts, *, patience_s: float, drain_s: float) -> None:
        self.url = url.rstrip("/")
        self.host, self.port = host, port
        self._prompts = prompts
        self._order = InOrder(patience_s)
        self._drain_s = drain_s
        self._began_s = time.time() - time.monotonic()
        self._active = 0
        self._was_reset = False
        """Whether the server's cache has been emptied since the last request that was handed over."""
        self._is_quiet = asyncio.Event()
        self._feed: Feed | None = None
        self._server: Any = None
        self._session: Any = None
        self._runner: Any = None
        self._site: Any = None

    async def start(self, feed: Feed) -> str:
        try:
            import aiohttp
            from aiohttp import web
        except ImportError:
            raise UsageError("listen: the proxy needs the package aiohttp: pip install kvsim[servers]") from None
        self._feed = feed
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
        )
        server = web.Server(self._pass, handler_cancellation=True, access_log=None, auto_decompress=False, logger=_quiet())
        self._runner = web.ServerRunner(server, shutdown_timeout=CUT_S)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, self.host, self.port, backlog=4096)
        try:
            await self._site.start()
        except OSError as error:
            raise UsageError(f"listen: cannot listen on {self.host}:{self.port}: {error.strerror or error}") from None
        self.port = self._runner.addresses[0][1]
        return f"passes http://{self.host}:{self.port} on to {self.url}"

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._hand_over()

    def hurry(self) -> None:
        self._is_quiet.set()

    async def close(self) -> None:
        if self._session is None:
            return
        if self._runner.addresses:
            await self._site.stop()
        if self._active:
            self._is_quiet.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._drain_s):
                    await self._is_quiet.wait()
        await self._runner.cleanup()
        await self._session.close()
        self._order.patience_s = 0.0
        self._hand_over()

    # --- passing on ----------------------------------------------------------------------------------------------------------

    async def _pass(self, request: "web.BaseRequest") -> "web.StreamResponse":
        from aiohttp import web

        if not request.raw_path.startswith("/"):  # it would name another server
            return web.Response(status=400, text="the proxy passes on requests for paths only\n")
        exchange, body = await self._received(request)
        self._active += 1
        try:
            return await self._answered(request, exchange, body)
        except Exception as error:
            assert self._feed is not None
            self._feed.fail(error)
            raise
        finally:
            self._active -= 1
            if not self._active:
                self._is_quiet.set()
            if exchange is not None:
                exchange.answer.end()
                exchange.has_ended = True
                self._hand_over()

    async def _received(self, request: "web.BaseRequest") -> tuple[Exchange | None, bytes]:
        """Read the body of a request; returned with an exchange if it is one with a prompt."""
        from aiohttp import web

        arrival_s = self._now_s()
        expected = request.headers.get("Expect", "").lower() if request.version >= (1, 1) else ""  # RFC 9110, 10.1.1
        if expected == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts, size = [], 0
        async for part in request.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > LONGEST_BODY_BYTES:
                raise web.HTTPRequestEntityTooLarge(LONGEST_BODY_BYTES, size)
        body = b"".join(parts)
        if request.method != "POST" or request.path not in PATHS:
            return None, body
        exchange = Exchange(arrival_s, request.path, body, request.headers.get("X-Session-ID"))
        self._order.add(exchange)
        return exchange, body

    async def _answered(self, request: "web.BaseRequest", exchange: Exchange | None, body: bytes) -> "web.StreamResponse":
        """Ask the server, and pass its answer back. If it cannot be reached or dies, the client's connection is broken, too."""
        import aiohttp
        from aiohttp import web

        try:
            async with self._ask(request, body) as answer:
                passed = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_of_request(answer.headers))
                if request.version < (1, 1) and "Content-Length" not in answer.headers:
                    passed.force_close()  # its end is the end of the answer
                await passed.prepare(request)
                if exchange is not None:
                    exchange.status = answer.status
                    exchange.answer = AnswerReader(
                        answer.headers.get("Content-Type", ""), answer.headers.get("Content-Encoding", "")
                    )
                async for part in answer.content.iter_any():
                    await passed.write(part)
                    if exchange is not None:
                        exchange.answer.feed(part)
                await passed.write_eof()
                if exchange is not None:
                    exchange.is_complete = True
                if request.path in RESETS and answer.status == 200:
                    self._order.add(Exchange(self._now_s(), request.path, b"", has_ended=True))
                return passed
        except ConnectionResetError:
            if request.transport is not None and not request.transport.is_closing():
                self._broken(request, "it has broken the connection")
        except (aiohttp.ClientError, OSError) as error:
            self._broken(request, _reason(error))
        return web.Response(status=502)  # to a client that has gone

    def _ask(self, request: "web.BaseRequest", body: bytes) -> Any:
        from yarl import URL

        headers = _of_request(request.headers)
        has_body = bool(body) or "Content-Length" in request.headers
        return self._session.request(
            request.method,
            URL(self.url + request.raw_path, encoded=True),
            headers=headers,
            data=body if has_body else None,
            allow_redirects=False,
            skip_auto_headers=[name for name in AUTOMATIC if name not in headers],
        )

    def _broken(self, request: "web.BaseRequest", reason: str) -> None:
        """Break a client's connection, as the server's is broken."""
        assert self._feed is not None
        self._feed.tell("server", f"{self.url}: {reason}; the client's connection is broken, too")
        if request.transport is not None:
            request.transport.abort()

    def _now_s(self) -> float:
        """Return Unix time that never goes back, whoever sets the clock."""
        return self._began_s + time.monotonic()

    # --- the shadow ----------------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Give the shadow the exchanges whose turn it is, unless it is too far behind."""
        assert self._feed is not None
        for exchange in self._order.take(self._now_s()):
            self._was_reset |= exchange.path in RESETS
            if not exchange.was_served:
                continue
            if not exchange.has_ended:
                self._feed.tell("patience", f"no whole answer within shadow.patience_s={self._order.patience_s:g}: {UNENDED}")
            if self._feed.put(partial(self._read, exchange, after_reset=self._was_reset), len(exchange.body)):
                self._was_reset = False
            else:
                self._feed.tell("behind", "the shadow is behind: requests pass without being seen")

    def _read(self, exchange: Exchange, *, after_reset: bool) -> None:
        assert self._feed is not None
        requests = exchange.requests(self._prompts)
        self._feed.requests(one._replace(after_reset=after_reset and not number) for number, one in enumerate(requests))


def _of_request(headers: Any) -> Any:
    """Return headers without those that concern a connection only."""
    from multidict import CIMultiDict

    own = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in OF_CONNECTION | own)


def _quiet() -> logging.Logger:
    """Return a logger that says nothing: what goes wrong is told in one line, or ends the shadow."""
    logger = logging.getLogger("kvsim.shadow.proxy")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    return logger


def _reason(error: Exception) -> str:
    """Return in one line, without text of a request, why the server was not reached."""
    number = getattr(getattr(error, "os_error", error), "errno", None)
    return os.strerror(number).lower() if number else "it has broken the connection"
