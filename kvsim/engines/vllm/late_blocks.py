"""Blocks that are given back late, since a step in flight may still write them: ``deferred_frees`` of vLLM's scheduler."""

from kvsim.engines.vllm.block_pool import BlockLease
from kvsim.engines.vllm.served import Served
from kvsim.engines.vllm.stepped import SteppedCache


class LateBlocks:
    """Gives back what requests hold that leave: at once or, if they are late, when the step in flight has ended."""

    def __init__(self, cache: SteppedCache, *, are_late: bool) -> None:
        """``are_late``: whether the blocks of a request that a step in flight computes are."""
        self._cache = cache
        self._are_late = are_late
        self._late: list[tuple[BlockLease, str]] = []

    def give_back(self, served: Served, why: str, now: float) -> None:
        """Give back the blocks of a request that has left."""
        if self._are_late and served.steps_out:
            self._late.append((served.lease, why))
        else:
            self._cache.release(served.lease, why, now)

    def step_ended(self, now: float) -> None:
        """Give back those that are late: the step in flight has ended, or was lost."""
        late, self._late = self._late, []
        for lease, why in late:
            self._cache.release(lease, why, now)
