"""One tier: its slots, its eviction policy, and how much of it is in use."""

from typing import TYPE_CHECKING, Final

from kvsim.core.pool import Pool

if TYPE_CHECKING:
    from kvsim.core.edge import Edge
    from kvsim.policies.eviction.base import EvictionPolicy

GPU: Final = 0
CPU: Final = 1
DISK: Final = 2
"""Levels: the columns of a request's hits."""

LEVELS = ("gpu", "cpu", "disk")
"""Their names."""


class PolicyError(Exception):
    """A policy broke its contract; the message names it and says what it did."""


def overrides(policy: object, name: str) -> bool:
    """Whether a policy has a method of its own, beside the one of its contract, which does nothing."""
    return sum([name in cls.__dict__ for cls in type(policy).__mro__]) > 1


class Tier:
    """A level of the hierarchy, or one of several side by side.

    ``index`` is its position among all tiers of the cache and in a node's lists; ``level`` (GPU, CPU, DISK) says what it is.
    Hooks of the eviction policy are called only if it overrides them: ``hears_hits`` and its like say so.
    """

    def __init__(self, name: str, index: int, pool: Pool, eviction: "EvictionPolicy", level: int | None = None) -> None:
        self.name = name
        self.index = index
        self.level = index if level is None else level
        self.pool = pool
        self.eviction = eviction
        self.below: list[Edge] = []
        """Edges to the tiers below, in the order in which they are asked to take what leaves."""
        self.above: list[Edge] = []
        """Edges to the tiers above."""
        self.slot_bytes: int | None = None
        """Bytes of a slot, if it holds something other than a page of KV."""
        self.evictable_pages = 0
        """Pages of ready copies that nothing pins: they can all be evicted, leaves first."""
        self.leaving_pages = 0
        """Pages of leaving copies: their slots are free as soon as they are written below."""
        self.promised_pages = 0
        """Slots promised to requests and transfers, which take them when they are free."""
        self.inserted_pages = 0
        self.evicted_pages = 0
        self.hears_arrivals = overrides(eviction, "on_arrival")
        self.hears_requests = overrides(eviction, "on_request")
        self.hears_finishes = overrides(eviction, "on_finish")
        self.hears_inserts = overrides(eviction, "on_insert")
        self.hears_hits = overrides(eviction, "on_hit")
        self.hears_splits = overrides(eviction, "on_split")
        self.hears_merges = overrides(eviction, "on_merge")
        self.hears_removals = overrides(eviction, "on_remove")
        self.hears_shortenings = overrides(eviction, "on_shorten")
        self.may_shorten = self.hears_shortenings or not self.hears_removals

    def __repr__(self) -> str:
        return f"Tier({self.name})"

    def edge_to(self, lower: "Tier") -> "Edge":
        """The edge to a tier directly below."""
        for edge in self.below:
            if edge.lower is lower:
                return edge
        raise AssertionError(f"no edge joins {self.name} and {lower.name}")

    @property
    def spare_pages(self) -> int:
        """Slots that are free, or will be once writes below have ended, and are not promised."""
        return self.pool.free + self.leaving_pages - self.promised_pages

    @property
    def available_pages(self) -> int:
        """Slots that can be had by evicting everything that may be evicted."""
        return self.spare_pages + self.evictable_pages

    @property
    def held_pages(self) -> int:
        """Pages that are here: what was inserted and has not been evicted."""
        return self.inserted_pages - self.evicted_pages
