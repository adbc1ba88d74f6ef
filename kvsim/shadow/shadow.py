"""Beside live engines: their trees, and ghost caches that serve the same requests."""

from collections.abc import Callable, Mapping
from math import inf

from kvsim.errors import UsageError
from kvsim.plans.plan import Plan
from kvsim.report.comparison.differing import differing, labels
from kvsim.shadow.bound import SESSION_BYTES, SESSIONS_SHARE, Bound, limited
from kvsim.shadow.ghost import Ghost, Tally
from kvsim.shadow.live import LiveRequest, problem_of
from kvsim.shadow.prompts import Prompts, Sessions
from kvsim.shadow.settings import ShadowSettings
from kvsim.shadow.snapshot import GhostView, Snapshot


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
        self._engines: dict[str, None] = {}
        self.on_request: Callable[[LiveRequest], None] | None = None
        """Called with each request that events have made."""
        self.events = self.requests = self.skipped = self.late = self.gaps = 0
        self.last_problem = ""
        """What was wrong with the last request that was left out."""

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
        made = {size: prompts.request(request, number, at_s, place) for size, prompts in self._prompts.items()}
        for ghost in self.ghosts:
            ghost.serve(request.engine, made[ghost.plan.page_tokens], request.cached_tokens)
        self._bound.grew(made.values())

    def _refused(self, engine: str) -> str:
        """Say why requests of an engine are left out; empty if they are not."""
        if engine not in self._engines:
            if len(self._engines) >= self.settings.most_engines:
                return f"it is of one engine more than {self.settings.most_engines}"
            self._engines[engine] = None
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
            engines=(),
            ghosts=tuple(_view(ghost, base, told) for ghost, told in zip(self.ghosts, self._differs, strict=True)),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> list[str]:
        notes = self._bound.notes()
        if self.late:
            notes.append(f"{self.late:,} requests had arrived before one that was served earlier; they were served in between")
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
