"""Talks to one server, and says in one line what goes wrong."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvsim.errors import UsageError
from kvsim.servers.answer import Failed

if TYPE_CHECKING:
    import httpx

KEY = "KVSIM_API_KEY"
"""The environment variable with the key of a server that asks for one."""
KEY_CHARACTERS = frozenset(map(chr, range(0x21, 0x7F)))
"""What keys are made of: printable ASCII. A header has room for no other character."""
ASKED_S = 60.0
"""Longest time that a question other than a request may take: emptying a large cache takes a while."""
KEPT_S = 2.0
"""Longest time that an unused connection is kept: servers close theirs after 5 s, and a request that meets that fails."""
LONGEST_TEXT = 200
"""Characters of a server's message in an error."""


class Reply(NamedTuple):
    """A complete answer."""

    status: int
    text: str
    kind: str
    """Its media type, such as text/plain."""

    @property
    def is_good(self) -> bool:
        return self.status == 200

    def json(self) -> Any:
        """Return its content; None if that is not JSON."""
        try:
            return msgspec.json.decode(self.text)
        except ValueError:
            return None


class Http:
    """The connections to one server; to be used as an asynchronous context. No proxy stands between it and the server."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """``timeout_s`` bounds how long a connection takes to come about; nothing else here is bounded. Raises UsageError without
        httpx, and for a key that none can be."""
        try:
            import httpx
        except ImportError:
            raise UsageError("httpx is missing, which talks to servers: pip install kvsim[servers]") from None
        self._errors = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError)
        self._refused = (httpx.ConnectError, httpx.ConnectTimeout)
        self.url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(KEY, "")
        if not KEY_CHARACTERS.issuperset(key):
            raise UsageError(f"{KEY} is no key: it has a space, a line end or a character that is not ASCII")
        self._client: httpx.AsyncClient = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEPT_S),
            timeout=httpx.Timeout(None, connect=min(timeout_s, ASKED_S)),
            verify=self.url.startswith("https:"),  # without it, no certificates are loaded
            trust_env=False,
        )

    async def __aenter__(self) -> "Http":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> Reply:
        """Ask for something. Raises UsageError if the server does not answer."""
        return await self._ask("GET", path)

    async def post(self, path: str) -> Reply:
        """Ask the server to do something. Raises UsageError if it does not answer."""
        return await self._ask("POST", path)

    async def _ask(self, method: str, path: str) -> Reply:
        try:
            response = await self._client.request(method, self.url + path, timeout=ASKED_S)
        except self._errors as error:
            raise UsageError(f"{self.url} does not answer: {_told(error)}") from None
        return Reply(response.status_code, response.text, response.headers.get("content-type", "").partition(";")[0])

    @asynccontextmanager
    async def events(self, path: str, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request and yield the events of its answer (``data: ...``) as they arrive.

        Raises Failed, also while the answer is read: for a status other than 200, and if the connection breaks.
        """
        headers = {"Content-Type": "application/json"}
        try:
            async with self._client.stream("POST", self.url + path, content=body, headers=headers) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise Failed(f"HTTP {response.status_code}: {message_of(text)}")
                yield _data(response)
        except self._refused as error:
            raise Broken(f"the server does not answer: {_told(error)}") from None
        except self._errors as error:
            raise Broken(f"the connection broke: {_told(error)}") from None


class Broken(Failed):
    """There is no connection to the server, or no longer. It may be dead."""


async def _data(response: "httpx.Response") -> AsyncIterator[bytes]:
    """Yield the data of events. Lines end with a line feed and nothing else: text may have other characters that end lines."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def message_of(text: str) -> str:
    """Return what the body of an error says, in one short line: its ``message``, where it has one."""
    try:
        found = msgspec.json.decode(text)
    except ValueError:
        found = text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    line = " ".join(str(found).split()) or "without a message"
    return line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}..."


def _told(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
