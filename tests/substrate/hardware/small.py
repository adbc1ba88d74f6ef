"""Engines on real memory, small enough to follow by hand: a page is a letter of four tokens, two layers of 512 bytes each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra

from kvsim.build import build_run
from kvsim.core.cache import Cache
from kvsim.core.request import Request
from kvsim.core.transfer import Transfer
from kvsim.engine.cluster import Cluster
from kvsim.engine.engine import Engine
from kvsim.engine.outcome import Outcome
from kvsim.plan import Plan
from kvsim.policies.prefetch.base import Offer
from kvsim.run import Prefetching, build_tiers
from kvsim.substrates import SUBSTRATES
from tests.engine.small import ask, make_requests

PAGE_TOKENS = 4
PAGE_BYTES = 1024
SMALL = (
    "model=tiny",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden_size=16",
    "model.vocabulary=16",
    "model.mlp_width=16",
    f"page_tokens={PAGE_TOKENS}",
)


class PatientEngine(Engine):
    """Checks its cache after every transfer. A request that waits for another arrives once all transfers have ended.

    So each request finds the same, however long things take.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: list[Request] = []

    def _end(self, request: Request) -> None:
        self.held += self._followers.pop(request.index, [])
        super()._end(request)
        self._let_go()

    def _landed(self, transfer: Transfer) -> None:
        super()._landed(transfer)
        self.cache.check()
        self._let_go()

    def _let_go(self) -> None:
        if not self.cache.in_flight and not any(self.mover._lines):
            for request in self.held:
                arrival = self.env.timeout(0, request)
                arrival.callbacks.append(lambda event: self._arrive(event.value))
            self.held = []


def plan(folder: Path, *overrides: str, substrate: str = "hardware") -> Plan:
    """A small run's plan, its folder in ``folder``."""
    words = [*SMALL, f"substrate={substrate}", f"output={folder / 'run'}", *overrides]
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=words)
    return build_run(cfg, command="simulate", overrides=words)


def tiers(gpu: int, cpu: int = 0, disk: int = 0) -> list[str]:
    return [f"tiers.{name}.capacity={pages}pages" for name, pages in (("gpu", gpu), ("cpu", cpu), ("disk", disk)) if pages]


def serve(made: Plan, requests: list[Request], *, meddle: Callable[[Any], None] | None = None) -> Outcome:
    """Serve the requests. ``meddle`` gets the substrate before they arrive. Afterwards nothing is held or awaited."""
    choice = SUBSTRATES[made.substrate]
    cache = Cache(*build_tiers(made, requests, choice.pool), made.rules, made.page_tokens)
    prefetching = Prefetching(cache, made.prefetch, Offer)
    substrate = choice.open(made, requests, cache)
    try:
        if meddle is not None:
            meddle(substrate)
        engine = PatientEngine(substrate, cache, prefetching, made.engine, made.scheduling)
        outcome = Cluster([engine]).run(requests)
        check_idle(engine)
    finally:
        substrate.close()
    return outcome


def check_idle(engine: Engine) -> None:
    """Whatever happened, every pool adds up."""
    cache = engine.cache
    cache.check()
    assert not cache.leases and not cache.in_flight and not cache.residency.doomed
    for tier in cache.tiers:
        assert tier.promised_pages == tier.leaving_pages == 0
        assert tier.evictable_pages == tier.pool.capacity - tier.pool.free


def in_turn(*words: str, output: int = 1) -> list[Request]:
    """Requests that come one after another. Their prompts are words, and one token more."""
    return make_requests([ask(word, output=output, after=number - 1) for number, word in enumerate(words)], PAGE_TOKENS)
