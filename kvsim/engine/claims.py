"""Slots that are reserved for requests and are still being freed."""

from kvsim.core.lease import Lease
from kvsim.core.serving import ServedCache
from kvsim.engine.job import Job
from kvsim.engine.mover import Mover


class Claims:
    """The requests on one GPU that have been admitted and wait for their slots, first come, first served."""

    def __init__(self, cache: ServedCache, mover: Mover) -> None:
        self.cache = cache
        self.mover = mover
        self._waiting: list[tuple[Job, Lease]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: Job, lease: Lease) -> None:
        """Let a request wait for the slots that its lease has reserved."""
        self._waiting.append((job, lease))

    def settle(self, now: float) -> tuple[Job, Lease, bool] | None:
        """Take the first request out if it need not wait any more: return it, its lease, and whether its slots are lost.

        Returns None if it has to wait, or if there is none. Requests that have given up their leases are forgotten.
        """
        while self._waiting:
            job, lease = self._waiting[0]
            if lease is not job.lease and lease is not job.decode_lease:
                del self._waiting[0]
                continue
            if self.cache.is_waiting(lease):
                return None
            claim = self.cache.claim(lease, now)
            if claim.waits:
                self.mover.submit(claim.waits)
                return None
            del self._waiting[0]
            return job, lease, claim.is_lost
        return None

    def clear(self) -> None:
        """Forget all requests: their leases have been given back."""
        self._waiting.clear()
