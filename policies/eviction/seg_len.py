"""SegLen (Qiao et al., Abdelfattah lab: Rethinking prefix caching for hybrid LLMs, 2026, abdelfattah-lab.github.io/blogs/seglen;
github.com/abdelfattah-lab/sglang, pull request 3)."""

from dataclasses import dataclass
from math import inf

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.numbers import Real, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.leaves import Leaf, least_recently_used
from kvsim.policies.eviction.sampled import SampledEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class SegmentLength(SampledEviction):
    """SegLen: keeps recurrent states far behind the one before them, for without them much has to be computed again.

    segment  pages from the nearest state before, or the beginning, to a state; 0 of pages without a state after them
    recency  last use of a leaf; if it has a state, of the state, which only requests that began from it or saved it have used
    victim   the lowest weight * segment / longest + (1 - weight) * recency, from 0 for the oldest to 1 for the newest

    A simpler Marconi (``flop_aware``): it knows nothing of the model. The authors' weight is 0.85. What they scale both parts
    by is not told; here it is by the leaves and states that are compared, ``samples`` of them drawn at random, or all if there
    are no more. In shared memory a leaf leaves with its state; SGLang has a pool for each. Without states it is LRU among them.
    """

    weight: float = 0.85
    samples: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Real(least=0, most=1), "weight")
        self._has_states = False
        """Whether there has been a state."""

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._is_plain = self.scores_as(SegmentLength, "scores", "worth")

    def on_hit(self, node: Node, now: float) -> None:
        self._leaves.use(node)

    def on_insert(self, node: Node, now: float) -> None:
        self._has_states = self._has_states or node.is_state

    def lowest(self, leaves: list[Leaf], now: float) -> Leaf:
        return least_recently_used(leaves) if self._is_plain and not self._has_states else super().lowest(leaves, now)

    def state_of(self, pages: Node) -> Node | None:
        """Return the state after a node's pages, if it is usable in this tier."""
        state: Node | None = pages.partner
        if state is None or state.partner is not pages or state.state[self.tier] != READY:
            return None
        return state

    def worth(self, node: Node) -> tuple[int, float]:
        """Return the segment that a leaf's state or a state ends, and the last use."""
        if node.partner is None:
            return 0, node.last_used_in(self.tier)
        state: Node | None = node if node.is_state else self.state_of(node)
        pages: Node | None = node.partner if node.is_state else node
        if state is None or pages is None or pages.partner is not state or pages.state[self.tier] != READY:
            return 0, node.last_used_in(self.tier)
        before: Node = pages
        while before.parent is not None:
            before = before.parent
            if self.state_of(before) is not None:
                break
        return pages.depth + pages.pages - before.depth - before.pages, state.last_used_in(self.tier)

    def scores(self, nodes: list[Node], now: float) -> list[float]:
        segments: list[int] = []
        times_s: list[float] = []
        longest, oldest_s, newest_s, weight = 0, inf, -inf, self.weight
        for node in nodes:
            segment, used_s = self.worth(node)
            longest = segment if segment > longest else longest
            oldest_s = used_s if used_s < oldest_s else oldest_s
            newest_s = used_s if used_s > newest_s else newest_s
            segments.append(segment)
            times_s.append(used_s)
        if not longest:
            return times_s  # the same order as that of the recency alone
        span_s = newest_s - oldest_s
        values: list[float] = []
        for at, used_s in enumerate(times_s):
            length = segments[at] / longest
            recency = (used_s - oldest_s) / span_s if span_s else 0.0
            values.append(weight * length + (1 - weight) * recency)
        return values

    def score(self, node: Node, now: float) -> float:
        return self.scores([node], now)[0]
