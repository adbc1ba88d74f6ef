"""LightLLM's cache, page by page: obvious and slow. Plain lists; everything else is counted when it is asked for.

It plays the rules that ``LightLLMCache`` and ``PageStore`` state, with LRU on the GPU.
"""

from dataclasses import dataclass
from itertools import count

from kvsim.core.request import Request
from tests.workloads import pages_of

Row = tuple[int, int]
"""Hit pages on the GPU and on the CPU; (-1, 0) for a request that can never fit."""


@dataclass(eq=False)
class SlowNode:
    pages: list[int]
    above: int
    """The page before the first one; -1 at the root."""
    used: int


@dataclass(eq=False)
class Running:
    path: list[int]
    """Page ids of everything that the request computes."""
    stored: list[int]
    """CPU pages of its prompt."""
    nodes: list[SlowNode]
    needed: int
    hit: int


class SlowLightLLM:
    def __init__(self, gpu: int, cpu: int = 0, *, unit: int = 1, page_tokens: int = 1, cache_output: bool = False) -> None:
        self.gpu, self.cpu, self.unit = gpu, cpu // unit, unit
        self.page_tokens, self.cache_output = page_tokens, cache_output
        self.nodes: list[SlowNode] = []
        self.on_cpu: list[int] = []
        """CPU pages, the next to leave first; each is named by the last of its GPU pages."""
        self.found: list[int] = []
        """CPU pages that the request which waits for room has found."""
        self.running: list[Running] = []
        self.clock = count()

    # --- requests ----------------------------------------------------------------------------------------------------

    def serve(self, request: Request, in_flight: int) -> Row:
        if len(self.running) >= in_flight:
            self.finish_oldest()
        path, tokens = pages_of(request.runs), request.prompt_tokens + request.output_tokens
        if self.cache_output:
            path += pages_of(request.output_runs or ())
            tokens = request.prompt_tokens + max(request.output_tokens - 1, 0)
        needed = -(-tokens // self.page_tokens)
        usable = (request.prompt_tokens - 1) // self.page_tokens
        stored = path[:usable][self.unit - 1 :: self.unit]
        if needed >= self.gpu:
            return -1, 0
        for page in stored:
            if page not in self.on_cpu:
                break
            self.found.append(page)
        while needed + sum(other.needed for other in self.running) >= self.gpu:
            self.finish_oldest()
        nodes = self.walk(path[:usable])
        hit = sum(len(node.pages) for node in nodes)
        loaded = max(0, len(self.found) * self.unit - hit)
        self.move_to_the_end(self.found)
        self.found = []
        self.running.append(Running(path, stored, nodes, needed, hit))
        while self.free() < 0:
            self.nodes.remove(min(self.leaves(), key=lambda node: node.used))
        return hit, loaded

    def finish_oldest(self) -> None:
        request = self.running.pop(0)
        self.store(request.stored)
        path = self.walk(request.path)
        known = sum(len(node.pages) for node in path)
        if known < len(request.path):
            above = path[-1].pages[-1] if path else -1
            self.nodes.append(SlowNode(request.path[known:], above, next(self.clock)))

    # --- GPU ---------------------------------------------------------------------------------------------------------

    def free(self) -> int:
        return self.gpu - sum(len(node.pages) for node in self.nodes) - sum(one.needed - one.hit for one in self.running)

    def leaves(self) -> list[SlowNode]:
        held = [node for request in self.running for node in request.nodes]
        parents = {node.above for node in self.nodes}
        return [node for node in self.nodes if node.pages[-1] not in parents and node not in held]

    def walk(self, pages: list[int]) -> list[SlowNode]:
        """The nodes that hold the longest prefix, all used now; the last is cut where the match ends."""
        path, now = [], next(self.clock)
        while node := next((node for node in self.nodes if pages and node.pages[0] == pages[0]), None):
            same = sum(mine == asked for mine, asked in zip(node.pages, pages, strict=False))
            if same < len(node.pages):
                lower, node = node, SlowNode(node.pages[:same], node.above, now)
                lower.pages, lower.above = lower.pages[same:], node.pages[-1]
                self.nodes.append(node)
                for request in self.running:
                    if lower in request.nodes:
                        request.nodes.append(node)
            node.used, pages = now, pages[same:]
            path.append(node)
        return path

    # --- CPU ---------------------------------------------------------------------------------------------------------

    def store(self, pages: list[int]) -> None:
        done: list[int] = []
        for page in pages:
            if page not in self.on_cpu:
                idle = [other for other in self.on_cpu if other not in done and other not in self.found]
                if len(self.on_cpu) == self.cpu and not idle:
                    break
                if len(self.on_cpu) == self.cpu:
                    self.on_cpu.remove(idle[0])
                self.on_cpu.append(page)
            done.append(page)
        self.move_to_the_end([page for page in done if page not in self.found])

    def move_to_the_end(self, pages: list[int]) -> None:
        self.on_cpu = [page for page in self.on_cpu if page not in pages] + pages


def play_slowly(cache: SlowLightLLM, requests: list[Request], *, in_flight: int = 1) -> list[Row]:
    """Rows of all requests."""
    return [cache.serve(request, in_flight) for request in requests]
