"""KVRouting's learning-based greedy routing (Wu, Silwal and Zhang, Randomization Boosts KV Caching, Learning Balances Query Load,
ICLR 2026, arXiv 2601.18999; ``eta_online_3d`` in its ``router.rs``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import MOST_SECONDS, SECONDS, Real, Whole, check_settings
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.sent_prompts import SentPrompts

FIRST_UNCERTAINTY: Final = 1e6
"""Before the first answer, the learned delay is anything: the first answer sets it."""


def left(half_lives: float) -> float:
    """Return the share of work that is left after some half-lives."""
    return float(0.5**half_lives)


class Learned:
    """What is learned of one engine, and what it is believed to have to do."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        """How much longer answers take than prefill and queue explain."""
        self._uncertainty = FIRST_UNCERTAINTY
        self._workload_s = 0.0
        self._at_s = 0.0

    def workload_s(self, now: float, half_life_s: float) -> float:
        """Return the work that is left, of which half is done in each half-life."""
        return self._workload_s * left((now - self._at_s) / half_life_s)

    def add_work(self, work_s: float, now: float, half_life_s: float) -> None:
        """Add work that comes; less than 0 takes out work that is left."""
        self._workload_s = max(0.0, self.workload_s(now, half_life_s) + work_s)
        self._at_s = now

    def learn(self, delay_s: float, forgetting: float) -> None:
        """Take an answer's delay into account: recursive least squares of a constant."""
        gain = self._uncertainty / (forgetting + self._uncertainty)
        self.delay_s += gain * (delay_s - self.delay_s)
        self._uncertainty = (1.0 - gain) * self._uncertainty / forgetting


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class KVRoutingGreedy(RoutingPolicy):
    """Sends a request where its answer is expected to end first, and learns from each answer how slow an engine really is.

    every request   the engine with the shortest expected time; a later one, by number, only if it is at least slack_s shorter
    expected time   prefill + workload + delay
    prefill         uncached_s_per_token * tokens of the prompt that were not sent to the engine lately; at least slack_s
    workload        prefill of the requests that were sent there, which halves every half_life_s, without those that have ended
    delay           learned: the mean of what answers took above prefill and workload as of when they were sent, and at least
                    slack_s, with weights that fall by ``forgetting`` from one answer to the next

    Its repository measures prompts in characters (1 ms each here stands for a token) and lets the workload fall by 1/32 every
    20 ms, a half-life of 0.44 s. ``forgetting`` 0.95 and slack_s 0.001 are from there, too. Its randomized eviction is another
    matter. Nothing is learned from requests that are rejected, or lost before their first token. The times of all engines are
    compared for each request.
    """

    uncached_s_per_token: float = 0.001
    half_life_s: float = 0.4366
    forgetting: float = 0.95
    slack_s: float = 0.001
    max_tree_tokens: int = 16777216

    def __post_init__(self) -> None:
        check_settings(self, SECONDS, "uncached_s_per_token", "slack_s")
        check_settings(self, Real(above=0, most=MOST_SECONDS), "half_life_s")
        check_settings(self, Real(above=0, most=1), "forgetting")
        check_settings(self, Whole(1), "max_tree_tokens")

    def bind(self, context: RoutingContext) -> None:
        pages = self.max_tree_tokens // context.page_tokens
        if not pages:
            raise ValueError(f"max_tree_tokens={self.max_tree_tokens} is less than a page of {context.page_tokens} tokens")
        self._page_tokens = context.page_tokens
        self._prefills = context.prefills
        self._sent = SentPrompts(context.engines, dict.fromkeys(context.engines, pages))
        self._learned = {engine: Learned() for engine in context.engines}
        self._under_way: dict[int, tuple[float, float, float]] = {}
        """By request: when it was sent, its prefill, and the workload then."""
        self._begun: set[int] = set()
        """Requests under way whose first token has passed."""
        self._chosen = 0.0, 0.0

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        found = self._sent.matches(request.runs, now) if self._prefills else {}
        chosen, shortest = -1, 0.0
        for status in engines:
            engine, learned = status.engine, self._learned[status.engine]
            prefill_s = self._prefill_s(request, found.get(engine, 0))
            workload_s = learned.workload_s(now, self.half_life_s)
            expected_s = max(prefill_s + workload_s + learned.delay_s, self.slack_s)
            if chosen < 0 or expected_s + self.slack_s < shortest:
                chosen, shortest = engine, expected_s
                self._chosen = prefill_s, workload_s
        return chosen

    def _prefill_s(self, request: Request, cached_pages: int) -> float:
        """Return the seconds to compute what is not cached of a prompt."""
        tokens = max(0, request.prompt_tokens - cached_pages * self._page_tokens) if self._prefills else 0
        return max(self.uncached_s_per_token * tokens, self.slack_s)

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        prefill_s, workload_s = self._chosen
        self._under_way[request.index] = now, prefill_s, workload_s
        self._learned[engine].add_work(prefill_s, now, self.half_life_s)
        self._sent.add(request.runs, engine, now)

    def on_first_token(self, request: Request, engine: int, now: float) -> None:
        self._begun.add(request.index)

    def on_ended(self, request: Request, engine: int, now: float) -> None:
        sent_s, prefill_s, workload_s = self._under_way.pop(request.index)
        learned = self._learned[engine]
        learned.add_work(-prefill_s * left((now - sent_s) / self.half_life_s), now, self.half_life_s)
        if request.index in self._begun:
            self._begun.discard(request.index)
            learned.learn(max(self.slack_s, now - sent_s - prefill_s - workload_s), self.forgetting)
            self._sent.add(request.runs, engine, now)

    def on_down(self, engine: int, now: float) -> None:
        self._sent.forget(engine)
