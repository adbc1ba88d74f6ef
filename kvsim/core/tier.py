"""Tiers and the edges that join them: slots, policies, and the sums of pages in each state."""

from collections.abc import Sequence
from typing import Any, Final

from kvsim.core.answers import is_typed, number, truth, whole_number
from kvsim.core.pool import Pool
from kvsim.core.questions import Eviction, Placement
from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Carrier, Node
from kvsim.pages.extents import Extent

GPU: Final = 0
CPU: Final = 1
DISK: Final = 2
"""Levels, in the order of a request's hits: those that kvsim's own rules and the caches of engines treat apart. The table of all
is in ``kvsim/hardware/tier_kinds.py``."""


def overrides(policy: object, name: str) -> bool:
    """Whether a policy overrides a method that its contract defines with an empty default."""
    return sum([name in cls.__dict__ for cls in type(policy).__mro__]) > 1


@mypyc_attr(allow_interpreted_subclasses=True)
class PageWatch:
    """Is told of the pages of a tier, once something has happened to them, and changes nothing."""

    def stored(self, tier: "Tier", extents: tuple[Extent, ...]) -> None:
        """Pages of KV are ready in a tier from now on. Recurrent states do not count."""

    def dropped(self, tier: "Tier", extents: tuple[Extent, ...]) -> None:
        """Pages of KV are no longer ready in a tier.

        A page that leaves for the tier below counts as dropped at once, and as stored again if it stays after all. Under the
        rules of vLLM a page may be stored twice; then it is dropped twice.
        """


class Tier:
    """A place that holds pages, such as GPU memory. Several tiers of the same level may stand side by side.

    ``index`` is its position among the cache's tiers and in a node's lists; ``level`` is that of its kind, by
    ``kvsim/hardware/tier_kinds.py``. A hook of the eviction policy is called only if the policy overrides it, as
    recorded in ``wants_hits`` and its like.
    """

    def __init__(self, name: str, index: int, pool: Pool, eviction: Eviction, level: int | None = None) -> None:
        self.name = name
        self.index = index
        self.level = index if level is None else level
        self.pool = pool
        self.eviction = eviction
        self.below: list[Edge] = []
        """Edges to the tiers below, in the order in which victims are offered to them."""
        self.above: list[Edge] = []
        """Edges to the tiers above."""
        self.owner = 0
        """Number of the engine that a GPU tier belongs to; of the host, for any other tier."""
        self.slot_bytes: int | None = None
        """Bytes per slot if slots hold something other than pages of KV; otherwise None."""
        self.unit_pages = 1
        """Pages of the GPU that this tier stores as one larger page, where an engine's rules support it."""
        self.told_unit = 1
        """Pages of which ``watches`` are told the last one only, since they are stored as one."""
        self.evictable_pages = 0
        """Pages of ready, unpinned copies: all of them can be evicted, leaves first."""
        self.leaving_pages = 0
        """Pages of leaving copies; their slots become free once they are written to the tier below."""
        self.reserved_pages = 0
        """Slots reserved for requests and transfers, which take them once they are free."""
        self.watches: list[PageWatch] = []
        """Are told of the pages that become ready in this tier or stop being so."""
        self.inserted_pages = 0
        self.evicted_pages = 0
        self.wants_arrivals = overrides(eviction, "on_arrival")
        self.wants_requests = overrides(eviction, "on_request")
        self.wants_finishes = overrides(eviction, "on_finish")
        self.wants_departures = overrides(eviction, "on_departure")
        self.wants_inserts = overrides(eviction, "on_insert")
        self.wants_hits = overrides(eviction, "on_hit")
        self.wants_splits = overrides(eviction, "on_split")
        self.wants_merges = overrides(eviction, "on_merge")
        self.wants_removals = overrides(eviction, "on_remove")
        self.wants_shortenings = overrides(eviction, "on_shorten")
        self.wants_unevictable = overrides(eviction, "on_unevictable")
        self.may_shorten = self.wants_shortenings or not self.wants_removals

    def __repr__(self) -> str:
        return f"Tier({self.name})"

    def all_below(self) -> "list[Tier]":
        """Return the tiers below, directly and indirectly, each once, from the top down."""
        tiers = [edge.lower for edge in self.below]
        for tier in tiers:
            tiers += [edge.lower for edge in tier.below if edge.lower not in tiers]
        return list(dict.fromkeys(tiers))

    def edge_to(self, lower: "Tier") -> "Edge":
        """Return the edge to a tier directly below."""
        for edge in self.below:
            if edge.lower is lower:
                return edge
        raise AssertionError(f"no edge joins {self.name} and {lower.name}")

    # --- pages in an order of their own, without nodes: only of a tier that has no residency --------------------------------

    def store(self, pages: int) -> Any:
        """Take free slots for pages that are stored from now on."""
        self.inserted_pages += pages
        return self.pool.take(pages)

    def drop(self, slots: Any) -> None:
        """Free the slots of stored pages."""
        self.evicted_pages += self.pool.count(slots)
        self.pool.give(slots)

    def lend(self, pages: int) -> Any:
        """Take free slots for something that is not stored."""
        return self.pool.take(pages)

    def get_back(self, slots: Any) -> None:
        """Free slots that were lent."""
        self.pool.give(slots)

    # --- room ---------------------------------------------------------------------------------------------------------------

    @property
    def spare_pages(self) -> int:
        """Slots that are free, or will be once write-downs end, minus those reserved; may be negative."""
        return self.pool.free + self.leaving_pages - self.reserved_pages

    @property
    def available_pages(self) -> int:
        """Spare slots after evicting everything evictable."""
        return self.pool.free + self.leaving_pages - self.reserved_pages + self.evictable_pages

    @property
    def held_pages(self) -> int:
        """Pages stored in the tier: inserted and not yet evicted."""
        return self.inserted_pages - self.evicted_pages


