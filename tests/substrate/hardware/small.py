"""Engines on real memory, small enough to follow by hand: a page is a letter of four tokens, two layers of 512 bytes each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra

from kvsim.cluster.cluster import Cluster
from kvsim.core.request import Request
from kvsim.core.transfer import Transfer
from kvsim.core.watch import Watch
from kvsim.engine.outcome import Outcome
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.plans.substrate_choice import SUBSTRATES
from kvsim.run.assembly import build_cluster, build_graphs, build_served
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


class Landed(Watch):
    """Calls a function for every transfer that has ended."""

    def __init__(self, landed: Callable[[Transfer], None]) -> None:
        self.landed = landed

    def ended(self, transfer: Transfer) -> None:
        self.landed(transfer)


class PatientCluster(Cluster):
    """Checks its caches after every transfer. A request that waits for another arrives once all transfers have ended.

    So each request finds the same, however long things take.
    """

    def __init__(self, built: Cluster) -> None:
        super().__init__(
            built.engines,
            built.router,
            hand_over=built.hand_over,
            failures=built.failures,
            layout=built.layout,
            samples=built.samples,
        )
        self.held: list[Request] = []
        self.movers = list(dict.fromkeys(engine.mover for engine in self.engines))
        for mover in self.movers:
            mover.watches.append(Landed(self._landed))

    def ended(self, request: Request, engine: int) -> None:
        self.held += [self.book.requests[number] for number in self._followers.of_ended(request.index)]
        super().ended(request, engine)
        self._let_go()

    def _landed(self, transfer: Transfer) -> None:
        for cache in self.caches:
            cache.check()
        self._let_go()

    def _let_go(self) -> None:
        if not any(cache.in_flight for cache in self.caches) and not any(any(mover._lines) for mover in self.movers):
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
    caches = [build_served(made, graph, requests) for graph in build_graphs(made, requests, choice.pool)]
    substrate = choice.open(made, requests, caches)
    try:
        if meddle is not None:
            meddle(substrate)
        outcome = PatientCluster(build_cluster(made, requests, caches, substrate)).run(requests)
        for cache in caches:
            check_idle(cache)
    finally:
        substrate.close()
    return outcome


def check_idle(cache: Any) -> None:
    """Whatever happened, every pool adds up."""
    cache.check()
    assert not cache.leases and not cache.in_flight and not cache.residency.doomed
    for tier in cache.tiers:
        assert tier.reserved_pages == tier.leaving_pages == 0
        assert tier.held_pages == tier.pool.capacity - tier.pool.free
    for tier in cache.residency.tiers:
        assert tier.evictable_pages == tier.held_pages


def in_turn(*words: str, output: int = 1) -> list[Request]:
    """Requests that come one after another. Their prompts are words, and one token more."""
    return make_requests([ask(word, output=output, after=number - 1) for number, word in enumerate(words)], PAGE_TOKENS)
