"""Time to live per session (Continuum: Efficient and robust multi-turn LLM agent scheduling with KV cache time-to-live,
arXiv:2511.02230, 2025)."""

from dataclasses import dataclass
from math import inf

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.numbers import Real, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.continuum import Continuum
from kvsim.policies.eviction.expiring import ExpiringEviction
from kvsim.policies.fields import keep_types

LEARNED = "learned"


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class TimeToLive(ExpiringEviction):
    """Keeps what a session has used until it should have returned: for agents, whose tools return soon or not at all.

    last finished request longer ago than its ttl, or without session   leave first, least recently used first
    the others                                                          leave after them, least recently used first

    ``ttl_s`` is the same for all requests (the order is then that of LRU, if every request has a session) or ``learned``: for
    each request, the tau among 0 and the observed pauses with the highest ``P(pause <= tau) * (eta * Tq + C) - tau``:

    P     pauses after requests of the same kind if more than 100 were observed, else after all; with 100 or fewer, tau is 2 s
    eta   -corr(turns done, turns left), initially 1; a session has ended when it is silent for longer than any pause so far
    Tq    mean queueing delay of the last 100 requests, from arrival to admission; 0 in a replay, which has no queue
    C     seconds to load the prompt from the tier below, or to compute it if there is none

    In a replay answers take no time, so a pause lasts from one arrival to the next. Nothing is pinned: protected pages leave
    too when no others remain. Needs requests with a ``session``; ``kind`` stands for the tool.
    """

    ttl_s: int | float | str = 300

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ttl_s != LEARNED:
            check_settings(self, Real(above=0), "ttl_s", hint=f"or set it to {LEARNED}")
        self._continuum = Continuum() if self.ttl_s == LEARNED else None

    @property
    def reads_hardware(self) -> bool:
        """Whether decisions depend on the machine's rates."""
        return self._continuum is not None

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        context.require("session", "the session of each request")
        self._reload_s = context.reload_s

    def on_arrival(self, request: Request, now: float) -> None:
        if self._continuum is not None and request.session >= 0:
            self._continuum.observe_arrival(request, now)

    def on_request(self, request: Request, now: float) -> None:
        if self._continuum is not None and request.session >= 0:
            self._continuum.observe_admission(request, now)

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        if request.session < 0:
            ttl_s = -inf
        elif self._continuum is None:
            ttl_s = float(self.ttl_s)
        else:
            self._continuum.observe_finish(request, now)
            ttl_s = self._continuum.ttl_s(request.kind, self._reload_s(request.prompt_tokens))
        self.note_path(node, now + ttl_s)

    def rank(self, node: Node) -> tuple[bool, float]:
        expiry_s = node.notes[self.tier]
        return expiry_s is None or expiry_s > self._now, node.last_used_in(self.tier)

    def ends_s(self, node: Node) -> float:
        expiry_s: float | None = node.notes[self.tier]
        return inf if expiry_s is None else expiry_s


keep_types(TimeToLive, ttl_s=int | float | str)
