"""LPC (Yang, Li, Li and Lloyd: Learned prefix caching for efficient LLM inference, NeurIPS 2025, section 3.4)."""

from dataclasses import dataclass
from math import inf, log

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.numbers import Real, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import RankedEviction

Talk = tuple[float, int]
"""What is noted with a node: (rank, session) of the conversation that is most likely to go on."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LearnedPrefix(RankedEviction):
    """LPC: keeps what conversations have used that are likely to go on, and less so the longer they are silent.

    p        chance that a conversation goes on after this turn
    p(t)     p d / (p d + 1 - p), d = e^(-t / interval_s), after t seconds of silence
    victim   the lowest p(t); of a page that several conversations share, the highest p(t) counts

    p(t) is the posterior chance if conversations that go on do so after times with an exponential distribution. Its log-odds,
    log(p / (1 - p)) - t / interval_s, all fall alike, so the order of log-odds + last use / interval_s never changes.

    The authors predict p from the text of the last prompts and the number of the turn. Here it is counted as the run goes on, by
    type and turn of the request: (continued + 1) / (requests + 2). With ``interval_s`` they take the mean time between turns,
    about 100 s. A shared page remembers the one conversation that counts. Needs requests with a ``session``.
    """

    interval_s: float = 100.0

    def __post_init__(self) -> None:
        check_settings(self, Real(above=0), "interval_s")
        self._requests: dict[tuple[str, int], int] = {}
        self._continued: dict[tuple[str, int], int] = {}
        self._last: dict[int, tuple[int, str, int]] = {}
        """By session: index, type and turn of its latest request."""

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        context.require("session", "the session of each request")

    def on_request(self, request: Request, now: float) -> None:
        index, kind, turn = self._last.get(request.session, (-1, "", 0))
        if request.session < 0 or request.index <= index:
            return
        self._last[request.session] = request.index, request.kind, request.turn
        self._count(self._requests, request.kind, request.turn)
        if index >= 0:
            self._count(self._continued, kind, turn)

    def _count(self, counts: dict[tuple[str, int], int], kind: str, turn: int) -> None:
        counts[kind, turn] = counts.get((kind, turn), 0) + 1

    def odds(self, kind: str, turn: int) -> float:
        """Return p / (1 - p) of a turn of this type."""
        continued = self._continued.get((kind, turn), 0)
        return (continued + 1) / (self._requests.get((kind, turn), 0) - continued + 1)

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        if request.session < 0:
            self._count(self._requests, request.kind, request.turn)
        talk = log(self.odds(request.kind, request.turn)) + now / self.interval_s, request.session
        path: Node = node
        while path.parent is not None:
            self._note(path, talk)
            path = path.parent
        for state in self.request_states:
            self._note(state, talk)

    def _note(self, node: Node, talk: Talk) -> None:
        """Note a conversation, in place of what it has said before or of another one that is less likely to go on."""
        before: Talk | None = node.notes[self.tier]
        if before is None or before[1] == talk[1] >= 0 or before[0] < talk[0]:
            node.note(self.tier, talk)
            if node.is_evictable(self.tier):
                self.on_evictable(node)

    def rank(self, node: Node) -> tuple[float, float]:
        talk: Talk | None = node.notes[self.tier]
        return inf if talk is None else talk[0], node.last_used_in(self.tier)
