"""What the core asks of policies and tells them. Their contracts (``policies/FAMILY/base.py``) extend these classes."""

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node


@mypyc_attr(allow_interpreted_subclasses=True)
class Eviction(metaclass=ABCMeta):
    """Decides which nodes leave a tier first. One instance serves one tier.

    The core owns the tree, pins and slots. Only evictable nodes can leave: ready in the tier, unpinned and without a child
    there (``node.is_evictable(tier)``). By vLLM's rules pages may be stored twice, and a node with a copy counts no children: it
    can leave before them. If a victim has more pages than are needed, the core cuts it (``on_split``) and evicts
    the lower part (``on_remove``), or shortens it (``on_shorten``); it never shortens if the policy overrides ``on_remove``
    but not ``on_shorten``.

    A node's ``hits`` and ``last_used`` change only while it is pinned, or are announced by ``on_hit`` or ``on_evictable``; its
    extent also changes with a cut, a merge or an eviction. ``node.notes[tier]`` belongs to the policy: it can store there,
    with ``node.note``, what it needs to remember about these pages.
    """

    tier: int = 0
    cut: Callable[[Node, int], Node]
    """Set by the core: cuts a node after the given number of pages and returns the upper part."""
    most_pages: int = UNLIMITED
    """Set by ``victims`` with each node it offers: at most this many pages, counted from the node's end, leave before the core
    asks for another node. A value above the node's size means all pages."""

    empty_cache: Callable[[Any], Any]
    """Returns an empty cache of the kind that the policy serves, with the given tier as its only one. For trials."""
    request_states: Sequence[Node] = ()
    """Set by the core for ``on_finish``: recurrent states that the request has begun from or saved, if states share the pages'
    memory. A state (``node.is_state``) is a leaf of the root; it is evictable like any other and leaves whole. Its
    ``node.partner`` is the node of pages that it was saved after."""

    def on_arrival(self, request: Request, now: float) -> None:
        """Called when a request has arrived and waits to be admitted; never in a replay, which has no queue."""

    def on_request(self, request: Request, now: float) -> None:
        """Called before a request uses nodes, and again before it inserts nodes: the ``on_hit`` and ``on_insert`` that follow
        belong to it.

        Called again for a request that is admitted again after a retraction, and before a chunk of its prompt is inserted if
        another request has been announced since its last chunk.
        """

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        """Called when a request has finished, before its path down to ``node`` is unpinned."""

    def on_departure(self, request: Request, node: Node, now: float) -> None:
        """Called in place of ``on_finish`` when a request that has arrived is given up, since its engine has failed or nobody
        waits for its answer any more, or when it ends after the cache has been emptied.

        Of its prompt, the tree has the path down to ``node``, or nothing if that is the root.
        """

    def on_insert(self, node: Node, now: float) -> None:
        """Called when a node has become ready in the tier."""

    def on_hit(self, node: Node, now: float) -> None:
        """Called when a request uses a node that is ready in the tier; its ``hits`` and ``last_used`` include this use."""

    def on_split(self, upper: Node, lower: Node) -> None:
        """Called when a node has been cut. ``lower`` is the old object, ``upper`` a new one with the same history."""

    def on_merge(self, upper: Node, lower: Node) -> None:
        """Called when a cut is undone, since its parts no longer differ: ``lower`` becomes the whole, ``upper`` is discarded."""

    def on_remove(self, node: Node) -> None:
        """Called when a node leaves the tier, or begins to leave because it is being written to the tier below."""

    def on_shorten(self, node: Node, pages: int) -> None:
        """Called before the last ``pages`` pages leave of a node that ``victims`` has offered; its other pages stay evictable."""

    @abstractmethod
    def on_evictable(self, node: Node) -> None:
        """Called when a node has become evictable: it has lost its last pin, or its last child in the tier."""

    def on_unevictable(self, node: Node) -> None:
        """Called when an evictable node is about to be pinned, to get a child in the tier, or to leave it, also as a victim."""

    def note_path(self, node: Node, note: Any) -> None:
        """Store one note with a node, all nodes above it and the states beside them, when the request that used them finishes.

        On the GPU they are still pinned. Those that are evictable, in lower tiers, are passed to ``on_evictable`` again.
        """
        tier = self.tier
        while node.parent is not None:
            node.note(tier, note)
            if tier and node.is_evictable(tier):
                self.on_evictable(node)
            node = node.parent
        for state in self.request_states:
            state.note(tier, note)
            if state.is_evictable(tier):
                self.on_evictable(state)

    @abstractmethod
    def victims(self, now: float) -> Iterator[Node]:
        """Yield evictable nodes, the first to leave first.

        The core evicts each node before it asks for the next, and stops when it has enough. A node of which all or a part
        stays is announced again by ``on_evictable``; it may be offered again in the same call if a part has left.
        """

    def cut_offered(self, node: Node) -> None:
        """Cut off the pages of an offered node that ``most_pages`` keeps from leaving."""
        if self.most_pages < node.pages and not node.is_state:
            self.cut(node, node.pages - self.most_pages)

    def orders_by_last_use(self) -> bool:
        """Whether leaves leave strictly in the order of ``last_used``, earliest first."""
        return False

    def offload_order(self, capacity_pages: int) -> Any:
        """Return the policy's order (``OffloadOrder``) of single pages in vLLM's CPU tier. Raises ValueError if it has none."""
        raise ValueError(f"{type(self).__name__} cannot order the single pages of vLLM's CPU tier: choose lru or arc")

    def offload_order_by_use(self, capacity_pages: int) -> Any:
        """Return the same for vLLM 0.25, where each use counts. Raises ValueError if the policy has none."""
        raise ValueError(f"{type(self).__name__} cannot order the single pages of vLLM's CPU tier: choose lru or arc")


