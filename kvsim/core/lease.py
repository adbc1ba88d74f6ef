"""A lease: one request's hold on the cache."""

from math import inf
from typing import Any, Final

from kvsim.core.request import Request
from kvsim.core.state_lease import StateLease
from kvsim.core.tier import Tier
from kvsim.core.transfer import NO_TRANSFERS, Transfer, transfers_of
from kvsim.core.tree import Node
from kvsim.pages.extents import Extent

FIRST: Final = 0
AGAIN: Final = 1
KNOWN: Final = 2
FOR_DECODE: Final = 3
LOOK: Final = 4
AHEAD: Final = 5
"""Why a request is matched: for its first admission; again, after it was admitted and gave its pages back before its prompt was
computed; with a prompt that the same request has computed, as after a retraction of its answer or for another sample, so that
policies that count prompts know it; for pages to decode on, while another GPU computes the prompt, so that tiers below hear of it
from there; only to see what is cached, without an admission; or to bring pages to the GPU that a request is expected to use, of
which neither policies nor watches hear. Only the first counts pages as used again."""

FINISHED: Final = "finished"
RETRACTED: Final = "retracted"
HANDED_OVER: Final = "handed over"
LOST: Final = "lost"
"""Why a lease ends: the answer is complete; others need the pages; another GPU has them; the engine fails, or gives them up."""


NOTHING: Final[list[int]] = []
"""No pages at any level; shared, never modified."""
NO_PATH: Final[list[Node]] = []
"""The path before a match; shared, never modified."""


def total(pages: list[int], level: int = 0) -> int:
    """Return the pages of all levels from this one on."""
    count = 0
    for at in range(level, len(pages)):
        count += pages[at]
    return count


class Holder:
    """Who pins a path of the tree down to ``node``, and has ``slots`` besides."""

    __slots__ = ("node", "slots")

    def __init__(self, node: Node, slots: Any) -> None:
        self.node = node
        """The deepest node of the pinned path."""
        self.slots = slots


class Lease(Holder):
    """What a request can reuse and, from admission to release, what it holds of the cache.

    match    ``path`` is what can be reused: ``gpu_pages`` on the GPU or arriving there, then those of tiers below, which
             ``below`` has by the level of the tier that they would be read from
    admit    the path is pinned down to ``node``; the request has ``slots``, or a reservation of ``reserved_pages`` of them, for
             all other pages
    load     ``loaded_pages`` come from tiers below, those of levels beyond the first by level in ``loaded``
    insert   computed pages are in the tree and pinned too; ``slots`` keeps those of the partial page and the answer. Where
             ``end_chunk`` inserts those of a chunk, ``rest`` are the prompt's pages after them
    """

    __slots__ = (
        "begun_at", "below", "epoch", "gpu", "gpu_nodes", "gpu_pages", "hits", "is_finishing", "leading_pages", "loaded",
        "loaded_pages", "loading", "missing_pages", "path", "reserved_pages", "request", "rest", "states", "waits", "why",
    )  # fmt: skip

    def __init__(self, request: Request, gpu: Tier, root: Node, why: int = FIRST) -> None:
        self.node, self.slots = root, None
        self.request = request
        self.why = why
        """FIRST, AGAIN, KNOWN, FOR_DECODE, LOOK or AHEAD."""
        self.gpu = gpu
        """The GPU tier that serves the request."""
        self.path = NO_PATH
        self.gpu_nodes = 0
        """Number of nodes at the head of ``path`` that are on the GPU."""
        self.gpu_pages = 0
        self.below = NOTHING
        """Pages of tiers below by level, from level 0 on, where there are none; empty if the whole match is on the GPU."""
        self.leading_pages = 0
        """Pages of the first level below the GPU before the first page that only deeper levels have."""
        self.rest: tuple[Extent, ...] = ()
        """The prompt's pages after the path; once admitted, after the pinned path."""
        self.reserved_pages = 0
        self.loading: Node | None = None
        """The last node to load, until the load is started."""
        self.loaded_pages = 0
        self.loaded = NOTHING
        """``loaded_pages`` by level, as far as they are from deeper levels than the first; empty until the load is started."""
        self.missing_pages = 0
        """Pages of the pinned path that loads, its own or those of other requests, have failed to bring: to be computed."""
        self.waits = NO_TRANSFERS
        """Write-downs that make room for this request."""
        self.epoch = 0
        """The residency's ``epoch`` at admission."""
        self.begun_at = inf
        """When the first pages of what it computes now entered the tree; infinite if none have."""
        self.hits: tuple[int, ...] = ()
        """Hit pages by level, from the GPU down; set in a replay."""
        self.is_finishing = False
        """The answer is complete: what is inserted now is not the prompt."""
        self.states: StateLease | None = None
        """The recurrent states that the request holds, on a hybrid model."""

    def set_match(self, path: list[Node], pages: int, rest: tuple[Extent, ...]) -> None:
        """Record a match of ``pages`` pages, assuming that all are on the GPU."""
        self.path = path
        self.gpu_nodes = len(path)
        self.gpu_pages = pages
        self.below = NOTHING
        self.leading_pages = 0
        self.rest = rest

    @property
    def is_first(self) -> bool:
        """Whether it is for the request's first admission, so that the pages that it finds are used again."""
        return self.why == FIRST

    def arriving(self) -> list[Transfer]:
        """Return the loads, its own and those of other requests, that still fill the pinned path; then that of its state."""
        loads: dict[Transfer, None] = {}
        node = self.node
        while node.parent is not None:
            for transfer in transfers_of(node):
                if transfer.target is self.gpu:
                    loads[transfer] = None
            node = node.parent
        if self.states is not None and self.states.load is not None and not self.states.load.done:
            loads[self.states.load] = None
        return list(loads)

    @property
    def has_load(self) -> bool:
        """Whether the request still has a load to start."""
        return self.loading is not None or self.states is not None and self.states.is_below

    @property
    def lower_pages(self) -> int:
        """Matched pages that would have to be loaded from tiers below."""
        return total(self.below)

    @property
    def far_pages(self) -> int:
        """Those of deeper levels than the first."""
        return total(self.below, 2)

    @property
    def loaded_far_pages(self) -> int:
        """Loaded pages of deeper levels than the first."""
        return total(self.loaded)

    def pages_at(self, level: int) -> int:
        """Return the matched pages that would have to be loaded from a level below the GPU."""
        return self.below[level] if level < len(self.below) else 0

    def lose_far(self, pages: int) -> None:
        """Take ``pages`` pages that do not arrive out of ``loaded``, as far as they are in it, from the deepest level on."""
        for level in range(len(self.loaded) - 1, -1, -1):
            lost = min(pages, self.loaded[level])
            self.loaded[level] -= lost
            pages -= lost

    def reused_pages(self, levels: int) -> list[int]:
        """Return the pages that the request does not compute, by the level that they come from, with an entry for each level."""
        row = [0] * levels
        row[: len(self.loaded)] = self.loaded
        row[0] = self.gpu_pages
        if levels > 1:
            row[1] = self.loaded_pages - self.loaded_far_pages
        return row
