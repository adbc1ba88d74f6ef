"""Hit rate against the capacity of one tier: LRU at every capacity in one pass, other policies by replay."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvsim.bounds.limits import not_bounded
from kvsim.bounds.lru_curve import LruCurve
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.engine.columns import hit_tokens
from kvsim.engine.outcome import FINISHED
from kvsim.errors import UsageError, first_line
from kvsim.numbers import Real, check_settings
from kvsim.plans.capacity import capacity_pages
from kvsim.plans.construct import construct
from kvsim.plans.plan import Plan, TierPlan
from kvsim.policies.eviction.base import BypassEviction, EvictionPolicy
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.replaying.settings import ReplaySettings
from kvsim.report.notebook import html_table
from kvsim.results.frame import frame
from kvsim.results.rates import percent, ratio
from kvsim.results.result import warmup_requests
from kvsim.run import play
from kvsim.settings.settings_file import UNREADABLE, read_file
from kvsim.settings.sources import files_of
from kvsim.suggest import closest
from kvsim.trace.subtrees import Subtrees

if TYPE_CHECKING:
    import plotly.graph_objects as go

LINE_POINTS = 200
"""Number of capacities at which the picture shows LRU."""


@dataclass(kw_only=True)
class CurveSettings:
    """The settings of ``kvsim curve``."""

    capacities: list[Any] | None = None
    policies: list[str] = field(default_factory=list)
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.capacities is not None and not self.capacities:
            raise ValueError("capacities is empty: give some, for example [1000pages,40GiB], or leave it out")
        check_settings(self, Real(above=0, most=1), "fraction", hint="it is the share to sample")


def curve_settings(node: Any) -> CurveSettings:
    """Read the settings from the configuration's ``curve``; a single capacity or policy counts as a list. Raises UsageError."""
    if isinstance(node, dict):
        node = node | {name: [node[name]] for name in ("capacities", "policies") if isinstance(node.get(name), (str, int, float))}
    return construct(CurveSettings, node, "curve")


@dataclass(frozen=True, kw_only=True)
class Point:
    """The hits of one policy at one capacity; of a sample, at the capacity scaled down accordingly."""

    policy: str
    capacity_pages: int
    hit_tokens: int
    hit_pages: int
    prompt_tokens: int
    """Prompt tokens of the requests counted and served."""
    prompt_pages: int
    rejected: int
    """Counted requests that need more pages than the tier has."""
    sampled: bool

    @property
    def hit_rate(self) -> float:
        """Hit tokens per prompt token."""
        return ratio(self.hit_tokens, self.prompt_tokens) or 0.0

    @property
    def page_hit_rate(self) -> float:
        """Hit pages per prompt page."""
        return ratio(self.hit_pages, self.prompt_pages) or 0.0

    def record(self) -> dict[str, Any]:
        """Return the fields with the hit rates."""
        return asdict(self) | {"hit_rate": self.hit_rate, "page_hit_rate": self.page_hit_rate}


@dataclass(frozen=True, kw_only=True, repr=False)
class Curve:
    """The result of ``kvsim curve``."""

    points: list[Point]
    """Points by policy in table order, LRU first, then by ascending capacity."""
    line: list[Point]
    """Exact LRU at as many capacities as a picture needs."""
    unlimited: Point
    capacities: list[int]
    requests: int
    """Number of requests counted: those after the warm-up."""
    warmup_requests: int
    largest_pages: int
    unique_pages: int
    sampled_requests: int | None
    """Number of requests in the sample; None if every policy replayed the whole trace."""
    sampled_share: float
    """Unique pages of the sample divided by all unique pages: the factor by which capacities are scaled."""
    page_tokens: int
    page_bytes: int

    @property
    def table(self) -> Any:
        """A table with one row per point, and the fields of ``Point``: a DataFrame or an array, as ``requests`` of a run is."""
        rows = [point.record() for point in self.points]
        return frame({name: np.array([row[name] for row in rows]) for name in rows[0]})

    def plot(self) -> "go.Figure":
        """Return the picture of the curve's page as a Plotly figure: LRU as a line, the other policies at the capacities."""
        import plotly.graph_objects as go

        from kvsim.report.curve import curve_figure

        line = [point.record() for point in self.line]
        columns = {name: [point[name] for point in line] for name in ("capacity_pages", "hit_rate")}
        points = [point.record() for point in self.points]
        record = {"line": columns, "points": points, "unlimited": self.unlimited.record()}
        return go.Figure(curve_figure(record | {"page_tokens": self.page_tokens, "page_bytes": self.page_bytes}))

    def __repr__(self) -> str:
        policies = ", ".join(dict.fromkeys(point.policy for point in self.points))
        sizes = f"{self.capacities[0]:,} to {self.capacities[-1]:,} pages" if self.capacities else "no capacities"
        return f"Curve({policies}: {sizes} of {self.page_tokens} tokens, unlimited hit rate {self.unlimited.hit_rate:.2%})"

    def _repr_html_(self) -> str:
        rates = {(point.policy, point.sampled, point.capacity_pages): percent(point.hit_rate) for point in self.points}
        kinds = dict.fromkeys((point.policy, point.sampled) for point in self.points)
        rows = [
            (f"{policy}, sample" if sampled else policy, *(rates.get((policy, sampled, size), "-") for size in self.capacities))
            for policy, sampled in kinds
        ]
        return html_table(("pages", *(f"{size:,}" for size in self.capacities)), rows)


