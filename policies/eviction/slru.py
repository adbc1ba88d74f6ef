"""Segmented LRU (Karedla, Love and Wherry: Caching strategies to improve disk system performance, IEEE Computer 27(3), 1994)."""

from dataclasses import dataclass
from typing import Final

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.numbers import Whole, check_settings
from kvsim.policies.eviction.base import EvictionPolicy, RankedEviction
from kvsim.policies.eviction.queues import Mark, QueueEviction, check_fractions
from kvsim.policies.fields import keep_types

PROBATION: Final = 0
PROTECTED: Final = 1
PROTECTED_FRACTION: Final = 0.8
SEGMENTS = ("unsized", "sized")


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class SegmentedLRU(RankedEviction):
    """LRU in two classes, so that pages used once never push out pages used again.

    hits < protected_hits   leave first, least recently used first
    the others              leave after them, least recently used first

    With segments=unsized, any number of pages may be protected, as in SGLang's ``slru``; segments=sized is
    ``SizedSegmentedLRU``.
    """

    protected_hits: int = 2
    segments: str = "unsized"
    protected_fraction: float | None = None

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "protected_hits")
        if self.segments not in SEGMENTS:
            raise ValueError(f"segments must be {' or '.join(SEGMENTS)}, not {self.segments}")
        if self.protected_fraction is not None:
            check_fractions(self, "protected_fraction")
            if self.segments != "sized":
                raise ValueError(f"protected_fraction={self.protected_fraction} has no effect without segments=sized")

        if self.segments == "sized" and type(self) is not SegmentedLRU:
            raise ValueError(f"segments=sized would replace {type(self).__name__}: derive it from SizedSegmentedLRU instead")

    def variant(self) -> EvictionPolicy:
        if self.segments == "unsized":
            return self
        fraction = PROTECTED_FRACTION if self.protected_fraction is None else self.protected_fraction
        return SizedSegmentedLRU(protected_hits=self.protected_hits, protected_fraction=fraction)

    def rank(self, node: Node) -> tuple[bool, float]:
        return node.hits_in(self.tier) >= self.protected_hits, node.last_used_in(self.tier)


keep_types(SegmentedLRU, protected_fraction=float | None)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class SizedSegmentedLRU(QueueEviction):
    """Segmented LRU with a share for each segment, as published: what was used often long ago does not stay forever.

    probation   LRU. New pages enter here
    protected   LRU. A page enters at its use number protected_hits, counted since it entered the tier. When room is made while
                it has more than protected_fraction * capacity pages, its first leaf moves back to the end of probation
    victim      the first leaf of probation, else that of protected
    """

    protected_hits: int = 2
    protected_fraction: float = PROTECTED_FRACTION

    def enter(self, ghost: None) -> Mark:
        return Mark(PROBATION if self.protected_hits > 1 else PROTECTED, self.clock, 1)

    def use(self, mark: Mark) -> Mark:
        uses: int = mark.value + 1
        return Mark(PROTECTED if uses >= self.protected_hits else PROBATION, self.clock, uses)

    def choose(self) -> tuple[int, float] | None:
        self.demote(PROTECTED, PROBATION, self.protected_fraction * self.capacity_pages)
        return self.first_of(PROBATION)
