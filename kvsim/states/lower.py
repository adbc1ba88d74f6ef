"""What lies below the GPU on a hybrid model: pages, and the states that requests begin from."""

from kvsim.core.cache import Cache
from kvsim.core.lease import Lease
from kvsim.core.serving import NO_LOAD, Fetch, Load, Lower
from kvsim.core.tier import GPU
from kvsim.core.transfer import NO_TRANSFERS, Begin, Transfer, transfers_of
from kvsim.core.transfers import Transfers, is_gap
from kvsim.core.tree import READY
from kvsim.states.starts import Starts, states_of
from kvsim.states.store import StateStore


class HybridLower(Lower):
    """Loads a request's state before its pages. States move in the KV's tiers or, if they have their own memory, in theirs."""

    def __init__(self, kv: Cache, states: StateStore, starts: Starts) -> None:
        self.kv = kv
        self.states = states
        self.starts = starts
        self.views = kv.transfers.views
        self._pages = kv.transfers

    @property
    def in_flight(self) -> dict[Transfer, None]:
        """Transfers of pages and of states."""
        pages = self._pages.in_flight
        return pages if self.starts.shares_room else pages | self.states.transfers.in_flight

    def fetch(self, lease: Lease, pages: int, now: float) -> Fetch:
        return self._pages.fetch(lease, pages, now)

    # --- loads ---------------------------------------------------------------------------------------------------------------

    def load(self, lease: Lease, now: float, short: Transfer | None = None) -> Load:
        """Start the loads, that of the state first, or another request's load of it is among them; then shorten the hit.

        If pages, or the state, are out of reach by now, the request begins from an earlier state.
        """
        load = NO_LOAD
        if lease.has_load:
            load = self._start(lease, now)
        return Load(load.transfers, load.loads, self._shorten(lease, short, now))

    def _start(self, lease: Lease, now: float) -> Load:
        states, reused = states_of(lease), lease.gpu_pages + lease.loaded_pages
        own = self._load_state(lease, now) if states.is_below else NO_TRANSFERS
        load = NO_LOAD if lease.loading is None else self._pages.start_loads(lease, lease.loading, now)
        pages = lease.gpu_pages + lease.loaded_pages
        limit = min(pages, reused - states.is_below)
        if limit < reused:
            self.starts.begin_earlier(lease, pages, limit, now)
        loads = load.loads if states.load is None else [states.load, *load.loads]
        return Load(own + load.transfers, loads, 0)

    def _load_state(self, lease: Lease, now: float) -> list[Transfer]:
        """Start loading the state, unless another request has done so.

        Without room on the way, after a reset, or if the other request's load has failed, it stays below.
        """
        states, home = states_of(lease), self.states
        state = states.state
        assert state is not None and states.tier is not None
        loads: list[Transfer] = []
        if lease.epoch != self.kv.residency.epoch:
            return loads
        if state.state[GPU]:
            states.load = next((load for load in transfers_of(state) if load.target is home.gpu), None)
            if states.load is None and state.state[GPU] != READY:
                return loads
        else:
            if self.starts.shares_room:
                slots, left = home.gpu.pool.split(lease.slots, home.units)
            else:
                slots, left = states.slots, None
            loads = home.load(state, slots, now)
            if not loads:
                return loads
            states.load = loads[-1]
            if self.starts.shares_room:
                lease.slots = left
            else:
                states.slots = None
        home.residency.pin(state, home.gpu)
        home.residency.unpin(state, states.tier)
        states.tier, states.is_below = home.gpu, False
        return loads

    def _shorten(self, lease: Lease, short: Transfer | None, now: float) -> int:
        """Begin from an earlier state, since none follows the last page that has arrived. Returns the pages lost."""
        reused, gpu = lease.gpu_pages + lease.loaded_pages, lease.gpu
        gaps = [node.depth for node in lease.node.path() if is_gap(node, gpu)]
        there = min([reused, *gaps])
        limit = min(there, reused - (short is not None and short is states_of(lease).load))
        if limit < reused:
            self.starts.begin_earlier(lease, there, limit, now)
        return reused - lease.gpu_pages - lease.loaded_pages

    # --- transfers -----------------------------------------------------------------------------------------------------------

    def _home_of(self, transfer: Transfer) -> Transfers:
        """Return the ``Transfers`` object that a transfer belongs to."""
        return self._pages if transfer.target in self.kv.tiers else self.states.transfers

    def flush(self) -> list[Transfer]:
        """Return the write-downs decided on since the last call, of pages and of states."""
        transfers = self._pages.under_way.flush()
        return transfers if self.starts.shares_room else transfers + self.states.transfers.under_way.flush()

    def begin(self, transfer: Transfer, now: float) -> Begin:
        return self._home_of(transfer).begin(transfer, now)

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        return self._home_of(transfer).finish(transfer, now) + self.flush()

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        return self._home_of(transfer).abort(transfer, pages_arrived, now) + self.flush()
