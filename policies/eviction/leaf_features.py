"""What a learned policy sees of a leaf: numbers that are known when a victim is chosen, in training and in a run alike."""

from collections.abc import Sequence
from struct import pack_into
from typing import Final, TypeAlias

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


def features_of(nodes: Sequence[Node], tier: int, page_tokens: int, now: float) -> Vector:
    """Return a row for each leaf, with the columns of ``FEATURES``, of its last page at ``now`` seconds of the run."""
    numbers: list[float] = []
    for node in nodes:
        numbers.extend(_row(node, node.notes[tier], tier, page_tokens, now))
    packed = bytearray(8 * len(numbers))
    pack_into(f"{len(numbers)}d", packed, 0, *numbers)  # a tenth of the time of an array of rows
    values: Vector = np.frombuffer(packed, dtype=np.float64).reshape(len(nodes), len(FEATURES))
    values[:, :-1] = np.log1p(values[:, :-1])
    return values


def _row(node: Node, use: LastUse, tier: int, page_tokens: int, now: float) -> tuple[float, ...]:
    used, created, hits = node.last_used_in(tier), node.created_in(tier), node.hits_in(tier)
    end = (node.depth + node.pages) * page_tokens
    gap = (used - created) / float(hits - 1) if hits > 1 else 0.0
    return (
        max(now - used, 0.0), max(now - created, 0.0), max(gap, 0.0), max(use.gap_s, 0.0), float(hits), float(end),
        float(node.pages * page_tokens), float(use.prompt_tokens), float(use.output_tokens), float(use.turn),
        1.0 if end > use.prompt_tokens else 0.0,
    )  # fmt: skip
