"""SegLen (Qiao et al., Abdelfattah lab: Rethinking prefix caching for hybrid LLMs, 2026, abdelfattah-lab.github.io/blogs/seglen;
github.com/abdelfattah-lab/sglang, pull request 3)."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.numbers import Real, check_settings
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
        self._worth: dict[Node, tuple[int, float]] = {}
        """(segment, last use) of what is compared."""
        self._longest = 1
        self._oldest_s = self._span_s = 0.0

    def state_of(self, pages: Node) -> Node | None:
        """Return the state after a node's pages, if it is usable in this tier."""
        state: Node | None = pages.partner
        if state is None or state.partner is not pages or state.state[self.tier] != READY:
            return None
        return state

    def worth(self, node: Node) -> tuple[int, float]:
        """Return the segment that a leaf's state or a state ends, and the last use."""
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

    def _candidates(self) -> list[Node]:
        nodes = super()._candidates()
        self._worth = {node: self.worth(node) for node in nodes}
        if nodes:
            times = [used_s for _, used_s in self._worth.values()]
            self._longest = max([segment for segment, _ in self._worth.values()])
            self._oldest_s = min(times)
            self._span_s = max(times) - self._oldest_s
        return nodes

    def score(self, node: Node, now: float) -> float:
        segment, used_s = self._worth[node]
        length = segment / self._longest if self._longest else 0.0
        recency = (used_s - self._oldest_s) / self._span_s if self._span_s else 0.0
        return self.weight * length + (1 - self.weight) * recency
