"""The contract of placement policies."""

from kvsim.core.questions import Placement
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext


@mypyc_attr(allow_interpreted_subclasses=True)
class PlacementPolicy(Placement):
    """The base class of placement policies. ``Placement`` says what the core asks and announces."""

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run. The context's tier is the lower one."""

    @property
    def reads_hardware(self) -> bool:
        """Whether decisions depend on the machine's rates, even in a replay."""
        return False


@mypyc_attr(allow_interpreted_subclasses=True)
class ReadOnly(PlacementPolicy):
    """The policy of an edge that is only read over. Pages are written down over another edge, whose policy is ``writes``."""

    def __init__(self, writes: PlacementPolicy) -> None:
        self._writes = writes

    @property
    def keeps_loaded(self) -> bool:
        return self._writes.keeps_loaded

    def after_eviction(self, node: Node, now: float) -> bool:
        return False
