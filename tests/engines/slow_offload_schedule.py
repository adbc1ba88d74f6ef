"""vLLM's scheduler with CPU offloading and with async scheduling, block by block and copy by copy: obvious and slow.

The numbers in the comments are those of the rules in the README beside the recorded schedules.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf

from kvsim.core.request import Request
from kvsim.hardware.spec import LinearHardware
from tests.engines.slow_blocks import Block
from tests.engines.slow_chunk_pool import SlowArcPool, SlowChunkPool, SlowLruPool, SlowUse
from tests.workloads import pages_of

POLL_S = 0.001
WAITING, LOADING, LOADED, PREFILLING, DECODING, FINISHED = range(6)
Row = tuple[int, int, int, float, float]
"""Hit blocks on the GPU and in CPU memory, preemptions, and when the first and the last token were there."""


@dataclass(kw_only=True)
class Offloading:
    """The settings of the CPU tier; ``chunks`` is its size."""

    chunks: int
    policy: str = "lru"
    threshold: int = 0
    tracked: int = 64_000
    blocks_per_chunk: int = 1
    prompt_only: bool = True
    load_block_s: float
    store_block_s: float
    latency_s: float


@dataclass(eq=False)
class Served:
    """A request on its way. ``pages`` are the ids of its full pages, of the prompt and of its answer."""

    request: Request
    pages: list[int]
    blocks: list[Block] = field(default_factory=list)
    last_blocks: list[Block] = field(default_factory=list)
    """Those it had when it finished."""
    named: int = 0
    """Number of its first blocks that have been named."""
    computed: int = 0
    """Tokens that are computed, counting those of steps that are out."""
    generated: int = 0
    in_flight: int = 0
    """Tokens of its answer that steps which are out will bring."""
    steps_out: int = 0
    is_partial: bool = False
    """Whether its last step leaves part of the known tokens to compute."""
    phase: int = WAITING
    hits: tuple[int, int] | None = None
    preemptions: int = 0
    loaded: int = 0
    """Blocks loaded by its last admission."""
    next_chunk: int = 0
    """The first chunk of the next offer."""
    stores: "list[Copy]" = field(default_factory=list)
    """Its stores that have not been reported."""
    use: SlowUse = field(default_factory=SlowUse)
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def known(self) -> int:
        return self.request.prompt_tokens + self.generated

    @property
    def is_last_out(self) -> bool:
        return self.in_flight > 0 and self.generated + self.in_flight >= max(self.request.output_tokens, 1)


@dataclass(eq=False)
class Copy:
    """A load or a store, by chunk and by the GPU's blocks."""

    one: Served
    is_load: bool
    chunks: list[int]
    blocks: list[Block]
    end_s: float = inf
    is_reported: bool = False


Plan = list[tuple[Served, int, bool]]
"""What a step computes: requests, tokens, and whether a token of the answer comes of it."""


@dataclass(eq=False)
class Step:
    """A step that has been launched, and the copies that are reported with it."""

    plan: Plan
    end_s: float
    reported: list[Copy]


