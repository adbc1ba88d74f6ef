"""vLLM's cache for models with sliding windows as the serving engine calls it: blocks are taken and given back step by step."""

from typing import cast

from kvsim.core.lease import FIRST, LOOK, Lease
from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.serving import NO_ROOM, ROOM, Growth
from kvsim.core.tier import Tier
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.engines.vllm.block_pool import BlockLease
from kvsim.engines.vllm.stepped import SteppedCache
from kvsim.engines.vllm.window_blocks import WindowBlockPool, WindowLease
from kvsim.engines.vllm.window_groups import WindowGroups
from kvsim.pages.extents import Extent


class WindowSteppedCache(SteppedCache):
    """As ``SteppedCache``, with the blocks of groups with a window besides those of full attention.

    admit           asks for room for the whole prompt, of which groups with a window hold ``most_pages`` at most, and for the
                    first chunk
    begin_chunk     gives back what is behind the window before it takes blocks
    insert          lets it be done in the next step, if one follows
    slide           does so before a step of an answer that leaves something behind, in the order of admission
    grow            takes a page of each answer, in the order of admission, each after what those before it have left behind
    """

    def __init__(self, gpu: Tier, rules: Rules, page_tokens: int, windows: WindowGroups) -> None:
        self.blocks = WindowBlockPool(gpu, windows)
        super().__init__(gpu, rules, page_tokens, pool=self.blocks)
        self.slots_per_page = 1 + windows.groups
        self._leaving: list[tuple[WindowLease, int]] = []
        """Requests that leave something behind in the step that is being formed, in their turn."""
        self._turns = 0
        self.slides_at = (windows.window_tokens - 1) % page_tokens
        self._windows = windows

    def held_extents(self) -> list[Extent]:
        return super().held_extents() + self.blocks.held_extents()

    def match(self, request: Request, gpu: Tier | None = None, why: int = FIRST, tokens: int = 0) -> Lease:
        lease = WindowLease(request, self.gpu, self.tree.root, self._path(request), why)
        lease.epoch = self.residency.epoch
        self.blocks.find(lease, ((tokens or request.prompt_tokens) - self._last_token) // self.page_tokens)
        lease.computed_tokens = lease.hit_pages * self.page_tokens
        if why != LOOK:
            for watch in self.watches:
                watch.matched(lease)
        return lease

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0, in_all: int = 0) -> bool:
        own = cast(WindowLease, lease)
        has_room = self._has_room(own, max(pages, in_all))
        if has_room:
            self.blocks.hold_found(own, now)
            self._turns += 1
            own.turn = self._turns
            self.leases[lease] = None
        if self.watches:
            self._tell_admission(lease, pages, load_pages, is_admitted=has_room)
        return has_room

    def _has_room(self, lease: WindowLease, pages: int) -> bool:
        """Whether there is room for a request of ``pages`` pages, and for its first chunk."""
        groups, hit = self._windows.groups, lease.hit_pages
        idle = self.blocks.idle_pages(lease) + self.blocks.idle_blocks(lease)
        room = self.gpu.pool.free + self.gpu.evictable_pages - idle
        capped = pages if self._windows.most_pages is None else min(pages, self._windows.most_pages)
        chunk = min(pages, -(-(hit * self.page_tokens + self.step_tokens) // self.page_tokens)) - hit
        return pages - hit + groups * max(0, capped - hit) <= room and chunk * (1 + groups) <= room

    def kept_pages(self, lease: Lease) -> int:
        windows, request, size = self._windows, lease.request, self.page_tokens
        prompt, whole = request.pages_for(request.prompt_tokens, size), request.pages_in_all(size)
        with_prompt = prompt + windows.groups * min(prompt, windows.most_pages or prompt)
        with_answer = whole + windows.groups * min(whole, windows.run_pages + 1)
        return max(with_prompt, with_answer) - whole

    def begin_chunk(self, lease: Lease, tokens: int, now: float) -> bool:
        own = cast(WindowLease, lease)
        self.blocks.drop_behind(own, own.computed_tokens)
        if not super().begin_chunk(lease, tokens, now):
            return False
        own.computed_tokens = tokens
        return True

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        own = cast(WindowLease, lease)
        self._leaving.append((own, own.computed_tokens))
        return NO_TRANSFERS

    def slide(self, leaving: list[tuple[Lease, int]], *, in_turn: bool) -> None:
        self._leaving += [(cast(WindowLease, lease), tokens) for lease, tokens in leaving]
        if self._leaving and not in_turn:
            self._slide_before(UNLIMITED)

    def _slide_before(self, turn: int) -> None:
        """Give back what requests leave behind whose turn is no later."""
        leaving = sorted(self._leaving, key=_turn_of)
        self._leaving = [(lease, tokens) for lease, tokens in leaving if lease.turn > turn]
        for lease, tokens in leaving:
            if lease.turn <= turn and lease in self.leases:
                self.blocks.drop_behind(lease, tokens)

    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        own = [(cast(WindowLease, lease), pages) for lease, pages in needs]
        if own:
            own.sort(key=_turn_of)
            self._slide_before(own[0][0].turn)
            self._drop(own[0][0])
        if not self._fits_in_turn(own):
            self._name_before_retraction(needs)
            return NO_ROOM
        for lease, _ in own:
            self._slide_before(lease.turn)
            self._take_next(lease)
        if self.names_answers:
            self._name_answers([(lease, pages) for lease, pages in own if lease.request.own_path is None])
        return ROOM

    def _fits(self, needs: list[tuple[WindowLease, int]]) -> bool:
        room = self.gpu.pool.free + self.gpu.evictable_pages
        return sum([pages for _, pages in needs]) * self.slots_per_page <= room

    def _fits_in_turn(self, needs: list[tuple[WindowLease, int]]) -> bool:
        """Whether each of these requests finds room for a page in its turn, after what those before it have left behind."""
        if self._fits(needs):
            return True
        room = self.gpu.pool.free + self.gpu.evictable_pages
        leaving, size = {lease: tokens for lease, tokens in self._leaving if lease in self.leases}, self.page_tokens
        takers = {lease for lease, _ in needs}
        for lease in sorted([*takers, *[lease for lease in leaving if lease not in takers]], key=lambda one: one.turn):
            if lease in takers:
                room += self.blocks.left_behind(lease, lease.held_pages * size) - self.slots_per_page
            else:
                room += self.blocks.left_behind(lease, leaving[lease])
            if room < 0:
                return False
        return True

    def _take_next(self, lease: WindowLease) -> None:
        """Take an answer's next page."""
        self._drop(lease)
        has_room = self.blocks.take(lease, 1)
        assert has_room, "an answer had no room for its next page"

    def _drop(self, lease: WindowLease) -> None:
        """Give back what an answer leaves behind before it takes its next page: all those that it holds are full."""
        if self._windows.names_answers and lease.epoch == self.residency.epoch:
            self.blocks.name_windows(lease, lease.held_pages)
        self.blocks.drop_behind(lease, lease.held_pages * self.page_tokens)

    def name(self, lease: BlockLease, tokens: int) -> None:
        super().name(lease, tokens)
        if lease.epoch == self.residency.epoch:
            self.blocks.name_windows(cast(WindowLease, lease), tokens // self.page_tokens)


def _turn_of(entry: tuple[WindowLease, int]) -> int:
    return entry[0].turn
