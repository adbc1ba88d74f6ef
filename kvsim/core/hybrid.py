"""The cache of a hybrid model: a cached prefix is reused up to the last page after which a recurrent state was saved."""

from collections.abc import Iterable
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING, Any

from kvsim.core.cache import Lease, TieredCache
from kvsim.core.checkpoints import DetachedStates, Place, StateStore, places_after
from kvsim.core.movement import CPU, GPU, Movement
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.runs import Run, join_runs, split_runs
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.core.tree import ABSENT, LEAVING, READY, Node

if TYPE_CHECKING:
    from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill


class HybridLease(Lease):
    """A lease that ends at a state: ``known_pages`` of the prompt have KV in some tier, but only those up to the state count."""

    __slots__ = (
        "known_pages",
        "state",
        "state_tier",
        "state_slots",
        "state_load",
        "detached",
        "save_after",
        "state_pages",
        "states",
    )

    def __init__(self, request: Request, path: list[Node], pages: int, rest: tuple[Run, ...]) -> None:
        super().__init__(request, path, pages, rest)
        self.known_pages = 0
        self.state: Node | None = None
        self.state_tier: int | None = None
        """Where the state is pinned while the request starts from it."""
        self.state_slots: Any = None
        """Where it will be loaded to, if states have room of their own."""
        self.state_load: Transfer | None = None
        self.detached: int | None = None
        """The page after which a detached state was found."""
        self.save_after: list[int] = []
        """Pages of the prompt after which a state will be saved."""
        self.state_pages = 0
        """Of the request's slots, so many are kept for states."""
        self.states: list[Node] = []
        """Those in the pages' room that the request began from or saved."""

    @property
    def has_load(self) -> bool:
        return self.loading is not None or self.state_tier == CPU