class Edge:
    """Joins an upper tier to a lower one. Pages are written down and loaded along edges only."""

    def __init__(self, upper: Tier, lower: Tier, placement: Placement) -> None:
        self.upper = upper
        self.lower = lower
        self.placement = placement
        upper.below.append(self)
        lower.above.append(self)
        self.leaving: list[Node] = []
        """Victims of the current eviction pass that will be written down at its end, in order of eviction."""
        self.opened: Carrier | None = None
        """The write-down that has been decided on and not yet handed out."""
        self.departing: list[Carrier] = []
        """Write-downs handed out but not yet ended, oldest first."""
        self.inserted_at_early_write = 0
        """``inserted_pages`` of the upper tier when pages were last written early."""
        self._policy: Any = placement
        """The same object, typed so that its answers may be anything."""
        self._is_typed = is_typed(placement, "after_use", "after_eviction")
        self._policy_name = f"the placement policy of the {lower.name} tier, {type(placement).__name__},"
        self._may_drop_loaded = overrides(placement, "keeps_loaded")
        self.wants_requests = overrides(placement, "on_request")
        self.copies_prompts = overrides(placement, "wanted_pages")
        """After a use, the policy decides about the whole prompt."""
        self.copies_nodes = not self.copies_prompts and overrides(placement, "after_use")
        """After a use, the policy decides node by node."""

    def __repr__(self) -> str:
        return f"Edge({self.upper.name}-{self.lower.name})"

    @property
    def copies_after_use(self) -> bool:
        """Whether the policy copies pages down after a request has used them."""
        return self.copies_nodes or self.copies_prompts

    # --- what the placement policy answers; PolicyError if the answer is unusable --------------------------------------------

    def wants_used(self, node: Node, now: float) -> bool:
        """Whether to copy a node down after a request has used it."""
        if self._is_typed:
            return self.placement.after_use(node, now)
        answer = self._policy.after_use(node, now)
        return answer is True or truth(self._policy_name, "after_use()", answer)

    def wants_evicted(self, node: Node, now: float) -> bool:
        """Whether to write a node down when it leaves the upper tier."""
        if self._is_typed:
            return self.placement.after_eviction(node, now)
        answer = self._policy.after_eviction(node, now)
        return answer is True or truth(self._policy_name, "after_eviction()", answer)

    def wanted_pages(self, request: Request, path: Sequence[Node], now: float) -> int:
        """How many leading pages of a prompt the lower tier should have."""
        answer = self._policy.wanted_pages(request, path, now)
        return whole_number(self._policy_name, "wanted_pages()", answer, request.prompt_pages)

    def keeps_loaded(self) -> bool:
        """Whether the lower tier keeps its copy of pages that the upper tier also has."""
        return not self._may_drop_loaded or truth(self._policy_name, "keeps_loaded", self._policy.keeps_loaded)

    def watermark(self) -> float:
        """Fill of the upper tier above which pages are written early; 0 means never."""
        return number(self._policy_name, "watermark", self._policy.watermark, 1.0)


def chain(tiers: Sequence[Tier], placements: Sequence[Placement]) -> list[Edge]:
    """Return edges that join each tier to the next; ``placements`` has one entry per edge, from the top."""
    return [Edge(tiers[at], tiers[at + 1], placement) for at, placement in enumerate(placements)]
