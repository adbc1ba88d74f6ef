"""An emulated server: takes prompts as tokens at any time, and tells of their answers when a simulation has them."""

import asyncio
from collections.abc import Sequence
from math import inf

from kvsim.core.request import Request
from kvsim.emulation.live_cluster import LiveCluster
from kvsim.emulation.live_pages import LivePages
from kvsim.emulation.served import NO_EXTRAS, Extras, Served, ServedWatch
from kvsim.emulation.token_watch import TokenWatch
from kvsim.engine.outcome import tier_names
from kvsim.errors import UsageError
from kvsim.pages.extents import split_extents
from kvsim.plans.combinations import check_bypass, check_unforeseen
from kvsim.plans.plan import Plan
from kvsim.plans.tool_calls import check_calls_known
from kvsim.run.assembly import build_cluster_of, build_graphs, build_served
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from kvsim.trace.page_hasher import PageHasher

FIRST_TOKEN, TOKENS = 1000, 29_000
"""Answers have token ids from the first on, so many different ones, unless told otherwise."""


class Emulator:
    """One plan's engines on a clock that runs ``speed`` times as fast as real time, from the first call of ``run`` on.

    Prompts are cut into pages by their tokens, as in a trace of tokens; answers have random tokens, which enter the cache where
    the plan's rules cache answers. An answer goes on if nobody waits for it any more, unless it is aborted.
    """

    def __init__(self, plan: Plan, speed: float = 1.0) -> None:
        """Raises UsageError for a plan that cannot be emulated."""
        if plan.substrate != "simulated":
            raise UsageError("substrate: only simulated engines can be emulated: set substrate=simulated")
        check_bypass(plan, "simulate")
        check_unforeseen(plan)
        check_calls_known(plan)
        self.plan = plan if plan.rules.cache_output is not None else plan.with_answers(True)
        self.speed = speed
        self.vocabulary: Sequence[int] = range(FIRST_TOKEN, FIRST_TOKEN + TOKENS)
        """The tokens of answers."""
        self.watches: list[ServedWatch] = []
        self.served: dict[int, Served] = {}
        """The requests under way, by their numbers."""
        self.arrived = 0
        """The number of requests so far."""
        self._hasher = PageHasher(plan.page_tokens)
        self.cluster = self._build()
        tiers = [tier for cache in self.cluster.caches for tier in cache.tiers]
        self.tier_names: tuple[str, ...] = tuple(tier_names(tiers))
        """The tiers that hits are counted by."""
        self.pages = LivePages(tiers)
        self.cluster.open()
        self._began_s: float | None = None
        self._woken = asyncio.Event()

    def _build(self) -> LiveCluster:
        plan = self.plan
        substrate = SimulatedSubstrate(
            plan.model, plan.hardware, plan.page_tokens, links=plan.engine.links, seed=plan.seed, layout=plan.layout
        )
        caches = [build_served(plan, graph, []) for graph in build_graphs(plan)]
        watch = TokenWatch(substrate.env, substrate.steps.leap_s, self._on_tokens)
        cluster = build_cluster_of(LiveCluster, plan, [], caches, substrate, [watch])
        cluster.on_first_token, cluster.on_end = self._on_first_token, self._on_end
        return cluster

    # --- requests ------------------------------------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        output_tokens: int,
        *,
        most_tokens: int | None = None,
        is_streamed: bool = False,
        extras: Extras = NO_EXTRAS,
    ) -> Served:
        """Take a request that arrives now, whose answer has ``output_tokens`` of the ``most_tokens`` that it may have, by default
        all. Raises ValueError for tokens that are none."""
        self.catch_up()
        number, size, words = self.arrived, self.plan.page_tokens, self.vocabulary
        answer = [words[(number * 7919 + at * 104_729) % len(words)] for at in range(output_tokens)]
        known = [*tokens, *answer[:-1]]
        path = self.pages.lookup(self._hasher.keys(known, tenant=extras.salt))
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
        most = output_tokens if most_tokens is None else most_tokens
        served = self.served[number] = Served(request, answer, most, is_streamed, extras)
        self.arrived += 1
        for watch in self.watches:
            watch.comes(served, known)
        self.cluster.arrive(request)
        for watch in self.watches:
            watch.arrived(served)
        if self.pages.is_full:
            under_way = [one.request for one in self.served.values()]
            self.pages.forget([extent for one in under_way for extent in (*one.runs, *(one.output_runs or ()))])
        self._woken.set()
        return served

    def abort(self, served: Served) -> None:
        """Give up a request, since nobody waits for its answer; nothing happens if it has ended."""
        self.catch_up()
        if not (served.is_ended or served.is_aborted):
            served.is_aborted = True
            self.cluster.abort(served.number)
            self._woken.set()

    def empty(self) -> bool:
        """Drop all pages if no request is under way. Returns whether it did."""
        self.catch_up()
        emptied = self.cluster.empty()
        self._woken.set()
        return emptied

    @property
    def unfinished(self) -> int:
        """The number of requests that have not ended."""
        return self.cluster.unfinished

    @property
    def running(self) -> int:
        """The number of those that are admitted."""
        return self.cluster.running

    # --- time ----------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Let time pass until cancelled."""
        self.catch_up()
        while True:
            self._woken.clear()
            next_s = self.cluster.env.peek()
            wait_s = None if next_s == inf else max(0.0, next_s - self._now_s()) / self.speed
            try:
                async with asyncio.timeout(wait_s):  # wait_for may lose a cancellation before Python 3.12
                    await self._woken.wait()
            except TimeoutError:
                self.catch_up()

    def catch_up(self) -> None:
        """Let everything happen that is due by now."""
        now_s = self._now_s()
        if now_s > self.cluster.env.now:
            self.cluster.env.run(now_s)

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
            served.first_token_s = served.last_token_s = self.cluster.env.now
            self._take_hits(served)
            served.generated = 1
            served.news.set()
            for watch in self.watches:
                watch.first_token(served)

    def _take_hits(self, served: Served) -> None:
        size = self.plan.page_tokens
        served.cached_tokens = tuple(pages * size for pages in self.cluster.hit_pages(served.number))
        served.queued_s = self.cluster.queued_s(served.number)

    def _on_tokens(self, numbers: list[int]) -> None:
        for number in numbers:
            served = self.served.get(number)
            if served is not None and 0 < served.generated < len(served.answer) - 1:  # the last one comes with the end
                self._generate(served)

    def _generate(self, served: Served) -> None:
        now = self.cluster.env.now
        after_s, served.last_token_s = now - served.last_token_s, now
        served.generated += 1
        served.news.set()
        for watch in self.watches:
            watch.token(served, after_s)

    def _on_end(self, number: int) -> None:
        served = self.served.pop(number)
        served.is_ended, served.end_s = True, self.cluster.env.now
        served.is_rejected, served.is_shed = self.cluster.is_rejected(number), self.cluster.is_shed(number)
        served.retractions = self.cluster.retractions(number)
        if not (served.is_refused or served.is_aborted):
            self._take_hits(served)
            while served.generated < len(served.answer):
                self._generate(served)
        served.news.set()
        for watch in self.watches:
            watch.ended(served)
