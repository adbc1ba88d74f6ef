"""FLOP-aware eviction (Pan et al.: Marconi: Prefix caching for the era of hybrid LLMs, MLSys 2025, arXiv:2411.19379).

Section 4.2, equations 1 and 2; section 4.3 for what may leave and whose use counts. Where the authors' code
(github.com/ruipeterpan/marconi) departs from the paper, the paper is followed: an MLP saves the FLOPs of an MLP, and an eviction
frees the victim's own bytes. Ages are counted in requests, as in that code: if a trace's times are rounded to seconds, 1 / age
in seconds is large for the newest requests and the same for all others.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Final

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.numbers import Real, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import SteppingEviction
from kvsim.policies.eviction.flop_bins import NEVER, Bin, Bins, Entry
from kvsim.policies.eviction.flop_tuning import Tuning
from kvsim.policies.fields import keep_types

if TYPE_CHECKING:
    from mypy_extensions import i64  # an int that compiled code does not box

TUNED = "tuned"
BINS = 1024
"""Number of bins, a power of two."""
NOWHERE: Final = -1


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class FlopAware(SteppingEviction):
    """Keeps what saves many FLOPs per byte: the deep ends of long prompts, whose attention costs most. Marconi's rule.

    eff       FLOPs that a leaf saves / its bytes: (F(S) - F(p)) / bytes for tokens p ... S - 1 of a prompt.
              With recurrent states in the same memory, a leaf's bytes are those of its pages and of the state after them; a
              state that one child continues saves as much for its own bytes alone, and leaves alone
    utility   alpha * minmax(eff) + minmax(1 / age), each scaled to 0 ... 1 over all leaves; the lowest leaves first
    age       requests since the last use; for a leaf with a state after it, since a request began from that state or saved it
              (4.3)

    ``alpha: tuned`` is 0 until the first eviction, at request N, and while the next 5 N requests are collected. These are then
    replayed from a snapshot of that moment with 0, 0.1 ... 2, and the alpha that saves most FLOPs is kept (flop_tuning.py).

    F is linear in tokens, plus attention in pairs of tokens, so eff grows with p + S alone, that is with 2 depth + pages, and
    its scale cancels. Leaves of equal value share a bin, least recently used first, and only the heads of bins compete. The
    victim is the one that comparing all leaves would give as long as no path exceeds 512 pages; with each doubling beyond, a
    bin covers twice as many values, which then count as equal: at most 1 / 512 of the greatest. With states, bins are by eff
    itself, in units of the FLOPs of a pair of pages.

    States that several children continue, or that follow pages in use, leave only when nothing else can, least recently used
    first. Once there are states, pages without a state after them save nothing, and neither does a state whose pages are gone.
    """

    alpha: int | float | str = TUNED

    def __post_init__(self) -> None:
        if self.alpha != TUNED:
            check_settings(self, Real(least=0), "alpha", hint=f"or set it to {TUNED}")
        self._alpha = 0.0 if isinstance(self.alpha, str) else float(self.alpha)
        self._tuning: Tuning | None = None
        self._halvings = 0
        """How often neighbouring bins have been joined: each covers 2 to the power of this of what were the values of one."""
        self._places = BINS
        self._bins = Bins()
        """One of the heads of their front has the lowest utility."""
        self._announced_s: list[float] = []
        """Ascending times at which requests were announced, that is, were about to use or insert nodes."""
        self._newest: list[Entry] = []
        """Entries in ascending order of last use."""
        self._others: list[Entry] = []
        """Entries that would have broken that order: a heap by minus the last use."""
        self._older: list[Entry] = []
        """Those that are not in this heap yet: hardly any is ever used later than the last of ``_newest``."""
        self._older_s = -NEVER
        """The latest of their last uses."""
        self._entries = 0
        self._compact_at = 1024
        self._offered: dict[Node, None] = {}
        self._popped: Node | None = None
        """The last node that was taken from its bin to leave. What stays of it keeps its last use."""
        self._popped_s = 0.0
        self._popped_turn = 0
        self._popped_at = 0
        """Number of announcements then."""
        self._linear = 0.0
        """FLOPs of a page that do not depend on its depth, divided by those of a pair of pages; 0 until there are states."""
        self._linear_of_model = 0.0
        self._last_resort: list[Entry] = []
        """States that leave only when nothing else can."""
        self._compact_last_at = 1024

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        if self.alpha == TUNED:
            if context.states_apart:
                raise ValueError(
                    "alpha=tuned needs recurrent states to share the pages' memory, as its trial has no other layout: set "
                    "states=shared for every tier, or set alpha to a number"
                )
            self._tuning = Tuning(context, FlopAware.from_moment, lambda tier: self.empty_cache(tier))
        model = context.model
        if model is not None and model.is_hybrid:
            pair = model.attention_flops_per_pair * context.page_tokens
            self._linear_of_model = (2 * model.linear_flops_per_token + model.attention_flops_per_pair) / pair

    @property
    def chosen_alpha(self) -> float | None:
        """The alpha in use; None while ``tuned`` has not chosen one yet and uses 0."""
        return self._alpha if self._tuning is None else None

    @classmethod
    def from_moment(cls, alpha: float, announced_s: list[float]) -> "FlopAware":
        """Return a policy to which requests were announced at these times."""
        policy = cls(alpha=alpha)
        policy._announced_s = announced_s.copy()
        return policy

    def on_request(self, request: Request, now: float) -> None:
        self._announced_s.append(now)
        if self._tuning is not None and (alpha := self._tuning.observe(request, now)) is not None:
            self._alpha, self._tuning = alpha, None

    def on_split(self, upper: Node, lower: Node) -> None:
        """The lower part begins later, so it is more efficient now."""
        if lower.is_evictable(self.tier):
            self.on_evictable(lower)
        self._enter_state(lower.partner)

    def on_merge(self, upper: Node, lower: Node) -> None:
        """The whole begins earlier than its lower part, so it is less efficient."""
        for node in (lower, lower.partner):
            if node is not None and node.is_evictable(self.tier) and (place := self._place(node, upper.depth)) != NOWHERE:
                self._add(node, place)

    def on_insert(self, node: Node, now: float) -> None:
        """The first state changes the scale. A node's first child makes the state after the node a candidate."""
        if not self._linear_of_model:
            return  # the model has no states
        if node.is_state:
            if not self._linear:
                self._linear = self._linear_of_model
                leaves = {
                    entry[2]: None for known in self._bins.filled for entry in known.entries if entry[2].is_evictable(self.tier)
                }
                self._bins.fill([])
                for leaf in leaves:
                    self.on_evictable(leaf)
        elif node.parent is not None:
            self._enter_state(node.parent.partner)

    def on_remove(self, node: Node) -> None:
        """Enter what has changed again: a state whose pages have lost a child or are gone, or a leaf that has lost its state."""
        if not self._linear_of_model:
            return
        if node.is_state:
            if (pages := node.partner) is not None and pages.is_evictable(self.tier):
                self.on_evictable(pages)
            return
        self._enter_state(node.partner)
        if node.parent is not None and (state := node.parent.partner) is not None and state.is_evictable(self.tier):
            self._add(state, self._place_of(self._efficiency_of_state(state, node.parent.depth)))

    def on_shorten(self, node: Node, pages: int) -> None:
        """Widen the bins up to the pages that leave. What is left is less efficient, and ``on_evictable`` enters it again."""
        self._reach(self._place(node, node.depth + node.pages - pages))

    def _enter_state(self, state: Node | None) -> None:
        """Enter a state again if it is evictable."""
        if state is not None and state.is_state and state.is_evictable(self.tier):
            self.on_evictable(state)

    def on_evictable(self, node: Node) -> None:
        offered = self._offered
        if offered and node in offered:
            del offered[node]
        place = self._place(node)
        if place != NOWHERE:
            self._add(node, place)
        else:
            self._entries += 1
            heappush(self._last_resort, (node.last_used_in(self.tier), self._entries, node, 0))
            if len(self._last_resort) > self._compact_last_at:
                self._compact_last()

    def _place(self, node: Node, begin: int | None = None) -> int:
        """Return the bin of what leaves with a leaf or a state, possibly beyond the last bin; NOWHERE for a state that leaves
        only when nothing else can."""
        if not self._linear:
            return ((node.depth if begin is None else begin) + node.depth + node.pages) >> self._halvings
        efficiency = self._efficiency(node, begin)
        return NOWHERE if efficiency is None else self._place_of(efficiency)

    def _place_of(self, efficiency: float) -> int:
        return int(efficiency) >> self._halvings

    def _efficiency(self, node: Node, begin: int | None = None) -> float | None:
        """Return the FLOPs saved per slot by what leaves with a leaf or a state, up to a linear scale, once there are states.

        ``begin`` is the depth at which its pages begin, if that is about to change. Returns None for a state that leaves only
        when nothing else can.
        """
        partner, tier = node.partner, self.tier
        if node.is_state:
            if partner is None or partner.partner is not node or partner.state[tier] != READY:
                return 0.0
            if partner.children_in[tier] != 1:
                return None
            return self._efficiency_of_state(node, partner.depth if begin is None else begin)
        if partner is None or partner.partner is not node or partner.state[tier] != READY:
            return 0.0
        begin = node.depth if begin is None else begin
        end = node.depth + node.pages
        pages = end - begin
        return pages * (self._linear + begin + end) / (pages + partner.pages)

    def _efficiency_of_state(self, state: Node, begin: int) -> float:
        end = state.depth + state.pages
        return (end - begin) * (self._linear + begin + end) / state.pages

    def _used_at(self, node: Node) -> float:
        """Return the last use of a leaf or a state; for a leaf with a state after it, that of the state."""
        partner = node.partner
        if partner is None or node.is_state or partner.partner is not node or partner.state[self.tier] != READY:
            return node.last_used_in(self.tier)
        return partner.last_used_in(self.tier)

    def _add(self, node: Node, place: int) -> None:
        """Enter a leaf or a state into a bin."""
        used_s = self._used_at(node)
        place = self._reach(place)
        announced_s = self._announced_s
        turn = len(announced_s)
        if node is self._popped and used_s == self._popped_s and turn == self._popped_at:
            turn = self._popped_turn
        elif turn and used_s < announced_s[-1]:
            turn = bisect_right(announced_s, used_s)
        self._entries = number = self._entries + 1
        entry = (used_s, number, node, turn)
        self._bins.push(place, entry)
        newest = self._newest
        if not newest or used_s >= newest[-1][0]:
            newest.append(entry)
        else:
            self._older.append(entry)
            if used_s > self._older_s:
                self._older_s = used_s
        if len(newest) + len(self._others) + len(self._older) > self._compact_at:
            self._compact()

    def _reach(self, place: int) -> int:
        """Widen the bins until they include ``place``. Returns the place after that."""
        while place >= self._places:
            self._widen()
            place >>= 1
        return place

    def _widen(self) -> None:
        """Join neighbouring bins in pairs."""
        self._halvings += 1
        joined: dict[int, list[Entry]] = {}
        for known in self._bins.filled:
            joined.setdefault(known.place >> 1, []).extend(known.entries)
        self._bins.fill(list(joined.items()))

    def _compact(self) -> None:
        """Drop stale entries."""
        tier = self.tier
        entries = self._newest + self._older + [(-entry[0], entry[1], entry[2], entry[3]) for entry in self._others]
        self._newest = sorted([entry for entry in entries if entry[2].is_evictable(tier) and entry[0] == self._used_at(entry[2])])
        self._others, self._older, self._older_s = [], [], -NEVER
        self._compact_at = max(1024, 8 * len(self._newest))
        bins = self._bins
        bins.fill(
            [(known.place, self._latest(known.entries) if len(known.entries) > 1 else known.entries) for known in bins.filled]
        )

    def _latest(self, heap: list[Entry]) -> list[Entry]:
        """Return the latest entry of each leaf."""
        return list({entry[2]: entry for entry in sorted(heap) if entry[2].is_evictable(self.tier)}.values())

    def _compact_last(self) -> None:
        """Keep one entry for each state that leaves only when nothing else can."""
        self._last_resort = self._latest(self._last_resort)
        self._compact_last_at = max(1024, 2 * len(self._last_resort))

    def victims(self, now: float) -> Iterator[Node]:
        self._offered.clear()
        return super().victims(now)

    def next_victim(self) -> Node | None:
        lowest = self._least()
        if lowest is not None:
            node = self._popped = lowest.node
            self._popped_s, self._popped_turn, self._popped_at = lowest.used_s, lowest.turn, len(self._announced_s)
            self._bins.pop(lowest)
        elif (last := self._last()) is not None:
            node = last
        else:
            return None
        self._offered[node] = None
        if self._tuning is not None:
            self._tuning.begin(node, self._announced_s)
        return node

    def _last(self) -> Node | None:
        """Return the least recently used of the states that leave only when nothing else can."""
        heap = self._last_resort
        while heap:
            used_s, number, node, turn = heap[0]
            if not node.is_evictable(self.tier) or node in self._offered:
                heappop(heap)
            elif node.last_used_in(self.tier) != used_s:
                heapreplace(heap, (node.last_used_in(self.tier), number, node, turn))
            else:
                return heappop(heap)[2]
        return None

    def _least(self) -> Bin | None:
        """Return the bin whose head has the lowest utility; None if all are empty."""
        alpha, bins = self._alpha, self._bins
        while front := bins.front():
            low, oldest = front[0], front[-1]
            if not self._is_current(oldest):
                continue
            if not alpha:
                return oldest
            high = bins.filled[-1]
            if low is not oldest and not self._is_current(low) or high is not oldest and not self._is_current(high):
                continue
            last_turn: i64 = len(self._announced_s)
            newest_age, oldest_age = max(float(last_turn - self._newest_turn()), 1.0), float(last_turn - oldest.turn)
            weight = alpha / float(high.place - low.place) if high is not low else 1.0
            recency = 1.0 / (1.0 / newest_age - 1.0 / oldest_age) if oldest_age > newest_age else 0.0
            least, best = NEVER, oldest
            for known in front:
                age = last_turn - known.turn
                utility = float(known.place) * weight + recency / (float(age) if age else 1.0)
                if utility < least:
                    least, best = utility, known
            if best is oldest or self._is_current(best):
                return best
        return None

    def _is_current(self, known: Bin) -> bool:
        """Whether a bin's head is as it was entered. If not, correct it, after which the bins may have changed."""
        node, offered = known.node, self._offered
        if (
            node.is_evictable(self.tier)
            and not (offered and node in offered)
            and self._place(node) == known.place
            and self._used_at(node) == known.used_s
        ):
            return True
        return self._correct(known)

    def _correct(self, known: Bin) -> bool:
        """Drop and correct a bin's entries until its head is as it was entered. Returns whether the last use of the head is still
        the same; if not, the bins may have changed."""
        offered, bins, heap = self._offered, self._bins, known.entries
        filled = bins.filled
        while heap:
            used_s, number, node, _ = heap[0]
            if not node.is_evictable(self.tier) or offered and node in offered:
                heappop(heap)
            elif self._place(node) != known.place:
                heappop(heap)
                self.on_evictable(node)
                if bins.filled is not filled:
                    return False
            elif (last_used := self._used_at(node)) != used_s:
                heapreplace(heap, (last_used, number, node, bisect_right(self._announced_s, last_used)))
            elif used_s == known.used_s:
                known.note_head()
                return True
            else:
                break
        bins.note_lost(known)
        return False

    def _newest_turn(self) -> int:
        """Return the number of requests announced by the most recent use of any leaf; there must be a leaf."""
        tier, offered, newest, others = self.tier, self._offered, self._newest, self._others
        while True:
            if self._older and (not newest or self._older_s > newest[-1][0]):
                for entry in self._older:
                    heappush(others, (-entry[0], entry[1], entry[2], entry[3]))
                self._older, self._older_s = [], -NEVER
            is_other = not newest or bool(others) and -others[0][0] > newest[-1][0]
            used_s, number, node, turn = others[0] if is_other else newest[-1]
            is_leaf = (
                node.state[tier] == READY
                and not node.pins[tier]
                and not node.children_in[tier]
                and not (offered and node in offered)
                and self._place(node) != NOWHERE
            )
            last_used = self._used_at(node)
            if is_leaf and last_used == (-used_s if is_other else used_s):
                return turn
            if is_other:
                heappop(others)
            else:
                newest.pop()
            if is_leaf:
                heappush(others, (-last_used, number, node, bisect_right(self._announced_s, last_used)))


keep_types(FlopAware, alpha=int | float | str)
