"""Depth-first order of the radix tree: SGLang's ``dfs-weight`` (Zheng et al., SGLang, 2024, section 3;
managers/schedule_policy.py, mem_cache/base_prefix_cache.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.queue_view import Round, Waiting
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Whole, check_settings
from kvsim.pages.extents import split_extents
from kvsim.policies.fields import keep_types
from kvsim.policies.scheduling.base import DEPTH, BoundedScheduling
from kvsim.policies.scheduling.branches import Branch


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
        check_settings(self, Whole(), "fcfs_above", or_null=True, hint="null sets no limit")

    def order(self, round: Round) -> Sequence[Waiting]:
        root = Branch(0, 0)
        for one in round.waiting:
            root.add(split_extents(one.request.runs, round.gpu_pages(one))[0]).ending.append(one)
        ordered: list[Waiting] = []
        stack = [root]
        while stack:  # in reverse: what ends with a branch, then its children, lightest first
            branch = stack.pop()
            ordered += reversed(branch.ending)
            stack += sorted(branch.children.values(), key=lambda child: -child.weight)
        ordered.reverse()
        return ordered

    def goes_by(self) -> str:
        return DEPTH


keep_types(DfsWeight, fcfs_above=int | None)
