"""vLLM's pool for models with sliding windows, block by block and token by token: obvious and slow.

Written after ``v1/core`` of vLLM 0.33.0: a table of blocks for each group, None where vLLM has its null block.
"""

from kvsim.core.request import Request
from tests.engines.slow_blocks import Block
from tests.workloads import pages_of

FULL = "full"


class Running:
    """What a request holds: for each group, a table of the blocks of its pages; and how many of its pages have had names."""

    def __init__(self, groups: list[str], request: Request, pages: list[int]) -> None:
        self.tables: dict[str, list[Block | None]] = {group: [] for group in groups}
        self.request, self.pages = request, pages
        self.cached = dict.fromkeys(groups, 0)
        self.junction = 0


class NoRoom(Exception):
    """A step did not get its blocks."""


class SlowWindowBlocks:
    """``free`` are blocks without users in the order in which they are taken, ``named`` those with a key, oldest key first."""

    def __init__(
        self, capacity: int, *, groups: int = 1, window: int = 8, retention: int | None = 0, chunk: int = 0,
        page_tokens: int = 4, full_first: bool = False, cache_output: bool = False,
    ) -> None:  # fmt: skip
        self.blocks = [Block() for _ in range(capacity)]
        self.free, self.named = list(self.blocks), list[Block]()
        windows = [f"window {number}" for number in range(groups)]
        self.groups = [FULL, *windows] if full_first else [*windows, FULL]
        self.windows, self.window, self.retention = windows, window, retention
        self.chunk, self.page_tokens, self.cache_output = chunk, page_tokens, cache_output

    # --- the pool --------------------------------------------------------------------------------------------------------

    def find(self, group: str, page: int) -> Block | None:
        return next((block for block in self.named if block.key == (group, page)), None)

    def take(self) -> Block:
        if not self.free:
            raise NoRoom
        block = self.free.pop(0)
        if block.key is not None:
            self.named.remove(block)
            block.key = None
        block.users = 1
        return block

    def touch(self, block: Block) -> None:
        if not block.users:
            self.free.remove(block)
        block.users += 1

    def release(self, blocks: list[Block]) -> None:
        """``free_blocks``: the first is evicted first."""
        first, last = list[Block](), list[Block]()
        for block in blocks:
            block.users -= 1
            if not block.users:
                (last if block.key else first).append(block)
        self.free = first + self.free + last

    # --- find_longest_cache_hit ------------------------------------------------------------------------------------------

    def known(self, pages: list[int]) -> int:
        known = 0
        while known < len(pages) and self.find(FULL, pages[known]):
            known += 1
        return known

    def hit(self, pages: list[int]) -> int:
        """Right to left; as many pages in a row as the window needs, or fewer at the beginning."""
        need = -(-(self.window - 1) // self.page_tokens)
        in_a_row = 0
        for at in range(len(pages) - 1, -1, -1):
            if all(self.find(group, pages[at]) for group in self.windows):
                in_a_row += 1
                if in_a_row >= need:
                    return at + in_a_row
            else:
                in_a_row = 0
        return in_a_row

    # --- a request -------------------------------------------------------------------------------------------------------

    def serve(self, request: Request) -> tuple[Running, int] | None:
        before = list(self.free), list(self.named), [(block.key, block.users) for block in self.blocks]
        try:
            return self.admitted(request)
        except NoRoom:
            self.free, self.named, blocks = before
            for block, (key, users) in zip(self.blocks, blocks, strict=True):
                block.key, block.users = key, users
            return None

    def admitted(self, request: Request) -> tuple[Running, int]:
        size, prompt = self.page_tokens, request.prompt_tokens
        own = pages_of(request.runs) + (pages_of(request.output_runs or ()) if self.cache_output else [])
        running = Running(self.groups, request, own)
        pages = own[: (prompt - 1) // size]
        known = self.known(pages)
        hit = self.hit(pages[:known])
        running.junction = known * size if hit < known else 0
        for group in self.groups:
            skipped = self.skipped(group, hit * size)
            found = [self.find(group, page) for page in pages[:hit]]
            running.tables[group] = [None] * skipped + found[skipped:]
            running.cached[group] = hit
            for block in running.tables[group][skipped:]:
                assert block is not None
                self.touch(block)
        start = hit * size
        while start < prompt:
            end = min(prompt, start + (self.chunk or prompt))
            self.step(running, start, end)
            start = end
        for token in range(prompt, prompt + request.output_tokens - 1):
            self.step(running, token, token + 1)
        return running, hit

    def skipped(self, group: str, tokens: int) -> int:
        return 0 if group == FULL else max(0, tokens - self.window + 1) // self.page_tokens

    def step(self, running: Running, computed: int, upto: int) -> None:
        """``allocate_slots``: remove what is skipped, allocate, cache."""
        for group in self.groups:
            self.remove(running, group, self.skipped(group, computed))
        for group in self.groups:
            table = running.tables[group]
            while len(table) < -(-upto // self.page_tokens):
                table.append(self.take())
        for group in self.groups:
            self.cache(running, group, upto)

    def remove(self, running: Running, group: str, skipped: int) -> None:
        table, removed = running.tables[group], list[Block]()
        for at in range(min(skipped, len(table)) - 1, -1, -1):
            block = table[at]
            if block is None:
                break
            removed.append(block)
            table[at] = None
        self.release(removed)

    def cache(self, running: Running, group: str, tokens: int) -> None:
        """Answers' pages of full attention get their names at the end: in a replay, nobody could find them before."""
        full = min(tokens // self.page_tokens, len(running.pages))
        if group == FULL:
            full = min(full, len(pages_of(running.request.runs)))
        for at in range(running.cached[group], full):
            block = running.tables[group][at]
            if block is not None and (group == FULL or self.is_reachable(running, at)):
                self.name(block, group, running.pages[at])
        running.cached[group] = max(running.cached[group], full)

    def name(self, block: Block, group: str, page: int) -> None:
        block.key = group, page
        self.named.append(block)

    def is_reachable(self, running: Running, at: int) -> bool:
        """``reachable_block_mask``."""
        size = self.page_tokens
        need = -(-(self.window - 1) // size)
        if self.retention is None:
            return True
        if self.retention:
            per_segment = self.retention // size
            if need >= per_segment or at % per_segment >= per_segment - need:
                return True
        boundaries = [running.request.prompt_tokens - 1, *([running.junction] if running.junction else [])]
        return any(tokens // size - need <= at < tokens // size for tokens in boundaries)

    def finish(self, running: Running) -> None:
        table = running.tables[FULL]
        for at in range(running.cached[FULL], min(len(table), len(running.pages))):
            block = table[at]
            assert block is not None
            self.name(block, FULL, running.pages[at])
        for group in self.groups:
            self.release([block for block in reversed(running.tables[group]) if block is not None])


def play_slowly(pool: SlowWindowBlocks, requests: list[Request], in_flight: int = 1) -> list[int]:
    """The hit pages of each request, ``in_flight`` of which stay unfinished; -1 for one that can never fit."""
    running: list[Running] = []
    rows: list[int] = []
    for request in requests:
        if len(running) == in_flight:
            pool.finish(running.pop(0))
        served = pool.serve(request)
        while served is None and running:
            pool.finish(running.pop(0))
            served = pool.serve(request)
        rows.append(served[1] if served else -1)
        if served:
            running.append(served[0])
    return rows
