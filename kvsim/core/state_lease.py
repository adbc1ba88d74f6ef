"""What a request of a hybrid model holds besides pages."""

from typing import Any

from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.core.tree import Node


class StateLease:
    """The recurrent states that a request holds; its match ends at one of them, or is empty."""

    __slots__ = ("detached", "is_below", "known_pages", "load", "pages", "save_after", "slots", "state", "states", "tier")

    def __init__(self, known_pages: int) -> None:
        self.known_pages = known_pages
        """Leading pages of the prompt whose KV is in some tier; only those before the state are reused."""
        self.state: Node | None = None
        self.detached: int | None = None
        """The page whose detached state the request begins from."""
        self.tier: Tier | None = None
        """The tier in which the state is pinned until the request has begun."""
        self.is_below = False
        """Whether ``tier`` is below the GPU."""
        self.slots: Any = None
        """The slots to load the state into, if states have their own memory."""
        self.load: Transfer | None = None
        self.save_after: list[int] = []
        """Depths in the prompt, in pages, at which a state will be saved."""
        self.pages = 0
        """Number of the request's slots reserved for states."""
        self.states: list[Node] = []
        """States that the request began from or saved, where states share the pages' memory."""
