"""A slow model of SGLang's unified cache: no counters and no pins; whatever is asked is looked up in lists of paths.

A path is a tuple of page ids. What keeps pages in place is listed as a path, or as the part of a path from some page on, so that
nothing changes when a node is cut.
"""

from itertools import count

from kvsim.core.request import Request
from tests.workloads import pages_of

Path = tuple[int, ...]
Part = tuple[Path, int]
"""The pages of a path from a position on."""


class SlowNode:
    """The last pages of a path, from ``start`` on."""

    def __init__(self, path: Path, start: int, used: int) -> None:
        self.path, self.start, self.used = path, start, used
        self.on_gpu = self.on_host = False
        self.hits = 0

    @property
    def end(self) -> int:
        return len(self.path)

    @property
    def size(self) -> int:
        return self.end - self.start

    def is_in(self, part: Part) -> bool:
        return self.start >= part[1] and part[0][: self.end] == self.path


class SlowUnified:
    def __init__(
        self, gpu: int, cpu: int = 0, *, write: str = "write_through", storage: int = 0, chunk: int = 0, copy_steps: int = 0,
        cache_output: bool = True, page_tokens: int = 1,
    ) -> None:  # fmt: skip
        self.gpu_pages, self.host_pages, self.page_tokens = gpu, cpu, page_tokens
        self.hits_to_copy = {"write_through": 1, "write_through_selective": 2}.get(write, 0) if cpu else 0
        self.counts_hits, self.writes_back = write != "write_back" or not cpu, write == "write_back" and cpu > 0
        self.chunk, self.copy_steps, self.cache_output = chunk or 10**9, copy_steps, cache_output
        self.clock, self.step_number = count(), 0
        self.nodes: list[SlowNode] = []
        self.own_pages = 0
        """GPU pages of requests that are in no node."""
        self.locks: list[Path] = []
        """Everything on these paths stays on the GPU."""
        self.unsent: list[Part] = []
        self.copies: list[tuple[int, list[Part]]] = []
        self.loads: list[tuple[int, Part]] = []
        self.to_store: list[Part] = []
        self.kept: list[Part] = []
        """Stays on the host, besides what is to be stored."""
        self.both: list[SlowNode] = []
        self.stored: set[Path] | None = set() if storage else None

    # --- what is where -----------------------------------------------------------------------------------------------------

    def gpu_free(self) -> int:
        return self.gpu_pages - self.own_pages - sum(node.size for node in self.nodes if node.on_gpu)

    def host_free(self) -> int:
        return self.host_pages - sum(node.size for node in self.nodes if node.on_host)

    def is_locked(self, node: SlowNode) -> bool:
        return any(path[: node.end] == node.path for path in self.locks)

    def is_kept(self, node: SlowNode) -> bool:
        return any(node.is_in(part) for part in (*self.to_store, *self.kept)) or self.is_loading(node)

    def is_loading(self, node: SlowNode) -> bool:
        return any(node.is_in(part) for _, part in self.loads)

    def below(self, node: SlowNode) -> list[SlowNode]:
        return [other for other in self.nodes if other.start >= node.end and other.path[: node.end] == node.path]

    def gpu_leaves(self) -> list[SlowNode]:
        here = [node for node in self.nodes if node.on_gpu]
        return [node for node in here if not self.is_locked(node) and not any(other.on_gpu for other in self.below(node))]

    def host_leaves(self) -> list[SlowNode]:
        here = [node for node in self.nodes if not node.on_gpu and not self.below(node)]
        return [node for node in here if not self.is_locked(node) and not self.is_kept(node)]

    def touch(self, node: SlowNode) -> None:
        node.used = next(self.clock)

    def register(self, node: SlowNode) -> None:
        if not (node.on_gpu and node.on_host) or self.is_loading(node):
            self.both = [other for other in self.both if other is not node]
        elif node not in self.both:
            self.both.append(node)

    def child(self, pages: Path, at: int) -> SlowNode | None:
        """The node after the first ``at`` pages of a path, cut where the path leaves it."""
        for node in self.nodes:
            if at < len(pages) and node.start == at and node.path[: at + 1] == pages[: at + 1]:
                same = max(end for end in range(at, node.end + 1) if node.path[:end] == pages[:end])
                return node if same == node.end else self.cut(node, same)
        return None

    def cut(self, node: SlowNode, at: int) -> SlowNode:
        upper = SlowNode(node.path[:at], node.start, next(self.clock))
        upper.on_gpu, upper.on_host, upper.hits = node.on_gpu, node.on_host, node.hits
        node.start = at
        self.touch(node)
        self.nodes.append(upper)
        self.register(upper)
        return upper

    def find(self, pages: Path) -> list[SlowNode]:
        path: list[SlowNode] = []
        while (node := self.child(pages, path[-1].end if path else 0)) is not None:
            path.append(node)
        for node in path:
            self.touch(node)
        return path

    # --- moves -------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.step_number += 1
        self.store()
        while self.copies and self.copies[0][0] <= self.step_number:
            for part in self.copies.pop(0)[1]:
                self.locks.remove(part[0])
                self.to_store += [part] if self.stored is not None else []
        while self.loads and self.loads[0][0] <= self.step_number:
            part = self.loads.pop(0)[1]
            self.locks.remove(part[0])
            for node in sorted(self.nodes, key=lambda node: -node.end):
                if node.is_in(part) and self.writes_back:
                    self.register(node)

    def store(self) -> None:
        for path, start in self.to_store:
            assert self.stored is not None
            self.stored |= {path[: at + 1] for at in range(start, len(path))}
        self.to_store = []

    def send(self) -> None:
        self.copies += [(self.step_number + self.copy_steps, self.unsent)] if self.unsent else []
        self.unsent = []

    def hit(self, node: SlowNode) -> None:
        if not self.counts_hits:
            return
        node.hits += 1
        if not self.hits_to_copy or node.on_host or node.hits < self.hits_to_copy:
            return
        above = [other for other in self.nodes if other.path == node.path[: other.end]]
        lacking = sorted(above, key=lambda other: other.end)
        for at in range(len(lacking), 0, -1):
            if lacking[at - 1].on_host:
                lacking = lacking[at:]
                break
        for other in lacking:
            if not self.host_copy(other):
                return
            self.locks.append(other.path)
            self.unsent.append((other.path, other.start))

    def host_copy(self, node: SlowNode) -> bool:
        self.make_host_room(node.size - self.host_free())
        node.on_host = self.host_free() >= node.size
        return node.on_host

    def make_host_room(self, pages: int) -> None:
        for spares_leaves in (True, False) if self.writes_back and pages > 0 else ():
            for node in list(self.both):
                if pages <= 0:
                    break
                if not (node.on_gpu and node.on_host):
                    self.both.remove(node)
                elif not self.is_kept(node) and not (spares_leaves and node in self.gpu_leaves()):
                    node.on_host = False
                    self.both.remove(node)
                    pages -= node.size
        while pages > 0 and (leaves := self.host_leaves()):
            oldest = min(leaves, key=lambda node: node.used)
            pages -= oldest.size
            self.remove(oldest)

    def remove(self, node: SlowNode) -> None:
        self.nodes.remove(node)
        self.both = [other for other in self.both if other is not node]

    def make_room(self, pages: int) -> None:
        refused: list[SlowNode] = []
        while self.gpu_free() < pages and (leaves := [node for node in self.gpu_leaves() if node not in refused]):
            node = min(leaves, key=lambda node: node.used)
            if not node.on_host and self.writes_back and self.host_copy(node):
                self.register(node)
                self.to_store += [(node.path, node.start)] if self.stored is not None else []
            if node.on_host:
                node.on_gpu = False
            elif any(self.is_locked(other) or self.is_kept(other) for other in self.below(node)):
                refused.append(node)
            else:
                for other in [*self.below(node), node]:
                    self.remove(other)

    # --- requests ----------------------------------------------------------------------------------------------------------

    def insert(self, pages: Path, own_from: int, counted: int) -> None:
        at = 0
        while (node := self.child_touched(pages, at)) is not None:
            at = node.end
            self.own_pages -= node.size if node.start >= own_from else 0
            if not node.on_gpu:
                node.on_gpu = True
                self.register(node)
            if at > counted:
                self.hit(node)
        if at < len(pages):
            leaf = SlowNode(pages, at, next(self.clock))
            leaf.on_gpu = True
            self.nodes.append(leaf)
            self.own_pages -= leaf.size
            self.hit(leaf)

    def child_touched(self, pages: Path, at: int) -> SlowNode | None:
        for node in self.nodes:
            if at < len(pages) and node.start == at and node.path[: at + 1] == pages[: at + 1]:
                self.touch(node)
        return self.child(pages, at)

    def read_ahead(self, sought: Path) -> tuple[int, int]:
        """Bring to the host what storage has of a prompt. Returns the first page and how many."""
        assert self.stored is not None
        path = self.find(sought)
        start, found = (path[-1].end if path else 0), 0
        while (not path or path[-1].on_host) and start + found < len(sought) and sought[: start + found + 1] in self.stored:
            found += 1
        part = (path[-1].path, path[-1].start) if path else ((), 0)
        self.kept.append(part)
        self.step()
        if found > self.host_free():
            self.make_host_room(found)
        found = min(found, self.host_free())
        if found:
            for node in path[-1:]:
                self.touch(node)
            new = SlowNode(sought[: start + found], start, next(self.clock))
            new.on_host = True
            self.nodes.append(new)
        self.kept.remove(part)
        self.store()
        return start, found

    def load(self, sought: Path, start: int, end: int) -> int:
        self.locks.append(sought[:end])
        self.make_room(end - start)
        self.locks.remove(sought[:end])
        if self.gpu_free() < end - start:
            return 0
        for node in self.nodes:
            node.on_gpu = node.on_gpu or node.path == sought[: node.end]
        self.locks.append(sought[:end])
        self.loads.append((self.step_number + self.copy_steps, (sought[:end], start)))
        return end - start


