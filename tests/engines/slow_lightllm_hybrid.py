"""LightLLM's cache for hybrid models, page by page: obvious and slow. Plain lists; free pages are counted anew."""

from dataclasses import dataclass

from kvsim.core.request import Request
from tests.engines.slow_lightllm import Row, SlowLightLLM, SlowNode
from tests.workloads import pages_of


@dataclass(eq=False)
class Running:
    stored: list[int]
    """CPU pages of its prompt."""
    nodes: list[SlowNode]
    """The path that it holds."""
    needed: int
    own: int = 0
    """Pages that it computed or loaded and that are not in the tree."""
    duplicates: int = 0
    """Pages that it computed although the tree has them."""


class SlowLightLLMHybrid(SlowLightLLM):
    """A state is named by the page that it comes after; ``chunk`` is in pages, 0 for whole prompts."""

    def __init__(self, gpu: int, cpu: int = 0, *, states: int, chunk: int, unit: int = 1, page_tokens: int = 1) -> None:
        super().__init__(gpu, cpu, unit=unit, page_tokens=page_tokens)
        self.states, self.chunk = states, chunk
        self.kept: list[int] = []
        self.detached: list[int] = []
        """Both with the next to leave first."""
        self.alive: list[Running] = []

    # --- requests ----------------------------------------------------------------------------------------------------

    def serve(self, request: Request, in_flight: int) -> Row:
        if len(self.alive) >= in_flight:
            self.finish_oldest()
        path, tokens = pages_of(request.runs), request.prompt_tokens
        needed, usable = -(-(tokens + request.output_tokens) // self.page_tokens), (tokens - 1) // self.page_tokens
        stored = path[:usable][self.unit - 1 :: self.unit] if self.cpu else []
        if needed >= self.gpu:
            return -1, 0
        for page in stored:
            if page not in self.on_cpu:
                break
            self.found.append(page)
        while needed + sum(other.needed for other in self.alive) >= self.gpu or len(self.alive) >= self.states:
            self.finish_oldest()
        known = self.walk(path[:usable])
        known_pages = sum(len(node.pages) for node in known)
        while known and known[-1].pages[-1] not in self.kept:
            known.pop()
        hit = sum(len(node.pages) for node in known)
        running = Running(stored, known, needed)
        for node in reversed(known):
            if node.pages[-1] in self.kept:
                self.kept.append(self.kept.pop(self.kept.index(node.pages[-1])))
        self.alive.append(running)
        self.begin(known[-1].pages[-1] if known else -1)
        taken = max(hit, self.use_detached(running, path, hit, known_pages))
        self.move_to_the_end(self.found)
        self.found = []
        self.prefill(running, path, taken, tokens)
        return hit, taken - hit

    def use_detached(self, running: Running, path: list[int], hit: int, known_pages: int) -> int:
        """The depth of the detached state that the request begins from."""
        limit = max(known_pages, len(self.found) * self.unit)
        depth = next((depth for depth in range(limit, 0, -1) if path[depth - 1] in self.detached), 0)
        if depth:
            self.detached.append(self.detached.pop(self.detached.index(path[depth - 1])))
        if depth <= hit:
            return 0
        shared = min(known_pages, depth)
        if shared > hit:
            running.nodes = self.walk(path[:shared])
        self.take(running, depth - shared)
        self.insert(running, path[:depth], shared)
        return depth

    def prefill(self, running: Running, path: list[int], taken: int, tokens: int) -> None:
        while self.chunk and (taken + self.chunk) * self.page_tokens < tokens:
            self.take(running, self.chunk)
            self.insert(running, path[: taken + self.chunk], taken)
            taken += self.chunk
        self.take(running, running.needed - taken)

    def finish_oldest(self) -> None:
        self.store(self.alive.pop(0).stored)

    # --- pages -------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Running]:  # type: ignore[override]
        return getattr(self, "alive", [])

    @running.setter
    def running(self, _: list[Running]) -> None:
        pass

    def free(self) -> int:
        own = sum(one.own + one.duplicates for one in self.alive)
        return self.gpu - sum(len(node.pages) for node in self.nodes) - own

    def take(self, running: Running, pages: int) -> None:
        running.own += pages
        held = [node for one in self.alive for node in one.nodes]
        if self.free() + sum(len(node.pages) for node in self.nodes if node not in held) < 0:
            for other in self.alive:
                other.duplicates = 0
        while self.free() < 0:
            leaf = min(self.leaves(), key=lambda node: node.used)
            self.nodes.remove(leaf)
            if leaf.pages[-1] in self.kept:
                self.leave(leaf)

    def depth(self, node: SlowNode) -> int:
        above = next((other for other in self.nodes if node.above in other.pages), None)
        return len(node.pages) + (self.depth(above) if above else 0)

    def insert(self, running: Running, pages: list[int], shared: int) -> None:
        """Insert a request's first pages, of which ``shared`` are the tree's, and the state after them."""
        path = self.walk(pages)
        known = sum(len(node.pages) for node in path)
        running.own -= len(pages) - shared
        running.duplicates += known - shared
        if known < len(pages):
            path.append(SlowNode(pages[known:], path[-1].pages[-1] if path else -1, next(self.clock)))
            self.nodes.append(path[-1])
        running.nodes = path
        if pages[-1] not in self.kept and self.make_room(1):
            self.kept.append(pages[-1])

    # --- states ------------------------------------------------------------------------------------------------------

    def begin(self, start: int) -> None:
        """Make room for the state of the last request of ``alive``; the one that it begins from is the last to leave."""
        if not self.make_room(0, start):
            self.kept.remove(start)

    def make_room(self, wanted: int, start: int = -1) -> bool:
        """Make room for as many more states; that of ``start`` stays."""
        if len(self.kept) + len(self.detached) + len(self.alive) + wanted <= self.states:
            return True
        held = [page for one in self.alive for node in one.nodes for page in node.pages]
        others = [page for page in self.kept if page != start]
        idle = [page for page in others if page not in held]
        if others:
            self.kept.remove((idle or others)[0])
            return True
        return bool(self.detached) and self.detached.pop(0) >= 0

    def leave(self, node: SlowNode) -> None:
        page = node.pages[-1]
        self.kept.remove(page)
        if self.cpu and self.depth(node) % self.unit == 0:
            self.detached = [other for other in self.detached if other != page] + [page]
