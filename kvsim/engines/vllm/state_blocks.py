"""A pool of blocks like vLLM's for hybrid models: pages, and recurrent states of one block for each Mamba group."""

from typing import Any

from kvsim.core.tier import Tier
from kvsim.core.tree import Node
from kvsim.engines.vllm.block_pool import BlockPool
from kvsim.pages.extents import Extent
from kvsim.states.store import Place, StateIndex

StateBlocks = list[list[Node]]
"""The blocks of one state, by Mamba group; in each group the copies, the oldest first."""


class StateBlockPool(BlockPool):
    """Pages as in ``BlockPool``, and states. Each block of a state ages and leaves by itself; states may have copies, too."""

    def __init__(self, gpu: Tier, groups: int) -> None:
        super().__init__(gpu)
        self.groups = groups
        self.states: StateIndex[StateBlocks] = StateIndex()
        self.new_states = 0
        """Number of states stored at places that had no block of one."""
        self._aside = Node((), 0, 0, None, self.tree, 0.0)
        """The parent of all blocks of states."""

    def deepest_state(self, extents: tuple[Extent, ...], limit: int) -> tuple[int, list[Node]]:
        """Return (depth in pages, oldest block of each group) of a prompt's deepest state within its first ``limit`` pages."""
        for depth, blocks in self.states.deepest_first(extents, limit):
            if all(blocks):
                return depth, [copies[0] for copies in blocks]
        return 0, []

    def add_state(self, place: Place, slots: Any, now: float) -> list[Node]:
        """Store the state at a place, a block for each group. Returns its blocks, held."""
        blocks = self.states.get(place.page)
        if blocks is None:
            blocks = [[] for _ in range(self.groups)]
            self.states.put(place, blocks)
            self.new_states += 1
        nodes, tree = [], self.residency.tree
        for group, copies in enumerate(blocks):
            node = Node(((place.page * self.groups + group, 1),), 1, place.depth - 1, self._aside, tree, now)
            node.is_state = True
            mine, slots = self.gpu.pool.split(slots, 1)
            self.residency.add_outside_tree(node, self.gpu, mine, now)
            copies.append(node)
            nodes.append(node)
        return nodes

    def hold_state(self, nodes: list[Node]) -> None:
        """Keep the blocks of a state from leaving."""
        for node in nodes:
            self.residency.pin_alone(node, self.gpu)
            node.hits += 1

    def give_back_state(self, node: Node, now: float) -> None:
        """Undo one hold on a block of a state. With the last one, it becomes the most recent one."""
        if node.pins[0] == 1:
            node.last_used = now
        self.residency.unpin_alone(node, self.gpu)

    def _remove(self, node: Node) -> None:
        if not node.is_state:
            super()._remove(node)
            return
        page, group = divmod(node.runs[0][0], self.groups)
        blocks = self.states.get(page)
        assert blocks is not None
        self._vacate(node)
        blocks[group].remove(node)
        if not any(blocks):
            self.states.pop(page)
