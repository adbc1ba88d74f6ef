"""The cache of a hybrid model: a cached prefix is reused up to the last page after which a recurrent state was saved."""

from collections.abc import Iterable
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING, Any

from kvsim.core.answers import whole_numbers
from kvsim.core.cache import Cache
from kvsim.core.edge import Edge
from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.runs import Run, join_runs, split_runs
from kvsim.core.serving import Claim, Fetch, Growth, Load, ServedCache
from kvsim.core.states import DetachedStates, Place, StateStore, places_after
from kvsim.core.tier import GPU, Tier
from kvsim.core.transfer import Transfer
from kvsim.core.transfers import NO_TRANSFERS, Begin, Transfers
from kvsim.core.tree import ABSENT, LEAVING, READY, Node

if TYPE_CHECKING:
    from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill


class StateLease:
    """What a request holds of recurrent states: its match ends at one."""

    __slots__ = ("detached", "is_below", "known_pages", "load", "pages", "save_after", "slots", "state", "states", "tier")

    def __init__(self, known_pages: int) -> None:
        self.known_pages = known_pages
        """Pages of the prompt that have KV in some tier; only those up to the state count."""
        self.state: Node | None = None
        self.detached: int | None = None
        """The page after which a detached state was found."""
        self.tier: Tier | None = None
        """Where the state is pinned while the request starts from it."""
        self.is_below = False
        """Whether that is a tier below the GPU."""
        self.slots: Any = None
        """Where it will be loaded to, if states have room of their own."""
        self.load: Transfer | None = None
        self.save_after: list[int] = []
        """Pages of the prompt after which a state will be saved."""
        self.pages = 0
        """How many of the request's slots are kept for states."""
        self.states: list[Node] = []
        """Those in the pages' room that the request began from or saved."""


