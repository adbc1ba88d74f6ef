"""vLLM's scheduler V1 on one GPU, block by block and step by step: obvious and slow."""

from dataclasses import dataclass, field

from kvsim.core.request import Request
from kvsim.hardware.spec import LinearHardware
from tests.engines.slow_blocks import Block
from tests.workloads import pages_of


@dataclass(eq=False)
class Served:
    """A request on its way. ``pages`` are the ids of its full pages, of the prompt and of its answer."""

    request: Request
    pages: list[int]
    blocks: list[Block] = field(default_factory=list)
    computed: int = 0
    generated: int = 0
    hit_pages: int = -1
    preemptions: int = 0
    is_decoding: bool = False
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.generated


class SlowSchedule:
    """``free`` has the free blocks, the next to be taken first; ``named`` the blocks that hold a page, oldest first.

    With ``by_priority``, the highest priority is tried first, and the lowest is preempted first; of equals, those that arrived
    first and last. ``has_skipped`` is set where a request that preempts itself ends the planning of a step, so that others which
    run behind it compute nothing in that step. With ``names_late``, an answer's page is named when the next one is wanted, a step
    later than in vLLM and before anything is preempted for that, or when its request leaves.
    """

    def __init__(
        self,
        hardware: LinearHardware,
        page_tokens: int,
        capacity: int,
        max_batch_tokens: int,
        max_running: int,
        *,
        by_priority: bool = False,
        names_late: bool = False,
    ) -> None:
        self.by_priority, self.has_skipped, self.names_late = by_priority, False, names_late
        self.hardware, self.page_tokens = hardware, page_tokens
        self.max_batch_tokens, self.max_running = max_batch_tokens, max_running
        self.free = [Block() for _ in range(capacity)]
        self.named: dict[int, list[Block]] = {}
        self.waiting: list[Served] = []
        self.running: list[Served] = []

    def run(self, requests: list[Request], *, names_answers: bool) -> list[tuple[int, int, float, float]]:
        """Hit pages, preemptions, and the times of the first and the last token of each request."""
        all_served = [Served(one, pages_of((*one.runs, *((one.output_runs or ()) if names_answers else ())))) for one in requests]
        arriving, now = list(all_served), 0.0
        while arriving or self.waiting or self.running:
            while arriving and arriving[0].request.arrival_s <= now:
                self.waiting.append(arriving.pop(0))
            if self.by_priority:
                self.waiting.sort(key=rank)
            if not self.waiting and not self.running:
                now = arriving[0].request.arrival_s
                continue
            now = self.step(now)
        return [(one.hit_pages, one.preemptions, one.first_token_s, one.last_token_s) for one in all_served]

    def step(self, now: float) -> float:
        """Schedule and run one step. Returns when it ends."""
        plan: list[tuple[Served, int]] = []
        budget, has_preempted = self.max_batch_tokens, False
        behind = list(self.running)
        for one in behind:
            if one not in self.running or not budget:
                continue
            new = min(one.tokens - one.computed, budget)
            while one in self.running and not self.allocate(one, one.computed + new, []):
                preempted = self.preempt()
                budget += sum(tokens for other, tokens in plan if other is preempted)
                plan = [(other, tokens) for other, tokens in plan if other is not preempted]
                has_preempted = True
            if one not in self.running:
                self.has_skipped = self.has_skipped or one is not behind[-1]
                break
            plan.append((one, new))
            budget -= new
        while self.waiting and budget and len(self.running) < self.max_running and not has_preempted:
            one = self.waiting[0]
            hits = self.find(one)
            computed = len(hits) * self.page_tokens
            new = min(one.tokens - computed, budget)
            if not self.fits(one, hits, new):
                break
            one.computed = computed
            assert self.allocate(one, computed + new, hits)
            if one.hit_pages < 0:
                one.hit_pages = len(hits)
            self.running.append(self.waiting.pop(0))
            plan.append((one, new))
            budget -= new
        now += self.seconds(plan)
        for one, new in plan:
            one.computed += new
            if one.computed == one.tokens:
                self.sample(one, now)
        return now

    def fits(self, one: Served, hits: list[Block], new: int) -> bool:
        """Whether all tokens of a waiting request fit, of which a step would compute ``new`` tokens."""
        whole = -(-one.tokens // self.page_tokens) - len(hits) + sum(not block.users for block in hits)
        return whole <= len(self.free)

    def sample(self, one: Served, now: float) -> None:
        one.generated, one.is_decoding = one.generated + 1, True
        if one.generated == 1:
            one.first_token_s = now
        if one.generated >= one.request.output_tokens:
            one.last_token_s = now
            self.running.remove(one)
            self.give_back(one)

    def seconds(self, plan: list[tuple[Served, int]]) -> float:
        formula, seconds = self.hardware, self.hardware.fixed_s
        for one, new in plan:
            if one.is_decoding:
                seconds += formula.decode_request_s + formula.decode_context_s * one.computed
            else:
                seconds += formula.prefill_token_s * new + formula.chunk_context_s * new * one.computed
        return seconds

    def find(self, one: Served) -> list[Block]:
        hits = []
        for page in one.pages[: (one.tokens - 1) // self.page_tokens]:
            if page not in self.named:
                break
            hits.append(self.named[page][0])
        return hits

    def allocate(self, one: Served, tokens: int, hits: list[Block]) -> bool:
        """Take the blocks for the first ``tokens`` tokens and name the full ones."""
        missing = -(-tokens // self.page_tokens) - len(one.blocks) - len(hits)
        names_late = self.names_late and one.is_decoding
        if names_late and missing:
            self.name(one, tokens)
        if missing + sum(not block.users for block in hits) > len(self.free):
            return False
        for block in hits:
            if not block.users:
                self.free.remove(block)
            block.users += 1
        one.blocks += hits
        for _ in range(missing):
            block = self.free.pop(0)
            if block.key is not None:
                self.forget(block)
            block.users = 1
            one.blocks.append(block)
        if not names_late:
            self.name(one, tokens)
        return True

    def name(self, one: Served, tokens: int) -> None:
        """Name the full ones among the blocks of a request's first tokens."""
        for page, block in zip(one.pages, one.blocks[: tokens // self.page_tokens], strict=False):
            if block.key is None:
                block.key = page
                self.named.setdefault(page, []).append(block)

    def forget(self, block: Block) -> None:
        self.named[block.key].remove(block)
        if not self.named[block.key]:
            del self.named[block.key]
        block.key = None

    def give_back(self, one: Served) -> None:
        """Free a request's blocks, the last one first: it is taken first. A block without a page is taken before all others."""
        if one.is_decoding:
            self.name(one, one.computed)
        for block in reversed(one.blocks):
            block.users -= 1
            if not block.users:
                self.free.insert(0 if block.key is None else len(self.free), block)
        one.blocks = []

    def preempt(self) -> Served:
        one = max(self.running, key=rank) if self.by_priority else self.running[-1]
        self.running.remove(one)
        self.give_back(one)
        one.computed, one.is_decoding = 0, False
        one.preemptions += 1
        self.waiting.insert(0, one)
        if self.by_priority:
            self.waiting.sort(key=rank)
        return one


def rank(one: Served) -> tuple[int, int]:
    """Most important first, of equals the one that arrived first."""
    return -one.request.priority, one.request.index