class HybridCache(TieredCache):
    """A tiered cache whose hits end at saved states.

    ``states`` are kept in the KV's own tiers, if its home is this cache, or in tiers of their own. They follow the KV of their
    page: when it leaves the GPU they leave too, unless the policy keeps detached ones. ``grid_pages``: states exist only after
    multiples of so many pages.
    """

    lease_type = HybridLease

    def __init__(
        self,
        tiers: list[Tier],
        rules: Rules,
        page_tokens: int,
        *,
        policy: "CheckpointPolicy",
        prefill: "type[Prefill]",
        grid_pages: int,
        state_bytes: int,
        state_pages: int,
        state_tiers: list[Tier] | None = None,
    ) -> None:
        super().__init__(tiers, rules, page_tokens)
        self.state_bytes = state_bytes
        self.known_pages: dict[int, int] = {}
        """By request, the pages that a model without recurrent layers could have reused."""
        self.policy = policy
        self.grid_pages = grid_pages
        self._prefill = prefill
        self.shares_room = state_tiers is None
        self.detached = DetachedStates(policy.detached_states) if policy.detached else None
        self.states = StateStore(self if state_tiers is None else Movement(state_tiers, rules), state_pages, self.detached)
        for tier in tiers:
            self._follow(tier)
            if self.shares_room:
                tier.eviction.empty_cache = self.empty_cache

    def empty_cache(self, tier: Tier) -> TieredCache:
        """A cache like this one, of another tier alone, its states among the pages."""
        return HybridCache(
            [tier],
            self.rules,
            self.page_tokens,
            policy=self.policy,
            prefill=self._prefill,
            grid_pages=self.grid_pages,
            state_bytes=self.state_bytes,
            state_pages=self.states.units,
        )

    def _follow(self, tier: Tier) -> None:
        """Hear of pages that leave the tier, before its policy does."""
        told = tier.on_remove

        def left(node: Node) -> None:
            if told:
                told(node)
            if not node.is_state:
                self._leave_with(node, tier.index)

        tier.on_remove = left

    # --- requests ----------------------------------------------------------------------------------------------------

    def match(self, request: Request) -> Any:
        """The longest prefix whose KV some tier has, cut back to the deepest usable state."""
        lease: Any = super().match(request)
        known = lease.gpu_pages + lease.lower_pages
        lease = self._end_at_state(lease, known)
        lease.known_pages = known
        return lease

    def _end_at_state(self, lease: HybridLease, limit: int) -> HybridLease:
        """A lease of the same request that ends at its deepest state within ``limit`` pages."""
        request = lease.request
        found = self.states.deepest(request.runs, limit)
        detached = self.detached.longest(request.runs, limit) if self.detached is not None else None
        depth = max(found[0] if found else 0, detached[0] if detached else 0)
        if depth < lease.gpu_pages + lease.lower_pages:
            longer, lease = lease, self.match_runs(request, split_runs(request.runs, depth)[0])
            lease.known_pages = longer.known_pages
            lease.is_resumed, lease.is_known_prompt = longer.is_resumed, longer.is_known_prompt
        if found is not None and found[0] == depth:
            lease.state = found[1]
        elif detached is not None:
            lease.detached = detached[1]
        return lease

    def admit(self, lease: Any, pages: int, now: float, load_pages: int = 0) -> bool:
        """As for any cache; room for the states that this request will save, or has to load, is reserved too."""
        if load_pages < lease.lower_pages:
            shorter = self._end_at_state(lease, lease.gpu_pages + load_pages)
            for name in (*Lease.__slots__, *HybridLease.__slots__):
                if hasattr(shorter, name):
                    setattr(lease, name, getattr(shorter, name))
            load_pages = lease.lower_pages
        lease.save_after = self._plan(lease)
        state, home = lease.state, self.states.home
        loads_state = state is not None and state.state[GPU] not in (READY, LEAVING)
        if self.shares_room:
            wanted = len(lease.save_after) + (state is not None)
            spare = max(0, self.gpu.pool.capacity - pages) // self.states.units
            del lease.save_after[: max(0, wanted - spare)]
            lease.state_pages = self.states.units * (len(lease.save_after) + loads_state)
        if state is not None:
            lease.state_tier = self.states.pin(state, now)
        if loads_state and not self.shares_room:
            if not home.make_room(home.gpu, 1, now) or not home.gpu.pool.free:
                self._end_start(lease)
                return False
            lease.state_slots = home.gpu.pool.take(1)
        if not super().admit(lease, pages + lease.state_pages, now, load_pages):
            self._end_start(lease)
            return False
        if state is not None:
            if self.shares_room:
                self.states.join_to(state, lease.path[-1])
                lease.states.append(state)
            self.states.begin_from(state, self.now, is_use=not lease.is_resumed)
        elif lease.detached is not None and self.detached is not None:
            self.detached.touch(lease.detached)
        if not lease.is_resumed:
            self._count_admission(lease)
        return True

    def _count_admission(self, lease: HybridLease) -> None:
        """Count what a request begins from and what it lacks: once, however often it is admitted."""
        self.known_pages[lease.request.index] = lease.known_pages
        counts, lost = self.states.counts, lease.known_pages - lease.gpu_pages - lease.lower_pages
        counts.used += lease.state is not None or lease.detached is not None
        counts.tokens_lost_to_missing_state += lost * self.page_tokens

    def _plan(self, lease: HybridLease) -> list[int]:
        """Pages after which this prompt's states are saved."""
        request = lease.request
        start = lease.gpu_pages + lease.lower_pages
        full = self._full_pages(request)
        replay = min(full, (request.prompt_tokens - 1) // self.page_tokens)
        prefill = self._prefill(start=start, known=min(lease.known_pages, full), full=full, replay=replay)
        return self._on_grid(self.policy.after_prefill(prefill), start, full)

    def _full_pages(self, request: Request) -> int:
        """Pages of a prompt that are full and have a name."""
        return min(request.prompt_tokens // self.page_tokens, request.prompt_pages)

    def _on_grid(self, pages: Iterable[int], start: int, stop: int) -> list[int]:
        """Ascending, after ``start`` and up to ``stop``, where the kernels have a state."""
        grid = self.grid_pages
        return sorted({page // grid * grid for page in pages if start < page // grid * grid <= stop})

    def load(self, lease: Any, now: float) -> list[Transfer]:
        transfers = []
        if lease.state_tier == CPU:
            transfers = self._load_state(lease, now)
        planned = lease.loaded_pages
        transfers += super().load(lease, now)
        if lease.loaded_pages < planned:
            self._settle_for_less(lease)
        return transfers

    def _load_state(self, lease: HybridLease, now: float) -> list[Transfer]:
        """Bring the state to the GPU, unless another request has begun to."""
        state, home, units = lease.state, self.states.home, self.states.units
        assert state is not None
        loads = []
        if state.state[GPU]:
            lease.state_load = next((load for load in state.transfers if load.target is home.gpu), None)
        else:
            if self.shares_room:
                slots, lease.slots = home.gpu.pool.split(lease.slots, units)
            else:
                slots, lease.state_slots = lease.state_slots, None
            lease.state_load = self.states.load(state, slots)
            loads = [lease.state_load]
        home.pin(state, GPU)
        home.unpin(state, CPU)
        lease.state_tier = GPU
        return loads

    def _settle_for_less(self, lease: HybridLease) -> None:
        """KV that a load cannot bring makes the state useless: what is left counts up to the state before."""
        there = lease.gpu_pages + lease.loaded_pages
        found = self.states.deepest(lease.request.runs, there)
        usable = found[0] if found else 0
        lease.loaded_pages = max(0, usable - lease.gpu_pages)
        lease.gpu_pages = min(lease.gpu_pages, usable)

    def arriving(self, lease: Any) -> list[Transfer]:
        loads = super().arriving(lease)
        load = lease.state_load
        return [*loads, load] if load is not None and not load.done and load not in loads else loads

    def _ends(self, node: Node, depths: list[int]) -> dict[int, Node]:
        """By depth, ascending in ``depths``, the nodes of the path to ``node`` that end there; they are cut if need be."""
        ends: dict[int, Node] = {}
        for depth in reversed(depths):
            while node.depth >= depth and node.parent is not None:
                node = node.parent
            ends[depth] = self.cut(node, depth - node.depth) if node.depth + node.pages > depth else node
        return ends

    def _save(self, lease: HybridLease, place: Place, end: Node | None) -> None:
        """Save a state: where states share room with the KV, in slots of the request, or, after its answer, in others."""
        now = self.tick(self.now)
        if not self.shares_room:
            self.states.save(place, now)
        else:
            if self.gpu.pool.count(lease.slots) >= self.states.units:
                lease.slots = self.states.save(place, now, lease.slots, end)
            elif lease.is_finishing:
                self.states.save(place, now, None, end)
            if (state := self.states.find(place.page)) is not None:
                lease.states.append(state)
            if len(self.tiers) > CPU and self.tiers[CPU].wanted_pages and self._is_on_cpu(lease.node, place.depth):
                self.states.follow(place.page, now)

    @staticmethod
    def _is_on_cpu(node: Node, depth: int) -> bool:
        """Whether the CPU has, or is getting, the page at this depth of a path that ends with ``node``."""
        while node.depth >= depth and node.parent is not None:
            node = node.parent
        return node.state[CPU] not in (ABSENT, LEAVING)

    def insert(self, lease: Any, now: float) -> list[Transfer]:
        """As for any cache; and the states that were planned, or those after the answer, are saved."""
        transfers = super().insert(lease, now)
        self._end_start(lease)
        if lease.epoch == self.epoch:
            request = lease.request
            runs, depths = request.runs, lease.save_after
            if lease.is_finishing:
                full = self._full_pages(request)
                stop = lease.node.depth + lease.node.pages
                prompt = split_runs(runs, full)[0]
                runs = join_runs(prompt, request.output_runs) if prompt else request.output_runs
                depths = self._on_grid(self.policy.after_answer(full, stop), full, stop)
            self._save_all(lease, runs, depths)
        lease.save_after = []
        return transfers + self.flush()

    def _save_all(self, lease: HybridLease, runs: tuple[Run, ...], depths: list[int]) -> None:
        ends = self._ends(lease.node, depths) if self.shares_room else {}
        limit = self.policy.max_states_per_path
        for place in places_after(runs, depths):
            self._save(lease, place, ends.get(place.depth))
            if limit is not None:
                self.states.keep_recent(runs, place.depth, limit)

    def finish_request(self, lease: Any, now: float = -inf) -> list[Transfer]:
        """As for any cache; what policies note of the path, they note of the states beside it."""
        for tier in self.tiers:
            tier.eviction.beside = lease.states
        transfers = self._end_within_prompt(lease) + super().finish_request(lease, now)
        for tier in self.tiers:
            tier.eviction.beside = ()
        return transfers

    def _end_within_prompt(self, lease: HybridLease) -> list[Transfer]:
        """Save the state at the end of an answer that fills no page of its own: after the last full page of its prompt."""
        request = lease.request
        if not self.rules.cache_output or request.output_runs != () or lease.epoch != self.epoch:
            return []
        full, begin = self._full_pages(request), lease.gpu_pages + lease.loaded_pages
        lease.is_finishing = True
        self._save_all(lease, request.runs, self._on_grid(self.policy.after_answer(full, full), begin, full))
        return self.flush()

    def release(self, lease: Any) -> None:
        self._end_start(lease)
        super().release(lease)

    def _end_start(self, lease: HybridLease) -> None:
        """The request has begun: its first state is not needed any more."""
        home = self.states.home
        if lease.state is not None and lease.state_tier is not None:
            home.unpin(lease.state, lease.state_tier)
            lease.state_tier = None
        if lease.state_slots is not None:
            home.gpu.pool.give(lease.state_slots)
            lease.state_slots = None

    # --- states follow the KV ----------------------------------------------------------------------------------------

    def _leave_with(self, node: Node, tier: int) -> None:
        """The KV of these pages leaves a tier: so do the states after them, or, from the GPU, they become detached."""
        home = self.states.home
        if tier >= len(home.tiers):
            return
        for place, state in self.states.index.along(node.runs):
            if state.state[tier] != READY or state.pins[tier]:
                continue
            if tier == GPU and self.detached is not None:
                self.detached.insert(place)
                self.states.counts.detached += 1
                home.free(state, home.tiers[tier])
            else:
                home.evict(state, home.tiers[tier], self.now)

    # --- two homes ---------------------------------------------------------------------------------------------------

    def flush(self) -> list[Transfer]:
        transfers = super().flush()
        return transfers if self.shares_room else transfers + self.states.home.flush()

    def _home_of(self, transfer: Transfer) -> Movement | None:
        """The other cache that a transfer belongs to, if states have room of their own."""
        return None if self.shares_room or transfer.target in self.tiers else self.states.home

    def begin(self, transfer: Transfer, now: float) -> list[Transfer]:
        home = self._home_of(transfer)
        return super().begin(transfer, now) if home is None else home.begin(transfer, now)

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        home = self._home_of(transfer)
        return super().finish(transfer, now) if home is None else home.finish(transfer, now)

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        home = self._home_of(transfer)
        return super().abort(transfer, pages_arrived, now) if home is None else home.abort(transfer, pages_arrived, now)

    def reset(self) -> None:
        super().reset()
        if not self.shares_room:
            self.states.home.reset()
        self.states.clear()
        if self.detached is not None:
            self.detached.clear()

    def describe_checkpoints(self) -> dict[str, int]:
        """What became of states, by name."""
        return asdict(self.states.count(self.state_bytes))

    # --- checks ------------------------------------------------------------------------------------------------------

    def pinned(self) -> list[tuple[Node, int]]:
        return super().pinned() + (self._pinned_states() if self.shares_room else [])

    def _pinned_states(self) -> list[tuple[Node, int]]:
        return [(lease.state, lease.state_tier) for lease in self.leases if lease.state_tier is not None]

    def check(self) -> None:
        super().check()
        counts = self.states.count(self.state_bytes)
        if not 0 <= counts.evicted <= counts.saved:
            raise AssertionError(f"{counts.evicted} states evicted of {counts.saved}")
        if not self.shares_room:
            from kvsim.core.check import Held, check

            slots = [lease.state_slots for lease in self.leases if lease.state_slots is not None]
            check(self.states.home, Held(pins=self._pinned_states(), slots=slots))
