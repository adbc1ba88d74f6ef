"""SGLang's caches, page by page: obvious and slow. A plain list of nodes; everything else is counted when it is asked for.

It plays the rules that ``WholeNodeCache`` and ``HostedNodeCache`` state; with one tier, the host has no room.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvsim.core.request import Request
from tests.workloads import pages_of

Row = tuple[int, int]
"""Hit pages on the GPU and on the host; (-1, 0) for a request that can never fit."""


@dataclass(eq=False)
class SlowNode:
    pages: list[int]
    above: int
    """The page before the first one; -1 at the root. Page ids name their prefix, so this tells the parent."""
    used: int
    created: int
    hits: int = 0
    users: int = 0
    on_gpu: bool = True
    on_host: bool = False
    is_kept: bool = False


class SlowRadix:
    def __init__(
        self,
        gpu: int,
        host: int = 0,
        *,
        order: Callable[[SlowNode], Any] = lambda node: node.used,
        copy_at_hits: int | None = None,
        copy_at_eviction: bool = False,
        page_tokens: int = 1,
        load_min_tokens: int = 0,
    ) -> None:
        self.capacity = {"gpu": gpu, "host": host}
        self.order, self.copy_at_hits, self.copy_at_eviction = order, copy_at_hits, copy_at_eviction
        self.counts_hits = not copy_at_eviction
        self.page_tokens, self.load_min_tokens = page_tokens, load_min_tokens
        self.nodes: list[SlowNode] = []
        self.running: list[tuple[list[SlowNode], int]] = []
        self.clock = count()

    # --- what is where -----------------------------------------------------------------------------------------------

    def children(self, node: SlowNode) -> list[SlowNode]:
        return [other for other in self.nodes if other.above == node.pages[-1]]

    def parent_is_on_host(self, node: SlowNode) -> bool:
        return node.above == -1 or next(other for other in self.nodes if node.above in other.pages).on_host

    def gpu_room(self) -> int:
        cached = sum(len(node.pages) for node in self.nodes if node.on_gpu)
        return self.capacity["gpu"] - cached - sum(pages for _, pages in self.running)

    def host_room(self) -> int:
        return self.capacity["host"] - sum(len(node.pages) for node in self.nodes if node.on_host)

    def gpu_leaves(self) -> list[SlowNode]:
        idle = [node for node in self.nodes if node.on_gpu and not node.users]
        return sorted((node for node in idle if not any(child.on_gpu for child in self.children(node))), key=self.order)

    def host_leaves(self) -> list[SlowNode]:
        below = [node for node in self.nodes if not node.on_gpu and not node.is_kept]
        return sorted((node for node in below if not self.children(node)), key=self.order)

    # --- requests ----------------------------------------------------------------------------------------------------

    def step(self, pages: Sequence[int]) -> SlowNode | None:
        """The node that begins these pages; the upper part of one that parts from them."""
        node = next((node for node in self.nodes if node.pages[0] == pages[0]), None)
        if node is None:
            return None
        node.used = next(self.clock)
        same = sum(mine == asked for mine, asked in zip(node.pages, pages, strict=False))
        if same < len(node.pages):
            upper = SlowNode(**{**vars(node), "pages": node.pages[:same], "used": next(self.clock), "created": next(self.clock)})
            node.above, node.pages = node.pages[same - 1], node.pages[same:]
            self.nodes.append(upper)
            for path, _ in self.running:
                if node in path:
                    path.append(upper)
            return upper
        return node

    def path(self, pages: Sequence[int]) -> list[SlowNode]:
        path = []
        while pages and (node := self.step(pages)):
            path.append(node)
            pages = pages[len(node.pages) :]
        return path

    def finish_oldest(self) -> None:
        for node in self.running.pop(0)[0]:
            node.users -= 1

    def serve(self, pages: list[int], usable: int, needed: int) -> Row:
        path = self.path(pages[:usable])
        gpu = [node for node in path if node.on_gpu]
        host = [node for node in path if not node.on_gpu]
        hit = sum(len(node.pages) for node in gpu)
        loaded = sum(len(node.pages) for node in host)
        while self.gpu_room() + sum(len(n.pages) for n in self.nodes if n.on_gpu and not n.users and n not in gpu) < needed - hit:
            if not self.running:
                return -1, 0
            self.finish_oldest()
        for node in gpu:
            node.users += 1
        if loaded * self.page_tokens < self.load_min_tokens:
            loaded = 0
        elif loaded:
            for node in host:
                node.is_kept = True
            if self.gpu_room() < loaded:
                self.evict_gpu(loaded)
            for node in host:
                node.is_kept, node.on_gpu = False, True
                node.users += 1
        self.evict_gpu(needed - hit - loaded - self.gpu_room())
        for node in self.insert(pages):
            node.users += node not in gpu and not (loaded and node in host)
        self.running.append((self.path(pages), needed - len(pages)))
        return hit, loaded

    def insert(self, pages: Sequence[int]) -> list[SlowNode]:
        path, above = [], -1
        while pages:
            node = self.step(pages)
            was_on_gpu = node is None or node.on_gpu
            if node is None:
                node = SlowNode(list(pages), above, next(self.clock), next(self.clock))
                self.nodes.append(node)
            node.on_gpu = True
            path.append(node)
            if was_on_gpu and self.counts_hits:
                node.hits += 1
                if self.copy_at_hits and node.hits >= self.copy_at_hits and not node.on_host and self.parent_is_on_host(node):
                    self.copy_to_host(node)
            above, pages = node.pages[-1], pages[len(node.pages) :]
        return path

    # --- eviction ----------------------------------------------------------------------------------------------------

    def copy_to_host(self, node: SlowNode) -> None:
        if self.host_room() < len(node.pages):
            lacking = len(node.pages)
            while lacking > 0 and (leaves := self.host_leaves()):
                lacking -= len(leaves[0].pages)
                self.nodes.remove(leaves[0])
        node.on_host = self.host_room() >= len(node.pages)

    def evict_gpu(self, pages: int) -> None:
        copied: list[SlowNode] = []
        while pages > 0 and (leaves := self.gpu_leaves()):
            leaf = leaves[0]
            pages -= len(leaf.pages)
            if not leaf.on_host and self.copy_at_eviction:
                self.copy_to_host(leaf)
                leaf.is_kept = leaf.on_host
                copied += [leaf] * leaf.on_host
            leaf.on_gpu = False
            if not leaf.on_host:
                for node in copied:
                    node.is_kept = False
                self.drop(leaf)
        for node in copied:
            node.is_kept = False

    def drop(self, node: SlowNode) -> None:
        for child in self.children(node):
            self.drop(child)
        self.nodes.remove(node)


def play_slowly(cache: SlowRadix, requests: list[Request], *, in_flight: int = 1, hold_output: bool = True) -> list[Row]:
    """Rows of all requests; each prompt is spelled out page by page."""
    rows = []
    for request in requests:
        if len(cache.running) >= in_flight:
            cache.finish_oldest()
        pages = pages_of(request.runs)
        usable = (request.prompt_tokens - 1) // cache.page_tokens
        tokens = request.prompt_tokens + request.output_tokens
        needed = -(-tokens // cache.page_tokens) if hold_output else len(pages)
        rows.append(cache.serve(pages, usable, needed))
    return rows
