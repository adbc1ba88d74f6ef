"""Session-aware eviction, after a site that runs agents on SGLang (github.com/sgl-project/sglang, issue 24656, a comment of May
2026) and SGLang's cache with references of sessions (its pull request 29173)."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import RankedEviction


class Turn:
    """A request of a session that has finished."""

    __slots__ = ("ends", "index", "session", "states")

    def __init__(self, session: int, index: int) -> None:
        self.session = session
        self.index = index
        self.ends: list[Node] = []
        """Where the paths of its samples ended."""
        self.states: list[Node] = []
        """Recurrent states that it used."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class SessionAware(RankedEviction):
    """Lets go of what its session has left behind: once a turn has ended, the prompts before it matter only as its beginning.

    superseded                           leaves first, least recently used first
    latest prompt or answer of a session  leaves after it, least recently used first

    A page is superseded when the session of the last finished request that used it finishes a later request that does not use
    it. That happens when prompts are revised, compacted or branched; prompts that only grow supersede nothing but thoughts and
    answers that are not sent again. Requests without a session are superseded at once. SGLang protects what any live session
    refers to, and is told when a session is closed; a trace does not say that, so a session's latest prompt ages with the others.

    A page whose first request has not finished leaves last. Requests that one session runs side by side supersede each other.
    Needs requests with a ``session``.
    """

    def __post_init__(self) -> None:
        self._latest: dict[int, Turn] = {}
        """By session."""

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        context.require("session", "the session of each request")

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        before = self._latest.get(request.session)
        if before is not None and before.index == request.index:
            turn = before
        else:
            turn = Turn(request.session, request.index)
        if request.session >= 0:
            self._latest[request.session] = turn
            turn.ends.append(node)
            turn.states += self.request_states
        self.note_path(node, turn)
        if before is not None and before is not turn:
            self._supersede(before)

    def _supersede(self, turn: Turn) -> None:
        """Enter what the turn used last again: its paths' leaves, of which the last pages may have left, and its states."""
        tier = self.tier
        for end in turn.ends:
            node: Node = end
            while node.parent is not None and node.notes[tier] is turn:
                if node.is_evictable(tier):
                    self.on_evictable(node)
                node = node.parent
        for state in turn.states:
            if state.notes[tier] is turn and state.is_evictable(tier):
                self.on_evictable(state)

    def rank(self, node: Node) -> tuple[bool, float]:
        turn: Turn | None = node.notes[self.tier]
        is_latest = turn is None or self._latest.get(turn.session) is turn
        return is_latest, node.last_used_in(self.tier)
