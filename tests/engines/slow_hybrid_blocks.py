"""vLLM's pool for hybrid models, block by block and step by step: obvious and slow. Lists, the next to leave first."""

from dataclasses import dataclass, field

from kvsim.core.request import Request
from tests.engines.slow_blocks import Block
from tests.workloads import pages_of

Key = tuple[str, int]
"""What a block holds: ("kv", page), or (group of states, page that the state comes after)."""


@dataclass(eq=False)
class Running:
    """What a request holds: blocks of pages, and by group those of states, by the number of the page that they end in."""

    kv: list[Block]
    states: dict[str, dict[int, Block]] = field(default_factory=dict)


class SlowHybridBlocks:
    """``free`` are blocks without users in the order in which they are taken, ``named`` those with a key, oldest key first."""

    def __init__(self, capacity: int, *, groups: int = 1, interval: int | None = 0, chunk: int = 0, page_tokens: int = 4) -> None:
        self.free = [Block() for _ in range(capacity)]
        self.named: list[Block] = []
        self.groups = [f"group {number}" for number in range(groups)]
        self.interval, self.chunk, self.page_tokens = interval, chunk, page_tokens

    # --- blocks ----------------------------------------------------------------------------------------------------------

    def find(self, kind: str, page: int) -> Block | None:
        return next((block for block in self.named if block.key == (kind, page)), None)

    def take(self) -> Block:
        block = self.free.pop(0)
        if block.key is not None:
            self.named.remove(block)
            block.key = None
        block.users = 1
        return block

    def share(self, block: Block) -> None:
        if not block.users:
            self.free.remove(block)
        block.users += 1

    def name(self, block: Block, kind: str, page: int) -> None:
        block.key = kind, page
        self.named.append(block)

    def release(self, block: Block) -> None:
        block.users -= 1
        if not block.users:
            self.free.insert(len(self.free) if block.key else 0, block)

    # --- requests --------------------------------------------------------------------------------------------------------

    def known(self, pages: list[int]) -> list[Block]:
        known: list[Block] = []
        for page in pages:
            block = self.find("kv", page)
            if block is None:
                break
            known.append(block)
        return known

    def hit_pages(self, pages: list[int], known: int) -> int:
        depths = range(known, 0, -1)
        return next((depth for depth in depths if all(self.find(group, pages[depth - 1]) for group in self.groups)), 0)

    def next_end(self, start: int, tokens: int, junction: int) -> int:
        """One step: up to a chunk, cut at a page boundary unless it ends the prompt or stays inside one page."""
        size, last = self.page_tokens, (tokens - 1) // self.page_tokens * self.page_tokens
        end = min(tokens, start + (self.chunk or tokens))
        if end < tokens and (end // size * size > start or size <= self.chunk):
            end = end // size * size
        boundary = (start // size + 1) * size if start % size else 0
        return min([stop for stop in (last, junction, boundary) if start < stop < end], default=end)

    def is_kept(self, end: int, tokens: int, junction: int) -> bool:
        if end % self.page_tokens:
            return False
        if self.interval is None or self.interval // self.page_tokens == 1:
            return True
        is_multiple = self.interval > 0 and end % self.interval == 0
        return is_multiple or end == junction or end == (tokens - 1) // self.page_tokens * self.page_tokens

    def serve(self, request: Request) -> tuple[Running, int] | None:
        size, tokens = self.page_tokens, request.prompt_tokens
        pages = pages_of(request.runs)
        known = self.known(pages[: (tokens - 1) // size])
        hit = self.hit_pages(pages, len(known))
        junction = len(known) * size if hit < len(known) else 0
        total = -(-(tokens + request.output_tokens) // size)
        start = hit * size
        ends: list[int] = []
        while not ends or ends[-1] < tokens:
            ends.append(self.next_end(ends[-1] if ends else start, tokens, junction))
        states = {group: self.find(group, pages[hit - 1]) for group in self.groups} if hit else {}
        if not self.has_room(total - hit, len(ends), known[:hit], [block for block in states.values() if block]):
            return None
        running = Running(known[:hit], {group: {} for group in self.groups})
        for block in running.kv:
            self.share(block)
        for group, state in states.items():
            assert state is not None
            self.share(state)
            running.states[group][hit - 1] = state
        for end in ends:
            self.step(running, pages, start, end, total if end == tokens else -(-end // size))
            if self.is_kept(end, tokens, junction):
                for group in self.groups:
                    self.name(running.states[group][end // size - 1], group, pages[end // size - 1])
            start = end
        return running, hit

    def has_room(self, own: int, steps: int, hit: list[Block], states: list[Block]) -> bool:
        """Whether the last step gets its blocks: from the second step on, the state that was hit may leave."""
        kept = hit + states if steps == 1 else hit
        return own + min(2, steps) * len(self.groups) <= len([block for block in self.free if block not in kept])

    def step(self, running: Running, pages: list[int], start: int, end: int, upto: int) -> None:
        size = self.page_tokens
        for blocks in running.states.values():
            for number in [number for number in blocks if number < (start - 1) // size]:
                self.release(blocks.pop(number))
        while len(running.kv) < upto:
            running.kv.append(self.take())
        for blocks in running.states.values():
            if -(-end // size) - 1 not in blocks:
                blocks[-(-end // size) - 1] = self.take()
        for number in range(start // size, end // size):
            self.name(running.kv[number], "kv", pages[number])

    def finish(self, running: Running) -> None:
        for block in reversed(running.kv):
            self.release(block)
        for blocks in running.states.values():
            for number in sorted(blocks, reverse=True):
                self.release(blocks[number])


def play_slowly(pool: SlowHybridBlocks, requests: list[Request], in_flight: int = 1) -> list[int]:
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
