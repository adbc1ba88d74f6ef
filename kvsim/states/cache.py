"""The cache of a hybrid model: a cached prefix is reusable up to the last page after which a recurrent state was saved."""

from collections.abc import Iterable
from dataclasses import asdict
from math import inf
from typing import Any

from kvsim.core.answers import whole_numbers
from kvsim.core.cache import Cache
from kvsim.core.check import Held, check
from kvsim.core.lease import Lease
from kvsim.core.questions import Checkpoints
from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.serving import Claim, Fetch, Growth, Load, ServedCache
from kvsim.core.state_lease import StateLease
from kvsim.core.tier import DISK, GPU, Edge, Tier
from kvsim.core.transfer import Hold, Transfer, transfers_of
from kvsim.core.transfers import NO_TRANSFERS, Begin, Transfers, is_gap
from kvsim.core.tree import ABSENT, LEAVING, READY, Node
from kvsim.pages.extents import Run, join_runs, split_runs
from kvsim.states.store import DetachedStates, Place, StateStore, StateWatch, places_after


class HybridCache(ServedCache):
    """A KV cache whose hits end at saved recurrent states.

    States are stored in the KV's tiers or, if ``state_tiers`` are given, in tiers of their own. When the KV of a state's page
    leaves a tier, the state leaves that tier too; from the GPU it becomes detached instead, if the policy says so. States exist
    only after multiples of ``grid_pages`` pages.
    """

    def __init__(
        self,
        kv: Cache,
        *,
        policy: Checkpoints,
        prefill: type[Any],
        grid_pages: int,
        state_bytes: int,
        state_pages: int,
        state_tiers: list[Tier] | None = None,
        state_edges: list[Edge] | None = None,
    ) -> None:
        self.kv = kv
        self.policy = policy
        self._policy_name = f"the checkpoint policy {type(policy).__name__}"
        self.grid_pages = grid_pages
        self.state_bytes = state_bytes
        self.known_pages: dict[int, int] = {}
        """By request index, the pages that a model without recurrent layers could have reused."""
        self.shares_room = state_tiers is None
        self.tiers = kv.tiers
        self.edges = kv.edges
        self.gpu = kv.gpu
        self.rules = kv.rules
        self.page_tokens = kv.page_tokens
        self.views = kv.views
        self.leases = kv.leases
        self.residency = kv.residency
        self.transfers = kv.transfers
        self._prefill = prefill
        home = kv.transfers if state_tiers is None else Transfers(Residency(state_tiers), state_edges or [])
        self.detached = DetachedStates(policy.detached_states) if policy.detached else None
        self.states = StateStore(home, state_pages, self.detached)
        self.watch: StateWatch | None = None
        """Is told of states that are saved, detached, or begun from while detached."""
        kv.residency.on_leave = self._leave_with
        if self.shares_room:
            for tier in kv.tiers:
                tier.eviction.empty_cache = self.empty_cache

    def empty_cache(self, tier: Tier) -> "HybridCache":
        """Return an empty cache like this one with ``tier`` as its only tier, which pages and states share."""
        return HybridCache(
            Cache([tier], [], self.rules, self.page_tokens),
            policy=self.policy,
            prefill=self._prefill,
            grid_pages=self.grid_pages,
            state_bytes=self.state_bytes,
            state_pages=self.states.units,
        )

    # --- requests ----------------------------------------------------------------------------------------------------------

    def match(self, request: Request, gpu: Tier | None = None) -> Lease:
        """Find the longest prefix whose KV some tier has, cut back to the deepest usable state."""
        lease = self.kv.match(request, gpu)
        known = lease.gpu_pages + lease.lower_pages
        lease.states = StateLease(known)
        self._end_at_state(lease, known)
        return lease

    def _end_at_state(self, lease: Lease, limit: int) -> None:
        """Cut the match of a lease that has not been admitted back to its deepest state within ``limit`` pages."""
        states = self._states_of(lease)
        depth, found, detached = self._deepest_state(lease.request, limit)
        if depth < lease.gpu_pages + lease.lower_pages:
            self.kv.rematch(lease, depth)
        states.state = states.detached = None
        if found is not None and found[0] == depth:
            states.state = found[1]
        elif detached is not None:
            states.detached = detached[1]

    def _deepest_state(
        self, request: Request, limit: int, *, on_gpu: bool = False
    ) -> tuple[int, tuple[int, Node] | None, tuple[int, int] | None]:
        """Return the depth of the deepest usable state within ``limit`` pages, and (depth, state), (depth, detached state).

        With ``on_gpu``, states that would have to be loaded are not usable.
        """
        while True:
            found = self.states.deepest(request.runs, limit, on_gpu=on_gpu)
            detached = self.detached.longest(request.runs, limit) if self.detached is not None else None
            depth = max(found[0] if found else 0, detached[0] if detached else 0)
            limit = request.pages_outside_images(depth, self.page_tokens)
            if limit == depth:
                return depth, found, detached

    @property
    def version(self) -> int:
        return self.residency.version + self.states.residency.version

    @property
    def in_flight(self) -> dict[Transfer, None]:
        """Transfers of pages and of states handed out but not yet ended."""
        pages = self.transfers.in_flight
        return pages if self.shares_room else pages | self.states.transfers.in_flight

    def cached_pages(self, request: Request, gpu: Tier | None = None) -> tuple[int, int]:
        """As for any cache: up to the deepest usable state."""
        on_gpu, lower = self.kv.count_cached(request, gpu or self.gpu, lowest=DISK)
        depth = self._deepest_state(request, on_gpu + lower)[0]
        below = self.kv.cached_pages(request, gpu)[1]
        return min(on_gpu, depth), min(below, max(0, depth - on_gpu))

    @staticmethod
    def _states_of(lease: Lease) -> StateLease:
        assert lease.states is not None
        return lease.states

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0) -> bool:
        """As for any cache; also reserves room for the states that the request will save or load.

        If the tier is too small, states that share it with pages are given up, including the one to begin from.
        """
        states = self._states_of(lease)
        if load_pages < lease.lower_pages:
            self._end_at_state(lease, lease.gpu_pages + load_pages)
            load_pages = lease.lower_pages
        spare_pages = self.gpu.pool.capacity - self.kept_pages(lease) - pages
        if self.shares_room and states.state is not None and spare_pages < self.states.units:
            self._end_at_state(lease, 0)
            load_pages = 0
        states.save_after = self._plan(lease)
        state = states.state
        loads_state = state is not None and state.state[GPU] not in (READY, LEAVING)
        if self.shares_room:
            wanted = len(states.save_after) + (state is not None)
            spare = max(0, spare_pages) // self.states.units
            del states.save_after[: max(0, wanted - spare)]
            states.pages = self.states.units * (len(states.save_after) + loads_state)
        if not self.kv.can_admit(lease, pages + states.pages + self._idle_state_pages(state)):
            return False
        if state is not None:
            states.tier = self.states.pin(state, now)
            states.is_below = states.tier.index != GPU
        if loads_state and not self.shares_room:
            room = self.states.gpu
            if not self.states.transfers.make_room(room, 1, now) or not room.pool.free:
                self._release_start(lease)
                return False
            states.slots = room.pool.take(1)
        if state is None and states.detached is not None and self.watch is not None:
            self.watch.begins_detached(lease, states.detached)
        if not self.kv.admit(lease, pages + states.pages, now, load_pages):
            self._release_start(lease)
            return False
        if state is not None and self.shares_room:
            self.states.join_to(state, lease.path[-1])
        self._use_start(lease)
        if not lease.is_resumed:
            self._count_admission(lease)
        return True

    def _use_start(self, lease: Lease) -> None:
        """Record that a request begins from its state, or from its detached state."""
        states = self._states_of(lease)
        if states.state is not None:
            if self.shares_room:
                states.states.append(states.state)
            self.states.begin_from(states.state, self.now, is_first=not lease.is_resumed)
        elif states.detached is not None and self.detached is not None and states.detached in self.detached:
            self.detached.touch(states.detached)

    def _idle_state_pages(self, state: Node | None) -> int:
        """Count the pages of a state that could be evicted now, but not once a request begins from it."""
        if not self.shares_room or state is None:
            return 0
        is_idle = state.state[GPU] == LEAVING or state.state[GPU] == READY and not state.pins[GPU]
        return state.pages if is_idle else 0

    def can_admit(self, lease: Lease, pages: int) -> bool:
        return self.kv.can_admit(lease, pages)

    def kept_pages(self, lease: Lease) -> int:
        return self.kv.kept_pages(lease)

    def _count_admission(self, lease: Lease) -> None:
        """Count the state that a request begins from and the tokens lost for lack of one; once per request."""
        states = self._states_of(lease)
        self.known_pages[lease.request.index] = states.known_pages
        counts, lost = self.states.counts, states.known_pages - lease.gpu_pages - lease.lower_pages
        counts.used += states.state is not None or states.detached is not None
        counts.tokens_lost_to_missing_state += lost * self.page_tokens

    def _plan(self, lease: Lease) -> list[int]:
        """Return the depths, in pages, at which states of this prompt are saved."""
        request, known = lease.request, self._states_of(lease).known_pages
        start = lease.gpu_pages + lease.lower_pages
        full = self._full_pages(request)
        replay = min(full, request.lookup_pages(self.page_tokens))
        prefill = self._prefill(start=start, known=min(known, full), full=full, replay=replay)
        pages = whole_numbers(self._policy_name, "after_prefill()", self.policy.after_prefill(prefill), full)
        return self._on_grid(pages, start, full)

    def _after_answer(self, full: int, stop: int) -> list[int]:
        """Return the depths at which states of an answer are saved that takes the path from ``full`` pages to ``stop``."""
        return whole_numbers(self._policy_name, "after_answer()", self.policy.after_answer(full, stop), stop)

    def _full_pages(self, request: Request) -> int:
        """Return the number of a prompt's full pages, not counting pages without an id."""
        return min(request.prompt_tokens // self.page_tokens, request.prompt_pages)

    def _on_grid(self, pages: Iterable[int], start: int, stop: int) -> list[int]:
        """Round depths down to the grid; return those after ``start`` and up to ``stop``, ascending."""
        grid = self.grid_pages
        return sorted({page // grid * grid for page in pages if start < page // grid * grid <= stop})

    def claim(self, lease: Lease, now: float) -> Claim:
        """As for any cache."""
        return self.kv.claim(lease, now)

    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        """As for any cache."""
        return self.kv.grow(needs, now)

    def fetch(self, lease: Lease, pages: int, now: float) -> Fetch:
        """As for any cache."""
        return self.kv.fetch(lease, pages, now)

    def room_to_fetch(self, lease: Lease) -> int:
        """As for any cache."""
        return self.kv.room_to_fetch(lease)

    def hold(self, fetch: Transfer) -> Hold:
        """As for any cache."""
        return self.kv.hold(fetch)

    def let_go(self, hold: Hold) -> None:
        """As for any cache."""
        self.kv.let_go(hold)

    def load(self, lease: Lease, now: float) -> Load:
        """As for any cache; the state is loaded first, or another request's load of it is among the loads.

        If pages, or the state, are out of reach by now, the request begins from an earlier state.
        """
        states, reused = self._states_of(lease), lease.gpu_pages + lease.loaded_pages
        own = self._load_state(lease, now) if states.is_below else NO_TRANSFERS
        load = self.kv.load(lease, now)
        pages = lease.gpu_pages + lease.loaded_pages
        limit = min(pages, reused - states.is_below)
        if limit < reused:
            self._begin_earlier(lease, pages, limit, now)
        loads = load.loads if states.load is None else [states.load, *load.loads]
        return Load(own + load.transfers, loads)

    def _load_state(self, lease: Lease, now: float) -> list[Transfer]:
        """Start loading the state, unless another request has done so.

        Without room on the way, after a reset, or if the other request's load has failed, it stays below.
        """
        states, home = self._states_of(lease), self.states
        state = states.state
        assert state is not None and states.tier is not None
        loads: list[Transfer] = []
        if lease.epoch != self.kv.epoch:
            return loads
        if state.state[GPU]:
            states.load = next((load for load in transfers_of(state) if load.target is home.gpu), None)
            if states.load is None and state.state[GPU] != READY:
                return loads
        else:
            if self.shares_room:
                slots, left = home.gpu.pool.split(lease.slots, home.units)
            else:
                slots, left = states.slots, None
            loads = home.load(state, slots, now)
            if not loads:
                return loads
            states.load = loads[-1]
            if self.shares_room:
                lease.slots = left
            else:
                states.slots = None
        home.residency.pin(state, home.gpu)
        home.residency.unpin(state, states.tier)
        states.tier, states.is_below = home.gpu, False
        return loads

    def shorten_hit(self, lease: Lease, load: Transfer | None, now: float) -> int:
        """As for any cache; the request begins from an earlier state, since none follows the last page that has arrived."""
        reused, gpu = lease.gpu_pages + lease.loaded_pages, lease.gpu
        gaps = [node.depth for node in lease.node.path() if is_gap(node, gpu)]
        there = min([reused, *gaps])
        limit = min(there, reused - (load is not None and load is self._states_of(lease).load))
        if limit < reused:
            self._begin_earlier(lease, there, limit, now)
        return reused - lease.gpu_pages - lease.loaded_pages

    def _begin_earlier(self, lease: Lease, pages: int, limit: int, now: float) -> None:
        """Cut what an admitted request reuses back to a state within ``limit`` pages, of ``pages`` whose KV is there.

        The state must be on the GPU: what is still below would hold up the request again. Without one, nothing is reused.
        """
        states, counts = self._states_of(lease), self.states.counts
        had_one = states.state is not None or states.detached is not None
        depth, found, detached = self._deepest_state(lease.request, limit, on_gpu=True)
        self._release_start(lease)
        if states.state in states.states:
            states.states.remove(states.state)
        states.state = states.detached = states.load = None
        if found is not None and found[0] == depth:
            states.state, states.tier = found[1], self.states.pin(found[1], now)
        elif detached is not None and depth:
            states.detached = detached[1]
            if self.watch is not None:
                self.watch.begins_detached(lease, states.detached)
        self._use_start(lease)
        if not lease.is_resumed:
            counts.used -= had_one and not depth
            counts.tokens_lost_to_missing_state += (pages - depth) * self.page_tokens
        lost = lease.gpu_pages + lease.loaded_pages - depth
        lease.loaded_disk_pages = max(0, lease.loaded_disk_pages - lost)
        lease.loaded_pages = max(0, depth - lease.gpu_pages)
        lease.gpu_pages = min(lease.gpu_pages, depth)

    def arriving(self, lease: Lease) -> list[Transfer]:
        """As for any cache, including the load of the request's state."""
        loads = self.kv.arriving(lease)
        load = self._states_of(lease).load
        return [*loads, load] if load is not None and not load.done and load not in loads else loads

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        """As for any cache; also saves the states planned for the prompt, or those of the answer."""
        states = self._states_of(lease)
        transfers = self.kv.insert(lease, now)
        self._release_start(lease)
        if lease.epoch == self.kv.epoch:
            request = lease.request
            runs, depths = request.runs, states.save_after
            if lease.is_finishing:
                full = self._full_pages(request)
                stop = lease.node.depth + lease.node.pages
                prompt, answer = split_runs(runs, full)[0], request.output_runs or ()
                runs = join_runs(prompt, answer) if prompt else answer
                depths = self._on_grid(self._after_answer(full, stop), full, stop)
            self._save_all(lease, runs, depths)
        states.save_after = []
        return transfers + self._flush()

    def _save_all(self, lease: Lease, runs: tuple[Run, ...], depths: list[int]) -> None:
        ends = self._ends(lease.node, depths) if self.shares_room else {}
        limit = self.policy.max_states_per_path
        for place in places_after(runs, depths):
            self._save(lease, place, ends.get(place.depth))
            if limit is not None:
                self.states.keep_recent(runs, place.depth, limit)

    def _ends(self, node: Node, depths: list[int]) -> dict[int, Node]:
        """Return, by depth, the nodes of the path to ``node`` that end at ``depths`` (ascending), cutting where need be."""
        ends: dict[int, Node] = {}
        for depth in reversed(depths):
            while node.depth >= depth and node.parent is not None:
                node = node.parent
            ends[depth] = self.residency.cut(node, depth - node.depth) if node.depth + node.pages > depth else node
        return ends

    def _save(self, lease: Lease, place: Place, end: Node | None) -> None:
        """Save a state. Where states share memory with the KV it takes the request's slots or, after the answer, others."""
        states, now, saved = self._states_of(lease), self.residency.tick(self.now), self.states.counts.saved
        if not self.shares_room:
            self.states.save(place, now)
        elif self.gpu.pool.count(lease.slots) >= self.states.units:
            lease.slots = self.states.save(place, now, lease.slots, end)
        elif lease.is_finishing:
            self.states.save(place, now, None, end)
        if self.watch is not None and self.states.counts.saved > saved:
            self.watch.saved(lease, place.page, self.states.gpu_slots(place.page))
        if not self.shares_room:
            return
        state = self.states.find(place.page)
        if state is not None:
            states.states.append(state)
        for edge in self.gpu.below:
            if edge.copies_prompts and self._is_on(edge.lower, lease.node, place.depth):
                self.states.follow(place.page, edge, now)

    @staticmethod
    def _is_on(tier: Tier, node: Node, depth: int) -> bool:
        """Whether a tier has, or is receiving, the page at this depth of the path to ``node``."""
        while node.depth >= depth and node.parent is not None:
            node = node.parent
        return node.state[tier.index] not in (ABSENT, LEAVING)

    # --- the end of a request ------------------------------------------------------------------------------------------------

    def finish_request(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        """As for any cache; policies can note the same about the request's states as about its path."""
        self.kv.keep_prompt(lease)
        for tier in self.tiers:
            tier.eviction.request_states = self._states_of(lease).states
        transfers = self._end_within_prompt(lease)
        if self.kv.begin_answer(lease):
            transfers = transfers + self.insert(lease, max(now, self.now))
        self._release_start(lease)
        self.kv.end_request(lease, now)
        if self.transfers.writes_early:
            transfers = transfers + self.kv.write_early()
        transfers = transfers + self._flush()
        for tier in self.tiers:
            tier.eviction.request_states = ()
        return transfers

    def _end_within_prompt(self, lease: Lease) -> list[Transfer]:
        """If the answer fills no page of its own, save its state after the last full page of the prompt."""
        request = lease.request
        if not self.rules.cache_output or request.output_runs != () or lease.epoch != self.kv.epoch:
            return NO_TRANSFERS
        full, begin = self._full_pages(request), lease.gpu_pages + lease.loaded_pages
        lease.is_finishing = True
        self._save_all(lease, request.runs, self._on_grid(self._after_answer(full, full), begin, full))
        return self._flush()

    def release(self, lease: Lease) -> None:
        """As for any cache."""
        self._release_start(lease)
        self.kv.release(lease)

    def _release_start(self, lease: Lease) -> None:
        """Unpin the state that the request begins from, and give back slots that were reserved to load it."""
        states, home = self._states_of(lease), self.states
        if states.state is not None and states.tier is not None:
            home.residency.unpin(states.state, states.tier)
            states.tier, states.is_below = None, False
        if states.slots is not None:
            home.gpu.pool.give(states.slots)
            states.slots = None

    # --- states leave with the KV --------------------------------------------------------------------------------------------

    def _leave_with(self, node: Node, tier: Tier) -> None:
        """Evict the states after pages whose KV has left a tier; states on the GPU are detached instead if the policy says so."""
        home, index = self.states, tier.index
        if index >= len(home.tiers):
            return
        for place, state in home.index.along(node.runs):
            if state.state[index] != READY or state.pins[index]:
                continue
            if index == GPU and self.detached is not None:
                self.detached.insert(place)
                if self.watch is not None:
                    self.watch.detached(place.page, state.slots[index])
                home.counts.detached += 1
                home.residency.free(state, home.tiers[index])
            else:
                home.transfers.evict(state, home.tiers[index], self.now)

    # --- transfers of pages and, if states have their own memory, of states ----------------------------------------------------

    def _flush(self) -> list[Transfer]:
        transfers = self.transfers.flush()
        return transfers if self.shares_room else transfers + self.states.transfers.flush()

    def _home_of(self, transfer: Transfer) -> Transfers:
        """Return the ``Transfers`` object that a transfer belongs to."""
        return self.transfers if transfer.target in self.tiers else self.states.transfers

    def begin(self, transfer: Transfer, now: float) -> Begin:
        """Give a transfer its target slots, or return the transfers that must end first."""
        return self._home_of(transfer).begin(transfer, now)

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        """End a transfer whose pages have all arrived. Returns the write-downs that follow."""
        return self._home_of(transfer).finish(transfer, now) + self._flush()

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        """End a transfer after only its first ``pages_arrived`` pages arrived. Returns the write-downs that follow."""
        return self._home_of(transfer).abort(transfer, pages_arrived, now) + self._flush()

    # --- everything ------------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop every page and every state."""
        self.kv.reset()
        if not self.shares_room:
            self.states.residency.clear()
        self.states.clear()
        if self.detached is not None:
            self.detached.clear()

    def describe_checkpoints(self) -> dict[str, int]:
        return asdict(self.states.count(self.state_bytes))

    def pages_known(self) -> dict[int, int] | None:
        return self.known_pages

    def check(self) -> None:
        """Recount everything; raise AssertionError if a count or an invariant is wrong."""
        pinned: list[tuple[Node, Tier]] = []
        slots: list[Any] = []
        for lease in self.leases:
            states = self._states_of(lease)
            if states.state is not None and states.tier is not None:
                pinned.append((states.state, states.tier))
            if states.slots is not None:
                slots.append(states.slots)
        held = self.kv.held()
        if self.shares_room:
            held.pins.extend(pinned)
        else:
            check(self.states.residency, self.states.transfers, Held(pins=pinned, slots={self.states.gpu: slots}))
        check(self.residency, self.transfers, held)
        counts = self.states.count(self.state_bytes)
        if not 0 <= counts.evicted <= counts.saved:
            raise AssertionError(f"{counts.evicted} states evicted, but {counts.saved} saved")
