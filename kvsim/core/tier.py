"""One tier: its slots, its policies, and what goes in and out."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from kvsim.core.pool import Pool

if TYPE_CHECKING:
    from kvsim.policies.eviction.base import EvictionPolicy
    from kvsim.policies.placement.base import PlacementPolicy

Method = TypeVar("Method", bound=Callable[..., Any])


def optional(method: Method) -> Method:
    """Mark a contract's method as one that does nothing: the core does not call it unless a policy overrides it."""
    method.is_optional = True  # type: ignore[attr-defined]
    return method


def overridden(policy: object, name: str) -> Callable[..., Any] | None:
    """The policy's method, or None if it is the contract's own that does nothing."""
    method = getattr(policy, name)
    return None if getattr(method, "is_optional", False) else method


class Tier:
    """A level of the hierarchy. ``placement`` decides about copies that come here from the tier above."""

    def __init__(
        self, name: str, index: int, pool: Pool, eviction: "EvictionPolicy", placement: "PlacementPolicy | None" = None
    ) -> None:
        self.name = name
        self.index = index
        self.pool = pool
        self.eviction = eviction
        self.placement = placement
        self.lower: Tier | None = None
        self.slot_bytes: int | None = None
        """Bytes of a slot, if it holds something else than a page of KV."""
        self.evictable_pages = 0
        """Pages of ready copies that nothing pins: they can all be evicted, leaves first."""
        self.coming_pages = 0
        """Pages of leaving copies: free as soon as they are written to the tier below."""
        self.owed_pages = 0
        """Slots promised to somebody who will take them when they are free."""
        self.inserted_pages = 0
        self.evicted_pages = 0
        self.on_arrival = overridden(eviction, "on_arrival")
        self.on_request = overridden(eviction, "on_request")
        self.on_finish = overridden(eviction, "on_finish")
        self.on_insert = overridden(eviction, "on_insert")
        self.on_hit = overridden(eviction, "on_hit")
        self.on_split = overridden(eviction, "on_split")
        self.on_merge = overridden(eviction, "on_merge")
        self.on_remove = overridden(eviction, "on_remove")
        self.on_trim = overridden(eviction, "on_trim")
        self.on_evictable = eviction.on_evictable
        self.early_mark = 0
        """``inserted_pages`` when pages were last copied down early."""
        self.on_prompt = overridden(placement, "on_request") if placement else None
        self.wanted_pages = overridden(placement, "wanted_pages") if placement else None
        self.after_use = (self.wanted_pages or overridden(placement, "after_use")) if placement else None
        """Not None if anything is copied here after a use; with ``wanted_pages``, by whole prompts."""

    @property
    def spare_pages(self) -> int:
        """Slots that are free, or will be, and promised to nobody."""
        return self.pool.free + self.coming_pages - self.owed_pages

    @property
    def available_pages(self) -> int:
        """Slots that can be had by evicting everything that may be evicted."""
        return self.spare_pages + self.evictable_pages
