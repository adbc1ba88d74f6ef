"""SGLang's radix cache for models with recurrent layers: KV in pages, and after some nodes a state in a pool of its own."""

from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.rules import HybridSettings
from kvsim.core.serving import RulesError
from kvsim.core.tier import GPU, Tier
from kvsim.core.tree import Node
from kvsim.engines.sglang.whole_nodes import NodeLease, WholeNodeCache
from kvsim.pages.extents import Run, append_run, join_runs, split_runs
from kvsim.states.store import CheckpointCounts

STRIDE = 1 << 32
"""Distance between the page ids generated for two requests. No answer has this many pages."""


class StatefulLease(NodeLease):
    """What a request holds: the path that it found or inserted, the state at its end, and slots for all other pages."""

    __slots__ = ("known_pages", "prompt_pages", "rest", "states")

    def __init__(self, request: Request, node: Node, rest: tuple[Run, ...], prompt_pages: int, known_pages: int) -> None:
        super().__init__(request, node, (node.depth + node.pages, 0, 0), None)
        self.rest = rest
        """Page ids after ``node`` that may be inserted: of the prompt and, if answers are cached, of the answer."""
        self.prompt_pages = prompt_pages
        """Full pages of the prompt."""
        self.known_pages = known_pages
        """Leading pages of the prompt whose KV was cached when it was looked up."""
        self.states = 0
        """Slots for states that the request works with."""