@mypyc_attr(allow_interpreted_subclasses=True)
class Placement(metaclass=ABCMeta):
    """Decides when pages are copied from a tier to the tier below. One instance serves one such pair of tiers.

    The core owns slots, pins and transfers, and makes the copies that are possible: one that finds no room, even after
    evictions in the lower tier, is skipped and counted. After a use, a policy decides either node by node (``after_use``) or
    about the whole prompt (``wanted_pages``). A node is then copied only after its parent, if the upper tier has the parent.
    """

    @property
    def keeps_loaded(self) -> bool:
        """Whether the lower tier keeps its copy of pages that are loaded to the upper tier or, once written down, stay there."""
        return True

    @property
    def watermark(self) -> float:
        """Fill of the upper tier, 0 to 1, above which pages are written down before they are evicted; 0 means never."""
        return 0.0

    def on_request(self, request: Request, now: float) -> None:
        """Called when a request has computed its prompt for the first time, before the pages it used are offered."""

    def after_use(self, node: Node, now: float) -> bool:
        """Whether to copy a node down that a request has just computed or reused and that the lower tier lacks.

        Also asked when the node arrives in the upper tier from a tier above that.
        """
        return False

    def wanted_pages(self, request: Request, path: Sequence[Node], now: float) -> int:
        """Return how many leading pages of a computed prompt the lower tier should have, at most ``prompt_pages``.

        ``path`` leads from the root to the prompt's last node. Of these pages, those that the upper tier has and the lower
        tier lacks are written, or none if there is not room for all. Asked again when pages of the prompt arrive in the
        upper tier from a tier above that.
        """
        return 0

    @abstractmethod
    def after_eviction(self, node: Node, now: float) -> bool:
        """Whether to write a node down that leaves the upper tier, or soon will, and has no other copy.

        Nodes may be cut, and the last part then leaves first. So the answer may depend on where the node ends, but not on
        its length.
        """

    def offer_table(self) -> Any:
        """Return the table (``OfferTable``) that decides which offered pages vLLM's CPU tier stores.

        Raises ValueError if the policy has none.
        """
        raise ValueError(f"{type(self).__name__} cannot decide what vLLM's CPU tier stores: choose placement=store_threshold")


class Checkpoints(Protocol):
    """Decides where the recurrent state of a hybrid model is saved. ``CheckpointPolicy`` says what each answer means."""

    max_states_per_path: int | None
    detached: bool
    detached_states: int | None

    def after_prefill(self, prefill: Any) -> Sequence[int]: ...

    def after_answer(self, prompt_pages: int, pages: int) -> Sequence[int]: ...

    def retention_interval_tokens(self) -> int: ...
