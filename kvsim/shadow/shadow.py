"""Beside live engines: their trees, and ghost caches that serve the same requests."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import inf

from kvsim.errors import UsageError
from kvsim.kv_events.messages import EventBatch
from kvsim.plans.plan import Plan
from kvsim.report.comparison.differing import differing, labels
from kvsim.shadow.bound import SESSION_BYTES, SESSIONS_SHARE, Bound, limited
from kvsim.shadow.engine import LiveEngine
from kvsim.shadow.ghost import Ghost, Tally
from kvsim.shadow.live import ChainKeys, LiveRequest, problem_of
from kvsim.shadow.prompts import Prompts, Sessions
from kvsim.shadow.score import Scorer
from kvsim.shadow.settings import ShadowSettings
from kvsim.shadow.snapshot import EngineView, GhostView, Snapshot

SCORED_WITHIN_S = 120.0
"""How far apart an event and its prediction may be: a ghost serves a request at its beginning, its answer included."""


class Said:
    """What an engine has said of the prompts that it had cached."""

    def __init__(self) -> None:
        self.requests = self.cached_tokens = self.prompt_tokens = 0

    def add(self, request: LiveRequest) -> None:
        """Count a request, if the engine says what it had cached of it."""
        if request.cached_tokens is not None:
            self.requests += 1
            self.cached_tokens += request.cached_tokens
            self.prompt_tokens += request.prompt_tokens

    @property
    def hit_rate(self) -> float | None:
        return _share(self.cached_tokens, self.prompt_tokens)


class Shadow:
    """Takes what sources tell of live engines, and says at any time what it has found.

    Every ghost serves every request, in the order in which they are told, at their time of arrival; time never goes back. The
    first plan is the engines' own configuration. Each engine has a cache of its own in each ghost.
    """

    def __init__(self, plans: Mapping[str, Plan], page_tokens: int, settings: ShadowSettings) -> None:
        """``plans`` are the ghosts by name, ``page_tokens`` the source's page size. Raises UsageError."""
        self.page_tokens = page_tokens
        self.settings = settings
        self.ghosts = [
            Ghost(name, limited(plan, settings.memory_bytes // len(plans)), settings.window_requests)
            for name, plan in plans.items()
        ]
        if not self.ghosts:
            raise UsageError("a shadow needs a ghost: give it the configuration of the engine")
        self._prompts = {ghost.plan.page_tokens: _prompts(ghost, page_tokens) for ghost in self.ghosts}
        self._bound = Bound(settings.memory_bytes, self.ghosts, list(self._prompts.values()))
        self._differs = _differences([ghost.plan for ghost in self.ghosts])
        self._sessions = Sessions(settings.memory_bytes // SESSIONS_SHARE // SESSION_BYTES)
        self._began_s: float | None = None
        self._at_s, self._last_s = 0.0, -inf
        self._keys = ChainKeys(settings.salt_bytes)
        self._engines: dict[tuple[str, int | None], LiveEngine] = {}
        """Those that send events, by name and rank."""
        self._served: dict[str, Said] = {}
        """Those whose requests are served, by name."""
        self._lost_before: Counter[tuple[str, int | None]] = Counter()
        """Batches lost of engines, by name and rank, before the first event; those of no rank are of all ranks."""
        self.on_request: Callable[[LiveRequest], None] | None = None
        """Called with each request that events have made."""
        self.wants_more: Callable[[], bool] = lambda: True
        """Whether requests that events make are still to be served."""
        self.events = self.requests = self.skipped = self.late = self.gaps = 0
        self.refused_batches = 0
        """Batches of events of more engines than are followed."""
        self.last_problem = ""
        """What was wrong with the last request that was left out."""

    # --- events --------------------------------------------------------------------------------------------------------------

    def event(self, engine: str, batch: EventBatch) -> None:
        """Take an engine's next batch of events: its tree follows, and the requests that have ended are served."""
        live = self._live(engine, batch.rank)
        if live is None:
            self.refused_batches += 1
            return
        self.events += len(batch.events)
        before = live.tree.stored + live.tree.removed
        live.take(batch)
        self._bound.told(live, live.tree.stored + live.tree.removed - before)

    def lost(self, engine: str, batches: int, rank: int | None = None) -> None:
        """Take note that events were lost before the next one: of all ranks, or of one."""
        self.gaps += 1
        found = self._ranks(engine, rank)
        if not found:
            self._lost_before[engine, rank] += batches
        for live in found:
            live.lose(batches)

    def restarted(self, engine: str, rank: int | None = None) -> None:
        """Take note that an engine, or one rank of it, has started anew, with nothing cached."""
        for key in [key for key in self._lost_before if key[0] == engine and rank in (None, key[1])]:
            del self._lost_before[key]
        for live in self._ranks(engine, rank):
            live.restart()

    def flush(self) -> None:
        """Serve the requests that events have told of and that have not ended, and end the scores: nothing more is expected."""
        for live in self._engines.values():
            live.requests.end_all()
            if live.scorer is not None:
                live.scorer.finish()

    def _ranks(self, engine: str, rank: int | None) -> list[LiveEngine]:
        return [live for (name, other), live in self._engines.items() if name == engine and rank in (None, other)]

    def _live(self, engine: str, rank: int | None) -> LiveEngine | None:
        """Return an engine that sends events; None if there are too many."""
        live = self._engines.get((engine, rank))
        if live is None and len(self._engines) < self.settings.most_engines:
            live = LiveEngine(engine, rank, self.page_tokens, self._keys, self._from_events)
            self._engines[engine, rank] = live
            self._score(live)
            of_all = 0 if rank is None else self._lost_before[engine, None]
            if batches := self._lost_before.pop((engine, rank), 0) + of_all:
                live.lose(batches)
        return live

    def _score(self, live: LiveEngine) -> None:
        """Compare an engine's events with those of the first ghost, if that has pages of the same size."""
        base = self.ghosts[0]
        if base.plan.page_tokens == self.page_tokens and self.settings.requests_from_events:
            live.scorer = base.scorers[live.label] = Scorer(self._prompts[self.page_tokens].index, SCORED_WITHIN_S)

    def _from_events(self, request: LiveRequest) -> None:
        if self.settings.requests_from_events and self.wants_more():
            if self.on_request is not None:
                self.on_request(request)
            self.request(request)

    # --- requests ------------------------------------------------------------------------------------------------------------

    def request(self, request: LiveRequest) -> None:
        """Let every ghost serve a request. One with something wrong is counted and left out."""
        problem = problem_of(request, self.page_tokens) or self._refused(request.engine)
        if problem:
            self.skipped += 1
            self.last_problem = problem
            return
        at_s = self._time(request.arrival_s)
        number, place = self.requests, self._sessions.place(request.session)
        self.requests += 1
        self._served[request.engine].add(request)
        made = {size: prompts.request(request, number, at_s, place) for size, prompts in self._prompts.items()}
        for ghost in self.ghosts:
            ghost.serve(
                request.engine,
                made[ghost.plan.page_tokens],
                request.cached_tokens,
                at_s=request.arrival_s,
                after_reset=request.after_reset,
            )
        self._bound.grew(made.values())

    def _refused(self, engine: str) -> str:
        """Say why requests of an engine are left out; empty if they are not."""
        if engine not in self._served:
            if len(self._served) >= self.settings.most_engines:
                return f"it is of one engine more than {self.settings.most_engines}"
            self._served[engine] = Said()
        return ""

    def _time(self, arrival_s: float) -> float:
        """Return the time of a request on the ghosts' clock, which begins with the first request and never goes back."""
        if self._began_s is None:
            self._began_s = arrival_s
        if arrival_s < self._last_s:
            self.late += 1
        self._last_s = max(self._last_s, arrival_s)
        self._at_s = max(self._at_s, self._last_s)
        return self._last_s - self._began_s

    # --- what is known -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return everything there is to show."""
        base = self.ghosts[0].tally
        return Snapshot(
            at_s=self._at_s,
            events=self.events,
            requests=self.requests,
            skipped=self.skipped,
            late=self.late,
            gaps=self.gaps,
            memory_bytes=self._bound.measured(),
            forgotten_pages=sum(prompts.index.forgotten for prompts in self._prompts.values()),
            engines=tuple(self._engine_views()),
            ghosts=tuple(_view(ghost, base, told) for ghost, told in zip(self.ghosts, self._differs, strict=True)),
            notes=tuple(self._notes()),
        )

    def check(self) -> None:
        """Recount everything that engines' events and requests have left. Raises AssertionError."""
        for live in self._engines.values():
            live.tree.check()
        for prompts in self._prompts.values():
            prompts.index.check()
        self._bound.check()

    def _engine_views(self) -> Iterator[EngineView]:
        """Yield the engines that send events, then those of which only requests are known."""
        labels_ = {live.label for live in self._engines.values()}
        for live in self._engines.values():
            said = self._served.get(live.label, Said())
            yield live.view(said.requests, said.hit_rate)
        for name, said in self._served.items():
            if name not in labels_:
                yield EngineView(name=name, requests=said.requests, hit_rate=said.hit_rate)

    def _notes(self) -> list[str]:
        notes = self._bound.notes()
        if self.late:
            notes.append(f"{self.late:,} requests had arrived before one that was served earlier; they were served in between")
        if self.refused_batches:
            notes.append(f"{self.refused_batches:,} batches of events were of more engines than {self.settings.most_engines}")
        for live in self._engines.values():
            notes += live.notes()
        if self.skipped:
            notes.append(f"{self.skipped:,} requests were left out, the last because {self.last_problem}")
        return notes


def _prompts(ghost: Ghost, page_tokens: int) -> Prompts:
    """Return what makes requests for a ghost. Raises UsageError for pages that are no multiple of the source's."""
    size = ghost.plan.page_tokens
    if size % page_tokens:
        raise UsageError(
            f"ghost {ghost.name}: page_tokens={size} must be a multiple of the {page_tokens} tokens that a page of the source has"
        )
    return Prompts(size, size // page_tokens)


def _differences(plans: list[Plan]) -> list[str]:
    """Return, for each plan, the settings in which it differs from the first, as overrides."""
    named = [labels(plan.config, plan.choices) for plan in plans]
    return [" ".join(f"{key}={each.get(key, 'null')}" for key in differing([named[0], each])) for each in named]


def _view(ghost: Ghost, base: Tally, differs: str) -> GhostView:
    tally = ghost.tally
    rate, first = _share(sum(tally.hit_tokens), tally.prompt_tokens), _share(sum(base.hit_tokens), base.prompt_tokens)
    checked = _share(tally.checked_hits - tally.engine_hits, tally.checked_prompts)
    return GhostView(
        name=ghost.name,
        differs=differs,
        requests=tally.requests,
        rejected=tally.rejected,
        hit_rate=rate,
        hit_rate_by_tier=ghost.by_tier(),
        points=None if rate is None or first is None else 100 * (rate - first),
        recent_hit_rate=_share(tally.recent_hits, tally.recent_prompts),
        recent_requests=len(tally.recent),
        checked_requests=tally.checked,
        alike_requests=tally.alike,
        engine_points=None if checked is None else 100 * checked,
        occupancy=ghost.occupancy(),
        emptied=ghost.emptied,
        problem=ghost.problem,
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
