"""Prefix-aware routing, as SGLang's router does it: its policy ``cache_aware`` (``sgl-model-gateway/src/policies/cache_aware.rs``
and ``tree.rs``)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Real, Whole, check_settings
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.lowest import Lowest
from kvsim.policies.routing.prefix_tree import PrefixTree

FALLBACKS = ("least_loaded", "smallest_tree")


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class PrefixAware(RoutingPolicy):
    """Sends a prompt where most of it was sent before, as long as the load is even; needs no reports from the engines.

    load                                  requests sent to an engine that have not ended
    highest - lowest load > abs, and
    highest > rel * lowest load           the engine with the lowest load
    matched > cache_threshold             the engine with the longest match; of several, the one that got those pages first
    otherwise                             fallback: the engine with the lowest load, or the one with the smallest tree
    always                                the prompt is added to the tree of the chosen engine

    abs and rel are balance_abs_threshold and balance_rel_threshold; matched is the share of the prompt's tokens. The tree of
    an engine holds the prompts sent there, not what the engine still has cached.

    An engine that has just started has no prompts, so it gets only those that match nowhere, until the load is uneven: where
    sessions go on for long and fewer than abs requests are under way, autoscaling helps new sessions only.

    The original compares characters, and every ``eviction_interval_secs`` shortens trees that have become too large, by whole
    nodes; this tree compares pages, and never becomes too large. Answers are in neither. SGLang fell back to the smallest tree
    until December 2025, then to the lowest load. Its options of 2026, such as drawing candidates for that, are left out.
    """

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    max_tree_tokens: int = 16777216
    fallback: str = "least_loaded"

    def __post_init__(self) -> None:
        check_settings(self, Real(least=0, most=1), "cache_threshold")
        check_settings(self, Whole(), "balance_abs_threshold")
        check_settings(self, Real(least=1), "balance_rel_threshold")
        check_settings(self, Whole(1), "max_tree_tokens")
        if self.fallback not in FALLBACKS:
            raise ValueError(f"fallback must be one of {', '.join(FALLBACKS)}, not {self.fallback}")

    def bind(self, context: RoutingContext) -> None:
        pages = self.max_tree_tokens // context.page_tokens
        if not pages:
            raise ValueError(f"max_tree_tokens={self.max_tree_tokens} is less than a page of {context.page_tokens} tokens")
        self._page_tokens = context.page_tokens
        self._tree = PrefixTree(context.engines, pages)
        changes = context.changes
        self._idlest = Lowest(None if changes is None else changes())
        self._busiest = Lowest(None if changes is None else changes())
        self._resized: set[int] = set()
        self._smallest = Lowest(self._resized)

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        idlest = engines[self._idlest.of(engines, outstanding_requests)]
        lowest = idlest.outstanding_requests
        highest = engines[self._busiest.of(engines, negated)].outstanding_requests
        if highest - lowest > self.balance_abs_threshold and highest > self.balance_rel_threshold * lowest:
            return idlest.engine
        pages, engine = self._tree.longest(request.runs)
        if pages * self._page_tokens > self.cache_threshold * request.prompt_tokens:
            return engine
        return idlest.engine if self.fallback == "least_loaded" else engines[self._smallest.of(engines, self._tree_pages)].engine

    def _tree_pages(self, status: EngineStatus) -> int:
        return self._tree.pages(status.engine)

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        self._tree.add(request, engine, now)
        self._resized.add(engine)

    def on_down(self, engine: int, now: float) -> None:
        self._tree.forget(engine)
        self._resized.add(engine)

    def on_draining(self, engine: int, now: float) -> None:
        self.on_down(engine, now)


def outstanding_requests(status: EngineStatus) -> int:
    """Return the load of an engine."""
    return status.outstanding_requests


def negated(status: EngineStatus) -> int:
    """Return the load of an engine, the lower the more it is."""
    return -status.outstanding_requests
