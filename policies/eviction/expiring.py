"""The base class of policies whose ranks fall at a known time, without a use: what was protected leaves earlier from then on."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.policies.eviction.base import RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class ExpiringEviction(RankedEviction):
    """Enters leaves again when what protects them ends. Ranks are taken at ``_now``, the time of the last pass."""

    def __post_init__(self) -> None:
        self._now = -inf
        self._expiring: list[tuple[float, int, Node]] = []
        """A heap of protected leaves: (when that ends, in seconds; number of the entry; leaf)."""

    @abstractmethod
    def ends_s(self, node: Node) -> float:
        """Return when the protection of a node's last page ends, in seconds; infinite if it has none, or one without an end."""

    def on_evictable(self, node: Node) -> None:
        super().on_evictable(node)
        if self._now < (end_s := self.ends_s(node)) < inf:
            heappush(self._expiring, (end_s, self._entries, node))

    def victims(self, now: float) -> Iterator[Node]:
        self._begin_pass(now)
        return super().victims(now)

    def _begin_pass(self, now: float) -> None:
        """Enter nodes again that are not protected any more."""
        self._now, expiring, tier = now, self._expiring, self.tier
        while expiring and expiring[0][0] <= now:
            node = heappop(expiring)[2]
            if node.state[tier] == READY and not node.pins[tier] and not node.children_in[tier]:
                super().on_evictable(node)

    def _compact(self) -> None:
        super()._compact()
        latest = {
            entry[2]: entry
            for entry in sorted(self._expiring)
            if entry[2].is_evictable(self.tier) and entry[0] == self.ends_s(entry[2])
        }
        self._expiring[:] = latest.values()
        heapify(self._expiring)
