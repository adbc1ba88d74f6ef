"""vLLM's block pool and its CPU tier, block by block and page by page: obvious and slow. Lists, the next to leave first."""

from dataclasses import dataclass, field
from typing import Any

from kvsim.core.request import Request
from tests.workloads import pages_of

Row = tuple[int, int]
"""Pages hit on the GPU and in CPU memory; (-1, 0) for a request that can never fit."""


@dataclass(eq=False)
class Block:
    """A slot of the GPU. A free one keeps its key, that of a page or a part of a state, until it is taken."""

    key: Any = None
    users: int = 0


@dataclass(eq=False)
class Running:
    """What a request holds, and what it was to the CPU tier: pages in the order of its path."""

    blocks: list[Block]
    path: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)


class SlowOffload:
    """The CPU tier with LRU. ``queue`` has its pages, ``offers`` (page, count), both from the oldest on."""

    def __init__(self, capacity: int, threshold: int, tracker_pages: int) -> None:
        self.capacity, self.threshold, self.tracker_pages = capacity, threshold, tracker_pages
        self.queue: list[int] = []
        self.offers: list[tuple[int, int]] = []

    def pages(self) -> list[int]:
        return self.queue

    def use(self, loaded: list[int], offered: list[int], running: Running) -> None:
        running.path = loaded + offered
        running.reused = [page for page in running.path if page in self.pages()]
        admitted = self.admit(offered)
        running.wanted = [page for page in admitted if page not in self.pages()]
        self.observe(running)
        others = [page for page in self.pages() if page not in running.path]
        surplus = len(self.pages()) + len(running.wanted) - self.capacity
        if surplus <= len(others):
            for _ in range(surplus):
                self.evict_one(running.path)
            self.trim()
            running.stored = running.wanted
            self.insert(running)

    def admit(self, offered: list[int]) -> list[int]:
        if self.threshold < 2:
            return offered
        counts = dict(self.offers)
        known = [page for page in offered if page in counts]
        new = [page for page in offered if page not in counts][: self.tracker_pages - len(known)]
        for page in known + new:
            self.offers = [offer for offer in self.offers if offer[0] != page]
            self.offers.append((page, counts.get(page, 0) + 1))
        self.offers = self.offers[-self.tracker_pages :]
        counts = dict(self.offers)
        return [page for page in offered if counts.get(page, 0) >= self.threshold]

    def touch(self, running: Running) -> None:
        for page in reversed(running.path):
            if page in self.queue and (page in running.reused or page in running.wanted):
                self.queue.remove(page)
                self.queue.append(page)

    def observe(self, running: Running) -> None:
        self.touch(running)

    def evict_one(self, kept: list[int]) -> None:
        self.queue.remove(next(page for page in self.queue if page not in kept))

    def insert(self, running: Running) -> None:
        self.queue += running.stored
        self.touch(running)

    def trim(self) -> None:
        pass

    def finish(self, running: Running) -> None:
        self.touch(running)


class SlowArc(SlowOffload):
    def __init__(self, capacity: int, threshold: int, tracker_pages: int) -> None:
        super().__init__(capacity, threshold, tracker_pages)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.target = 0.0

    def pages(self) -> list[int]:
        return self.t1 + self.t2

    def observe(self, running: Running) -> None:
        for page in reversed(running.wanted):
            if page in self.b1:
                self.target = min(self.target + max(1, len(self.b2) / len(self.b1)), self.capacity)
                self.b1.append(self.b1.pop(self.b1.index(page)))
            elif page in self.b2:
                self.target = max(self.target - max(1, len(self.b1) / len(self.b2)), 0)
                self.b2.append(self.b2.pop(self.b2.index(page)))

    def evict_one(self, kept: list[int]) -> None:
        in_t1 = [page for page in self.t1 if page not in kept]
        in_t2 = [page for page in self.t2 if page not in kept]
        if in_t1 and (len(self.t1) >= int(self.target) or not in_t2):
            self.t1.remove(in_t1[0])
            self.b1.append(in_t1[0])
        else:
            self.t2.remove(in_t2[0])
            self.b2.append(in_t2[0])

    def insert(self, running: Running) -> None:
        self.t1 += running.stored
        self.b1 = [page for page in self.b1 if page not in running.stored]
        self.b2 = [page for page in self.b2 if page not in running.stored]

    def trim(self) -> None:
        self.b1, self.b2 = self.b1[-self.capacity :], self.b2[-self.capacity :]

    def finish(self, running: Running) -> None:
        for page in reversed(running.path):
            if page in running.reused and page in self.pages():
                (self.t1 if page in self.t1 else self.t2).remove(page)
                self.t2.append(page)
            elif page in running.stored and page in self.pages():
                queue = self.t1 if page in self.t1 else self.t2
                queue.append(queue.pop(queue.index(page)))


class SlowBlocks:
    """The GPU. ``free`` are blocks without users in the order in which they are taken, ``blocks`` all in the order of naming."""

    def __init__(self, capacity: int, offload: SlowOffload | None = None, page_tokens: int = 4) -> None:
        self.free = [Block() for _ in range(capacity)]
        self.blocks: list[Block] = []
        self.offload, self.page_tokens = offload, page_tokens

    def find(self, page: int) -> Block | None:
        return next((block for block in self.blocks if block.key == page), None)

    def serve(self, request: Request) -> tuple[Running, Row] | None:
        pages = pages_of(request.runs)
        usable = (request.prompt_tokens - 1) // self.page_tokens
        hit: list[Block] = []
        for page in pages[:usable]:
            block = self.find(page)
            if block is None:
                break
            hit.append(block)
        total = -(-(request.prompt_tokens + request.output_tokens) // self.page_tokens)
        if total - len(hit) > len([block for block in self.free if block not in hit]):
            return None
        for block in hit:
            block.users += 1
        self.free = [block for block in self.free if not block.users]
        taken, self.free = self.free[: total - len(hit)], self.free[total - len(hit) :]
        for block in taken:
            block.key, block.users = None, 1
        self.blocks = [block for block in self.blocks if block not in taken]
        for block, page in zip(taken, pages[len(hit) :], strict=False):
            block.key = page
            self.blocks.append(block)
        running, loaded = Running(hit + taken), 0
        if self.offload is not None:
            for page in pages[len(hit) : usable]:
                if page not in self.offload.pages():
                    break
                loaded += 1
            after = pages[len(hit) :]
            self.offload.use(after[:loaded], after[loaded:] if loaded else pages, running)
        return running, (len(hit), loaded)

    def finish(self, running: Running) -> None:
        for block in reversed(running.blocks):
            block.users -= 1
            if not block.users and block.key is not None:
                self.free.append(block)
        self.free = [block for block in running.blocks if not block.users and block.key is None] + self.free
        if self.offload is not None:
            self.offload.finish(running)


def play_slowly(pool: SlowBlocks, requests: list[Request], in_flight: int = 1) -> list[Row]:
    """The hits of each request, ``in_flight`` of which stay unfinished."""
    running: list[Running] = []
    rows: list[Row] = []
    for request in requests:
        if len(running) == in_flight:
            pool.finish(running.pop(0))
        served = pool.serve(request)
        while served is None and running:
            pool.finish(running.pop(0))
            served = pool.serve(request)
        rows.append(served[1] if served else (-1, 0))
        if served:
            running.append(served[0])
    return rows
