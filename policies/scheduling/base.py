"""The contract of scheduling policies: which waiting request an engine tries to admit next."""

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.waiting import Waiting
from kvsim.policies.context import PolicyContext


@mypyc_attr(allow_interpreted_subclasses=True)
class SchedulingPolicy:
    """Says in which order an engine tries to admit waiting requests.

    The engine tries the first one; if that does not fit, admission stops until the next step. A policy may use what a server
    knows when a request arrives. It does not know how long the answer will be (``output_tokens``, ``output_runs``).
    """

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run. The context's tier is the GPU tier."""

    def rank(self, waiting: Waiting) -> float:
        """Return the request's rank; the lowest is tried first, and of equals the one that arrived first.

        Called whenever a request begins to wait; its rank stays the same while it waits.
        """
        return 0.0
