"""Choices of victims, recorded while a replay makes them, with what the future says of each candidate."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvsim.core.request import Request
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.foresight import NEVER, Foresight
from kvsim.policies.eviction.leaf_features import FEATURES, Vector
from kvsim.policies.eviction.leaf_model import LeafModel
from kvsim.policies.eviction.learned import Learned

FAR = np.iinfo(np.int64).max
"""Next use of a page that nobody uses again within the horizon, or before the cache is reset."""
HORIZON = 0.25
"""How far a recording looks ahead, as a share of its requests. It records nothing in that share at its end, where what is used
again later would look like what is never used; the same horizon for all is the memory window of Song et al. (NSDI 2020)."""


@dataclass(frozen=True)
class Decision:
    """The leaves among which a victim was chosen."""

    request: int
    """Index of the request for which room was made."""
    features: Vector
    """[candidates, FEATURES]."""
    next_uses: np.ndarray
    """Index of the request that uses each candidate's last page next; ``FAR`` if none does."""
    last_uses: np.ndarray
    """When each was last used, in seconds."""

    @property
    def best(self) -> np.ndarray:
        """Which candidates Belady's rule would let go: those of the farthest next use."""
        found: np.ndarray = self.next_uses == self.next_uses.max()
        return found


@dataclass
class Reservoir:
    """At most ``size`` decisions, each of those seen equally likely (Vitter: Random sampling with a reservoir, 1985)."""

    size: int
    rng: np.random.Generator
    kept: list[Decision] = field(default_factory=list)
    seen: int = 0

    def place(self) -> int | None:
        """Return where the next decision goes, None if it is not kept; at the end of ``kept``, it is added."""
        self.seen += 1
        if len(self.kept) < self.size:
            return len(self.kept)
        place = int(self.rng.integers(self.seen))
        return place if place < self.size else None

    def put(self, place: int, decision: Decision) -> None:
        """Keep a decision."""
        self.kept[place : place + 1] = [decision]

    def in_order(self) -> list[Decision]:
        """Return the decisions in the order of the requests."""
        return sorted(self.kept, key=lambda decision: decision.request)


class Recording(Learned):
    """Evicts as ``model`` says or, without one, the least recently used of the candidates; records what it chose among.

    It knows the future of the requests that it is bound to, and no others.
    """

    def __init__(self, model: LeafModel | None, reservoir: Reservoir, samples: int) -> None:
        super().__init__(samples=samples)
        self._chooser, self._reservoir = model, reservoir
        self._latest: int = NEVER

    @property
    def needs_future(self) -> bool:
        return True

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._future = Foresight(context.requests)
        self._horizon = max(1, round(HORIZON * len(context.requests)))
        self._last_recorded = len(context.requests) - self._horizon

    def on_request(self, request: Request, now: float) -> None:
        super().on_request(request, now)
        self._latest = max(self._latest, request.index)

    def scores(self, nodes: list[Node], now: float) -> list[float]:
        features = self.features(nodes, now)
        last_uses = [node.last_used_in(self.tier) for node in nodes]
        is_recorded = len(nodes) > 1 and self._latest < self._last_recorded
        place = self._reservoir.place() if is_recorded else None
        if place is not None:
            uses = np.array([self._next_use(node) for node in nodes], dtype=np.int64)
            self._reservoir.put(place, Decision(self._latest, features, uses, np.array(last_uses)))
        if self._chooser is None:
            return last_uses
        values: list[float] = self._chooser.scores(features).tolist()
        return values

    def _next_use(self, node: Node) -> int:
        use: Any = node.notes[self.tier]
        if use.request < 0:
            return FAR
        user = use.request
        while user != NEVER and user <= self._latest:
            user = self._future.next_user(user, node.depth + node.pages)
        is_far = user == NEVER or user > self._latest + self._horizon or self._future.is_lost(self._latest, user)
        return FAR if is_far else user


def padded(decisions: Sequence[Decision]) -> tuple[Vector, np.ndarray, np.ndarray, np.ndarray]:
    """Return decisions as arrays: features [decisions, candidates, FEATURES], and of [decisions, candidates] what Belady lets
    go, what is used again, and what is there at all."""
    most = max(len(decision.next_uses) for decision in decisions)
    features = np.zeros((len(decisions), most, len(FEATURES)))
    best, reused, there = (np.zeros((len(decisions), most), dtype=bool) for _ in range(3))
    for number, decision in enumerate(decisions):
        count = len(decision.next_uses)
        features[number, :count] = decision.features
        best[number, :count] = decision.best
        reused[number, :count] = decision.next_uses != FAR
        there[number, :count] = True
    return features, best, reused, there
