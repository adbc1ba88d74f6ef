"""Routing policies by hand: a router before a few engines, and requests of a few pages."""

from importlib.resources import files
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from kvsim.cluster.held_pages import Holders
from kvsim.cluster.router import Changes, Router, known_engines
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.tier import Tier, chain
from kvsim.pages.extents import Extent, count_pages
from kvsim.plans.construct import construct
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.routing.base import RoutingPolicy
from kvsim.policies.routing.context import RoutingContext

FOLDER = files("kvsim.conf") / "routing"
NAMES = sorted(path.name.removesuffix(".yaml") for path in FOLDER.iterdir() if path.name.endswith(".yaml"))
PAGE_TOKENS = 4


def policy_of(name: str) -> RoutingPolicy:
    """A policy with the defaults of its YAML."""
    settings = OmegaConf.to_container(OmegaConf.create((FOLDER / f"{name}.yaml").read_text()))
    return construct(RoutingPolicy, settings, "routing")


class SmallRouter(Router):
    """A router whose engines store what a test says."""

    def __init__(self, policy: RoutingPolicy, gpus: dict[int, Tier], holders: Holders, changes: Changes) -> None:
        super().__init__(policy, known_engines(policy, gpus, lambda: 0.0, holders, changes))
        self.gpus = gpus

    def cached(self, engine: int, *extents: Extent, level: int = 0) -> None:
        """An engine has stored pages on its GPU or, at a level of 1 or 2, in a tier below, and reports them."""
        tier = [self.gpus[engine], *self.gpus[engine].all_below()][level]
        (watch,) = tier.watches
        watch.stored(tier, extents)


def router(
    policy: RoutingPolicy, engines: int = 3, *, seed: int = 0, lower: bool = False, capacity: int | None = None, **known: Any
) -> SmallRouter:
    """A router before engines that are all up and empty; ``known`` is what else policies may know. The clock stands still.

    They compute a token of a prompt in a second, and one of an answer in half a second.

    With ``lower``, each has a CPU tier and a disk of its own. ``capacity`` is that of a GPU tier, in pages.
    """
    numbers = range(engines)
    holders, changes = Holders(numbers), Changes()
    policy.bind(
        RoutingContext(
            engines=numbers,
            capacities=[capacity] * engines,
            page_tokens=PAGE_TOKENS,
            holders=holders.of,
            leading=holders.leading,
            changes=changes.collect,
            prefill_s=lambda start, tokens: float(tokens - start),
            decode_step_s=0.5,
            rng=np.random.default_rng(seed),
            **known,
        )
    )
    gpus = {number: Tier("gpu", 0, Pool(capacity), LRU()) for number in numbers}
    for gpu in gpus.values() if lower else ():
        chain([gpu, Tier("cpu", 1, Pool(None), LRU()), Tier("disk", 2, Pool(None), LRU())], [WriteThrough(), WriteThrough()])
    return SmallRouter(policy, gpus, holders, changes)


def sent_to(small: SmallRouter, engine: int, request: Request, now: float = 0.0, *, is_computed: bool = False) -> Request:
    """An engine gets a request, as the only one that is offered; the others stay as they are."""
    offered, small._offered = small._offered, (small.engines[engine],)
    assert small.send(request, now) == engine
    small._offered = offered
    if is_computed:
        small.first_token(request, engine, now)
    return request


def prompt(*extents: Extent, index: int = 0, session: int = -1, output_tokens: int = 1) -> Request:
    """A request whose prompt has these page ids and one token more; without extents, one page of its own."""
    extents = extents or ((1000 + 10 * index, 1),)
    pages = count_pages(extents)
    return Request(
        index=index,
        arrival_s=float(index),
        prompt_tokens=pages * PAGE_TOKENS + 1,
        output_tokens=output_tokens,
        runs=extents,
        prompt_pages=pages,
        session=session,
    )
