"""The contract of scheduling policies: which waiting request an engine tries to admit next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvsim.core.queue_view import Round, Waiting
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import SECONDS, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.fields import keep_types

ARRIVAL: Final = "arrival"
PRIORITY: Final = "priority"
PREFIX: Final = "prefix"
DEPTH: Final = "depth"
OTHER: Final = ""
"""What an order depends on: the arrival alone; priority, then arrival, without a bound; SGLang's longest prefix match; its
depth-first order of the tree; anything else."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SchedulingPolicy:
    """Says in which order an engine tries to admit waiting requests: by ``rank`` or, if that is defined, by ``order``.

    The engine tries the first one; if it does not fit, admission stops until the next step, as in vLLM and SGLang. A policy may
    use what a server knows of a request. It must not use the length or the tokens of an answer that is still to come
    (``output_tokens``, ``output_runs``), unless its name says that it is an oracle.
    """

    max_wait_s: float | None = None
    """A request that arrived longer ago goes before all others; of several, the one that arrived first. None: no bound."""
    fcfs_above: int | None = None
    """``order`` is not asked while more requests wait: their order stays, and new ones are tried last; None: no limit."""

    @property
    def may_hold(self) -> bool:
        """Whether the order that the policy keeps may have no first one: nobody is then admitted in this round of admission. The
        next one comes after the step that is formed; if nothing runs, nothing else would bring it about."""
        return False

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run. The context's tier is the GPU tier."""

    def rank(self, waiting: Waiting) -> float:
        """Return the request's rank; the lowest is tried first, ties in order of arrival.

        Called whenever a request begins to wait; its rank stays the same while it waits.
        """
        return 0.0

    def order(self, round: Round) -> Sequence[Waiting]:
        """Return all of ``round.waiting`` in the order in which to try them.

        Called at the beginning of a round of admission, if the cache or the queue have changed since the last one.
        """
        return round.waiting

    def retraction_rank(self, waiting: Waiting) -> float:
        """Return the rank of a running request when decoding runs out of pages: the highest is retracted, of equals the youngest.

        Without it, the youngest request is retracted.
        """
        return 0.0

    def on_admitted(self, waiting: Waiting, tokens: int) -> None:
        """Called when a request has been admitted: ``tokens`` tokens are neither cached nor loaded, and are to be computed.

        These are tokens of its prompt and, after a retraction, of its answer so far.
        """

    def on_computed(self, waiting: Waiting) -> None:
        """Called once after each ``on_admitted``: these tokens are computed, or the request has been given up before that."""

    def on_generated(self, waiting: Waiting, tokens: int) -> None:
        """Called when a request has generated ``tokens`` tokens since the last call.

        That is before each round of admission while others wait, and when it ends, waits again or is given up.
        """

    def without_effect(self) -> Sequence[str]:
        """Return the names of settings that have no effect because of the others: an error if the user gives one."""
        return ()

    def goes_by(self) -> str:
        """Return what the order depends on, for engines whose schedules have only these queues; OTHER for any other order."""
        return OTHER


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class BoundedScheduling(SchedulingPolicy):
    """A policy that can starve requests, and a bound on how long they are passed over."""

    max_wait_s: float | None = None

    def __post_init__(self) -> None:
        check_settings(self, SECONDS, "max_wait_s", or_null=True, hint="null sets no bound")


keep_types(BoundedScheduling, max_wait_s=float | None)