class Curves:
    """Replays one trace at many capacities. Each request ends before the next begins, and answers occupy no pages."""

    def __init__(self, plan: Plan, settings: CurveSettings) -> None:
        """``plan`` is that of the command; its tiers are ignored. Raises UsageError for settings that cannot be used."""
        if type(plan.rules) is not Rules:
            raise UsageError("rules: kvsim curve supports only kvsim's own rules: use kvsim replay for an engine's rules")
        self.plan = plan
        self.settings = settings
        self.capacities = _capacities(plan, settings.capacities)
        self.policies = {name: policy_maker(name) for name in (*settings.policies, "belady") if name != "lru"}

    def load(self, requests: Sequence[Request]) -> None:
        """Set the trace and compute LRU's curve of it.

        Raises UsageError for a capacity that fits no request, and for resets, images and persistent prompts.
        """
        if what := not_bounded(requests):
            raise UsageError(f"kvsim curve: the trace {what}, which no curve accounts for: use kvsim replay")
        self.requests = requests
        self.first = warmup_requests(self.plan.warmup, len(requests))
        self.whole = self._lru(requests)
        self.capacities = self.capacities or default_capacities(self.whole.largest_pages, self.whole.unique_pages)
        smallest = min(request.prompt_pages for request in requests)
        if self.capacities[0] < smallest:
            raise UsageError(
                f"curve.capacities: no request fits into {self.capacities[0]} pages of {self.plan.page_tokens} tokens: "
                f"the smallest prompt has {smallest} pages"
            )
        self.played, self.share = requests, 1.0
        if self.settings.fraction < 1:
            self.played = sample(requests, self.settings.fraction, seed=self.plan.seed)
            self.part = self._lru(self.played)
            self.share = self.part.unique_pages / max(1, self.whole.unique_pages)

    @property
    def replayed_requests(self) -> int:
        """Total number of requests in the replays of ``draw``."""
        return len(self.played) * len(self.policies) * len(self.capacities)

    def draw(self, advance: Callable[[int], None] | None = None) -> Curve:
        """Compute all points. ``advance`` is called now and then with the number of requests replayed."""
        points = [self._lru_point(capacity) for capacity in self.capacities]
        scaled = {capacity: max(1, round(capacity * self.share)) for capacity in self.capacities}
        if sampled := self.settings.fraction < 1:
            # A small capacity, scaled down, would reject prompts that it can serve, so it is left out.
            scaled = {capacity: size for capacity, size in scaled.items() if size >= self.part.largest_pages}
            points += [self._point_of(self.part, size, "lru", capacity, sampled=True) for capacity, size in scaled.items()]
        for number, (name, make) in enumerate(self.policies.items()):
            for place, point in enumerate(self._replays(name, make, scaled)):
                points.append(point)
                if advance:
                    advance((number * len(scaled) + place + 1) * len(self.played))
        whole = self.whole
        ends = max(1, whole.largest_pages), max(1, whole.unique_pages)
        sizes = np.unique(np.geomspace(*ends, LINE_POINTS).round().astype(int)).tolist()
        return Curve(
            points=points,
            line=[self._point_of(whole, size, "lru", size) for size in sizes],
            unlimited=self._point_of(whole, whole.unique_pages, "unlimited", whole.unique_pages),
            capacities=self.capacities,
            requests=len(self.requests) - self.first,
            warmup_requests=self.first,
            largest_pages=whole.largest_pages,
            unique_pages=whole.unique_pages,
            sampled_requests=len(self.played) if sampled else None,
            sampled_share=self.share,
            page_tokens=self.plan.page_tokens,
            page_bytes=self.plan.page_bytes,
        )

    def _lru(self, requests: Sequence[Request]) -> LruCurve:
        rules = self.plan.rules
        return LruCurve(requests, self.plan.page_tokens, recompute_last_token=rules.recompute_last_token, counted_from=self.first)

    def _lru_point(self, capacity: int) -> Point:
        """Return the exact point. Below the size of the largest prompt it covers the requests that fit; others are rejected."""
        if capacity >= self.whole.largest_pages:
            return self._point_of(self.whole, capacity, "lru", capacity)
        fitting = [request for request in self.requests if request.prompt_pages <= capacity]
        rejected = sum(request.index >= self.first for request in self.requests if request.prompt_pages > capacity)
        return replace(self._point_of(self._lru(fitting), capacity, "lru", capacity), rejected=rejected)

    @staticmethod
    def _point_of(curve: LruCurve, size: int, policy: str, capacity: int, *, sampled: bool = False) -> Point:
        return Point(
            policy=policy,
            capacity_pages=capacity,
            hit_tokens=int(curve.hit_tokens(size)),
            hit_pages=int(curve.hit_pages(size)),
            prompt_tokens=curve.prompt_tokens,
            prompt_pages=curve.prompt_pages,
            rejected=0,
            sampled=sampled,
        )

    def _replays(self, name: str, make: Callable[[], EvictionPolicy], scaled: dict[int, int]) -> Iterator[Point]:
        """Yield a policy's points by ascending capacity. A bound that reaches an unlimited tier's hits is not replayed again."""
        most_pages = int((self.part if self.settings.fraction < 1 else self.whole).hit_pages(self.whole.unique_pages))
        policy, point = make(), None
        for capacity, size in scaled.items():
            is_bound = isinstance(policy, BypassEviction)
            if is_bound and point and point.hit_pages == most_pages and not point.rejected:
                point = replace(point, capacity_pages=capacity)
            else:
                point = self._replay(name, policy if is_bound else make(), capacity, size)
            yield point

    def _replay(self, name: str, policy: EvictionPolicy, capacity: int, size: int) -> Point:
        """Replay a policy on one tier of ``size`` pages, the scaled ``capacity``."""
        requests = self.played
        tier = TierPlan(name="gpu", capacity_pages=size, eviction=policy, placement=None)
        settings = ReplaySettings(in_flight=1, hold_output=False)
        outcome = play.replay(replace(self.plan, tiers=[tier], prefetch=NoPrefetch(), replay=settings), requests)
        counted = np.array([request.index >= self.first for request in requests])
        served = counted & (outcome.status == FINISHED)
        return Point(
            policy=name,
            capacity_pages=capacity,
            hit_tokens=int(hit_tokens(outcome)[served].sum()),
            hit_pages=int(outcome.hit_pages[served].sum()),
            prompt_tokens=sum(request.prompt_tokens for request, is_served in zip(requests, served, strict=True) if is_served),
            prompt_pages=sum(request.prompt_pages for request, is_served in zip(requests, served, strict=True) if is_served),
            rejected=int(np.count_nonzero(counted & ~served)),
            sampled=self.settings.fraction < 1,
        )


