"""Pages of a path on a GPU that nobody uses, moved to the tier below before others need their room."""

from kvsim.core.eviction import Eviction
from kvsim.core.loading import LowerTiers
from kvsim.core.tier import CPU, Edge, Tier
from kvsim.core.transfer import NO_TRANSFERS, Transfer, transfers_of
from kvsim.core.tree import ABSENT, LEAVING, READY, Node
from kvsim.pages.extents import Extent


class Offloading:
    """Moves idle pages from one GPU tier to the CPU tier below it."""

    def __init__(self, lower: LowerTiers, gpu: Tier) -> None:
        self.residency = lower.residency
        self.gpu = gpu
        self.edge: Edge = next(edge for edge in gpu.below if edge.lower.level == CPU)
        self._eviction: Eviction = lower.eviction
        self._under_way = lower.under_way

    def path(self, extents: tuple[Extent, ...]) -> list[Node]:
        """Return the nodes of a path that are in the tree as a whole, top to bottom."""
        tree = self.residency.tree
        return tree.walk(tree.root, extents)[0]

    def writes(self, extents: tuple[Extent, ...]) -> list[Transfer]:
        """Return the transfers that copy pages of a path from the GPU; until they end, these pages are in use."""
        found: dict[Transfer, None] = {}
        for node in self.path(extents):
            for transfer in transfers_of(node):
                if transfer.source is self.gpu and node.state[self.gpu.index] != LEAVING:
                    found[transfer] = None
        return list(found)

    def idle(self, extents: tuple[Extent, ...]) -> list[Node]:
        """Return the nodes at the end of a path that no request, no transfer and no other path on the GPU needs there, deepest
        first."""
        nodes: list[Node] = []
        index = self.gpu.index
        for node in reversed(self.path(extents)):
            state = node.state[index]
            if not nodes and state in (ABSENT, LEAVING):
                continue
            if state != READY or node.pins[index] or node.children_in[index] > (1 if nodes else 0):
                break
            nodes.append(node)
        return nodes

    def unwritten(self, nodes: list[Node]) -> int:
        """Return how many pages of nodes have no copy that the GPU could load again."""
        pages = 0
        for node in nodes:
            if not self._eviction.is_elsewhere(node, self.gpu):
                pages += node.pages
        return pages

    def offload(self, nodes: list[Node], now: float) -> list[Transfer] | None:
        """Free idle nodes on the GPU, those without a copy below once they have been written down. Returns the write-downs.

        None, with nothing changed, if the tier below cannot take them beside the path that they continue. Whether they are
        written is not the placement policy's choice.
        """
        if not nodes:
            return NO_TRANSFERS
        lower = self.edge.lower
        index, room = lower.index, lower.available_pages
        for node in nodes[0].path():
            if node.state[index] == READY and not node.pins[index]:
                room -= node.pages
        if self.unwritten(nodes) > room:
            return None
        self._eviction.offload(nodes, self.edge, max(now, self.residency.now))
        return self._under_way.flush()