class SlowOffloadSchedule:
    """One engine. ``free`` has the free blocks, the next to be taken first; ``named`` those that hold a page, oldest first."""

    def __init__(
        self,
        hardware: LinearHardware,
        page_tokens: int,
        capacity: int,
        max_batch_tokens: int,
        max_running: int,
        *,
        is_async: bool,
        offloading: Offloading | None = None,
    ) -> None:
        self.hardware, self.page_tokens, self.is_async = hardware, page_tokens, is_async
        self.max_batch_tokens, self.max_running = max_batch_tokens, max_running
        self.free = OrderedDict[Block, None]((Block(), None) for _ in range(capacity))
        self.named: dict[int, list[Block]] = {}
        self.waiting: list[Served] = []
        self.loading: list[Served] = []
        self.running: list[Served] = []
        self.finished: list[Served] = []
        """Those that finished since the last pass."""
        self.offloading = offloading
        if offloading is not None:
            kind = {"lru": SlowLruPool, "arc": SlowArcPool}[offloading.policy]
            self.pool: SlowChunkPool = kind(offloading.chunks, offloading.threshold, offloading.tracked)
        self.copies: list[Copy] = []
        """Those that have not been reported, as they were decided."""
        self.kept: list[Copy] = []
        """Stores decided in the last pass."""
        self.loads: list[Copy] = []
        """Loads decided in this pass."""
        self.line_s = {True: 0.0, False: 0.0}
        """When the last copy of a direction ends, by whether it loads."""
        self.step_end_s = 0.0
        self.out: list[Step] = []
        self.preempted: list[Served] = []
        self.handed: set[Block] = set()
        """Blocks that this pass hands to requests."""
        self.now = 0.0
        self.steps: list[tuple[float, float, int, int]] = []
        """Start, end, prompt tokens and decoding requests of each step that computed."""
        self.copied: list[tuple[float, float, bool, int]] = []
        """Start, end, whether it loads, and blocks of each copy."""

    def run(self, requests: list[Request], *, names_answers: bool) -> list[Row]:
        served = [Served(one, pages_of((*one.runs, *((one.output_runs or ()) if names_answers else ())))) for one in requests]
        self.arriving = list(served)
        while self.arriving or self.has_work or self.out:
            if self.is_async:
                self.turn_async()
            else:
                self.turn()
        assert all(not block.users for block in self.free)
        return [(*(one.hits or (-1, -1)), one.preemptions, one.first_token_s, one.last_token_s) for one in served]

    # --- the loop (1, 2, 6) ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.loading or self.finished or self.copies)

    def see_arrivals(self) -> None:
        while self.arriving and self.arriving[0].request.arrival_s <= self.now:
            self.waiting.append(self.arriving.pop(0))

    def turn(self) -> None:
        self.see_arrivals()
        if not self.has_work:
            self.now = self.arriving[0].request.arrival_s
            return
        step = self.launch(self.schedule())
        self.now = step.end_s
        self.apply(step)
        if not step.plan and self.has_work:
            self.now += POLL_S

    def turn_async(self) -> None:
        self.see_arrivals()
        is_empty = False
        if self.has_work:
            step = self.launch(self.schedule())
            self.out.append(step)
            is_empty = not step.plan
            if len(self.out) < 2 and (step.plan or self.has_work):
                if is_empty:
                    self.now += POLL_S
                return
        elif not self.out:
            self.now = self.arriving[0].request.arrival_s
            return
        step = self.out.pop(0)
        self.now = max(self.now, step.end_s)
        self.apply(step)
        if is_empty and self.has_work:
            self.now += POLL_S

    # --- launch and results (3, 4, 5, 17) --------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> Step:
        kept, decided = self.kept, self.offer_all(plan)
        flushed = [copy for copy in self.copies if self.waits_for(copy)]
        for copy in [*kept, *(copy for copy in decided if copy in flushed)]:
            self.submit(copy)
        self.kept = [copy for copy in decided if copy not in flushed]
        self.now = max([self.now, *(copy.end_s for copy in flushed)])
        start_s = max(self.now, self.step_end_s)
        self.step_end_s = start_s + (self.seconds(plan) if plan else 0.0)
        for copy in self.loads:
            self.submit(copy)
        self.loads = []
        if plan:
            prompt = [new for one, new, _ in plan if one.phase != DECODING]
            self.steps.append((start_s, self.step_end_s, sum(prompt), len(plan) - len(prompt)))
        for one, new, samples in plan:
            one.computed += new
            one.steps_out += 1
            one.in_flight += samples
            one.is_partial = not samples
            one.phase = DECODING if samples else one.phase
        reported = [copy for copy in self.copies if copy.end_s <= self.now and not copy.is_reported]
        for copy in reported:
            copy.is_reported = True
        return Step(plan, self.step_end_s, reported)

    def seconds(self, plan: Plan) -> float:
        formula, seconds = self.hardware, self.hardware.fixed_s
        for one, new, _ in plan:
            if one.phase == DECODING:
                seconds += formula.decode_request_s + formula.decode_context_s * one.computed
            else:
                seconds += formula.prefill_token_s * new + formula.chunk_context_s * new * one.computed
        return seconds

    def waits_for(self, copy: Copy) -> bool:
        """Whether the step that is launched waits until a store has ended (17)."""
        if copy.is_load:
            return False
        reads_handed = copy.one.phase == FINISHED and any(block in self.handed for block in copy.blocks)
        return reads_handed or copy.one in self.preempted

    def submit(self, copy: Copy) -> None:
        assert self.offloading is not None
        settings = self.offloading
        block_s = settings.load_block_s if copy.is_load else settings.store_block_s
        start_s = max(self.now, self.step_end_s, self.line_s[copy.is_load])
        copy.end_s = self.line_s[copy.is_load] = start_s + len(copy.blocks) * block_s + settings.latency_s
        self.copied.append((start_s, copy.end_s, copy.is_load, len(copy.blocks)))

    def apply(self, step: Step) -> None:
        """Let a step's tokens appear, requests finish, and what was reported with it take effect."""
        for one, _, samples in step.plan:
            one.steps_out -= 1
            if samples:
                self.sample(one)
        for copy in step.reported:
            self.copies.remove(copy)
            one = copy.one
            if not copy.is_load:
                one.stores.remove(copy)
                self.pool.writing.difference_update(copy.chunks)
                continue
            one.phase = LOADED
            for chunk in copy.chunks:
                self.pool.readers[chunk] -= 1

    def sample(self, one: Served) -> None:
        one.in_flight -= 1
        one.generated += 1
        if one.generated == 1:
            one.first_token_s = self.now
        if one in self.running:
            self.name(one, one.computed - one.in_flight)
        if one.generated >= one.request.output_tokens:
            one.last_token_s = self.now
            (self.running if one in self.running else self.waiting).remove(one)
            one.phase, one.last_blocks = FINISHED, one.blocks
            self.finished.append(one)
            self.give_back(one)

    # --- a pass (7, 8) ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        self.plan: Plan = []
        self.budget = self.max_batch_tokens
        self.preempted, self.handed = [], set()
        for one in list(self.running):
            if one in self.running and self.budget and not one.is_last_out and not self.serve(one):
                break
        self.passed: list[Served] = []
        if not self.preempted:
            while self.admit_next():
                pass
        return self.plan

    def serve(self, one: Served) -> bool:
        """Plan a running request's next tokens. Returns False if the pass serves no more running requests."""
        new = min(one.known + one.in_flight - one.computed, self.budget)
        while not self.has_room(one.computed + new, len(one.blocks)):
            last = self.running[-1]
            if self.offloading is not None and last.steps_out:
                return False
            self.preempt(last)
            if last is one:
                return False
        self.compute(one, new)
        return True

    def has_room(self, tokens: int, blocks: int) -> bool:
        return -(-tokens // self.page_tokens) - blocks <= len(self.free)

    def compute(self, one: Served, new: int) -> None:
        self.take(one, one.computed + new)
        self.name(one, min(one.computed + new, one.known))
        self.plan.append((one, new, one.computed + new == one.known + one.in_flight))
        self.budget -= new

    def preempt(self, one: Served) -> None:
        self.running.remove(one)
        self.give_back(one)
        one.computed, one.phase = 0, WAITING
        one.preemptions += 1
        self.preempted.append(one)
        self.waiting.insert(0, one)

    def admit_next(self) -> bool:
        """Try the first waiting request that need not wait for something else. Returns False at the end of the pass."""
        for one in [*self.loading, *self.waiting]:
            if not self.budget or len(self.running) == self.max_running:
                return False
            if one.phase == LOADING or one.in_flight or one in self.passed:
                continue
            if one.phase == LOADED:
                self.end_load(one)
                if not self.has_room(one.known, len(one.blocks)):
                    return False
                self.loading.remove(one)
                self.begin(one)
                return True
            hits = self.find(one)
            chunks = self.find_below(one, len(hits))
            if chunks is None:
                self.passed.append(one)  # not tried again in this pass, though others may have brought what it waits for
                continue
            idle = sum(not block.users for block in hits)
            if not self.has_room(one.known, len(hits) - idle):
                return False
            if chunks and not self.has_room_to_load(one, len(hits) - idle, chunks):
                return False
            self.waiting.remove(one)
            self.hold(one, hits)
            if chunks:
                self.load(one, chunks)
            else:
                one.next_chunk = one.loaded = 0
                self.begin(one)
            if one.hits is None:
                one.hits = len(hits), one.loaded
            return True
        return False

    def begin(self, one: Served) -> None:
        """Let an admitted request compute."""
        one.phase = PREFILLING
        self.running.append(one)
        self.compute(one, min(one.known - one.computed, self.budget))

    # --- blocks (9, 10, 12, 13) ------------------------------------------------------------------------------------------

    def find(self, one: Served) -> list[Block]:
        hits = []
        for page in one.pages[: (one.known - 1) // self.page_tokens]:
            if page not in self.named:
                break
            hits.append(self.named[page][0])
        return hits

    def hold(self, one: Served, hits: list[Block]) -> None:
        for block in hits:
            if not block.users:
                del self.free[block]
            block.users += 1
            self.handed.add(block)
        one.blocks, one.named = list(hits), len(hits)
        one.computed = len(hits) * self.page_tokens

    def take(self, one: Served, tokens: int) -> None:
        """Take blocks for a request's first tokens."""
        while len(one.blocks) * self.page_tokens < tokens:
            block, _ = self.free.popitem(last=False)
            if block.key is not None:
                self.forget(block)
            block.users = 1
            self.handed.add(block)
            one.blocks.append(block)

    def name(self, one: Served, tokens: int) -> None:
        """Name the full ones among the blocks of a request's first tokens."""
        last = min(tokens // self.page_tokens, len(one.pages))
        for at in range(one.named, last):
            one.blocks[at].key = one.pages[at]
            self.named.setdefault(one.pages[at], []).append(one.blocks[at])
        one.named = max(one.named, last)

    def forget(self, block: Block) -> None:
        self.named[block.key].remove(block)
        if not self.named[block.key]:
            del self.named[block.key]
        block.key = None

    def give_back(self, one: Served) -> None:
        """Free a request's blocks, the last one first: it is taken first. A block without a page is taken before all others."""
        for block in reversed(one.blocks):
            block.users -= 1
            if not block.users:
                self.free[block] = None
                self.free.move_to_end(block, last=block.key is not None)
        one.blocks, one.named = [], 0

    # --- loads (9, 10, 11, 12, 13) ---------------------------------------------------------------------------------------

    def chunks_of(self, one: Served, start: int, tokens: int) -> list[tuple[int, int]]:
        """The full chunks among a request's first tokens, from the one at ``start`` on, as (name, place)."""
        assert self.offloading is not None
        size = self.offloading.blocks_per_chunk
        end = min(tokens // self.page_tokens, len(one.pages)) // size
        return [(one.pages[(place + 1) * size - 1], place) for place in range(start, end)]

    def find_below(self, one: Served, hits: int) -> list[tuple[int, int]] | None:
        """The chunks that a request loads behind its hit on the GPU; None if it has to ask again."""
        if self.offloading is None:
            return []
        if one.stores:
            return None
        size = self.offloading.blocks_per_chunk
        if one.known // self.page_tokens // size * size - hits < size:
            return []
        found = []
        for chunk, place in self.chunks_of(one, hits // size, one.known):
            if not self.pool.has(chunk):
                break
            found.append((chunk, place))
        if any(chunk in self.pool.writing for chunk, _ in found):
            return None
        if not found or (found[-1][1] + 1) * size - hits < size:
            return []
        return None if any(self.pool.readers.get(chunk) for chunk, _ in found) else found

    def has_room_to_load(self, one: Served, held: int, chunks: list[tuple[int, int]]) -> bool:
        assert self.offloading is not None
        blocks = (chunks[-1][1] + 1) * self.offloading.blocks_per_chunk - held
        promised = 0
        for other in [*self.running, *self.loading]:
            if other.phase in (LOADING, LOADED) or other.is_partial:
                promised += max(0, -(-other.known // self.page_tokens) - len(other.blocks))
        return blocks <= len(self.free) - promised

    def load(self, one: Served, chunks: list[tuple[int, int]]) -> None:
        assert self.offloading is not None
        hits = len(one.blocks)
        one.next_chunk = chunks[-1][1] + 1
        one.computed = one.next_chunk * self.offloading.blocks_per_chunk * self.page_tokens
        self.take(one, one.computed)
        one.loaded = len(one.blocks) - hits
        self.pool.read(one.use, chunks)
        copy = Copy(one, True, [chunk for chunk, _ in chunks], one.blocks[hits:])
        self.copies.append(copy)
        self.loads.append(copy)
        one.phase = LOADING
        self.loading.append(one)

    def end_load(self, one: Served) -> None:
        """Name what has been loaded. At least one token is left to compute."""
        self.name(one, one.computed)
        one.computed = min(one.computed, one.known - 1)

    # --- stores (14, 15, 16, 18, 19) -------------------------------------------------------------------------------------

    def offer_all(self, plan: Plan) -> list[Copy]:
        """Offer what this step computes, then what finished requests have; then note that these have finished."""
        finished, self.finished = self.finished, []
        if self.offloading is None:
            return []
        copies = [self.offer(one, min(one.computed + new, one.known)) for one, new, _ in plan]
        copies += [self.offer(one, one.known - 1) for one in finished]
        for one in finished:
            self.pool.finish(one.use)
        return [copy for copy in copies if copy is not None]

    def offer(self, one: Served, tokens: int) -> Copy | None:
        """Offer the next full chunks among a request's first tokens. Returns the store that comes of it."""
        assert self.offloading is not None
        if self.offloading.prompt_only:
            tokens = min(tokens, one.request.prompt_tokens)
        offered = self.chunks_of(one, one.next_chunk, tokens)
        if not offered:
            return None
        stored = self.pool.offer(one.use, offered)
        if stored is None:
            return None
        one.next_chunk = offered[-1][1] + 1
        if not stored:
            return None
        size = self.offloading.blocks_per_chunk
        places = [place for chunk, place in offered if chunk in stored]
        blocks = [block for place in places for block in (one.blocks or one.last_blocks)[place * size : (place + 1) * size]]
        copy = Copy(one, False, stored, blocks)
        one.stores.append(copy)
        self.copies.append(copy)
        return copy
