"""NVIDIA Dynamo's KV router with its settings of 2026 (``lib/kv-router/src/scheduling/config.rs``, ``selector/default.rs``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import CPU
from kvsim.numbers import MOST_SECONDS, SECONDS, Real, check_settings
from kvsim.policies.fields import keep_types
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.cached import cached_pages
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.drawing import softmax
from kvsim.policies.routing.sent_prompts import SentPrompts
from kvsim.policies.routing.work import PagesInUse, SentWork

TTL = Real(above=0, most=MOST_SECONDS)
UNIT = Real(least=0, most=1)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Dynamo(RoutingPolicy):
    """Weighs what an engine has cached of a prompt, in every tier, against what it has to do.

    It is ``kv_aware`` with the settings that Dynamo's router has got since.

    every request   the engine with the lowest cost; of several, any
    cost            prefill_load_scale * max(0, prefill blocks - credit) + decode blocks + decode_active_request_weight * requests
    prefill blocks  tokens of the prompt, and those to be computed of requests sent there that have not had their first token,
                    divided by the tokens of a page
    credit          decayed overlap_score_credit * blocks on the GPU + host_cache_hit_weight * blocks that continue these in CPU
                    memory + disk_cache_hit_weight * blocks that continue these below
    decay           1 / (1 + overlap_score_credit_decay * excess): the tokens to be computed above those of the engine with the
                    fewest, in blocks, over the blocks of the prompt
    decode blocks   different pages of the prompts of all requests sent there that have not ended, and of this one
    requests        sent there and not ended
    temperature     above 0: an engine is drawn, with probability in proportion to exp(-cost / (range of costs) / temperature)
    without events  an engine has on its GPU what was sent there in the last router_ttl_s seconds, and nothing below it
    with both       router_predicted_ttl_s: what was sent there lately counts as well, if it is more than what is reported

    Of a request on its way, the tokens to be computed are those of its prompt without all blocks that were cached when it was
    sent, the ones below the GPU by their weights. On engines that only decode, decode blocks that prompts share count for each,
    and the prompt's own tokens do not count, as Dynamo's decode routers have it. What is shared by the whole cluster counts as
    every engine's, at disk_cache_hit_weight. Answers never count (``router_track_output_blocks``); the router's queue
    (``router_queue_threshold``), pinned workers and taints are left out.
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    decode_active_request_weight: float = 0.0
    router_temperature: float = 0.0
    use_kv_events: bool = True
    router_ttl_s: float = 120.0
    router_predicted_ttl_s: float | None = None
    staleness_s: float = 0.0
    late_answers: bool = False

    def __post_init__(self) -> None:
        check_settings(self, UNIT, "overlap_score_credit", "host_cache_hit_weight", "disk_cache_hit_weight")
        names = ("overlap_score_credit_decay", "prefill_load_scale", "decode_active_request_weight", "router_temperature")
        check_settings(self, Real(least=0), *names)
        check_settings(self, TTL, "router_ttl_s")
        check_settings(self, TTL, "router_predicted_ttl_s", or_null=True, hint="null believes reports alone")
        check_settings(self, SECONDS, "staleness_s")

    def without_effect(self) -> Sequence[str]:
        idle = [] if self.staleness_s else ["late_answers"]
        if self.use_kv_events:
            return [*idle, "router_ttl_s"]
        idle += ["host_cache_hit_weight", "disk_cache_hit_weight", "router_predicted_ttl_s"]
        return idle if self.late_answers else [*idle, "staleness_s"]

    @property
    def hears_late(self) -> bool:
        return self.late_answers

    @property
    def chooses_by(self) -> str:
        return "reports" if self.late_answers else "state"

    @property
    def needs_cached_pages(self) -> bool:
        return self.use_kv_events

    @property
    def needs_lower_pages(self) -> bool:
        return self.use_kv_events and self.host_cache_hit_weight + self.disk_cache_hit_weight > 0

    def bind(self, context: RoutingContext) -> None:
        self._page_tokens = context.page_tokens
        self._prefills, self._decodes = context.prefills, context.decodes
        self._rng: np.random.Generator = context.rng
        self._holders = context.holders
        self._work = SentWork(context.engines)
        self._in_use = PagesInUse(context.engines)
        ttl_s = self.router_predicted_ttl_s if self.use_kv_events else self.router_ttl_s
        self._sent = SentPrompts(context.engines, dict.fromkeys(context.engines), inf if ttl_s is None else ttl_s)
        self._predicts = ttl_s is not None
        self._tokens_to_compute = 0

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        self._work.offer(engines)
        costs, credited = self._costs(request, engines, now)
        at = softmax(costs, self.router_temperature, self._rng)
        cached = round(credited.get(at, 0.0) * self._page_tokens)
        self._tokens_to_compute = max(0, request.prompt_tokens - cached) if self._prefills else 0
        return engines[at].engine

    def _costs(self, request: Request, engines: Sequence[EngineStatus], now: float) -> tuple[np.ndarray, dict[int, float]]:
        """Return the cost of each engine, and by position how many blocks it has, those below the GPU by their weights."""
        work, in_use, page_tokens = self._work, self._in_use, self._page_tokens
        costs: np.ndarray = self.decode_active_request_weight * work.requests[work.rows]
        if not self._prefills:
            return costs + (in_use.all[work.rows] + request.prompt_pages), {}
        waiting = work.prefill_tokens[work.rows]
        blocks = (waiting + request.prompt_tokens) / page_tokens
        excess = (waiting - waiting.min()) / page_tokens / max(1, -(-request.prompt_tokens // page_tokens))
        credit = self.overlap_score_credit / (1.0 + self.overlap_score_credit_decay * excess)
        credited: dict[int, float] = {}
        for at, device in self._on_gpus(request, engines, now).items():
            lower = self._below(request, engines[at], device)
            credited[at] = device + lower
            blocks[at] = max(0.0, blocks[at] - credit[at] * device - lower)
        costs = costs + self.prefill_load_scale * blocks
        if self._decodes:
            costs += in_use.different[work.rows] + request.prompt_pages
            for engine in in_use.users(request):
                if engine in work.places:
                    costs[work.places[engine]] -= in_use.leading(request, engine)
        return costs, credited

    def _on_gpus(self, request: Request, engines: Sequence[EngineStatus], now: float) -> dict[int, int]:
        """Return, by position, the leading blocks on the GPUs of all engines that may have any in some tier."""
        places, found = self._work.places, dict[int, int]()
        if self.use_kv_events:
            found = cached_pages(request, engines, places, self._holders, with_none=self.needs_lower_pages)
        if self._predicts:
            for engine, pages in self._sent.matches(request.runs, now).items():
                if engine in places:
                    found[places[engine]] = max(pages, found.get(places[engine], 0))
        return found

    def _below(self, request: Request, status: EngineStatus, device: int) -> float:
        """Return the blocks that continue those on the GPU in the tiers below it, by their weights."""
        if not self.needs_lower_pages:
            return 0.0
        host, disk = self.host_cache_hit_weight, self.disk_cache_hit_weight
        return sum([(host if level == CPU else disk) * pages for level, pages in status.lower_pages(request, device)], 0.0)

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        self._work.sent(request, engine, self._tokens_to_compute)
        self._in_use.add(request, engine)
        if self._predicts:
            self._sent.add(request.runs, engine, now)

    def on_first_token(self, request: Request, engine: int, now: float) -> None:
        self._work.computed(request, engine)

    def on_ended(self, request: Request, engine: int, now: float) -> None:
        self._work.ended(request, engine)
        self._in_use.remove(request, engine)

    def on_down(self, engine: int, now: float) -> None:
        self._sent.forget(engine)


keep_types(Dynamo, router_predicted_ttl_s=float | None)
