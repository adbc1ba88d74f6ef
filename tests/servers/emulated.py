"""A server of kvsim's own for tests: speaks a dialect on a port, answers by simulation, and fails when told to."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Queue
from threading import Event, Thread

from kvsim.emulation.apis.base import Api, ApiSettings
from kvsim.emulation.apis.table import APIS
from kvsim.emulation.emulator import Emulator
from kvsim.emulation.http_server import HttpRequest, Reply
from kvsim.emulation.serve import serving
from kvsim.emulation.served import Served, ServedWatch
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.settings.configuration import compose_with_choices
from tests.waiting import LONG_S, join

ASKED = ("/v1/completions", "/generate")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong. Requests are numbered in the order in which they reach the server, from 0."""

    status: dict[int, int] = field(default_factory=dict)
    """The HTTP status that answers a request, by its number."""
    cut: frozenset[int] = frozenset()
    """Requests whose connection breaks after the first token."""
    ended_early: frozenset[int] = frozenset()
    """Requests whose stream ends after the first token, as if that was all."""
    silent: frozenset[int] = frozenset()
    """Requests that are never answered."""
    garbled: frozenset[int] = frozenset()
    """Requests whose stream has an event that is none."""
    failing: frozenset[int] = frozenset()
    """Requests whose stream tells of a failure after the first token."""
    dies_after: int | None = None
    """The server is gone when it has got this many requests."""
    health: int = 200


NO_FAULTS = Faults()


class Ended(Exception):
    """A stream has been ended early."""


class Faulty(Reply):
    """A reply that something goes wrong with after its first event."""

    def __init__(self, reply: Reply, number: int, faults: Faults) -> None:
        super().__init__(reply.request)
        self._number = number
        self._faults = faults

    async def event(self, content: object) -> None:
        number, faults, is_first = self._number, self._faults, not self.has_begun
        await super().event(content)
        if is_first and number in faults.cut:
            self.cut()
            raise ConnectionResetError
        if is_first and number in faults.ended_early:
            await self.end()
            raise Ended
        if is_first and number in faults.garbled:
            await super().event("no JSON at all")
        if is_first and number in faults.failing:
            await super().event({"error": {"message": "out of memory", "code": 500}})


class FaultyApi:
    """An interface with faults."""

    def __init__(self, api: Api, faults: Faults, die: Callable[[], None]) -> None:
        self.api = api
        self.faults = faults
        self.die = die
        self.asked = 0

    async def answer(self, request: HttpRequest, reply: Reply) -> None:
        faults, number = self.faults, self.asked
        if request.path == "/health" and faults.health != 200:
            await reply.whole(faults.health)
            return
        if request.path not in ASKED:
            await self.api.answer(request, reply)
            return
        self.asked += 1
        if faults.dies_after is not None and number >= faults.dies_after:
            self.die()
            reply.cut()
        elif number in faults.status:
            await reply.whole(faults.status[number], {"error": {"message": "not now"}})
        elif number in faults.silent:
            await asyncio.sleep(3600)
        else:
            with suppress(Ended):
                await self.api.answer(request, Faulty(reply, number, faults))


class Kept(ServedWatch):
    """Keeps all requests."""

    def __init__(self) -> None:
        self.served: list[Served] = []
        self.have_ended: Queue[Served] = Queue()

    def arrived(self, served: Served) -> None:
        self.served.append(served)

    def ended(self, served: Served) -> None:
        self.have_ended.put(served)


class Emulated:
    """A server that runs in a thread of its own."""

    def __init__(self, overrides: Sequence[str], dialect: str, speed: float, faults: Faults, settings: ApiSettings) -> None:
        self.overrides = overrides
        self.plan = plan_of(overrides)
        self.emulator = Emulator(self.plan, speed)
        self._kept = Kept()
        self.emulator.watches.append(self._kept)
        self._api = FaultyApi(APIS[dialect](self.emulator, settings), faults, self.stop)
        self._is_up, self._loop = Event(), asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._port = 0
        self._thread = Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._is_up.wait(LONG_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def served(self) -> list[Served]:
        """All requests so far, in the order of their arrival."""
        return self._kept.served

    def next_ended(self) -> Served:
        """Wait for the next request that ends."""
        return self._kept.have_ended.get(timeout=LONG_S)

    def forget_limit(self) -> None:
        """Neither name nor check the most tokens of a prompt and its answer."""
        self._api.api.longest_tokens = None

    async def _serve(self) -> None:
        async with serving(self.emulator, self._api.answer) as self._port:
            self._is_up.set()
            await self._stopped.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)

    def close(self) -> None:
        self.stop()
        join(self._thread)
        self._loop.close()


def plan_of(overrides: Sequence[str]) -> Plan:
    """The plan of ``kvsim simulate`` with these overrides."""
    config, choices = compose_with_choices(list(overrides))
    return build_run(config, command="simulate", overrides=overrides, choices=choices)


@contextmanager
def emulated(
    overrides: Sequence[str],
    *,
    dialect: str = "vllm",
    speed: float = 1.0,
    faults: Faults = NO_FAULTS,
    settings: ApiSettings = ApiSettings(),  # noqa: B008
) -> Iterator[Emulated]:
    """Serve with the simulation that these overrides of ``kvsim simulate`` describe, ``speed`` times as fast as in real time.

    Yields the server; its ``url`` is its address, and ``served`` what has become of each request.
    """
    server = Emulated(overrides, dialect, speed, faults, settings)
    try:
        yield server
    finally:
        server.close()