class HybridCache(ServedCache):
    """A cache of KV whose hits end at saved states.

    States are kept in the KV's own tiers or, if ``state_tiers`` are given, in tiers of their own. They follow the KV of their
    page: when it leaves the GPU they leave too, unless the policy keeps detached ones. ``grid_pages``: states exist only after
    multiples of that many pages.
    """

    def __init__(
        self,
        kv: Cache,
        *,
        policy: "CheckpointPolicy",
        prefill: "type[Prefill]",
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
        """By request, the pages that a model without recurrent layers could have reused."""
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
        kv.residency.on_leave = self._leave_with
        if self.shares_room:
            for tier in kv.tiers:
                tier.eviction.empty_cache = self.empty_cache

    def empty_cache(self, tier: Tier) -> "HybridCache":
        """A cache like this one, of another tier alone, its states among the pages."""
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
        """The longest prefix whose KV some tier has, cut back to the deepest usable state."""
        lease = self.kv.match(request, gpu)
        known = lease.gpu_pages + lease.lower_pages
        lease.states = StateLease(known)
        self._end_at_state(lease, known)
        return lease

    def _end_at_state(self, lease: Lease, limit: int) -> None:
        """Let a lease that has not been admitted end at its deepest state within ``limit`` pages."""
        request, states = lease.request, self._states_of(lease)
        found = self.states.deepest(request.runs, limit)
        detached = self.detached.longest(request.runs, limit) if self.detached is not None else None
        depth = max(found[0] if found else 0, detached[0] if detached else 0)
        if depth < lease.gpu_pages + lease.lower_pages:
            self.kv.rematch(lease, depth)
        states.state = states.detached = None
        if found is not None and found[0] == depth:
            states.state = found[1]
        elif detached is not None:
            states.detached = detached[1]

    @staticmethod
    def _states_of(lease: Lease) -> StateLease:
        assert lease.states is not None
        return lease.states

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0) -> bool:
        """As for any cache; room for the states that this request will save, or has to load, is reserved too."""
        states = self._states_of(lease)
        if load_pages < lease.lower_pages:
            self._end_at_state(lease, lease.gpu_pages + load_pages)
            load_pages = lease.lower_pages
        states.save_after = self._plan(lease)
        state = states.state
        loads_state = state is not None and state.state[GPU] not in (READY, LEAVING)
        if self.shares_room:
            wanted = len(states.save_after) + (state is not None)
            spare = max(0, self.gpu.pool.capacity - pages) // self.states.units
            del states.save_after[: max(0, wanted - spare)]
            states.pages = self.states.units * (len(states.save_after) + loads_state)
        if state is not None:
            states.tier = self.states.pin(state, now)
            states.is_below = states.tier.index != GPU
        if loads_state and not self.shares_room:
            room = self.states.gpu
            if not self.states.transfers.make_room(room, 1, now) or not room.pool.free:
                self._end_start(lease)
                return False
            states.slots = room.pool.take(1)
        if not self.kv.admit(lease, pages + states.pages, now, load_pages):
            self._end_start(lease)
            return False
        if state is not None:
            if self.shares_room:
                self.states.join_to(state, lease.path[-1])
                states.states.append(state)
            self.states.begin_from(state, self.now, is_first=not lease.is_resumed)
        elif states.detached is not None and self.detached is not None:
            self.detached.touch(states.detached)
        if not lease.is_resumed:
            self._count_admission(lease)
        return True

    def can_admit(self, lease: Lease, pages: int) -> bool:
        return self.kv.can_admit(lease, pages)

    def _count_admission(self, lease: Lease) -> None:
        """Count what a request begins from and what it lacks: once, however often it is admitted."""
        states = self._states_of(lease)
        self.known_pages[lease.request.index] = states.known_pages
        counts, lost = self.states.counts, states.known_pages - lease.gpu_pages - lease.lower_pages
        counts.used += states.state is not None or states.detached is not None
        counts.tokens_lost_to_missing_state += lost * self.page_tokens

    def _plan(self, lease: Lease) -> list[int]:
        """Pages after which this prompt's states are saved."""
        request, known = lease.request, self._states_of(lease).known_pages
        start = lease.gpu_pages + lease.lower_pages
        full = self._full_pages(request)
        replay = min(full, (request.prompt_tokens - 1) // self.page_tokens)
        prefill = self._prefill(start=start, known=min(known, full), full=full, replay=replay)
        pages = whole_numbers(self._policy_name, "after_prefill()", self.policy.after_prefill(prefill), full)
        return self._on_grid(pages, start, full)

    def _after_answer(self, full: int, stop: int) -> list[int]:
        """Pages after which a state is saved of an answer that goes on from ``full`` pages to ``stop``."""
        return whole_numbers(self._policy_name, "after_answer()", self.policy.after_answer(full, stop), stop)

    def _full_pages(self, request: Request) -> int:
        """Pages of a prompt that are full and have a name."""
        return min(request.prompt_tokens // self.page_tokens, request.prompt_pages)

    def _on_grid(self, pages: Iterable[int], start: int, stop: int) -> list[int]:
        """Ascending, after ``start`` and up to ``stop``, where the kernels have a state."""
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

    def load(self, lease: Lease, now: float) -> Load:
        """As for any cache; the state comes first."""
        states = self._states_of(lease)
        own = self._load_state(lease, now) if states.is_below else NO_TRANSFERS
        planned, limit = lease.loaded_pages, lease.gpu_pages + lease.loaded_pages
        if states.is_below:
            self._end_start(lease)
            limit -= 1  # the state could not be brought
        load = self.kv.load(lease, now)
        if lease.loaded_pages < planned or limit < lease.gpu_pages + lease.loaded_pages:
            self._settle_for_less(lease, limit)
        return Load(own + load.transfers, load.loads) if own else load

    def _load_state(self, lease: Lease, now: float) -> list[Transfer]:
        """Bring the state to the GPU, unless another request has begun to. It stays below if there is no room on the way."""
        states, home = self._states_of(lease), self.states
        state = states.state
        assert state is not None and states.tier is not None
        loads: list[Transfer] = []
        if state.state[GPU]:
            states.load = next((load for load in state.transfers if load.target is home.gpu), None)
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

    def _settle_for_less(self, lease: Lease, limit: int) -> None:
        """KV or a state that a load cannot bring: what is left counts up to the state before, within ``limit`` pages."""
        there = min(limit, lease.gpu_pages + lease.loaded_pages)
        found = self.states.deepest(lease.request.runs, there)
        usable = found[0] if found else 0
        lease.loaded_pages = max(0, usable - lease.gpu_pages)
        lease.gpu_pages = min(lease.gpu_pages, usable)

    def arriving(self, lease: Lease) -> list[Transfer]:
        """As for any cache, the load of its state included."""
        loads = self.kv.arriving(lease)
        load = self._states_of(lease).load
        return [*loads, load] if load is not None and not load.done and load not in loads else loads

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        """As for any cache; and the states that were planned, or those after the answer, are saved."""
        states = self._states_of(lease)
        transfers = self.kv.insert(lease, now)
        self._end_start(lease)
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
        """By depth, ascending in ``depths``, the nodes of the path to ``node`` that end there; they are cut if need be."""
        ends: dict[int, Node] = {}
        for depth in reversed(depths):
            while node.depth >= depth and node.parent is not None:
                node = node.parent
            ends[depth] = self.residency.cut(node, depth - node.depth) if node.depth + node.pages > depth else node
        return ends

    def _save(self, lease: Lease, place: Place, end: Node | None) -> None:
        """Save a state: where states share room with the KV, in slots of the request, or, after its answer, in others."""
        states, now = self._states_of(lease), self.residency.tick(self.now)
        if not self.shares_room:
            self.states.save(place, now)
            return
        if self.gpu.pool.count(lease.slots) >= self.states.units:
            lease.slots = self.states.save(place, now, lease.slots, end)
        elif lease.is_finishing:
            self.states.save(place, now, None, end)
        state = self.states.find(place.page)
        if state is not None:
            states.states.append(state)
        for edge in self.gpu.below:
            if edge.copies_prompts and self._is_on(edge.lower, lease.node, place.depth):
                self.states.follow(place.page, edge, now)

    @staticmethod
    def _is_on(tier: Tier, node: Node, depth: int) -> bool:
        """Whether a tier has, or is getting, the page at this depth of a path that ends with ``node``."""
        while node.depth >= depth and node.parent is not None:
            node = node.parent
        return node.state[tier.index] not in (ABSENT, LEAVING)

    # --- the end of a request ------------------------------------------------------------------------------------------------

    def finish_request(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        """As for any cache; what policies note of the path, they note of the states beside it."""
        for tier in self.tiers:
            tier.eviction.beside = self._states_of(lease).states
        transfers = self._end_within_prompt(lease)
        if self.kv.begin_answer(lease):
            transfers = transfers + self.insert(lease, max(now, self.now))
        self._end_start(lease)
        self.kv.end_request(lease, now)
        if self.transfers.writes_early:
            transfers = transfers + self.kv.write_early()
        transfers = transfers + self._flush()
        for tier in self.tiers:
            tier.eviction.beside = ()
        return transfers

    def _end_within_prompt(self, lease: Lease) -> list[Transfer]:
        """Save the state at the end of an answer that fills no page of its own: after the last full page of its prompt."""
        request = lease.request
        if not self.rules.cache_output or request.output_runs != () or lease.epoch != self.kv.epoch:
            return NO_TRANSFERS
        full, begin = self._full_pages(request), lease.gpu_pages + lease.loaded_pages
        lease.is_finishing = True
        self._save_all(lease, request.runs, self._on_grid(self._after_answer(full, full), begin, full))
        return self._flush()

    def release(self, lease: Lease) -> None:
        """As for any cache."""
        self._end_start(lease)
        self.kv.release(lease)

    def _end_start(self, lease: Lease) -> None:
        """The request has begun: its first state is no longer needed."""
        states, home = self._states_of(lease), self.states
        if states.state is not None and states.tier is not None:
            home.residency.unpin(states.state, states.tier)
            states.tier, states.is_below = None, False
        if states.slots is not None:
            home.gpu.pool.give(states.slots)
            states.slots = None

    # --- states follow the KV ------------------------------------------------------------------------------------------------

    def _leave_with(self, node: Node, tier: Tier) -> None:
        """The KV of these pages leaves a tier: so do the states after them, or, from the GPU, they become detached."""
        home, index = self.states, tier.index
        if index >= len(home.tiers):
            return
        for place, state in home.index.along(node.runs):
            if state.state[index] != READY or state.pins[index]:
                continue
            if index == GPU and self.detached is not None:
                self.detached.insert(place)
                home.counts.detached += 1
                home.residency.free(state, home.tiers[index])
            else:
                home.transfers.evict(state, home.tiers[index], self.now)

    # --- transfers: of pages and, if states have room of their own, of states --------------------------------------------------

    def _flush(self) -> list[Transfer]:
        transfers = self.transfers.flush()
        return transfers if self.shares_room else transfers + self.states.transfers.flush()

    def _home_of(self, transfer: Transfer) -> Transfers:
        """The transfers that one belongs to."""
        return self.transfers if transfer.target in self.tiers else self.states.transfers

    def begin(self, transfer: Transfer, now: float) -> Begin:
        """Give a transfer its target slots, or say what has to end first."""
        return self._home_of(transfer).begin(transfer, now)

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        """A transfer has brought everything. Returns the write-downs that follow."""
        return self._home_of(transfer).finish(transfer, now) + self._flush()

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        """A transfer has brought its first ``pages_arrived`` pages only. Returns the write-downs that follow."""
        return self._home_of(transfer).abort(transfer, pages_arrived, now) + self._flush()

    # --- everything ------------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every page and every state."""
        self.kv.reset()
        if not self.shares_room:
            self.states.residency.clear()
        self.states.clear()
        if self.detached is not None:
            self.detached.clear()

    def describe_checkpoints(self) -> dict[str, int]:
        """What became of states, by name."""
        return asdict(self.states.count(self.state_bytes))

    def check(self) -> None:
        """Recount everything; raises AssertionError where a count or an invariant does not hold."""
        from kvsim.core.check import Held, check, held_by_requests

        pinned: list[tuple[Node, Tier]] = []
        slots: list[Any] = []
        for lease in self.leases:
            states = self._states_of(lease)
            if states.state is not None and states.tier is not None:
                pinned.append((states.state, states.tier))
            if states.slots is not None:
                slots.append(states.slots)
        held = held_by_requests(self.kv)
        if self.shares_room:
            held.pins.extend(pinned)
        else:
            check(self.states.residency, self.states.transfers, Held(pins=pinned, slots={self.states.gpu: slots}))
        check(self.residency, self.transfers, held)
        counts = self.states.count(self.state_bytes)
        if not 0 <= counts.evicted <= counts.saved:
            raise AssertionError(f"{counts.evicted} states evicted of {counts.saved}")