class StatefulNodeCache(WholeNodeCache):
    """Serves a hybrid model from one tier. A node always has KV; it may have a state, the one after its last page.

    look-up    ends at the deepest node with a state; the KV known behind it is computed again. The node in which the known KV
               ends is cut there
    recency    KV: nodes down to the hit, and both parts of a cut; at an insert, its whole path. States: the one that is hit,
               and the one at the end of an insert
    slots      a running request works with 1 slot or, with ``extra_buffer``, 3; the first is taken by the look-up if it hits.
               Each insert needs a free one before it is known whether the state is there already
    admission  free + evictable pages >= pages not reused; a request without room keeps what its look-up found and the slot,
               until it runs or is rejected
    prefill    in chunks, from the hit on. After each, one insert of all pages up to the chunk's one state: after its last full
               page or, with ``extra_buffer``, where the known KV ends if that is within the chunk. Pages behind that wait for
               the next insert
    answer     if answers are cached, the finish inserts up to the state after the last full page of the answer, if it has one;
               without ``extra_buffer`` it inserts everything that is left, a partial page included
    eviction   of KV: as in ``WholeNodeCache``, with the state. Of a state: the least recently used one at which no running
               request's path ends; a leaf loses its KV too

    A request has an insert with its own time for every chunk, and one at its finish. SGLang 0.5.23, ``UnifiedRadixCache``.
    """

    def __init__(
        self,
        tiers: list[Tier],
        page_tokens: int,
        hybrid: HybridSettings,
        *,
        extra_buffer: bool = True,
        cache_output: bool = False,
        recompute_last_token: bool = True,
    ) -> None:
        super().__init__(tiers, page_tokens, recompute_last_token=recompute_last_token)
        assert hybrid.state_tiers is not None
        self.known_pages: dict[int, int] = {}
        self.state_counts = CheckpointCounts()
        self.slots = hybrid.state_tiers[GPU].pool
        """Slots for states: those of running requests and those of nodes."""
        self.states: OrderedDict[Node, int] = OrderedDict()
        """Nodes with a state, least recently used first, and the number of running requests whose path ends there."""
        self._state_bytes = hybrid.state_bytes
        self._chunk_pages = hybrid.prefill_chunk_tokens // page_tokens or UNLIMITED
        self._extra_buffer = extra_buffer
        self._working_slots = 3 if extra_buffer else 1
        self._cache_output = cache_output
        self._running = 0
        self._waiting: StatefulLease | None = None
        """The lease of a request that found no room when it was last tried."""
        self.residency.on_leave = self._lose_state

    def serve(self, request: Request, pages: int, now: float) -> StatefulLease | None:
        """Look up, admit with room for ``pages`` pages in all, and insert chunk by chunk. Returns None, still holding what was
        found if others are running, without room."""
        gpu = self.gpu
        pool = gpu.pool
        lease, self._waiting = self._waiting, None
        if lease is None or lease.request is not request:
            lease = self._find(request, now)
        missing = pages - lease.hits[GPU]
        if missing > pool.free + gpu.evictable_pages:
            if self._running:
                self._waiting = lease
            else:
                self._let_go(lease)
            return None
        self._running += 1
        self._take_states(lease, self._working_slots - lease.states)
        if missing > pool.free:
            self.evict(missing - pool.free, self.residency.now)
        lease.slots = self.residency.take(gpu, missing)
        self._count_admission(lease)
        self._prefill(lease)
        return lease

    def finish_request(self, lease: Any) -> None:
        """End a request whose answer is complete: insert what is to be cached of it and give back everything else."""
        if self._cache_output:
            answer = sum([pages for _, pages in lease.rest]) + lease.node.depth + lease.node.pages - lease.prompt_pages
            if answer > 0 or not self._extra_buffer:
                lease.states -= 1
                self._insert(lease, lease.rest)
                lease.rest = ()
                self._refresh(lease.node)
        self.residency.notices.finish(lease.request, lease.node, self.residency.now)
        self.residency.give(self.gpu, lease.slots)
        self._let_go(lease)
        self._running -= 1

    def pages_known(self) -> dict[int, int]:
        return self.known_pages

    def describe_checkpoints(self) -> dict[str, int]:
        """Return the counts of states, by name."""
        self.state_counts.bytes = self.state_counts.saved * self._state_bytes
        return asdict(self.state_counts)

    # --- the look-up -------------------------------------------------------------------------------------------------

    def _find(self, request: Request, now: float) -> StatefulLease:
        """Look a prompt up and hold the state that it hits, with a slot to copy it to and the path down to it."""
        now = self.residency.tick(now)
        full = min(request.prompt_tokens // self.page_tokens, request.prompt_pages)
        pages = request.lookup_pages(self.page_tokens) if self._recompute_last_token else full
        runs = self._path(request, full)
        path, partial, agreed, _ = self.tree.walk(self.tree.root, runs, pages)
        known = agreed
        if path:
            known += path[-1].depth + path[-1].pages
        if partial is not None:
            self.cut_at(partial, agreed, now)
        while path and path[-1] not in self.states:
            path.pop()
        hit = path[-1] if path else self.tree.root
        lease = StatefulLease(request, hit, split_runs(runs, hit.depth + hit.pages)[1], full, known)
        if path:
            for node in path:
                node.last_used = now
            self.residency.pin_path(path, self.gpu, hit.depth + hit.pages)
            self.states[hit] += 1
            self.states.move_to_end(hit)
            self._take_states(lease, 1)
        return lease

    def _path(self, request: Request, full: int) -> tuple[Run, ...]:
        """Return the page ids of all full pages that may enter the tree: the prompt's and, if answers are cached, the answer's.

        Pages of the answer without an id get one that no prompt has.
        """
        if not self._cache_output:
            return request.runs if full == request.prompt_pages else split_runs(request.runs, full)[0]
        path, answer = request.own_path, request.output_runs or ()
        if path is None:
            path = join_runs(request.runs, answer) if request.runs and answer else request.runs or answer
        tokens = request.prompt_tokens + request.output_tokens
        wanted = (tokens - 1) // self.page_tokens if self._extra_buffer else -(-tokens // self.page_tokens)
        missing = wanted - sum([pages for _, pages in path])
        if missing > 0:
            padded = list(path)
            append_run(padded, -STRIDE * (1 + request.index), missing)
            path = tuple(padded)
        return path

    def _let_go(self, lease: StatefulLease) -> None:
        """Give back the slots for states that a request works with, and unpin its path and the state at its end."""
        if lease.node in self.states:
            self.states[lease.node] -= 1
        self.residency.unpin(lease.node, self.gpu)
        self.slots.give(lease.states)

    def _count_admission(self, lease: StatefulLease) -> None:
        """Notify policies of a request, and count what it uses and what it could not use."""
        request, now = lease.request, self.residency.now
        self.residency.notices.request(request, now)
        self.residency.use(lease.node.path(), now, is_first=True)
        self.known_pages[request.index] = lease.known_pages
        self.state_counts.used += lease.hits[GPU] > 0
        self.state_counts.tokens_lost_to_missing_state += (lease.known_pages - lease.hits[GPU]) * self.page_tokens

    # --- the prefill -------------------------------------------------------------------------------------------------

    def _prefill(self, lease: StatefulLease) -> None:
        """Compute the prompt chunk by chunk, and insert after each chunk what lies before its state."""
        first, known, end = lease.hits[GPU], lease.known_pages, lease.prompt_pages
        for at in range(first, end, self._chunk_pages):
            stop = min(at + self._chunk_pages, end)
            if self._extra_buffer and at < known < stop:
                stop = known
            pages, rest = split_runs(lease.rest, stop - lease.node.depth - lease.node.pages)
            self._take_states(lease, 1)
            lease.states -= 1
            self._insert(lease, pages)
            lease.rest = rest
        if first < end:
            self._refresh(lease.node)

    def _insert(self, lease: StatefulLease, runs: tuple[Run, ...]) -> None:
        """Extend a request's path by pages that it has computed, and save its state there, in a slot that is free to use.

        The request holds the state at the new end of its path instead of the one before.
        """
        residency, states = self.residency, self.states
        if lease.node in states:
            states[lease.node] -= 1
        rest = self._insert_known(lease, runs, residency.tick(residency.now))
        if rest:
            self.add_leaf(lease, rest, residency.tick(residency.now))
        node = lease.node
        if node in states:
            self.slots.give(1)
            states[node] += 1
            states.move_to_end(node)
        else:
            states[node] = 1
            self.state_counts.saved += 1

    def _refresh(self, node: Node) -> None:
        """Mark a pinned path as used by an insert."""
        now = self.residency.tick(self.residency.now)
        for used in node.path():
            used.last_used = now

    # --- states ------------------------------------------------------------------------------------------------------

    def _take_states(self, lease: StatefulLease, count: int) -> None:
        """Give a request ``count`` more slots for states, evicting as needed."""
        while self.slots.free < count:
            victim = next((node for node, users in self.states.items() if not users), None)
            if victim is None:
                raise RulesError(
                    f"tiers.gpu.states: request {lease.request.index} finds no slot for a state, since {self._running} running "
                    f"requests hold all {self.slots.capacity}: increase it, or lower replay.in_flight"
                )
            if victim.is_evictable(GPU):
                self.counts.dropped_pages += victim.pages
                self.residency.free(victim, self.gpu)
            else:
                self._lose_state(victim, self.gpu)
        lease.states += self.slots.take(count)

    def _lose_state(self, node: Node, tier: Tier) -> None:
        """Drop the state of a node, if it has one."""
        if self.states.pop(node, None) is not None:
            self.slots.give(1)
            self.state_counts.evicted += 1
