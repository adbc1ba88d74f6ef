"""Depth-first order of the radix tree: SGLang's ``dfs-weight`` (Zheng et al., SGLang, 2024, section 3;
managers/schedule_policy.py, mem_cache/base_prefix_cache.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.runs import count_pages, split_runs
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node, RadixTree
from kvsim.core.waiting import Round, Waiting
from kvsim.policies.fields import keep_types
from kvsim.policies.scheduling.base import BoundedScheduling


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class DfsWeight(BoundedScheduling):
    """Serves one branch of the radix tree after the other, so that each is computed and loaded once.

    order                      depth first through the prefixes that waiting requests have on the GPU: branches with more waiting
                               requests first, what lies deeper before what ends earlier; of equals, in the order of the last
                               round, new requests at the end
    after retraction           as a new request
    more than fcfs_above wait  the order stays as it is, new requests at the end. SGLang has no such limit

    Between branches of equal weight SGLang goes by the age of their pages.
    """

    fcfs_above: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fcfs_above is not None and self.fcfs_above < 0:
            raise ValueError(f"fcfs_above must be at least 0, not {self.fcfs_above}; null sets no limit")

    def order(self, round: Round) -> Sequence[Waiting]:
        tree = RadixTree(1)
        ending: dict[Node, list[Waiting]] = {}
        for one in round.waiting:
            ending.setdefault(end_of_prefix(tree, one, round.gpu_pages(one)), []).append(one)
        weights: dict[Node, int] = {}
        for end, ones in ending.items():
            for node in (tree.root, *end.path()):
                weights[node] = weights.get(node, 0) + len(ones)
        ordered: list[Waiting] = []
        stack = [tree.root]
        while stack:  # a branch in reverse: what ends at its node, then its children, lightest first
            node = stack.pop()
            ordered += reversed(ending.get(node, ()))
            stack += sorted(node.children.values(), key=lambda child: -weights[child])
        ordered.reverse()
        return ordered


def end_of_prefix(tree: RadixTree, one: Waiting, pages: int) -> Node:
    """Return the node that ends with the first ``pages`` pages of a prompt, and add what the tree lacks of them."""
    path, partial, agreed, rest = tree.walk(tree.root, split_runs(one.request.runs, pages)[0])
    end = path[-1] if path else tree.root
    if partial is not None:
        end = tree.cut(partial, agreed)
    return tree.add(end, rest, count_pages(rest), 0.0) if rest else end


keep_types(DfsWeight, fcfs_above=int | None)
