"""Emulated servers side by side, each with an engine and a port of its own, until they are told to stop."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any, NamedTuple

from kvsim.emulation.apis.base import Api, ApiSettings
from kvsim.emulation.apis.table import APIS
from kvsim.emulation.emulator import Emulator
from kvsim.emulation.events import EventFeed
from kvsim.emulation.http_server import HttpServer
from kvsim.emulation.lengths import AnswerLengths
from kvsim.emulation.serve import running
from kvsim.emulation.settings import LAST_PORT, ServeSettings
from kvsim.emulation.tellers import TELLERS, Teller
from kvsim.emulation.text import Texts
from kvsim.errors import UsageError
from kvsim.kv_events.dialects import dialect_named
from kvsim.kv_events.publisher import Publisher
from kvsim.kv_events.wire import endpoint_of
from kvsim.plans.plan import Plan

LOOK_S = 0.02
"""How often it is looked whether requests under way have ended, once no more are taken."""


class Stop:
    """Set by a signal; a second one ends the wait for requests under way."""

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []
        self.first, self.second = asyncio.Event(), asyncio.Event()

    def receive(self, number: signal.Signals) -> None:
        """Take note of a signal."""
        self.signals.append(number)
        (self.second if self.first.is_set() else self.first).set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive SIGTERM and SIGINT during the block."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.receive, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def is_frozen(kind: Any) -> bool:
    """Whether objects of a class are those of a frozen dataclass."""
    parameters: Any = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def plan_of(plan: Plan, number: int) -> Plan:
    """Return the plan of one of several engines: policies have states and are its own; frozen settings are those of all.

    Settings are not copied, because an object of a compiled class that is frozen cannot be.
    """
    parts: list[Any] = [getattr(plan, one.name) for one in fields(plan)]
    shared = {id(part): part for part in parts if is_frozen(type(part))}
    return deepcopy(replace(plan, seed=plan.seed + number), shared)


def build_apis(plan: Plan, engines: int, api: str, settings: ServeSettings) -> list[Api]:
    """Return the interfaces of so many engines, each of which is the plan's. Raises UsageError."""
    texts = None if settings.tokenizer is None else Texts(settings.tokenizer)
    name = settings.model or plan.choices.get("model") or "model"
    built = []
    for number in range(engines):
        lengths = AnswerLengths(settings.output_tokens, settings.output_spread, plan.seed + number)
        own = ApiSettings(model=name, longest_tokens=settings.longest_tokens, texts=texts, lengths=lengths)
        built.append(APIS[api](Emulator(plan_of(plan, number), settings.speed), own))
    return built


class Ready(NamedTuple):
    """A server that is up."""

    api: Api
    address: str
    events: str | None
    """Where its events are."""
    replay: str | None


async def serve(apis: Sequence[Api], settings: ServeSettings, ready: Callable[[Ready], None], stop: Stop) -> str:
    """Serve until a signal comes; ``ready`` is told of each server once all are there.

    Returns what has become of the requests under way. Raises UsageError if a port cannot be had.
    """
    with stop.listening():
        async with AsyncExitStack() as stack:
            feeds = [await _publishing(stack, api, settings, number) for number, api in enumerate(apis)]
            servers = [await stack.enter_async_context(_listening(api, settings, number)) for number, api in enumerate(apis)]
            for api, server, (events, replay) in zip(apis, servers, feeds, strict=True):
                ready(Ready(api, f"http://{_in_url(settings.host)}:{server.port}", events, replay))
            await stop.first.wait()
            for server in servers:
                server.stop_listening()
            under_way = sum(api.emulator.unfinished for api in apis)
            await _ended(servers, settings.drain_s, stop)
            cut = sum(api.emulator.unfinished for api in apis)
    if not under_way:
        return "no request was under way"
    return f"{under_way} requests were under way: {under_way - cut} have ended, {cut} were cut"


async def _publishing(stack: AsyncExitStack, api: Api, settings: ServeSettings, number: int) -> tuple[str | None, str | None]:
    """Publish an engine's events while the stack is open. Returns the endpoints. Raises UsageError."""
    if settings.events is None:
        return None, None
    teller = TELLERS.get(api.engine)
    if teller is None:
        raise UsageError(f"serve.events: an engine behind the interface {api.engine} has no events: set serve.api=vllm or sglang")
    if settings.self_describing:
        _check_self_describing(api, teller)
    try:
        endpoint = endpoint_of(settings.events, number)
        replay = None if settings.replay is None else endpoint_of(settings.replay, number)
        dialect = dialect_named(settings.event_format or teller.dialect)
        publisher = await stack.enter_async_context(Publisher(dialect, endpoint, replay, topic=settings.topic))
    except UsageError as error:
        raise UsageError(f"serve.events: {error}") from None
    EventFeed(api.emulator, teller, publisher.publish, time.time, self_describing=settings.self_describing)
    return publisher.endpoint, publisher.replay_endpoint


def _check_self_describing(api: Api, teller: Teller) -> None:
    """Raise UsageError where events have tokens and parents anyway."""
    if not teller.offloads_blindly:
        raise UsageError(f"serve.self_describing has no effect on events of {api.engine}, which have tokens anyway: leave it out")
    if len(api.emulator.plan.tiers) == 1:
        raise UsageError(
            "serve.self_describing has no effect without a tier below the GPU: leave it out, or set tiers.cpu.capacity"
        )


async def _ended(servers: Sequence[HttpServer], most_s: float, stop: Stop) -> None:
    """Wait until nothing is being answered, for ``most_s`` seconds or until a second signal comes."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + most_s
    while any(server.answering for server in servers) and loop.time() < until_s and not stop.second.is_set():
        await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def _listening(api: Api, settings: ServeSettings, number: int) -> AsyncIterator[HttpServer]:
    server = HttpServer(api.answer)
    port = settings.port + number if settings.port else 0
    try:
        if port > LAST_PORT:
            raise UsageError(
                f"serve.port: engine {number} would have the port {port}, and {LAST_PORT} is the last: set a lower one"
            )
        async with running(api.emulator, server):
            try:
                await server.start(settings.host, port)
            except OSError as error:
                problem = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
                raise UsageError(
                    f"serve.port: {settings.host}:{port} cannot be had, {problem}: choose another with serve.port=PORT"
                ) from None
            yield server
    except* UsageError as group:
        raise group.exceptions[0] from None


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
