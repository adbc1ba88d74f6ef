"""A shadow with its sources in a thread of its own, and servers for it to stand in front of."""

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit

from kvsim.plans.build import SHADOW, build_run
from kvsim.plans.plan import Plan
from kvsim.settings.configuration import compose_with_choices
from kvsim.shadow.history import Observed
from kvsim.shadow.recording import Recording
from kvsim.shadow.settings import ShadowSettings
from kvsim.shadow.shadow import Shadow
from kvsim.shadow.sources.base import Source
from kvsim.shadow.sources.feed import Feed
from kvsim.shadow.sources.playing import Playing
from kvsim.shadow.sources.prompts import Prompts
from kvsim.shadow.sources.proxy import Proxy
from kvsim.shadow.sources.salt import Salt
from tests.waiting import LONG_S, join

SALT = Salt(b"s" * 32)
DOC = list(range(1000, 1064))
ASKED = {"prompt": DOC, "max_tokens": 3}
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
"""How an answer of events begins."""
PLAIN = ("model=tiny", "tiers.gpu.capacity=1000pages")


@cache
def plan_of(overrides: tuple[str, ...]) -> Plan:
    """The plan of ``kvsim shadow`` with these overrides."""
    config, choices = compose_with_choices([*overrides])
    return build_run(config, command=SHADOW, overrides=overrides, choices=choices)


class Shadowing:
    """A shadow at work."""

    def __init__(
        self,
        make: Callable[[Prompts], Source],
        overrides: Sequence[str] = PLAIN,
        record: Path | None = None,
        most: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        plan = plan_of(tuple(overrides))
        self.shadow = Shadow({"as_configured": plan}, plan.page_tokens, ShadowSettings())
        self.prompts = Prompts(plan.page_tokens, SALT, tokenizer)
        self.lines: list[str] = []
        self.said: list[str] = []
        recording = None if record is None else Recording(record, plan.page_tokens, SALT, lambda: "", goes_on=False)
        self.observed = Observed(1000)
        self.feed = Feed(self.shadow, recording, self.observed, lambda: None, every_s=60.0, most=most)
        self.feed.say = self.lines.append
        self.source = make(self.prompts)
        self.is_interrupted = False
        self.error: BaseException | None = None
        self._is_up, self._loop = Event(), asyncio.new_event_loop()
        self._playing = Playing([self.source], self.feed, self._say)
        self._thread = Thread(target=self._run)
        self._thread.start()
        assert self._is_up.wait(LONG_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._playing.run())
        except BaseException as error:
            self.error = error
        finally:
            self._loop.close()
            self._is_up.set()

    def _say(self, line: str) -> None:
        self.said.append(line)
        self._is_up.set()

    @property
    def url(self) -> str:
        """Where its proxy listens."""
        assert isinstance(self.source, Proxy)
        return f"http://127.0.0.1:{self.source.port}"

    def close(self) -> None:
        """Stop it, and wait for its end."""
        self.feed.on_stop()
        self.join()

    def interrupt(self) -> None:
        """Let it take a signal."""
        self.is_interrupted = True
        self._loop.call_soon_threadsafe(self._playing.interrupt, signal.SIGTERM)

    def join(self) -> None:
        """Wait for its end."""
        join(self._thread)


@contextmanager
def shadowing(
    make: Callable[[Prompts], Source],
    overrides: Sequence[str] = PLAIN,
    *,
    record: Path | None = None,
    most: int | None = None,
    tokenizer: str | None = None,
) -> Iterator[Shadowing]:
    """Run a source and a shadow during the block. What has failed in it is raised at the end."""
    running = Shadowing(make, overrides, record, most, tokenizer)
    try:
        yield running
    finally:
        if running._thread.is_alive() and not running.is_interrupted:
            running.close()
        running.join()
    if running.error is not None:
        raise running.error


def proxy(url: str, *, patience_s: float = 30.0, drain_s: float = 10.0) -> Callable[[Prompts], Source]:
    """Return what makes a proxy in front of a server."""
    return lambda prompts: Proxy(url, "127.0.0.1", 0, prompts, patience_s=patience_s, drain_s=drain_s)


Script = Callable[[socket.socket], None]
"""Answers a connection: reads what it likes, sends what it likes."""


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """Serve every connection by a script, each in a thread of its own. Yields the address."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        threads: list[Thread] = []

        def serve(connection: socket.socket) -> None:
            with closing(connection), suppress(OSError):  # the other side has gone
                script(connection)

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threads.append(Thread(target=serve, args=(connection,)))
                threads[-1].start()

        accepting = Thread(target=accept)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            join(accepting)
            join(*threads)


def request_of(connection: socket.socket) -> bytes:
    """Read one request: its head, and a body with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < sum(lengths):
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    """Return a chunk of a chunked answer."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(content: object) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def raw(url: str, request: bytes) -> bytes:
    """Return everything that a server answers to these bytes until it closes the connection."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=LONG_S) as connection:
        connection.sendall(request)
        found = b""
        while part := connection.recv(65536):
            found += part
    return found
