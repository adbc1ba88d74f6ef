"""Which memory of a GPU the recurrent states of its requests have, and the copies that the cache's decisions require."""

from typing import Any

import numpy as np

from kvsim.core.lease import Lease
from kvsim.core.transfers import is_gap
from kvsim.core.watch import Watch
from kvsim.states.cache import HybridCache
from kvsim.states.store import StateStore
from kvsim.substrate.hardware.orders import StateCopy


class StateSlots(Watch):
    """The slots of one engine's running requests, and of detached states after them.

    The cache reports what it saves and detaches; ``pending`` keeps the copies that follow until they are ordered.
    """

    def __init__(self, cache: HybridCache, *, requests: int, kept_states: int) -> None:
        self.cache = cache
        self.pending: list[StateCopy] = []
        self._slots: dict[Lease, int] = {}
        self._free = list(range(requests - 1, -1, -1))
        self._kept: dict[int, int] = {}
        """Slot of each detached state, by its page."""
        self._free_to_keep = list(range(requests + kept_states - 1, requests - 1, -1))

    @property
    def in_own_pool(self) -> bool:
        """Whether states are saved in a pool of their own, instead of in pages."""
        return not self.cache.shares_room

    def of(self, lease: Lease) -> int:
        """Return the slot of a running request."""
        if lease not in self._slots:
            if not self._free:
                self._give_back()
            self._slots[lease] = self._free.pop()
        return self._slots[lease]

    def start_of(self, lease: Lease) -> StateCopy | None:
        """Return the copy by which a request begins from a saved state, which is on the GPU or being loaded; None without one.

        A state that a load did not bring is not copied: until its hit is shortened, the request computes with what its slot has.
        """
        held, gpu = lease.states, self.cache.states.gpu
        if held is None or held.state is None or held.tier is None or is_gap(held.state, gpu):
            return None
        page = StateStore.page_of(held.state)
        return StateCopy(kind="load", slot=self.of(lease), page=page, saved=held.state.slots[gpu.index])

    def saved(self, lease: Lease, page: int, slots: Any) -> None:
        self.pending.append(StateCopy(kind="save", slot=self.of(lease), page=page, saved=np.array(slots)))

    def detached(self, page: int, slots: Any) -> None:
        if page in self._kept:
            return
        if not self._free_to_keep:
            self._forget()
        self._kept[page] = self._free_to_keep.pop()
        self.pending.append(StateCopy(kind="load", slot=self._kept[page], page=page, saved=np.array(slots)))

    def begins_detached(self, lease: Lease, page: int) -> None:
        self.pending.append(StateCopy(kind="share", slot=self.of(lease), page=page, source=self._kept[page]))

    def taken(self) -> list[StateCopy]:
        """Return the pending copies, which the caller orders now."""
        copies, self.pending = self.pending, []
        return copies

    def _give_back(self) -> None:
        """Take back the slots of requests that have ended."""
        for lease in [lease for lease in self._slots if lease not in self.cache.leases]:
            self._free.append(self._slots.pop(lease))

    def _forget(self) -> None:
        """Take back the slots of states that are not detached any more."""
        assert self.cache.detached is not None
        for page in [page for page in self._kept if page not in self.cache.detached]:
            self._free_to_keep.append(self._kept.pop(page))
