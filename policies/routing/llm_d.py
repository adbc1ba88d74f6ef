"""The request scheduler of llm-d (``llm-d-inference-scheduler``, ``pkg/epp/framework/plugins/scheduling``)."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import SECONDS, Real, Whole, check_settings
from kvsim.pages.extents import Extent, split_extents
from kvsim.policies.fields import keep_types
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.cached import cached_pages
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.drawing import lowest, weighted
from kvsim.policies.routing.sent_prompts import SentPrompts

PREFIXES = ("approximate", "precise")
PICKERS = ("max_score", "weighted_random")
WEIGHTS = (
    "prefix_weight",
    "queue_weight",
    "kv_cache_utilization_weight",
    "no_hit_lru_weight",
    "load_aware_weight",
    "active_request_weight",
    "session_affinity_weight",
)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LlmD(RoutingPolicy):
    """Adds up scores of cache and load, each from 0 to 1 times its weight, as a router is configured in llm-d.

    picker                 max_score: the engine with the highest sum; of several, any. weighted_random: one is drawn, with
                           probability in proportion to its sum
    prefix                 approximate: share of the prompt's pages, of its first max_prefix_pages at most, that were sent to the
                           engine and are not driven out by later ones: it has lru_capacity_pages. precise: of the pages that
                           engines report to have, (own - least) / (most - least) over those that have any; 1 if all these have
                           as many
    queue                  (most - own) / (most - least) of the requests that the engines' last passes of admission left waiting;
                           1 if all have as many
    kv_cache_utilization   1 - share of its pages that requests use, as last reported
    active_request         (most - own) / most of the requests that were sent to engines and have not ended; 1 if there are none
    load_aware             0.5 * (1 - waiting / load_threshold), at least 0
    no_hit_lru             for a prompt of which no engine has anything: 1 for the one that has had such a one least recently,
                           falling evenly to 0; engines that never had one come first, by number
    session_affinity       1 for the engine that had the session's request before, 0 for others
    affinity_threshold     only engines with that share of the prompt are considered, if there are any. With the probability
                           exploration_probability all are nevertheless (``prefix-cache-affinity-filter``)

    Weights of 3 for prefix, 2 for queue and 2 for utilization are those of its guides. In approximate mode the original compares
    hashes of characters and drives out single blocks of a prompt. It reads metrics every 50 ms (``staleness_s``). Scorers of
    adapters, labels, latency predictions and speculative entries are left out.
    """

    prefix: str = "approximate"
    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    kv_cache_utilization_weight: float = 2.0
    no_hit_lru_weight: float = 0.0
    load_aware_weight: float = 0.0
    active_request_weight: float = 0.0
    session_affinity_weight: float = 0.0
    max_prefix_pages: int = 256
    lru_capacity_pages: int | None = None
    load_threshold: int = 128
    affinity_threshold: float | None = None
    exploration_probability: float = 0.01
    picker: str = "max_score"
    staleness_s: float = 0.0
    late_answers: bool = False

    def __post_init__(self) -> None:
        if self.prefix not in PREFIXES:
            raise ValueError(f"prefix must be one of {', '.join(PREFIXES)}, not {self.prefix}")
        if self.picker not in PICKERS:
            raise ValueError(f"picker must be one of {', '.join(PICKERS)}, not {self.picker}")
        check_settings(self, Real(least=0), *WEIGHTS)
        check_settings(self, Whole(1), "max_prefix_pages", "load_threshold")
        check_settings(self, Whole(1), "lru_capacity_pages", or_null=True, hint="null is the capacity of each engine")
        check_settings(self, Real(above=0, most=1), "affinity_threshold", or_null=True, hint="null considers all engines")
        check_settings(self, Real(least=0, most=1), "exploration_probability")
        check_settings(self, SECONDS, "staleness_s")

    def without_effect(self) -> Sequence[str]:
        idle: list[str] = []
        if self.prefix == "precise":
            idle += ["max_prefix_pages", "lru_capacity_pages"]
        if not self.load_aware_weight:
            idle.append("load_threshold")
        if self.affinity_threshold is None:
            idle.append("exploration_probability")
        if not (self.staleness_s and self.active_request_weight):
            idle.append("late_answers")
        if not (self.needs_reports or self.needs_cached_pages or self.late_answers):
            idle.append("staleness_s")
        return idle

    @property
    def hears_late(self) -> bool:
        return self.late_answers

    @property
    def chooses_by(self) -> str:
        return "reports" if self.late_answers or not self.active_request_weight else "state"

    @property
    def needs_cached_pages(self) -> bool:
        return self.prefix == "precise"

    @property
    def needs_reports(self) -> bool:
        return self.queue_weight + self.load_aware_weight + self.kv_cache_utilization_weight > 0

    def bind(self, context: RoutingContext) -> None:
        self._rng: np.random.Generator = context.rng
        self._holders = context.holders
        own = self.lru_capacity_pages
        most = {
            engine: capacity if own is None else own for engine, capacity in zip(context.engines, context.capacities, strict=True)
        }
        self._sent = SentPrompts(context.engines, most)
        self._offered: Sequence[EngineStatus] = ()
        self._places: dict[int, int] = {}
        """Where each of the engines that were offered last stands among them."""
        self._had_cold: OrderedDict[int, None] = OrderedDict()
        """Engines that have had a request of which nothing was cached, the one that had it longest ago first."""
        self._is_cold = False
        self._sessions: dict[int, int] = {}

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        if engines is not self._offered:
            self._offered = engines
            self._places = {status.engine: at for at, status in enumerate(engines)}
        found, shares = self._found(request, engines, now)
        self._is_cold = not found
        scores = self._prefix_scores(found, shares, len(engines)) * self.prefix_weight
        scores += self._load_scores(engines)
        if self.active_request_weight:
            active = np.array([status.outstanding_requests for status in engines])
            scores += self.active_request_weight * (1.0 - active / max(1, active.max()))
        if self.no_hit_lru_weight and self._is_cold:
            scores += self.no_hit_lru_weight * self._cold_scores(engines)
        if self.session_affinity_weight and self._sessions.get(request.session, -1) in self._places:
            scores[self._places[self._sessions[request.session]]] += self.session_affinity_weight
        considered = self._considered(shares)
        at = self._pick(scores if considered is None else scores[considered])
        return engines[at if considered is None else int(considered[at])].engine

    def _found(self, request: Request, engines: Sequence[EngineStatus], now: float) -> tuple[dict[int, int], dict[int, float]]:
        """Return the pages that engines have of the prompt and their share of it, by position, of those that have any."""
        if self.prefix == "precise":
            found = cached_pages(request, engines, self._places, self._holders)
            total = request.prompt_pages
        else:
            extents, total = self._compared(request)
            sent = self._sent.matches(extents, now)
            found = {self._places[engine]: pages for engine, pages in sent.items() if engine in self._places}
        return found, {at: pages / total for at, pages in found.items()}

    def _compared(self, request: Request) -> tuple[tuple[Extent, ...], int]:
        """Return the pages of the prompt that count in approximate mode, and their number."""
        if request.prompt_pages <= self.max_prefix_pages:
            return request.runs, request.prompt_pages
        return split_extents(request.runs, self.max_prefix_pages)[0], self.max_prefix_pages

    def _prefix_scores(self, found: dict[int, int], shares: dict[int, float], count: int) -> np.ndarray:
        scores = np.zeros(count)
        if self.prefix == "approximate":
            for at, share in shares.items():
                scores[at] = share
        elif found:
            least, most = min(found.values()), max(found.values())
            for at, pages in found.items():
                scores[at] = (pages - least) / (most - least) if most > least else 1.0
        return scores

    def _load_scores(self, engines: Sequence[EngineStatus]) -> np.ndarray:
        """Return the weighted scores of what engines report of their load."""
        scores = np.zeros(len(engines))
        if self.queue_weight or self.load_aware_weight:
            waiting = np.array([status.pending_requests for status in engines])
            least, most = waiting.min(), waiting.max()
            scores += self.queue_weight * ((most - waiting) / (most - least) if most > least else np.ones(len(engines)))
            scores += self.load_aware_weight * 0.5 * (1.0 - np.minimum(waiting, self.load_threshold) / self.load_threshold)
        if self.kv_cache_utilization_weight:
            used = [status.pages_in_use / (status.capacity_pages or 1) if status.capacity_pages else 0.0 for status in engines]
            scores += self.kv_cache_utilization_weight * (1.0 - np.array(used))
        return scores

    def _cold_scores(self, engines: Sequence[EngineStatus]) -> np.ndarray:
        """Return by how long each engine has had no prompt of which nothing was cached."""
        if len(engines) == 1:
            return np.ones(1)
        turns = {engine: turn for turn, engine in enumerate(self._had_cold)}
        never = [at for at, status in enumerate(engines) if status.engine not in turns]
        ranks = np.array([len(never) + turns.get(status.engine, 0) for status in engines])
        ranks[never] = np.arange(len(never))
        scores: np.ndarray = np.maximum(0.0, 1.0 - ranks / (len(engines) - 1))
        return scores

    def _considered(self, shares: dict[int, float]) -> np.ndarray | None:
        """Return the positions of the engines that have enough of the prompt; None: all are considered."""
        if self.affinity_threshold is None or self._rng.random() < self.exploration_probability:
            return None
        enough = sorted([at for at, share in shares.items() if share >= self.affinity_threshold])
        return np.array(enough) if enough else None

    def _pick(self, scores: np.ndarray) -> int:
        """Return the position of the engine that is picked."""
        if self.picker == "max_score" or not scores.any():
            return lowest(-scores, self._rng)
        return weighted(scores.tolist(), self._rng)

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        if self.prefix == "approximate":
            self._sent.add(self._compared(request)[0], engine, now)
        if self._is_cold:
            self._had_cold[engine] = None
            self._had_cold.move_to_end(engine)
        if self.session_affinity_weight and request.session >= 0:
            self._sessions[request.session] = engine

    def on_down(self, engine: int, now: float) -> None:
        self._sent.forget(engine)


keep_types(LlmD, lru_capacity_pages=int | None, affinity_threshold=float | None)
