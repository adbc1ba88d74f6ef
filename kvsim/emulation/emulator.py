"""An emulated server: takes prompts as tokens at any time, and tells of their answers when a simulation has them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, nan

from kvsim.core.request import Request
from kvsim.emulation.live_cluster import LiveCluster
from kvsim.emulation.token_watch import TokenWatch
from kvsim.engine.outcome import tier_names
from kvsim.errors import UsageError
from kvsim.pages.extents import split_extents
from kvsim.plans.combinations import check_bypass
from kvsim.plans.plan import Plan
from kvsim.run.assembly import build_cluster_of, build_graphs, build_served
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from kvsim.trace.page_hasher import PageHasher
from kvsim.trace.page_index import PageIndex

FIRST_TOKEN, TOKENS = 1000, 29_000
"""Answers have token ids from the first on, so many different ones."""


@dataclass(eq=False)
class Served:
    """A request on its way, and what is known of it. Times are those of the simulation."""

    request: Request
    answer: list[int]
    """The tokens that it will have."""
    generated: int = 0
    """How many of them have been generated."""
    is_ended: bool = False
    is_rejected: bool = False
    first_token_s: float = nan
    end_s: float = nan
    cached_tokens: tuple[int, ...] = ()
    """By the emulator's ``tier_names``; known from the first token on."""
    queued_s: float = nan
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when any of this has changed."""


class Emulator:
    """One plan's engines on a clock that runs ``speed`` times as fast as real time, from the first call of ``run`` on.

    Prompts are cut into pages by their tokens, as in a trace of tokens; answers have random tokens, which enter the cache where
    the plan's rules cache answers. An answer goes on if nobody waits for it any more.
    """

    def __init__(self, plan: Plan, speed: float = 1.0) -> None:
        """Raises UsageError for a plan that cannot be emulated."""
        if plan.substrate != "simulated":
            raise UsageError("substrate: only simulated engines can be emulated: set substrate=simulated")
        check_bypass(plan, "simulate")
        self.plan = plan if plan.rules.cache_output is not None else plan.with_answers(True)
        self.speed = speed
        self.served: list[Served] = []
        """All requests so far, in the order of their arrival."""
        self._hasher = PageHasher(plan.page_tokens)
        self._index = PageIndex()
        self._cluster, self.tier_names = self._build()
        """The cluster, and the tiers that hits are counted by."""
        self._cluster.open()
        self._began_s: float | None = None
        self._woken = asyncio.Event()

    def _build(self) -> tuple[LiveCluster, tuple[str, ...]]:
        plan = self.plan
        substrate = SimulatedSubstrate(
            plan.model, plan.hardware, plan.page_tokens, links=plan.engine.links, seed=plan.seed, layout=plan.layout
        )
        caches = [build_served(plan, graph, []) for graph in build_graphs(plan)]
        watch = TokenWatch(substrate.env, substrate.steps.leap_s, self._on_tokens)
        cluster = build_cluster_of(LiveCluster, plan, [], caches, substrate, [watch])
        cluster.on_first_token, cluster.on_end = self._on_first_token, self._on_end
        return cluster, tier_names([tier for cache in caches for tier in cache.tiers])

    # --- requests ------------------------------------------------------------------------------------------------------------

    def submit(self, tokens: Sequence[int], output_tokens: int) -> Served:
        """Take a request that arrives now. Raises ValueError for tokens that are none."""
        self.catch_up()
        number, size = len(self.served), self.plan.page_tokens
        answer = [FIRST_TOKEN + (number * 7919 + at * 104_729) % TOKENS for at in range(output_tokens)]
        path = self._index.lookup(self._hasher.keys([*tokens, *answer[:-1]]))
        runs, after = split_extents(path, len(tokens) // size)
        request = Request(
            index=number,
            arrival_s=0.0,
            prompt_tokens=len(tokens),
            output_tokens=output_tokens,
            runs=runs,
            prompt_pages=len(tokens) // size,
            output_runs=after,
        )
        served = Served(request, answer)
        self.served.append(served)
        self._cluster.arrive(request)
        self._woken.set()
        return served

    def empty(self) -> bool:
        """Drop all pages if no request is under way. Returns whether it did."""
        self.catch_up()
        emptied = self._cluster.empty()
        self._woken.set()
        return emptied

    @property
    def unfinished(self) -> int:
        """The number of requests that have not ended."""
        return self._cluster.unfinished

    # --- time ----------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Let time pass until cancelled."""
        self.catch_up()
        while True:
            self._woken.clear()
            next_s = self._cluster.env.peek()
            wait_s = None if next_s == inf else max(0.0, next_s - self._now_s()) / self.speed
            try:
                await asyncio.wait_for(self._woken.wait(), wait_s)
            except TimeoutError:
                self.catch_up()

    def catch_up(self) -> None:
        """Let everything happen that is due by now."""
        now_s = self._now_s()
        if now_s > self._cluster.env.now:
            self._cluster.env.run(now_s)

    def _now_s(self) -> float:
        """Return the time of the simulation."""
        clock_s = asyncio.get_running_loop().time()
        if self._began_s is None:
            self._began_s = clock_s
        return (clock_s - self._began_s) * self.speed

    # --- what happens --------------------------------------------------------------------------------------------------------

    def _on_first_token(self, number: int) -> None:
        served = self.served[number]
        if not served.generated:
            served.first_token_s = self._cluster.env.now
            self._take_hits(served)
            served.generated = 1
            served.news.set()

    def _take_hits(self, served: Served) -> None:
        size, number = self.plan.page_tokens, served.request.index
        served.cached_tokens = tuple(pages * size for pages in self._cluster.hit_pages(number))
        served.queued_s = self._cluster.queued_s(number)

    def _on_tokens(self, numbers: list[int]) -> None:
        for number in numbers:
            served = self.served[number]
            if 0 < served.generated < len(served.answer) - 1:  # the last one comes with the end
                served.generated += 1
                served.news.set()

    def _on_end(self, number: int) -> None:
        served = self.served[number]
        served.is_ended, served.end_s = True, self._cluster.env.now
        served.is_rejected = self._cluster.is_rejected(number)
        if not served.is_rejected:
            self._take_hits(served)
            served.generated = len(served.answer)
        served.news.set()
