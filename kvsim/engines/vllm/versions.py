"""What versions of vLLM do differently: one row each."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvsim.core.questions import Eviction


class Version(NamedTuple):
    """The rules of a version that others do not have. All but the first are about CPU offloading."""

    counts_last_admission: bool
    """Whether the hits of a request that is preempted before its first token are what it finds at its last admission before
    that, not at its first one."""
    order: Callable[[Eviction, int], Any]
    """Makes the order of so many chunks (``OffloadOrder``) of the CPU tier's policy."""
    hears_look_ups: bool
    """Whether each look-up of a waiting request is a use of its chunks."""
    restarts_offers: bool
    """Whether a request that is admitted again offers its chunks from the first one on. If not, it goes on behind what it has
    offered, or behind what its first step then computes, if that is less."""
    offers_at_end: bool
    """Whether a request that has finished offers what found no room before."""
    frees_late: bool
    """Whether a request is preempted even while a step computes it: its blocks are free when that step has ended."""
    loads_follow_steps: bool
    """Whether a load begins when the step has ended that was launched with it; if not, it begins at once."""
    passed_go_first: bool
    """Whether requests that had to wait for something are tried before those ahead of them in the queue."""


VERSIONS: Mapping[str, Version] = {
    "0.33.0": Version(
        counts_last_admission=False,
        order=lambda policy, chunks: policy.offload_order(chunks),
        hears_look_ups=False,
        restarts_offers=True,
        offers_at_end=True,
        frees_late=False,
        loads_follow_steps=True,
        passed_go_first=False,
    ),
    "0.25.1": Version(
        counts_last_admission=True,
        order=lambda policy, chunks: policy.offload_order_by_use(chunks),
        hears_look_ups=True,
        restarts_offers=False,
        offers_at_end=False,
        frees_late=True,
        loads_follow_steps=False,
        passed_go_first=True,
    ),
}
LATEST = "0.33.0"
