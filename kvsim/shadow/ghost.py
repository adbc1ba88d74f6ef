"""A ghost cache: the settings of one plan, on the requests of live engines, served as ``kvsim replay`` serves a trace."""

from collections import deque
from collections.abc import Iterator, Mapping
from math import nan
from typing import Any

from kvsim.core.request import Request, Reset
from kvsim.core.serving import Hits
from kvsim.engine.outcome import tier_names
from kvsim.errors import UsageError
from kvsim.pages.extents import Extent
from kvsim.plans.combinations import check_unforeseen
from kvsim.plans.plan import Plan
from kvsim.plans.policy_errors import policies_named
from kvsim.replaying.replay import Replay
from kvsim.run.assembly import build_tiers
from kvsim.run.play import open_replay, with_known_answers
from kvsim.shadow.score import Scorer


class Tally:
    """Hit tokens and prompt tokens of requests served, in all and of the last ``window`` requests."""

    def __init__(self, tiers: int, window: int) -> None:
        self.requests = self.rejected = self.prompt_tokens = 0
        self.hit_tokens = [0] * tiers
        """By tier."""
        self.recent: deque[tuple[int, int]] = deque(maxlen=window)
        self.recent_hits = self.recent_prompts = 0
        self.checked = self.alike = self.checked_prompts = self.checked_hits = self.engine_hits = 0
        """Of the requests whose engine says what it had cached: their number, those with as much here, and tokens."""

    def add(self, hits: Hits, page_tokens: int, prompt_tokens: int, cached_tokens: int | None) -> None:
        """Count a request with these hit pages. Pages are whole ones, so each counts its tokens."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        for tier, pages in enumerate(hits[: len(self.hit_tokens)]):
            self.hit_tokens[tier] += pages * page_tokens
        tokens = sum(hits) * page_tokens
        if len(self.recent) == self.recent.maxlen:
            old_hits, old_prompt = self.recent[0]
            self.recent_hits -= old_hits
            self.recent_prompts -= old_prompt
        self.recent.append((tokens, prompt_tokens))
        self.recent_hits += tokens
        self.recent_prompts += prompt_tokens
        if cached_tokens is not None:
            self.checked += 1
            self.alike += tokens == cached_tokens
            self.checked_prompts += prompt_tokens
            self.checked_hits += tokens
            self.engine_hits += cached_tokens


class Ghost:
    """The caches of one plan, one for each engine whose requests it serves; each is a replay that goes on.

    Raises UsageError for a plan that no stream of requests can be played with.
    """

    def __init__(self, name: str, plan: Plan, window: int) -> None:
        self.name = name
        self.plan = with_known_answers(plan, [])
        check_unforeseen(plan, f"ghost {name}: ")
        self.problem = ""
        """Why it has stopped; empty while it runs."""
        self.emptied = 0
        self._replays: dict[str, Replay] = {}
        self.scorers: dict[str, Scorer] = {}
        """By engine, who is told what its cache stores and drops; must be there before its first request."""
        self._running: dict[str, deque[Request]] = {}
        """By engine, the last requests, among which are all that have not ended."""
        self.tiers = tier_names(self._replay("").server.tiers)
        """The tiers that hits are counted by."""
        self._replays.clear()
        self.tally = Tally(len(self.tiers), window)

    def serve(
        self, engine: str, request: Request, cached_tokens: int | None = None, *, at_s: float = 0.0, after_reset: bool = False
    ) -> Hits | None:
        """Serve the next request of an engine, whose cache was emptied before if ``after_reset``; ``at_s`` is for its scorer.

        Returns its hit pages by tier; None if it could not run even alone.

        A policy of the user's own that fails ends this ghost, not the others.
        """
        if self.problem:
            return None
        if after_reset:
            self._reset(engine)
        replay, scorer = self._replay(engine), self.scorers.get(engine)
        if scorer is not None:
            scorer.now_s = at_s
        try:
            hits = _played(self.plan, replay, request)
        except UsageError as error:
            self.stop(str(error))
            return None
        if hits is None:
            self.tally.rejected += 1
        else:
            if engine not in self._running:
                self._running[engine] = deque(maxlen=self.plan.replay.in_flight)
            self._running[engine].append(request)
            self.tally.add(hits, self.plan.page_tokens, request.prompt_tokens, cached_tokens)
        return hits

    def stop(self, problem: str) -> None:
        """Serve no request any more, and give back all memory."""
        self.problem = problem
        self._replays.clear()
        self._running.clear()

    def empty(self, engine: str) -> None:
        """Drop all that an engine's cache holds, because memory is short; what was counted stays."""
        self.emptied += engine in self._replays
        self._drop(engine)

    def _reset(self, engine: str) -> None:
        """Empty the cache of an engine as a replay does, or begin anew where its rules know no resets."""
        replay, scorer = self._replays.get(engine), self.scorers.get(engine)
        if replay is None:
            return
        if not (self.plan.rules.knows_resets or not self.plan.rules.engine):
            self._drop(engine)
            return
        was_paused = scorer is not None and scorer.is_paused
        if scorer is not None:
            scorer.is_paused = True
        replay.reset((Reset("drain", nan),))
        if scorer is not None:
            scorer.is_paused = was_paused

    def _drop(self, engine: str) -> None:
        self._replays.pop(engine, None)
        self._running.pop(engine, None)

    def held(self) -> Iterator[tuple[str, list[Extent]]]:
        """Yield, for each engine, the page ids that its cache may find again, or whose requests have not ended."""
        for engine, replay in self._replays.items():
            running = [run for request in self._running.get(engine, ()) for run in (*request.runs, *(request.output_runs or ()))]
            yield engine, replay.server.held_extents() + running

    def by_tier(self) -> Mapping[str, float]:
        """Return the hit tokens per prompt token, by the tier that they came from."""
        hits, prompts = dict(zip(self.tiers, self.tally.hit_tokens, strict=True)), self.tally.prompt_tokens
        return {tier.name: hits[tier.name] / prompts if prompts else 0.0 for tier in self.plan.tiers}

    def occupancy(self) -> Mapping[str, tuple[int, int | None]]:
        """Return the pages taken and the capacity by tier, over all engines."""
        taken = {tier.name: 0 for tier in self.plan.tiers}
        for replay in self._replays.values():
            for tier in replay.server.tiers:
                taken[tier.name] += tier.pool.capacity - tier.pool.free
        engines = max(1, len(self._replays))
        return {
            tier.name: (taken[tier.name], None if tier.capacity_pages is None else engines * tier.capacity_pages)
            for tier in self.plan.tiers
        }

    def _replay(self, engine: str) -> Replay:
        replay = self._replays.get(engine)
        if replay is None:
            replay = self._replays[engine] = _opened(self.plan.with_own_policies())
            if engine in self.scorers:
                for tier in replay.server.tiers:
                    tier.watches.append(self.scorers[engine])
        return replay


def _opened(plan: Plan) -> Replay:
    return open_replay(plan, build_tiers(plan), [])


@policies_named
def _played(plan: Plan, replay: Replay, request: Request) -> Hits | None:
    """Play one request."""
    (hits,) = replay.play([request])
    known: dict[Any, int] | None = replay.server.pages_known()
    if known:
        known.clear()  # for the report of a run, which has an end
    return hits