def policy_maker(text: str) -> Callable[[], EvictionPolicy]:
    """Return a factory for a policy of ``conf/eviction``, given as its name and settings: ``slru protected_hits=3``.

    Raises UsageError for an unknown name or setting.
    """
    files = files_of("eviction")
    names = sorted(files)
    name, *overrides = text.split() or [""]
    if name not in names:
        hint = closest(name, names) or f"; choose from {', '.join(names)}"
        raise UsageError(f"curve.policies: there is no eviction policy {name!r}{hint}")
    unreadable = next((word for word in overrides if "=" not in word), None)
    if unreadable is not None:
        raise UsageError(f"curve.policies: cannot parse {unreadable!r} in {text!r}: use {name!r} or '{name} KEY=VALUE'")
    own = OmegaConf.create(read_file(files[name]))
    try:
        settings = OmegaConf.to_container(OmegaConf.merge(own, OmegaConf.from_dotlist(overrides)), resolve=True)
    except (OmegaConfBaseException, *UNREADABLE) as error:
        raise UsageError(f"curve.policies: cannot read {text!r}: {first_line(error)}") from error
    construct(EvictionPolicy, settings, f"curve.policies: {name}")
    return lambda: construct(EvictionPolicy, settings, f"curve.policies: {name}")


def default_capacities(largest_pages: int, unique_pages: int) -> list[int]:
    """Return 1, 2, 5, 10, ... from the largest prompt to the number of unique pages; these two limits if none is between."""
    series = [digit * 10**power for power in range(len(str(unique_pages))) for digit in (1, 2, 5)]
    between = [pages for pages in series if largest_pages <= pages <= unique_pages]
    return between or sorted({max(1, largest_pages), max(1, unique_pages)})


def sample(requests: Sequence[Request], fraction: float, *, seed: int) -> list[Request]:
    """Return about this share of the requests, in whole subtrees (``Subtrees``): requests that share a page below the common ones
    are all in the sample or all out. Raises UsageError if the sample is empty.
    """
    subtrees = Subtrees(requests)
    chosen = [requests[at] for drawn in subtrees.draws(fraction, 1, seed=seed) for at in subtrees.requests_in(drawn).tolist()]
    if not chosen:
        raise UsageError(f"curve.fraction={fraction} leaves none of {len(requests)} requests: increase it")
    return chosen


def _capacities(plan: Plan, given: Sequence[Any] | None) -> list[int]:
    """Return the capacities in pages, ascending, without duplicates; empty if none is given."""
    sizes = set()
    for capacity in given or ():
        if str(capacity) in ("0", "unlimited"):
            raise UsageError(f"curve.capacities: {capacity} is always shown: leave it out")
        text = f"{capacity}pages" if isinstance(capacity, int) and not isinstance(capacity, bool) else str(capacity)
        try:
            page_bytes = plan.page_bytes
            pages = capacity_pages(text, page_tokens=plan.page_tokens, page_bytes=page_bytes)
        except ValueError as error:
            raise UsageError(f"curve.capacities: {error}") from error
        sizes.add(cast(int, pages))
    return sorted(sizes)
