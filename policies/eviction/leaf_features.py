"""What a learned policy sees of a leaf: numbers that are known when a victim is chosen, in training and in a run alike."""

from math import log
from struct import Struct
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvsim.core.request import Request
from kvsim.core.tree import Node

FEATURES: Final = (
    "age_s", "lifetime_s", "mean_gap_s", "last_gap_s", "hits", "end_tokens", "node_tokens", "prompt_tokens", "output_tokens",
    "turn", "is_answer",
)  # fmt: skip
"""All but the last as log(1 + value). ``age_s`` is since the last use, ``lifetime_s`` since the first; gaps are between uses.
``end_tokens`` is where the leaf ends, ``prompt_tokens`` to ``turn`` are of its last user, and ``is_answer`` is 1 for a leaf that
ends behind that request's prompt."""

AGES: Final = 2
"""The first of them, which change with time."""

Vector: TypeAlias = npt.NDArray[np.float64]


class LastUse:
    """What is noted with a node about its last use."""

    __slots__ = ("at_s", "gap_s", "output_tokens", "prompt_tokens", "request", "turn")

    def __init__(self, request: Request | None, at_s: float, before: "LastUse | None") -> None:
        self.at_s = at_s
        self.gap_s = at_s - before.at_s if before is not None else 0.0
        self.request = -1 if request is None else request.index
        self.prompt_tokens = 0 if request is None else request.prompt_tokens
        self.output_tokens = 0 if request is None else request.output_tokens
        self.turn = 0 if request is None else request.turn


class LeafTable:
    """What a learned policy sees of leaves, a column for each.

    Only ages change between two uses of a leaf: all else is noted once, and a victim is chosen among columns that are there.
    """

    __slots__ = ("_capacity", "_chosen", "_none", "_numbers", "_packing", "_page_tokens", "_table", "_tier")

    def __init__(self, tier: int, page_tokens: int) -> None:
        self._tier = tier
        self._page_tokens = page_tokens
        self._capacity = 0
        self._table: Vector = np.zeros((len(FEATURES), 0))
        self._resize(64)
        self._choose(1)

    def note(self, column: int, node: Node) -> None:
        """Note a leaf of which the tier has noted the ``LastUse``. The ages are the times since which they count."""
        if column >= self._capacity:
            self._resize(2 * column)
        use: LastUse = node.notes[self._tier]
        used, created, hits = node.last_used_in(self._tier), node.created_in(self._tier), node.hits_in(self._tier)
        end = (node.depth + node.pages) * self._page_tokens
        numbers, at, capacity = self._numbers, column, self._capacity
        for value in (
            used, created, log(1.0 + max((used - created) / float(hits - 1), 0.0)) if hits > 1 else 0.0,
            log(1.0 + max(use.gap_s, 0.0)), log(1.0 + float(hits)), log(1.0 + float(end)),
            log(1.0 + float(node.pages * self._page_tokens)), log(1.0 + float(use.prompt_tokens)),
            log(1.0 + float(use.output_tokens)), log(1.0 + float(use.turn)), 1.0 if end > use.prompt_tokens else 0.0,
        ):  # fmt: skip
            numbers[at] = value
            at += capacity

    def features(self, columns: list[int], now: float) -> Vector:
        """Return a row for each of these columns, with the numbers of ``FEATURES``, of its last page at ``now`` seconds of the
        run. The columns must be noted."""
        if len(columns) != len(self._chosen):
            self._choose(len(columns))
        self._packing.pack_into(self._chosen, 0, *columns)  # half of the time of an array of a list
        values = self._table.take(self._chosen, 1)
        ages = values[:AGES]
        np.subtract(now, ages, out=ages)
        np.maximum(ages, self._none, out=ages)
        np.log1p(ages, out=ages)
        rows: Vector = values.T
        return rows

    def _resize(self, capacity: int) -> None:
        table: Vector = np.zeros((len(FEATURES), capacity))
        table[:, : self._capacity] = self._table
        self._table, self._capacity = table, capacity
        self._numbers: Any = table.reshape(-1).data

    def _choose(self, count: int) -> None:
        """Prepare arrays for so many columns."""
        self._chosen: Any = np.zeros(count, dtype=np.int64)
        self._packing = Struct(f"{count}q")
        self._none = np.zeros((AGES, count))
