"""A learned order of leaves, in the manner of Song et al.: Learning relaxed Belady for content distribution network caching
(NSDI 2020), which also scores a sample, and of Liu et al.: An imitation learning approach for cache replacement (ICML 2020)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.leaf_features import LastUse, LeafTable, Vector
from kvsim.policies.eviction.leaf_model import DEFAULT, LeafModel, read_model
from kvsim.policies.eviction.leaves import Leaf
from kvsim.policies.eviction.sampled import SampledEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Learned(SampledEviction):
    """Evicts what a model that ``kvsim train`` has trained finds least worth keeping.

    score    the output of a small perceptron for the leaf's last page; its inputs are ``FEATURES``
    victim   the lowest score among ``samples`` leaves drawn at random; all of it leaves before the next draw

    ``path`` is the model's file; without one, the model that comes with kvsim, trained on half of a synthetic trace. A model
    knows the traffic that it was trained on: train one on yours.
    """

    path: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._model: LeafModel | None = read_model(Path(self.path)) if self.path else None
        self._request: Request | None = None

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,) if self.path else ()

    def use_model(self, model: LeafModel) -> None:
        """Decide by a model that is in no file yet."""
        self._model = model

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._table = LeafTable(self.tier, context.page_tokens)
        self._scores_leaves = self.scores_as(Learned, "scores", "features")

    def on_request(self, request: Request, now: float) -> None:
        self._request = request

    def on_insert(self, node: Node, now: float) -> None:
        node.note(self.tier, LastUse(self._request, now, None))
        self._leaves.use(node)

    def on_hit(self, node: Node, now: float) -> None:
        node.note(self.tier, LastUse(self._request, now, node.notes[self.tier]))
        self._leaves.use(node)

    def on_split(self, upper: Node, lower: Node) -> None:
        self._leaves.use(lower)

    def on_merge(self, upper: Node, lower: Node) -> None:
        self._leaves.use(lower)

    def scores_of(self, leaves: list[Leaf], now: float) -> list[float]:
        return self._scores_by(self._features_of(leaves, now)) if self._scores_leaves else super().scores_of(leaves, now)

    def scores(self, nodes: list[Node], now: float) -> list[float]:
        return self._scores_by(self.features(nodes, now))

    def features(self, nodes: Sequence[Node], now: float) -> Vector:
        """Return what is known of leaves, [leaves, FEATURES]."""
        return self._features_of([self._leaves.of[node] for node in nodes], now)

    def score(self, node: Node, now: float) -> float:
        return self.scores([node], now)[0]

    def _scores_by(self, features: Vector) -> list[float]:
        if self._model is None:
            self._model = read_model(DEFAULT)
        values: list[float] = self._model.scores(features).tolist()
        return values

    def _features_of(self, leaves: list[Leaf], now: float) -> Vector:
        columns: list[int] = []
        for leaf in leaves:
            if not leaf.is_noted:
                self._note(leaf)
            columns.append(leaf.column)
        return self._table.features(columns, now)

    def _note(self, leaf: Leaf) -> None:
        """Note what is known of a leaf; also the last use of one that no request of this tier has used, such as one that was
        fetched."""
        node = leaf.node
        if node.notes[self.tier] is None:
            node.note(self.tier, LastUse(None, node.last_used_in(self.tier), None))
        self._table.note(leaf.column, node)
        leaf.is_noted = True
