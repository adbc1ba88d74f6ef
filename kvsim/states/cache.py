"""The cache of a hybrid model: a cached prefix is reusable up to the last page after which a recurrent state was saved."""

from collections.abc import Iterable
from dataclasses import asdict
from math import inf
from typing import Any

from kvsim.core.answers import whole_numbers
from kvsim.core.cache import Cache
from kvsim.core.check import Held, check
from kvsim.core.lease import FINISHED, FIRST, LOOK, LOST, Lease
from kvsim.core.loading import LowerTiers
from kvsim.core.prompt_index import PromptIndex
from kvsim.core.questions import Checkpoints
from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.serving import Claim, Growth, ServedCache
from kvsim.core.state_lease import StateLease
from kvsim.core.tier import GPU, Edge, Tier
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.core.tree import ABSENT, LEAVING, READY, Node
from kvsim.pages.extents import Extent, join_extents, split_extents
from kvsim.states.lower import HybridLower
from kvsim.states.starts import Starts, states_of
from kvsim.states.store import DetachedStates, Place, StatefulPrompts, StateStore, places_after


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
        self.gpu = kv.gpu
        self.page_tokens = kv.page_tokens
        self.leases = kv.leases
        self.residency = kv.residency
        self.transfers = kv.transfers
        self._prefill = prefill
        home = kv.transfers if state_tiers is None else LowerTiers(Residency(state_tiers), state_edges or [])
        self.detached = DetachedStates(policy.detached_states) if policy.detached else None
        self.states = StateStore(home, state_pages, self.detached)
        self.watches, kv.watches = kv.watches, []
        home.watches = self.watches
        self.starts = Starts(kv, self.states, self.detached, self.watches, shares_room=self.shares_room)
        self._lower = HybridLower(kv, self.states, self.starts)
        self.lower = self._lower if kv.edges else None
        kv.residency.on_leave = self._leave_with
        if self.shares_room:
            for tier in kv.tiers:
                tier.eviction.empty_cache = self.empty_cache

    def empty_cache(self, tier: Tier) -> "HybridCache":
        """Return an empty cache like this one with ``tier`` as its only tier, which pages and states share."""
        return HybridCache(
            Cache([tier], [], self.kv.rules, self.page_tokens),
            policy=self.policy,
            prefill=self._prefill,
            grid_pages=self.grid_pages,
            state_bytes=self.state_bytes,
            state_pages=self.states.units,
        )

    # --- requests ----------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.residency.version + self.states.residency.version

    def index_prompts(self) -> PromptIndex:
        home = self.states.residency
        if self.residency.prompts is None:
            self.residency.prompts = home.prompts = StatefulPrompts()
            if self.detached is not None:
                self.detached.prompts = home.prompts
        return self.residency.prompts

    def match(self, request: Request, gpu: Tier | None = None, why: int = FIRST, tokens: int = 0) -> Lease:
        """Find the longest prefix whose KV some tier has, cut back to the deepest usable state."""
        lease = self.kv.match(request, gpu, why, tokens)
        known = lease.gpu_pages + lease.lower_pages
        if why == LOOK:
            depth = self.starts.deepest(request, known)[0]
            lease.leading_pages = min(lease.leading_pages, max(0, depth - lease.gpu_pages))
            lease.gpu_pages = min(lease.gpu_pages, depth)
            return lease
        lease.states = StateLease(known)
        self.starts.end_at_state(lease, known)
        for watch in self.watches:
            watch.matched(lease)
        return lease

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0, in_all: int = 0) -> bool:
        """Also reserves room for the states that the request will save or load.

        If the tier is too small, states that share it with pages are given up, including the one to begin from.
        """
        has_room = (in_all <= pages or self.kv.can_admit(lease, in_all)) and self._admit(lease, pages, now, load_pages)
        if self.watches:
            self._tell_admission(lease, pages, load_pages, is_admitted=has_room)
        return has_room

    def _admit(self, lease: Lease, pages: int, now: float, load_pages: int) -> bool:
        states = states_of(lease)
        if load_pages < lease.lower_pages:
            self.starts.end_at_state(lease, lease.gpu_pages + load_pages)
            load_pages = lease.lower_pages
        spare_pages = self.gpu.pool.capacity - self.kept_pages(lease) - pages
        if self.shares_room and states.state is not None and spare_pages < self.states.units:
            self.starts.end_at_state(lease, 0)
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
            if not self.states.transfers.eviction.make_room(room, 1, now) or not room.pool.free:
                self.starts.release(lease)
                return False
            states.slots = self.states.residency.take(room, 1)
        if state is None and states.detached is not None:
            for watch in self.watches:
                watch.begins_detached(lease, states.detached)
        if not self.kv.admit(lease, pages + states.pages, now, load_pages):
            self.starts.release(lease)
            return False
        if state is not None and self.shares_room:
            self.states.join_to(state, lease.path[-1])
        self.starts.use(lease)
        if lease.is_first:
            self._count_admission(lease)
        return True

    def _idle_state_pages(self, state: Node | None) -> int:
        """Count the pages of a state that could be evicted now, but not once a request begins from it."""
        if not self.shares_room or state is None:
            return 0
        is_idle = state.state[GPU] == LEAVING or state.state[GPU] == READY and not state.pins[GPU]
        return state.pages if is_idle else 0

    def kept_pages(self, lease: Lease) -> int:
        return self.kv.kept_pages(lease)

    def _count_admission(self, lease: Lease) -> None:
        """Count the state that a request begins from and the tokens lost for lack of one; once per request."""
        states = states_of(lease)
        self.known_pages[lease.request.index] = states.known_pages
        counts, lost = self.states.counts, states.known_pages - lease.gpu_pages - lease.lower_pages
        counts.used += states.state is not None or states.detached is not None
        counts.tokens_lost_to_missing_state += lost * self.page_tokens

    def _plan(self, lease: Lease) -> list[int]:
        """Return the depths, in pages, at which states of this prompt are saved."""
        request, known = lease.request, states_of(lease).known_pages
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
        claim = self.kv.claim(lease, now)
        if not (claim.waits or claim.is_lost):
            for watch in self.watches:
                watch.claimed(lease)
        return claim

    def is_waiting(self, lease: Lease) -> bool:
        return self.kv.is_waiting(lease)

    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        return self.kv.grow(needs, now)

    def end_chunk(self, lease: Lease, tokens: int, now: float) -> None:
        """Add the full pages that have been computed. Hits end at states, which are saved when the whole prompt is computed."""
        self.kv.end_chunk(lease, tokens, now)

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        """Also saves the states planned for the prompt, or those of the answer."""
        states = states_of(lease)
        transfers = self.kv.insert(lease, now)
        self.starts.release(lease)
        if lease.epoch == self.residency.epoch:
            request = lease.request
            extents, depths = request.runs, states.save_after
            if lease.is_finishing:
                full = self._full_pages(request)
                stop = lease.node.depth + lease.node.pages
                extents = join_extents(split_extents(extents, full)[0], request.output_runs or ())
                depths = self._on_grid(self._after_answer(full, stop), full, stop)
            self._save_all(lease, extents, depths)
        states.save_after = []
        return transfers + self._lower.flush()

    def _save_all(self, lease: Lease, extents: tuple[Extent, ...], depths: list[int]) -> None:
        ends = self._ends(lease.node, depths) if self.shares_room else {}
        limit = self.policy.max_states_per_path
        for place in places_after(extents, depths):
            self._save(lease, place, ends.get(place.depth))
            if limit is not None:
                self.states.keep_recent(extents, place.depth, limit)

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
        states, now, saved = states_of(lease), self.residency.tick(self.residency.now), self.states.counts.saved
        if not self.shares_room:
            self.states.save(place, now)
        elif self.gpu.pool.count(lease.slots) >= self.states.units:
            lease.slots = self.states.save(place, now, lease.slots, end)
        elif lease.is_finishing:
            self.states.save(place, now, None, end)
        if self.watches and self.states.counts.saved > saved:
            for watch in self.watches:
                watch.saved(lease, place.page, self.states.gpu_slots(place.page))
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

    def finish(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        """Policies can note the same about the request's states as about its path."""
        kv = self.kv
        kv.persistent.keep(lease)
        for tier in self.tiers:
            tier.eviction.request_states = tuple(states_of(lease).states)
        transfers = self._end_within_prompt(lease)
        if kv.begin_answer(lease):
            transfers = transfers + self.insert(lease, max(now, self.residency.now))
        self.starts.release(lease)
        kv.notify_finish(lease, now)
        kv.give_back(lease)
        transfers = transfers + kv.write_early() + self._lower.flush()
        for tier in self.tiers:
            tier.eviction.request_states = ()
        for watch in self.watches:
            watch.released(lease, FINISHED)
        return transfers

    def release(self, lease: Lease, why: str = LOST, now: float = -inf, tokens: int = 0) -> list[Transfer]:
        self.starts.release(lease)
        self.kv.give_back(lease)
        for watch in self.watches:
            watch.released(lease, why)
        return NO_TRANSFERS

    def _end_within_prompt(self, lease: Lease) -> list[Transfer]:
        """If the answer fills no page of its own, save its state after the last full page of the prompt."""
        request = lease.request
        if not self.kv.rules.cache_output or request.output_runs != () or lease.epoch != self.residency.epoch:
            return NO_TRANSFERS
        full, begin = self._full_pages(request), lease.gpu_pages + lease.loaded_pages
        lease.is_finishing = True
        self._save_all(lease, request.runs, self._on_grid(self._after_answer(full, full), begin, full))
        return self._lower.flush()

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
                for watch in self.watches:
                    watch.detached(place.page, state.slots[index])
                home.counts.detached += 1
                home.residency.free(state, home.tiers[index])
            else:
                home.transfers.eviction.evict(state, home.tiers[index], self.residency.now)

    # --- everything ------------------------------------------------------------------------------------------------------------

    def reset(self, gpu: Tier | None = None, now: float = -inf) -> None:
        """Drop every page and every state."""
        assert gpu is None or len(self.tiers) == 1, "states of one of several GPUs cannot be lost"
        self.kv.reset()
        if not self.shares_room:
            self.states.residency.clear()
        self.states.clear()
        if self.detached is not None:
            self.detached.clear()
        for watch in self.watches:
            watch.emptied(gpu)

    def adopt_state(self, state: Node, end: Node | None) -> None:
        self.states.adopt(state, end)

    def describe_checkpoints(self) -> dict[str, int]:
        return asdict(self.states.count(self.state_bytes))

    def held_extents(self) -> list[Extent]:
        return super().held_extents() + [(page, 1) for page in self.detached or ()]

    def pages_known(self) -> dict[int, int] | None:
        return self.known_pages

    def check(self) -> None:
        """Recount everything; raise AssertionError if a count or an invariant is wrong."""
        pinned: list[tuple[Node, Tier]] = []
        slots: list[Any] = []
        for lease in self.leases:
            states = states_of(lease)
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
