"""Sends requests when they are due, and follows their answers."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

import msgspec

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.servers.answer import Answer, Failed
from kvsim.servers.dialects.base import Dialect
from kvsim.servers.http import Broken, Http
from kvsim.servers.prompts import PromptTokens
from kvsim.servers.settings import ServerSettings

LOOK_S = 0.01
"""Seconds between two looks at whether the event loop is on time."""


class Sender:
    """Plays the requests of a trace, once.

    by time        a request is sent when it arrives or, if it follows others, its pause after the end of the last of them
    closed loop    ``concurrency`` requests are under way at any time, in the order of the trace. One that follows others waits
                   for the end of these, without its pause

    A prompt is made before its request is due where there is time, so that this does not make it late.
    """

    def __init__(
        self,
        http: Http,
        dialect: Dialect,
        model: str,
        requests: Sequence[Request],
        prompts: PromptTokens,
        settings: ServerSettings,
        *,
        longest_tokens: int | None = None,
        advance: Callable[[int], None] | None = None,
    ) -> None:
        """``longest_tokens`` is the most that a prompt and its answer may have: longer ones are not sent, and fail."""
        self.http = http
        self.dialect = dialect
        self.model = model
        self.requests = requests
        self.prompts = prompts
        self.settings = settings
        self.longest_tokens = longest_tokens
        self.advance = advance
        self.answers = [Answer(request.prompt_tokens) for request in requests]
        self.stall_s = 0.0
        """Longest time that the event loop was late."""
        self._zero_s = 0.0
        self._ended = 0
        self._place = {request.index: number for number, request in enumerate(requests)}
        self._ends: dict[int, asyncio.Event] = {}
        """The ends of requests that others follow."""
        self._is_dead = asyncio.Event()
        """Set when the server does not answer any more."""

    async def run(self) -> None:
        """Play all requests. What fails is in their answers."""
        for request in self.requests:
            for before in self._before(request):
                self._ends.setdefault(before, asyncio.Event())
        stalls = asyncio.create_task(self._look_for_stalls())
        self._zero_s = monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                if self.settings.concurrency is None:
                    await self._play_by_time(group)
                else:
                    turns = iter(range(len(self.requests)))
                    for _ in range(self.settings.concurrency):
                        group.create_task(self._take_turns(turns))
        finally:
            stalls.cancel()

    # --- when ----------------------------------------------------------------------------------------------------------------

    async def _play_by_time(self, group: asyncio.TaskGroup) -> None:
        followers = [number for number, request in enumerate(self.requests) if self._before(request)]
        for number in followers:
            group.create_task(self._follow(number))
        roots = sorted(set(range(len(self.requests))).difference(followers))
        first_s = min((self.requests[number].arrival_s for number in roots), default=0.0)
        for at, number in enumerate(sorted(roots, key=lambda number: self.requests[number].arrival_s)):
            body = self._body(number)
            if not at:
                self._zero_s = monotonic()
            due_s = self._zero_s + (self.requests[number].arrival_s - first_s) / self.settings.speed
            await self._until(due_s)
            group.create_task(self._ask(number, due_s, body))

    def _before(self, request: Request) -> list[int]:
        """Return the places of the requests that a request follows."""
        return [self._place[index] for index in request.predecessors if index in self._place]

    async def _ends_of(self, numbers: Sequence[int]) -> None:
        """Wait until all of these requests have ended."""
        for number in numbers:
            await self._ends[number].wait()

    async def _follow(self, number: int) -> None:
        """Send a request after those that it follows."""
        request = self.requests[number]
        await self._ends_of(self._before(request))
        due_s = monotonic() + request.delay_s / self.settings.speed
        body = self._body(number)
        await self._until(due_s)
        await self._ask(number, due_s, body)

    async def _take_turns(self, turns: Iterator[int]) -> None:
        """Send requests, one after the end of another, until none is left."""
        for number in turns:
            await self._ends_of(self._before(self.requests[number]))
            due_s = monotonic()
            await self._ask(number, due_s, self._body(number))

    async def _until(self, due_s: float) -> None:
        """Wait until a time, or until the server is dead."""
        left_s = due_s - monotonic()
        if left_s > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self._is_dead.wait()
            except TimeoutError:
                return

    async def _look_for_stalls(self) -> None:
        while True:
            before_s = monotonic()
            await asyncio.sleep(LOOK_S)
            self.stall_s = max(self.stall_s, monotonic() - before_s - LOOK_S)

    # --- one request ---------------------------------------------------------------------------------------------------------

    def _body(self, number: int) -> bytes:
        request = self.requests[number]
        prompt = self.prompts.prompt(request, number).tolist()
        return msgspec.json.encode(self.dialect.body(self.model, prompt, max(1, request.output_tokens)))

    async def _ask(self, number: int, due_s: float, body: bytes) -> None:
        """Send a request and follow its answer. Never fails: what goes wrong is in the answer."""
        answer = self.answers[number]
        answer.due_s = due_s - self._zero_s
        try:
            self._check(self.requests[number])
            answer.sent_s = monotonic() - self._zero_s
            await ask(self.http, self.dialect, body, answer, self.settings.timeout_s, self._zero_s)
        except Failed as error:
            answer.error = str(error)
            if isinstance(error, Broken) and not self._is_dead.is_set():
                await self._look_for_life()
        self._ended += 1
        if number in self._ends:
            self._ends[number].set()
        if self.advance:
            self.advance(self._ended)

    def _check(self, request: Request) -> None:
        """Raise Failed for a request that is not to be sent."""
        if self._is_dead.is_set():
            raise Failed(f"not sent: {self.http.url} did not answer any more")
        tokens = request.prompt_tokens + max(1, request.output_tokens)
        if self.longest_tokens is not None and tokens > self.longest_tokens:
            raise Failed(f"not sent: prompt and answer are longer than the server's {self.longest_tokens} tokens (max_model_len)")

    async def _look_for_life(self) -> None:
        try:
            await self.http.get("/health")
        except UsageError:
            self._is_dead.set()


async def ask(http: Http, dialect: Dialect, body: bytes, answer: Answer, timeout_s: float, zero_s: float) -> None:
    """Send one request and take its answer in; times count from ``zero_s``. Raises Failed, with what has come until then kept."""
    is_whole = False
    try:
        async with asyncio.timeout(timeout_s), http.events(dialect.path, body) as events:
            async for event in events:
                now_s = monotonic() - zero_s
                if event == b"[DONE]":
                    is_whole = True
                elif dialect.read(event, answer):
                    answer.chunk_times_s.append(now_s)
    except TimeoutError:
        raise Failed(f"no complete answer within {timeout_s:g} s") from None
    except ValueError as error:  # msgspec's
        raise Failed(f"the server's answer cannot be read: {error}") from None
    if not is_whole:
        raise Failed("the server ended its answer early")
    if not answer.chunk_times_s:
        raise Failed("the server's answer has no token")
    answer.end_s = answer.chunk_times_s[-1]
