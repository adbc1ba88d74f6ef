"""Depth-first order of the radix tree: SGLang's ``dfs-weight`` (Zheng et al., SGLang, 2024, section 3;
managers/schedule_policy.py, mem_cache/base_prefix_cache.py)."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Whole, check_settings
from kvsim.policies.fields import keep_types
from kvsim.policies.scheduling.base import DEPTH
from kvsim.policies.scheduling.depth_first import DepthFirstOrder
from kvsim.policies.scheduling.kept_order import KeptOrder, KeptScheduling


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class DfsWeight(KeptScheduling):
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

    def kept_order(self) -> KeptOrder:
        return DepthFirstOrder()

    def goes_by(self) -> str:
        return DEPTH


keep_types(DfsWeight, fcfs_above=int | None)
