"""vLLM's scheduler V1 on one GPU for a model with sliding windows, block by block and step by step: obvious and slow."""

from typing import Any

from kvsim.core.request import Request
from tests.engines.slow_blocks import Block
from tests.engines.slow_schedule import Served, SlowSchedule


class SlowWindowSchedule(SlowSchedule):
    """As the other one, which has the blocks of full attention. A block of a window has the key (group, page)."""

    def __init__(self, *about: Any, groups: int, window: int, retention: int | None, full_first: bool, **more: Any) -> None:
        super().__init__(*about, **more)
        self.groups, self.window, self.retention = list(range(groups)), window, retention
        self.full_first = full_first
        self.need = -(-(window - 1) // self.page_tokens)
        self.tables: dict[int, list[list[Block | None]]] = {}
        self.cached: dict[int, int] = {}
        self.junctions: dict[int, int] = {}

    def run(self, requests: list[Request], *, names_answers: bool) -> list[tuple[int, int, float, float]]:
        rows = super().run(requests, names_answers=names_answers)
        assert all(not block.users for block in self.free)
        return rows

    def skipped(self, tokens: int) -> int:
        return max(0, tokens - self.window + 1) // self.page_tokens

    def cap(self) -> int:
        return -(-(self.window - 1 + self.max_batch_tokens) // self.page_tokens) + 1

    def find(self, one: Served) -> list[Block]:
        """Also notes what the groups with a window have, and where full attention parts from them."""
        known = super().find(one)
        in_a_row, hit = 0, 0
        for at in range(len(known) - 1, -1, -1):
            in_a_row = in_a_row + 1 if all((group, one.pages[at]) in self.named for group in self.groups) else 0
            if in_a_row >= self.need:
                hit = at + in_a_row
                break
        hit = hit or in_a_row
        behind = self.skipped(hit * self.page_tokens)
        self.tables[id(one)] = [
            [None] * behind + [self.named[group, page][0] for page in one.pages[behind:hit]] for group in self.groups
        ]
        self.cached[id(one)] = hit
        self.junctions[id(one)] = len(known) if hit < len(known) else 0
        return known[:hit]

    def idle(self, one: Served, hits: list[Block]) -> int:
        found = [block for table in self.tables[id(one)] for block in table if block is not None]
        return sum(not block.users for block in [*hits, *found])

    def fits(self, one: Served, hits: list[Block], new: int) -> bool:
        pages, hit, groups = -(-one.tokens // self.page_tokens), len(hits), len(self.groups)
        whole = pages - hit + groups * max(0, min(pages, self.cap()) - hit)
        chunk = (-(-(hit * self.page_tokens + new) // self.page_tokens) - hit) * (1 + groups)
        return max(whole, chunk) + self.idle(one, hits) <= len(self.free)

    def allocate(self, one: Served, tokens: int, hits: list[Block]) -> bool:
        tables, pages = self.tables[id(one)], -(-tokens // self.page_tokens)
        is_new = not one.blocks
        missing = pages - len(one.blocks) - len(hits)
        if not is_new:
            self.slide(one)
        if self.names_late and one.is_decoding and missing:
            self.name(one, tokens)
        idle = self.idle(one, hits) if is_new else 0
        if missing * (1 + len(self.groups)) + idle > len(self.free):
            return False
        found = [block for table in tables for block in table if block is not None] if is_new else []
        for block in [*found, *hits]:
            if not block.users:
                self.free.remove(block)
            block.users += 1
        for table in tables:
            while len(table) < pages:
                table.append(self.taken())
        allocated = super().allocate(one, tokens, hits)
        assert allocated
        for block in hits:  # which the other one counts, too
            block.users -= 1
        return True

    def taken(self) -> Block:
        block = self.free.pop(0)
        if block.key is not None:
            self.forget(block)
        block.users = 1
        return block

    def slide(self, one: Served) -> None:
        """Give back the blocks behind the window, group by group, the last one first."""
        for table in self.tables[id(one)]:
            gone = range(min(self.skipped(one.computed), len(table)) - 1, -1, -1)
            self.release([block for at in gone if (block := table[at]) is not None])
            for at in gone:
                table[at] = None

    def name(self, one: Served, tokens: int) -> None:
        super().name(one, tokens)
        full = min(tokens // self.page_tokens, len(one.pages))
        for at in range(self.cached[id(one)], full):
            for group, table in zip(self.groups, self.tables[id(one)], strict=True):
                block = table[at]
                if block is not None and self.is_kept(one, at):
                    block.key = group, one.pages[at]
                    self.named.setdefault(block.key, []).append(block)
        self.cached[id(one)] = max(full, self.cached[id(one)])

    def is_kept(self, one: Served, at: int) -> bool:
        if self.retention is None:
            return True
        every = self.retention // self.page_tokens
        if every and (self.need >= every or at % every >= every - self.need):
            return True
        boundaries = (one.request.prompt_tokens - 1) // self.page_tokens, self.junctions[id(one)]
        return any(end - self.need <= at < end for end in boundaries)

    def release(self, blocks: list[Block]) -> None:
        """Undo a use of each; those without a key go to the front, the others to the end."""
        for block in blocks:
            block.users -= 1
            if not block.users:
                self.free.insert(0 if block.key is None else len(self.free), block)

    def give_back(self, one: Served) -> None:
        if one.is_decoding:
            self.name(one, one.computed)
        if self.full_first:
            super().give_back(one)
        for table in self.tables[id(one)]:
            self.release([block for block in reversed(table) if block is not None])
        if not self.full_first:
            self.tables[id(one)] = [[] for _ in self.groups]
            self.cached[id(one)] = 10**9
            super().give_back(one)
        self.tables[id(one)] = [[] for _ in self.groups]
