"""vLLM's cache for hybrid models: recurrent states and pages of attention in one pool of blocks."""

from dataclasses import asdict
from typing import Any

from kvsim.core.request import Request
from kvsim.core.rules import HybridSettings
from kvsim.core.serving import Server
from kvsim.core.tier import Tier
from kvsim.core.tree import Node, RadixTree
from kvsim.engines.vllm.block_pool import BlockLease
from kvsim.engines.vllm.state_blocks import StateBlockPool
from kvsim.pages.extents import Extent, split_extents
from kvsim.states.store import CheckpointCounts, Place, places_after


class HybridLease(BlockLease):
    """What a running request holds: pages, and states."""

    __slots__ = ("held_states",)

    def __init__(self, request: Request, gpu: Tier, root: Node) -> None:
        super().__init__(request, gpu, root)
        self.held_states: list[tuple[list[Node], Any]] = []
        """The state that its last step began from and the one that it ended with: (a node for each group, no slots) or, if
        the state has no key, (no nodes, slots)."""


class VLLMHybridCache(Server):
    """Serves requests from one pool of blocks; a page takes one, a state one for each Mamba group.

    hit       the deepest state within the known pages, which are those that attention alone could reuse
    steps     a prompt is computed in steps (``step_ends``). Before each one the state before the last one is given back; then
              the step takes blocks for its pages and for the state at its end. The last step takes the answer's too
    states    a step's state gets a key if it is at the junction, where the known pages end, after the last page that the same
              prompt could reuse, or after a multiple of the interval. Others are free as soon as they are given back
    pages     all full pages that the request computes get a key, copies of those that are known already included
    finish    the pages become the most recent blocks, the deepest the oldest of them; then group by group the states

    vLLM 0.33.0: ``HybridKVCacheCoordinator``, ``MambaManager`` with ``mamba_cache_mode="align"`` and the scheduler's split of
    prefills.
    """

    def __init__(self, gpu: Tier, page_tokens: int, groups: int, interval_pages: int, hybrid: HybridSettings) -> None:
        """``groups`` is the number of Mamba groups; states are kept every ``interval_pages`` pages (0: none for an interval)."""
        self.tiers = [gpu]
        self.page_tokens = page_tokens
        self.pool = StateBlockPool(gpu, groups)
        self.counts = self.pool.residency.counts
        self.known_pages: dict[int, int] = {}
        self._gpu = gpu
        self._groups = groups
        self._interval_pages = interval_pages
        self._chunk_tokens = hybrid.prefill_chunk_tokens
        self._state_bytes = hybrid.state_bytes
        self._checkpoints = CheckpointCounts()

    @property
    def tree(self) -> RadixTree:
        """The radix tree of the pages."""
        return self.pool.tree

    def held_extents(self) -> list[Extent]:
        return super().held_extents() + [(page, 1) for page in self.pool.states.pages()]

    def pages_known(self) -> dict[int, int]:
        return self.known_pages

    def describe_checkpoints(self) -> dict[str, int]:
        counts = self._checkpoints
        counts.evicted = self.pool.new_states - len(self.pool.states)
        counts.bytes = counts.saved * self._state_bytes
        return asdict(counts)

    def serve(self, request: Request, pages: int, now: float) -> HybridLease | None:
        """Match, and compute the rest with room for ``pages`` pages in all. Without room, return None; at most cut a node."""
        page_tokens, pool, extents = self.page_tokens, self.pool, request.runs
        full = request.prompt_tokens // page_tokens
        if full < request.prompt_pages:
            extents = split_extents(extents, full)[0]
        else:
            full = request.prompt_pages
        path, _ = pool.match(extents, request.lookup_pages(page_tokens))
        known = path[-1].depth + path[-1].pages if path else 0
        hit, state = pool.deepest_state(extents, known) if known else (0, [])
        nodes = pool.first_pages(path, hit)
        junction = known if known > hit else 0
        ends = step_ends(hit * page_tokens, request.prompt_tokens, junction * page_tokens, page_tokens, self._chunk_tokens)
        if not self._has_room(nodes, state, pages - hit, len(ends)):
            return None
        lease = HybridLease(request, self._gpu, pool.residency.tree.root)
        lease.hits = hit, 0, 0
        pool.hold(lease, nodes, now)
        if state:
            pool.hold_state(state)
            lease.held_states.append((state, None))
        self._compute(lease, ends, self._kept(request.prompt_tokens, extents, full, junction, ends), pages)
        if hit < full:
            pool.name(lease, split_extents(extents, hit)[1] if hit else extents)
        self._count(request, hit, known)
        return lease

    def finish_request(self, lease: HybridLease) -> None:
        """End a request whose answer is complete and give back its blocks."""
        self.pool.finish(lease)
        lease.held_states.reverse()
        for group in range(self._groups):
            for state, _ in lease.held_states:
                if state:
                    self.pool.give_back_state(state[group], self._tick())
        for state, slots in lease.held_states:
            if not state:
                self.pool.residency.give(self._gpu, slots)

    def _has_room(self, nodes: list[Node], state: list[Node], own_pages: int, steps: int) -> bool:
        """Whether the last step, which takes the most, would get its blocks: from the second on, the hit state can leave."""
        gpu = self._gpu
        idle = sum([node.pages for node in nodes if not node.pins[0]])
        if steps == 1:
            idle += sum([not node.pins[0] for node in state])
        wanted = own_pages + self._groups * min(steps, 2)
        return wanted <= gpu.pool.free + gpu.evictable_pages - idle

    def _kept(self, tokens: int, extents: tuple[Extent, ...], full: int, junction: int, ends: list[int]) -> dict[int, Place]:
        """Return the places of the states that get a key, by the tokens before them."""
        page_tokens, every = self.page_tokens, self._interval_pages
        replay = (tokens - 1) // page_tokens
        depths = [end // page_tokens for end in ends if end % page_tokens == 0 and end <= full * page_tokens]
        kept = [depth for depth in depths if depth in (replay, junction) or every and depth % every == 0]
        return {place.depth * page_tokens: place for place in places_after(extents, kept)}

    def _compute(self, lease: HybridLease, ends: list[int], kept: dict[int, Place], pages: int) -> None:
        """Take the blocks of all steps, one after another."""
        page_tokens, slots = self.page_tokens, self._gpu.pool
        taken, start, states = lease.held_pages, lease.held_pages * page_tokens, lease.held_states
        for at, end in enumerate(ends, 1):
            if len(states) > 1:
                self._give_back(*states.pop(0))
            upto = pages if at == len(ends) else -(-end // page_tokens)
            is_new = start % page_tokens == 0  # otherwise, the step goes on in the same block
            wanted = upto - taken + is_new * self._groups
            has_room = wanted <= slots.free or self.pool.make_room(wanted)
            assert has_room, "a step had no room for its blocks"
            lease.slots = slots.join(lease.slots, self.pool.residency.take(self._gpu, upto - taken))
            if is_new:
                states.append(([], self.pool.residency.take(self._gpu, self._groups)))
            if end in kept:
                states[-1] = self.pool.add_state(kept[end], states[-1][1], self._tick()), None
                self._checkpoints.saved += 1
            taken, start = upto, end
        lease.held_pages = pages

    def _give_back(self, state: list[Node], slots: Any) -> None:
        if not state:
            self.pool.residency.give(self._gpu, slots)
        for node in state:
            self.pool.give_back_state(node, self._tick())

    def _tick(self) -> float:
        """Return a time later than that of any use before."""
        residency = self.pool.residency
        return residency.tick(residency.now)

    def _count(self, request: Request, hit: int, known: int) -> None:
        self.known_pages[request.index] = known
        self._checkpoints.used += hit > 0
        self._checkpoints.tokens_lost_to_missing_state += (known - hit) * self.page_tokens


def step_ends(start: int, tokens: int, junction: int, page_tokens: int, chunk_tokens: int) -> list[int]:
    """Return where the steps end that compute a prompt from ``start`` tokens on; 0 chunk tokens are no limit.

    A step ends at a page boundary, except the last one and those inside a page longer than a chunk. It never goes past the
    junction or the last page boundary before the prompt's last token, nor past a boundary if it begins inside a page.
    """
    last, ends = (tokens - 1) // page_tokens * page_tokens, []
    while start < tokens:
        end = min(tokens, start + chunk_tokens) if chunk_tokens else tokens
        if end < tokens and (chunk_tokens >= page_tokens or end // page_tokens * page_tokens > start):
            end -= end % page_tokens
        for stop in (last, junction, -(-start // page_tokens) * page_tokens):
            if start < stop < end:
                end = stop
        ends.append(end)
        start = end
    return ends
