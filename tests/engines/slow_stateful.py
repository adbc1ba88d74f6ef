"""SGLang's cache for hybrid models, page by page: obvious and slow. A plain list of nodes; all else is counted when asked for.

It plays the rules that ``StatefulNodeCache`` states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from kvsim.core.request import Request
from tests.workloads import pages_of


class NoSlot(Exception):
    """Running requests have all slots for states."""


@dataclass(eq=False)
class SlowNode:
    pages: list[int]
    above: int
    """The page before the first one; -1 at the root. Page ids name their prefix, so this tells the parent."""
    used: int
    state_used: int | None = None
    """When its state was used last; None if it has none."""


@dataclass(eq=False)
class SlowRun:
    path: list[int]
    """Its pages in the tree, from the first on; it keeps them there, and the state after the last of them."""
    total: int
    slots: int = 0


class SlowStateful:
    def __init__(
        self, pages: int, states: int, *, chunk: int = 0, extra_buffer: bool = True, answers: bool = False, page_tokens: int = 1
    ) -> None:
        self.pages, self.states, self.chunk, self.extra_buffer = pages, states, chunk, extra_buffer
        self.answers, self.page_tokens = answers, page_tokens
        self.nodes: list[SlowNode] = []
        self.running: list[SlowRun] = []
        self.finals: dict[SlowRun, list[int]] = {}
        self.clock = count()

    # --- what is where -----------------------------------------------------------------------------------------------

    def free_pages(self) -> int:
        return self.pages - sum(len(n.pages) for n in self.nodes) - sum(run.total - len(run.path) for run in self.running)

    def free_slots(self) -> int:
        return self.states - sum(n.state_used is not None for n in self.nodes) - sum(run.slots for run in self.running)

    def is_locked(self, node: SlowNode) -> bool:
        return any(node.pages[-1] in run.path for run in self.running)

    def has_locked_state(self, node: SlowNode) -> bool:
        return any(run.path and node.pages[-1] == run.path[-1] for run in self.running)

    def leaves(self) -> list[SlowNode]:
        above = {node.above for node in self.nodes}
        return [node for node in self.nodes if node.pages[-1] not in above and not self.is_locked(node)]

    # --- the tree ----------------------------------------------------------------------------------------------------

    def follow(self, pages: Sequence[int]) -> list[SlowNode]:
        """The nodes that begin these pages; one that parts from them is cut, and both its parts are used now."""
        path = []
        while pages and (node := next((node for node in self.nodes if node.pages[0] == pages[0]), None)):
            same = sum(mine == asked for mine, asked in zip(node.pages, pages, strict=False))
            if same < len(node.pages):
                upper = SlowNode(node.pages[:same], node.above, next(self.clock))
                node.above, node.pages, node.used = node.pages[same - 1], node.pages[same:], next(self.clock)
                self.nodes.append(upper)
                node = upper
            path.append(node)
            pages = pages[len(node.pages) :]
        return path

    def insert(self, run: SlowRun, pages: list[int]) -> None:
        """Everything up to a state, for which the request has a slot."""
        path = self.follow(pages)
        for node in path:
            node.used = next(self.clock)
        there = sum(len(node.pages) for node in path)
        if there < len(pages):
            path.append(SlowNode(pages[there:], pages[there - 1] if there else -1, next(self.clock)))
            self.nodes.append(path[-1])
        path[-1].state_used = next(self.clock)
        run.slots -= 1
        run.path = pages

    def take_slot(self, run: SlowRun) -> None:
        if not self.free_slots():
            kept = [node for node in self.nodes if node.state_used is not None and not self.has_locked_state(node)]
            if not kept:
                raise NoSlot
            oldest = min(kept, key=lambda node: node.state_used or 0)
            oldest.state_used = None
            if oldest in self.leaves():
                self.nodes.remove(oldest)
        run.slots += 1

    # --- requests ----------------------------------------------------------------------------------------------------

    def serve(self, prompt: list[int], usable: int, total: int, final: list[int]) -> int:
        path = self.follow(prompt[:usable])
        known = sum(len(node.pages) for node in path)
        while path and path[-1].state_used is None:
            path.pop()
        hit = sum(len(node.pages) for node in path)
        run = SlowRun(prompt[:hit], total=hit)
        self.running.append(run)
        for node in path:
            node.used = next(self.clock)
        if path:
            path[-1].state_used = next(self.clock)
            self.take_slot(run)
        while self.free_pages() + sum(len(n.pages) for n in self.nodes if not self.is_locked(n)) < total - hit:
            if self.running[0] is run:
                self.running.remove(run)
                return -1
            self.finish_oldest()
        while run.slots < (3 if self.extra_buffer else 1):
            self.take_slot(run)
        while self.free_pages() < total - hit:
            self.nodes.remove(min(self.leaves(), key=lambda node: node.used))
        run.total = total
        self.finals[run] = final
        self.prefill(run, prompt, known)
        return hit

    def prefill(self, run: SlowRun, prompt: list[int], known: int) -> None:
        begin = len(run.path)
        while begin < len(prompt):
            end = min(begin + self.chunk, len(prompt)) if self.chunk else len(prompt)
            is_branch = self.extra_buffer and begin < known < end
            self.take_slot(run)
            self.insert(run, prompt[: known if is_branch else end])
            begin = end

    def finish_oldest(self) -> None:
        run = self.running[0]
        if final := self.finals.pop(run):
            self.insert(run, final)
        self.running.remove(run)

    def play(self, requests: list[Request], *, in_flight: int = 1) -> list[int]:
        """Hit pages of all requests; -1 for one that can never fit. Raises NoSlot."""
        rows = []
        for request in requests:
            if len(self.running) >= in_flight:
                self.finish_oldest()
            tokens, size = request.prompt_tokens, self.page_tokens
            prompt = pages_of(request.runs)[: tokens // size]
            total = -(-(tokens + request.output_tokens) // size)
            final = []
            if self.answers and (request.output_runs or not self.extra_buffer):
                final = [*prompt, *pages_of(request.output_runs or ())]
                final += [-2 - request.index] * (not self.extra_buffer and total > len(final))
            rows.append(self.serve(prompt, (tokens - 1) // size, total, final))
        return rows