class SlowRequest:
    def __init__(self, pages: Path, prompt_pages: int, held: int) -> None:
        self.pages, self.prompt_pages, self.held = pages, prompt_pages, held


def play_slowly(cache: SlowUnified, requests: list[Request], *, in_flight: int = 1) -> list[tuple[int, int, int]]:
    """The hits of each request on GPU, host and storage; (-1, 0, 0) for a rejected one. OverflowError: the engine would stop."""
    running: list[SlowRequest] = []
    rows = []

    def step() -> None:
        cache.step()
        cache.store()

    def finish() -> None:
        request = running.pop(0)
        n, pages = request.prompt_pages, request.pages
        if cache.cache_output:
            cache.insert(pages, n, n)
            if 0 < n < len(pages):
                cache.insert(pages[:n], n, n)
        cache.own_pages -= request.held - (len(pages) if cache.cache_output else n)
        cache.locks.remove(pages[:n])
        cache.send()

    for request in requests:
        tokens, size = request.prompt_tokens, cache.page_tokens
        prompt = tuple(pages_of(request.runs))
        n, held = len(prompt), request.pages_for(tokens + request.output_tokens, size)
        sought = prompt[: max(0, (tokens - 1) // size)]
        if len(running) >= in_flight:
            finish()
        step()
        first, brought = cache.read_ahead(sought) if cache.stored is not None else (0, 0)
        while True:
            path = cache.find(sought)
            l1 = sum(node.size for node in path if node.on_gpu)
            cache.locks.append(prompt[:l1])
            idle = sum(node.size for node in cache.nodes if node.on_gpu and not cache.is_locked(node))
            if cache.gpu_free() + idle >= held - l1 or not (running or cache.copies or cache.loads):
                break
            cache.locks.remove(prompt[:l1])
            if running:
                finish()
            step()
        cache.locks.remove(prompt[:l1])
        if cache.gpu_free() + idle < held - l1:
            rows.append((-1, 0, 0))
            continue
        found = path[-1].end if path else 0
        cache.locks.append(prompt[:l1])
        loaded = cache.load(sought, l1, found) if found > l1 else 0
        cache.locks.remove(prompt[:l1])
        at = l1 + loaded
        cache.locks.append(prompt[:at])
        cache.make_room(held - at)
        if cache.gpu_free() < held - at:
            raise OverflowError
        cache.own_pages += held - at
        l3 = max(0, min(at, first + brought) - max(l1, first)) if loaded else 0
        rows.append((l1, loaded - l3, l3))
        locked, counted, total = at, 0, max(n, -(-tokens // size))
        while at < total:
            upto = min(at + cache.chunk, total)
            cache.insert(prompt[: min(upto, n)], min(at, n), counted)
            cache.locks.remove(prompt[:locked])
            at, counted, locked = upto, min(upto, n), min(upto, n)
            cache.locks.append(prompt[:locked])
        cache.send()
        running.append(SlowRequest(prompt + tuple(pages_of(request.output_runs or ())), n, held))
    return rows


def play_alone(cache: SlowUnified, requests: list[Request], chunk_tokens: int) -> list[tuple[int, int]]:
    """The hits of each request on GPU and host if SGLang's scheduler serves one after another, and copies take no time.

    Every pass makes room for its step: a chunk of a prompt gets a page more than it needs, and a token of an answer leaves one
    page free.
    """
    rows, size = [], cache.page_tokens
    for index, request in enumerate(requests):
        tokens, output, prompt = request.prompt_tokens, request.output_tokens, tuple(pages_of(request.runs))
        cache.send(), cache.step()
        if index % 32 == 0:  # the whole queue is looked up
            cache.find(prompt)
        sought = prompt[: (tokens - 1) // size]
        path = cache.find(sought)
        l1, found = sum(node.size for node in path if node.on_gpu), path[-1].end if path else 0
        cache.locks.append(prompt[:l1])
        kept = l1 + (cache.load(sought, l1, found) if found > l1 else 0)
        cache.locks.remove(prompt[:l1])
        rows.append((l1, kept - l1))
        cache.locks.append(prompt[:kept])
        filled, counted = kept * size, 0
        while filled < tokens:
            end = min(tokens, filled + chunk_tokens)
            cache.make_room(-(-(end - filled) // size) + 1)
            cache.own_pages += -(-end // size) - -(-filled // size)
            filled = end
            if output > 1 or filled < tokens:
                if filled < tokens:
                    cache.send(), cache.step()
                cache.insert(prompt[: filled // size], kept, counted)
                cache.locks.remove(prompt[:kept])
                kept = counted = filled // size
                cache.locks.append(prompt[:kept])
        cache.send()
        for length in range(tokens, tokens + output - 1):
            cache.send(), cache.step()
            cache.make_room(1)
            cache.own_pages += length % size == 0
        whole = prompt + tuple(pages_of(request.output_runs or ())) * cache.cache_output
        cache.insert(whole[: (tokens + output - 1) // size], kept, counted)
        cache.find(prompt) if output > 1 else None
        cache.own_pages = 0
        cache.locks.remove(prompt[:kept])
        cache.send()
    return rows
