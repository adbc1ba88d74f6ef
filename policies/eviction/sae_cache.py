"""SAECache (Fang et al.: Not all tokens are worth caching: learning semantic-aware eviction for LLM prefix caches,
arXiv:2605.18825, 2026)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Final

from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent, last_pages
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.leaf_queue import Leaf, LeafQueue
from kvsim.policies.eviction.queues import forget_beyond
from kvsim.policies.eviction.sae_learning import EVERY, LEAST_S, Gaps, Parting, QueueWorth, TypeWorth

SHARED: Final = "shared"
PROMPT: Final = "prompt"
ANSWER: Final = "answer"

FIRST: Final = "first"
TEMPLATES: Final = "templates"
UNFINISHED: Final = "unfinished"
"""Queues; those of sessions are named by the type of request, after a slash."""


class Mark:
    """What is noted with a node: its queue, its type, and the session of the last finished request. Never changes."""

    __slots__ = ("kind", "queue", "session", "type_worth", "worth")

    def __init__(self, queue: str, kind: str, session: int, worth: QueueWorth, type_worth: TypeWorth) -> None:
        self.queue = queue
        self.kind = kind
        self.session = session
        self.worth = worth
        """Of the queue."""
        self.type_worth = type_worth


class Session:
    """What is known of a session: its requests so far, the type of the first one, and when the last one finished."""

    __slots__ = ("finished_s", "index", "kind", "turns")

    def __init__(self, index: int, kind: str) -> None:
        self.index = index
        self.kind = kind
        self.turns = 1
        self.finished_s = inf


class Group:
    """Leaves of one queue and type and, among templates, of depths up to the same power of two; entries have place 0."""

    __slots__ = ("compact_at", "gaps", "kind", "leaves", "power", "queue", "type_worth", "worth")

    def __init__(self, queue: str, kind: str, power: int, worth: QueueWorth, type_worth: TypeWorth, gaps: Gaps | None) -> None:
        self.worth = worth
        self.type_worth = type_worth
        self.gaps = gaps
        """Of a queue of sessions."""
        self.queue = queue
        self.kind = kind
        self.power = power
        self.leaves = LeafQueue()
        self.compact_at = 64


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class SemanticAdaptive(EvictionPolicy):
    """SAECache: keeps the types of tokens that are used again, in queues with a rule each. All of it is learned as the run goes.

    P         weight of the queue * weight of the type * p / seconds since the last use; the lowest leaves first
    sessions  a queue for each type of request: p is the chance of a log-normal time between turns that is longer still
    templates of single requests: p = 1 - (depth / longest prompt)^gamma
    first     before all other queues, least recently used first: answers that no prompt has contained yet, and pages of single
              requests that nobody shares

    weight of a type    -> 1 + 5 * missed again after eviction + 2 * hit rate, 0.1 ... 5, every 100 pages evicted
    weight of a queue   -> its hits per page held / those of all queues, 0.1 ... 3

    The authors know what tokens are (system prompt, query, tool, answer, thought). A trace does not, so types are what can be
    seen: ``shared`` by two sessions, ``answer``, other ``prompt``. Whether a first turn goes on is theirs to classify from a
    hidden state; here it is counted by type of request. What the summaries of the paper leave open is chosen here: running means
    of a tenth, a queue's weight as a ratio, gamma from the mean share that was known. Depths of templates count as the
    next power of two; otherwise the victim is the lowest of all. Needs requests with a ``session``.
    """

    def __post_init__(self) -> None:
        self.types = {name: TypeWorth() for name in (SHARED, PROMPT, ANSWER)}
        self.queues: dict[str, QueueWorth] = {}
        self.gaps: dict[str, Gaps] = {}
        """By queue of sessions."""
        self.parting = Parting()
        self._sessions: dict[int, Session] = {}
        self._first_turns: dict[str, int] = {}
        self._gone_on: dict[str, int] = {}
        """By type of request, first turns and those of them that a second one has followed."""
        self._longest = 1
        self._groups: dict[tuple[str, str, int], Group] = {}
        self._by_step: list[list[Group]] = [[], [], []]
        """Groups of the first queue, of those that compete, and of pages in no queue."""
        self._ghost_pages = inf
        self._entries = self._left_pages = 0
        self._offered: Node | None = None

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._ghosts = ExtentOrder()
        context.require("session", "the session of each request")
        if context.capacity_pages is not None:
            self._ghost_pages = float(context.capacity_pages)

    # --- requests ----------------------------------------------------------------------------------------------------

    def on_request(self, request: Request, now: float) -> None:
        if request.session < 0:
            return
        session = self._sessions.get(request.session)
        if session is None:
            self._sessions[request.session] = Session(request.index, request.kind)
            self._first_turns[request.kind] = self._first_turns.get(request.kind, 0) + 1
        elif request.index > session.index:
            if session.turns == 1:
                self._gone_on[session.kind] = self._gone_on.get(session.kind, 0) + 1
            session.index, session.turns = request.index, session.turns + 1
            if session.finished_s <= now:
                self._gaps_of(queue_of(request)).observe(now - session.finished_s)

    def is_of_session(self, request: Request) -> bool:
        """Whether a request is expected to be followed by another one of its session, or has followed one."""
        session = self._sessions.get(request.session)
        if session is None:
            return False
        expected = (self._gone_on.get(session.kind, 0) + 1) / (self._first_turns[session.kind] + 2)
        return session.turns > 1 or expected >= 0.5

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        of_session = self.is_of_session(request)
        if request.session in self._sessions:
            self._sessions[request.session].finished_s = now
        queue = queue_of(request) if of_session else ""
        known, path = 0, node
        while path.parent is not None:
            kind = self._mark(path, request, queue)
            if kind == SHARED:
                known = max(known, path.depth + path.pages)
            path = path.parent
        for state in self.request_states:
            self._mark(state, request, queue)
        if not of_session:
            self._longest = max(self._longest, request.prompt_pages)
            self.parting.observe(min(known, self._longest) / self._longest)

    def _mark(self, node: Node, request: Request, queue: str) -> str:
        """Mark a node that a request has used. Returns its type. ``queue`` is that of its session, if it is one of a session."""
        before: Mark | None = node.notes[self.tier]
        if before is None:
            kind = ANSWER if node.depth >= request.prompt_pages and not node.is_state else PROMPT
            self.types[kind].computed_pages += node.pages
        else:
            kind = before.kind if before.session == request.session >= 0 else SHARED
        if before is None and kind == ANSWER:
            queue = FIRST
        elif not queue:
            queue = TEMPLATES if kind == SHARED and not node.is_state else FIRST
        mark = Mark(queue, kind, request.session, self._queue(queue), self.types[kind])
        if node.state[self.tier] == READY:
            if before is not None:
                before.worth.held_pages -= node.pages
            mark.worth.held_pages += node.pages
        node.note(self.tier, mark)
        if node.is_evictable(self.tier):
            self.on_evictable(node)
        return kind

    # --- what is learned from pages ----------------------------------------------------------------------------------

    def on_insert(self, node: Node, now: float) -> None:
        self._hold(node.notes[self.tier], node.pages)
        if not node.is_state and self._ghosts.may_hold(node.runs):
            for (_, pages), kind in self._ghosts.pieces(node.runs):
                if kind is not None:
                    self.types[kind].missed_pages += pages
            self._ghosts.remove(node.runs)

    def on_hit(self, node: Node, now: float) -> None:
        mark: Mark | None = node.notes[self.tier]
        if mark is not None:
            mark.type_worth.hit_pages += node.pages
            mark.worth.hit_pages += node.pages
        if node.is_evictable(self.tier):
            self.on_evictable(node)

    def on_remove(self, node: Node) -> None:
        self._hold(node.notes[self.tier], -node.pages)
        if node is self._offered:
            self._offered = None
            self._evicted(node, node.runs, node.pages)

    def on_shorten(self, node: Node, pages: int) -> None:
        self._hold(node.notes[self.tier], -pages)
        self._evicted(node, last_pages(node.runs, pages), pages)

    def _evicted(self, node: Node, extents: tuple[Extent, ...], pages: int) -> None:
        """Remember pages that have left by choice, and update the weights from time to time."""
        mark: Mark | None = node.notes[self.tier]
        if mark is not None and not node.is_state:
            mark.type_worth.evicted_pages += pages
            self._ghosts.append(extents, value=mark.kind)
            forget_beyond(self._ghosts, self._ghost_pages)
        self._left_pages += pages
        if self._left_pages >= EVERY:
            self._left_pages %= EVERY
            held, hits = 0.0, 0.0
            for queue in self.queues.values():
                held += queue.held_pages
                hits += queue.hit_pages
            mean = hits / held if held else 0.0
            for queue in self.queues.values():
                queue.update(mean)
            for kind in self.types.values():
                kind.update()

    def _hold(self, mark: Mark | None, pages: int) -> None:
        if mark is not None:
            mark.worth.held_pages += pages

    def _queue(self, name: str) -> QueueWorth:
        worth = self.queues.get(name)
        if worth is None:
            worth = self.queues[name] = QueueWorth()
        return worth

    def _gaps_of(self, queue: str) -> Gaps:
        if queue not in self.gaps:
            self.gaps[queue] = Gaps()
        return self.gaps[queue]

    # --- leaves ------------------------------------------------------------------------------------------------------

    def priority(self, group: Group, age_s: float) -> float:
        """Return P of the leaves of a group that were last used ``age_s`` seconds ago."""
        if group.gaps is None:
            share = min(1.0, 2.0 ** (group.power - power_of(self._longest)))
            chance = self.parting.survival(share)
        else:
            chance = group.gaps.survival(age_s)
        return group.worth.weight * group.type_worth.weight * chance / max(age_s, LEAST_S)

    def on_evictable(self, node: Node) -> None:
        if node is self._offered:
            self._offered = None
        group = self._group(node)
        self._entries += 1
        leaves = group.leaves
        leaves.push(Leaf(0, node.last_used_in(self.tier), node.depth + node.pages, self._entries, node))
        if len(leaves) > group.compact_at:
            leaves.keep_latest([leaf for leaf in leaves.all() if self._is_current(group, leaf)])
            group.compact_at = max(64, 2 * len(leaves))

    def _group(self, node: Node) -> Group:
        mark: Mark | None = node.notes[self.tier]
        queue, kind = (UNFINISHED, PROMPT) if mark is None else (mark.queue, mark.kind)
        key = queue, kind, power_of(node.depth + node.pages) if queue == TEMPLATES else 0
        group = self._groups.get(key)
        return self._new_group(*key) if group is None else group

    def _new_group(self, queue: str, kind: str, power: int) -> Group:
        of_sessions = queue not in (FIRST, TEMPLATES, UNFINISHED)
        worth = QueueWorth() if queue == UNFINISHED else self._queue(queue)
        group = Group(queue, kind, power, worth, self.types[kind], self._gaps_of(queue) if of_sessions else None)
        self._groups[queue, kind, power] = group
        self._by_step[0 if queue == FIRST else 2 if queue == UNFINISHED else 1].append(group)
        return group

    def _is_current(self, group: Group, entry: Leaf) -> bool:
        node, tier = entry.node, self.tier
        if node.state[tier] != READY or node.pins[tier] or node.children_in[tier]:
            return False
        if node.last_used_in(tier) != entry.used_s or node.depth + node.pages != entry.end:
            return False
        mark: Mark | None = node.notes[self.tier]
        if mark is None:
            return group.queue == UNFINISHED
        if mark.worth is not group.worth or mark.type_worth is not group.type_worth:
            return False
        return group.queue != TEMPLATES or power_of(entry.end) == group.power

    def _head(self, group: Group) -> Leaf | None:
        """Return the entry of the least recently used leaf of a group, among equals the deepest; None if it has no leaf."""
        leaves = group.leaves
        while (first := leaves.first()) is not None and not self._is_current(group, first):
            leaves.remove(first)
        return first

    def victims(self, now: float) -> Iterator[Node]:
        while (group := self._lowest(now)) is not None:
            first = group.leaves.first()
            assert first is not None
            group.leaves.remove(first)
            node = first.node
            end = node.depth + node.pages
            self.most_pages = end - (1 << group.power >> 1) if group.queue == TEMPLATES else UNLIMITED
            self._offered = node
            yield node

    def _lowest(self, now: float) -> Group | None:
        """Return the group whose head leaves next; of equals, that of the least recently used one."""
        lowest: Group | None = None
        least, least_used_s = 0.0, 0.0
        for step, groups in enumerate(self._by_step):
            for group in groups:
                head = self._head(group)
                if head is None:
                    continue
                used_s = head.used_s
                value = self.priority(group, now - used_s) if step == 1 else 0.0
                if lowest is None or value < least or value == least and used_s < least_used_s:
                    lowest, least, least_used_s = group, value, used_s
            if lowest is not None:
                break
        return lowest


def queue_of(request: Request) -> str:
    """Return the queue of sessions with this type of request."""
    return f"sessions/{request.kind}"


def power_of(pages: int) -> int:
    """Return the exponent of the least power of two that is not below ``pages``."""
    return (pages - 1).bit_length()
