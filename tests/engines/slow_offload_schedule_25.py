"""vLLM 0.25.1's scheduler with CPU offloading: what it does in another way than 0.33, obvious and slow."""

from typing import Any

from kvsim.core.request import Request
from tests.engines.slow_blocks import Block
from tests.engines.slow_chunk_pool_by_use import SlowArcByUse, SlowLruByUse, SlowPoolByUse
from tests.engines.slow_offload_schedule import FINISHED, LOADED, LOADING, Copy, Plan, Row, Served, SlowOffloadSchedule, Step

KINDS: dict[str, type[SlowPoolByUse]] = {"lru": SlowLruByUse, "arc": SlowArcByUse}


class SlowSchedule25(SlowOffloadSchedule):
    """One engine with a CPU pool.

    preempted   at once, even if a step in flight computes the request: its blocks come back when that step has ended
    skipped     requests that wait for a load or for anything else, in the order in which they were tried last; they go first
    loads       begin when they are submitted, before the step
    offers      go on where they were, or where the step ends if that is less; nothing is offered at the end
    hits        those of the last admission before the first token
    """

    pool: SlowPoolByUse

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        assert self.offloading is not None
        self.pool = KINDS[self.offloading.policy](self.offloading.chunks, self.offloading.threshold, self.offloading.tracked)
        self.skipped: list[Served] = []
        self.late: list[list[Block]] = []
        """Blocks of requests that were preempted while a step in flight computed them."""

    def run(self, requests: list[Request], *, names_answers: bool) -> list[Row]:
        rows = super().run(requests, names_answers=names_answers)
        assert not (self.skipped or self.late)
        return rows

    @property
    def has_work(self) -> bool:
        return bool(super().has_work or self.skipped)

    # --- launch and results ----------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> Step:
        loads, self.loads = self.loads, []
        step = super().launch(plan)
        for copy in loads:
            self.submit(copy)
        return step

    def submit(self, copy: Copy) -> None:
        step_end_s = self.step_end_s
        if copy.is_load:
            self.step_end_s = self.now
        super().submit(copy)
        self.step_end_s = step_end_s

    def apply(self, step: Step) -> None:
        if step.plan:
            late, self.late = self.late, []
            for blocks in late:
                self.free_blocks(blocks)
        step.reported.sort(key=lambda copy: copy.is_load)
        super().apply(step)
        for copy in step.reported:
            (self.pool.end_read if copy.is_load else self.pool.end_write)(copy.chunks)

    # --- preemption ------------------------------------------------------------------------------------------------------

    def serve(self, one: Served) -> bool:
        new = min(one.known + one.in_flight - one.computed, self.budget)
        while not self.has_room(one.computed + new, len(one.blocks)):
            last = self.running[-1]
            self.preempt(last)
            if last is one:
                return False
        self.compute(one, new)
        return True

    def give_back(self, one: Served) -> None:
        if one.steps_out and one.phase != FINISHED:
            self.late.append(one.blocks)
        else:
            self.free_blocks(one.blocks)
        one.blocks, one.named = [], 0

    def free_blocks(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                self.free[block] = None
                self.free.move_to_end(block, last=block.key is not None)

    # --- admission -------------------------------------------------------------------------------------------------------

    def admit_next(self) -> bool:
        """Make the whole pass over the two queues."""
        tried: list[Served] = []
        while (self.skipped or self.waiting) and self.budget and len(self.running) < self.max_running:
            queue = self.skipped or self.waiting
            one = queue[0]
            if one.phase == LOADED:
                self.end_load(one)
                if not self.has_room(one.known, len(one.blocks)):
                    break
                queue.pop(0)
                self.loading.remove(one)
                self.begin(one)
                continue
            must_wait = one.phase == LOADING
            if not must_wait:
                assert not one.in_flight
                hits = self.find(one)
                chunks = self.find_below(one, len(hits))
                must_wait = chunks is None
            if must_wait:
                tried.append(queue.pop(0))
                continue
            assert chunks is not None
            held = len(hits) - sum(not block.users for block in hits)
            if not self.has_room(one.known, held) or chunks and not self.has_room_to_load(one, held, chunks):
                break
            queue.pop(0)
            self.hold(one, hits)
            one.loaded = 0
            if chunks:
                self.load(one, chunks)
                self.pool.begin_read([chunk for chunk, _ in chunks])
                tried.append(one)
            if one.hits is None or not one.generated:
                one.hits = len(hits), one.loaded
            if not chunks:
                self.begin(one)
        self.skipped = [*tried, *self.skipped]
        return False

    def find_below(self, one: Served, hits: int) -> list[tuple[int, int]] | None:
        assert self.offloading is not None
        if one.stores:
            return None
        size = self.offloading.blocks_per_chunk
        if one.known // self.page_tokens // size * size - hits >= size:
            for chunk, _ in self.chunks_of(one, hits // size, one.known):
                self.pool.count_look_up(chunk)
                if not self.pool.has(chunk):
                    break
        found = super().find_below(one, hits)
        self.pool.look_up([chunk for chunk, _ in self.chunks_of(one, 0, one.known)])
        return found

    # --- stores ----------------------------------------------------------------------------------------------------------

    def offer_all(self, plan: Plan) -> list[Copy]:
        self.finished = []
        copies = [self.offer(one, min(one.computed + new, one.known)) for one, new, _ in plan]
        return [copy for copy in copies if copy is not None]

    def offer(self, one: Served, tokens: int) -> Copy | None:
        assert self.offloading is not None
        if self.offloading.prompt_only:
            tokens = min(tokens, one.request.prompt_tokens)
        end = min(tokens // self.page_tokens, len(one.pages)) // self.offloading.blocks_per_chunk
        if end <= one.next_chunk:
            one.next_chunk = end
            return None
        copy = super().offer(one, tokens)
        if copy is not None:
            self.pool.look_up([chunk for chunk, _ in self.chunks_of(one, 0, one.known)])
        return copy
