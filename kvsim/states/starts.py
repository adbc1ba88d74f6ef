"""The recurrent state that a request of a hybrid model begins from."""

from kvsim.core.cache import Cache
from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.state_lease import StateLease
from kvsim.core.tree import Node
from kvsim.core.watch import Watch
from kvsim.states.store import DetachedStates, StateStore


def states_of(lease: Lease) -> StateLease:
    """Return what a request of a hybrid model holds besides pages."""
    assert lease.states is not None
    return lease.states


class Starts:
    """Finds the state that a request begins from, and gives it an earlier one if pages or the state itself do not arrive."""

    def __init__(
        self, kv: Cache, states: StateStore, detached: DetachedStates | None, watches: list[Watch], *, shares_room: bool
    ) -> None:
        """``shares_room``: states take slots of the page tiers."""
        self.kv = kv
        self.states = states
        self.detached = detached
        self.watches = watches
        self.shares_room = shares_room

    def end_at_state(self, lease: Lease, limit: int) -> None:
        """Cut the match of a lease that has not been admitted back to its deepest state within ``limit`` pages."""
        states = states_of(lease)
        depth, found, detached = self.deepest(lease.request, limit)
        if depth < lease.gpu_pages + lease.lower_pages:
            self.kv.rematch(lease, depth)
        states.state = states.detached = None
        if found is not None and found[0] == depth:
            states.state = found[1]
        elif detached is not None:
            states.detached = detached[1]

    def deepest(
        self, request: Request, limit: int, *, on_gpu: bool = False
    ) -> tuple[int, tuple[int, Node] | None, tuple[int, int] | None]:
        """Return the depth of the deepest usable state within ``limit`` pages, and (depth, state), (depth, detached state).

        With ``on_gpu``, states that would have to be loaded are not usable.
        """
        while True:
            found = self.states.deepest(request.runs, limit, on_gpu=on_gpu)
            detached = self.detached.longest(request.runs, limit) if self.detached is not None else None
            depth = max(found[0] if found else 0, detached[0] if detached else 0)
            limit = request.pages_outside_images(depth, self.kv.page_tokens)
            if limit == depth:
                return depth, found, detached

    def use(self, lease: Lease) -> None:
        """Record that a request begins from its state, or from its detached state."""
        states = states_of(lease)
        if states.state is not None:
            if self.shares_room:
                states.states.append(states.state)
            self.states.begin_from(states.state, self.kv.residency.now, is_first=lease.is_first)
        elif states.detached is not None and self.detached is not None and states.detached in self.detached:
            self.detached.touch(states.detached)

    def release(self, lease: Lease) -> None:
        """Unpin the state that the request begins from, and give back slots that were reserved to load it."""
        states, home = states_of(lease), self.states
        if states.state is not None and states.tier is not None:
            home.residency.unpin(states.state, states.tier)
            states.tier, states.is_below = None, False
        if states.slots is not None:
            home.residency.give(home.gpu, states.slots)
            states.slots = None

    def begin_earlier(self, lease: Lease, pages: int, limit: int, now: float) -> None:
        """Cut what an admitted request reuses back to a state within ``limit`` pages, of ``pages`` whose KV is there.

        The state must be on the GPU: what is still below would hold up the request again. Without one, nothing is reused.
        """
        states, counts = states_of(lease), self.states.counts
        had_one = states.state is not None or states.detached is not None
        depth, found, detached = self.deepest(lease.request, limit, on_gpu=True)
        self.release(lease)
        if states.state in states.states:
            states.states.remove(states.state)
        states.state = states.detached = states.load = None
        if found is not None and found[0] == depth:
            states.state, states.tier = found[1], self.states.pin(found[1], now)
        elif detached is not None and depth:
            states.detached = detached[1]
            for watch in self.watches:
                watch.begins_detached(lease, states.detached)
        self.use(lease)
        if lease.is_first:
            counts.used -= had_one and not depth
            counts.tokens_lost_to_missing_state += (pages - depth) * self.kv.page_tokens
        lost = lease.gpu_pages + lease.loaded_pages - depth
        lease.lose_far(lost)
        lease.loaded_pages = max(0, depth - lease.gpu_pages)
        lease.gpu_pages = min(lease.gpu_pages, depth)
