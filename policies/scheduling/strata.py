"""Strata's cache-aware scheduling (Xie et al., Strata: Hierarchical Context Caching for Long Context Language Model Serving,
2025, arXiv 2508.18572)."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from kvsim.core.queue_view import LookUps, Waiting
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Real, Whole, check_settings
from kvsim.pages.extent_counts import PageCounts
from kvsim.policies.context import PolicyContext
from kvsim.policies.fields import keep_types
from kvsim.policies.scheduling.kept_order import KeptOrder, KeptScheduling


class Batch:
    """The requests that are being computed, and what has to be loaded and computed for them, in tokens."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._prompts = PageCounts()
        self._tokens: dict[Waiting, tuple[int, int]] = {}
        self.loaded = self.computed = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, waiting: Waiting, loaded: int, computed: int) -> None:
        """A request is admitted."""
        self._tokens[waiting] = loaded, computed
        self.loaded += loaded
        self.computed += computed
        self._prompts.add(waiting.request.runs)

    def remove(self, waiting: Waiting) -> None:
        """A request is computed, or given up."""
        loaded, computed = self._tokens.pop(waiting)
        self.loaded -= loaded
        self.computed -= computed
        self._prompts.remove(waiting.request.runs)

    def shared(self, waiting: Waiting) -> int:
        """Return how many leading tokens of a prompt those of the batch have, cached or not."""
        return self._prompts.leading(waiting.request.runs) * self._page_tokens


class StrataOrder(KeptOrder):
    """Requests by arrival in the queue, but those whose turn would come too early are passed over."""

    def __init__(self, policy: "Strata", batch: Batch) -> None:
        self._policy = policy
        self._batch = batch
        self._waiting: OrderedDict[Waiting, tuple[int, int]] = OrderedDict()
        """Tokens to load, and all that are cached, by request."""

    def add(self, waiting: Waiting) -> None:
        self._waiting[waiting] = 0, 0

    def remove(self, waiting: Waiting) -> None:
        self._policy.to_load[waiting] = self._waiting.pop(waiting)[0]

    def update(self, changed: Sequence[Waiting], look_ups: LookUps) -> None:
        for waiting in changed:
            cached = look_ups.cached_tokens(waiting)
            self._waiting[waiting] = cached - look_ups.gpu_tokens(waiting), cached

    def first(self) -> Waiting | None:
        ready: Waiting | None = None
        for waiting, (loaded, cached) in islice(self._waiting.items(), self._policy.look_ahead):
            if self._batch.shared(waiting) - cached >= self._policy.delay_hit_tokens:
                continue
            if ready is None:
                ready = waiting
            if self._is_balanced(loaded, max(1, waiting.target_tokens - cached)):
                return waiting
        return ready

    def _is_balanced(self, loaded: int, computed: int) -> bool:
        """Whether what the batch loads can hide behind what it computes, with one request more."""
        return self._batch.loaded + loaded <= self._policy.ratio * (self._batch.computed + computed)

    def in_order(self) -> list[Waiting]:
        return list(self._waiting)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Strata(KeptScheduling):
    """By arrival, but loads hide behind prefill, and nobody computes what another request is computing already.

    batch        the requests that are admitted and not computed yet
    delay hit    a request shares delay_hit_tokens or more with one of the batch that are not cached: it is passed over until that
                 one is computed, and finds them then
    balance      the first request whose tokens to load, with those of the batch, are at most load_ratio times the tokens to
                 compute; if there is none, the first that is no delay hit
    look_ahead   only so many requests at the head of the queue are looked at; if all are delay hits, nobody is admitted
    load_ratio   null: seconds to compute a token / seconds to load one, of the model and the machine

    What is loaded is what the tier below the GPU has of the prompt, after what the GPU has. The paper's abstract and summaries
    name both rules, and a third that fills stalls with further requests: here steps go on while others load, under every policy.
    Its thresholds could not be found: these are chosen here. 100 tokens are a prefix that is worth waiting for.
    """

    delay_hit_tokens: int = 100
    load_ratio: float | None = None
    look_ahead: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Whole(1), "delay_hit_tokens", "look_ahead")
        check_settings(self, Real(least=0), "load_ratio", or_null=True, hint="null follows the model and the machine")

    @property
    def may_hold(self) -> bool:
        return True

    def bind(self, context: PolicyContext) -> None:
        self.ratio = inf if self.load_ratio is None else self.load_ratio
        if self.load_ratio is None and context.lower_tier_name is not None and context.model is not None:
            self.ratio = context.recompute_s(0, context.page_tokens) / (context.host_load_s(1001) - context.host_load_s(1)) * 1000
        self._batch = Batch(context.page_tokens)
        self.to_load: dict[Waiting, int] = {}
        """Of requests that have left the queue and may be about to be admitted, the tokens to load."""

    def kept_order(self) -> KeptOrder:
        return StrataOrder(self, self._batch)

    def on_admitted(self, waiting: Waiting, tokens: int) -> None:
        self._batch.add(waiting, self.to_load.pop(waiting, 0), tokens)
        self.to_load.clear()

    def on_computed(self, waiting: Waiting) -> None:
        self._batch.remove(waiting)


keep_types(Strata, load_ratio=float | None)
