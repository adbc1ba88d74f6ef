"""FastDeploy's cache, page by page: obvious and slow. A plain dictionary of pages; all else is counted when it is asked for.

It plays the rules that ``SwappingCache`` states; with one tier, the host has no room.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvsim.core.request import Request
from tests.workloads import pages_of

Row = tuple[int, int]
"""Hit pages on the GPU and in CPU memory; (-1, 0) for a request that can never fit."""


@dataclass(eq=False)
class SlowPage:
    above: int
    """The page before it, -1 for the first one. Page ids name their prefix."""
    depth: int
    used: int
    place: str = "gpu"
    users: int = 0


@dataclass(eq=False)
class Running:
    pages: list[int]
    own: int = 0
    """Pages without an id: the partial page and the answer's."""


class SlowSwaps:
    def __init__(self, gpu: int, host: int = 0, *, page_tokens: int = 1) -> None:
        self.gpu, self.host, self.page_tokens = gpu, host, page_tokens
        self.pages: dict[int, SlowPage] = {}
        self.running: list[Running] = []
        self.clock = 0

    # --- what is where -----------------------------------------------------------------------------------------------

    def count(self, place: str) -> int:
        return sum(page.place == place for page in self.pages.values())

    def gpu_room(self) -> int:
        return self.gpu - self.count("gpu") - sum(one.own for one in self.running)

    def first_to_leave(self, place: str) -> int | None:
        """The page to leave next: used least recently among those that nobody uses and that have no page after them there."""
        parents = {page.above for page in self.pages.values() if page.place == place}
        leaves = [id for id, page in self.pages.items() if page.place == place and not page.users and id not in parents]
        return min(leaves, key=lambda id: (self.pages[id].used, -self.pages[id].depth), default=None)

    # --- eviction ----------------------------------------------------------------------------------------------------

    def evict(self, pages: int) -> None:
        leaving = []
        while len(leaving) < pages and (leaf := self.first_to_leave("gpu")) is not None:
            self.pages[leaf].place = "between"
            leaving.append(leaf)
        if self.host and len(leaving) > self.host - self.count("host"):
            for _ in range(pages):
                if (leaf := self.first_to_leave("host")) is not None:
                    del self.pages[leaf]
        for id in leaving:
            self.pages[id].place = "host"
            if not self.host:
                del self.pages[id]

    def has_room(self, pages: int) -> bool:
        if self.gpu_room() < pages:
            self.evict(pages)
        return self.gpu_room() >= pages

    # --- requests ----------------------------------------------------------------------------------------------------

    def found(self, pages: list[int]) -> list[int]:
        known = [id in self.pages for id in [*pages, -1]]
        return pages[: known.index(False)]

    def finish_oldest(self) -> None:
        for id in self.running.pop(0).pages:
            self.pages[id].users -= 1

    def admit(self, pages: list[int], needed: int) -> Row | None:
        """One attempt for a prompt of ``needed`` pages, of which ``pages`` are full."""
        if self.host and not self.has_room(needed):
            return None
        self.clock += 1
        found = self.found(pages)
        on_gpu = sum(self.pages[id].place == "gpu" for id in found)
        for id in found:
            self.pages[id].place, self.pages[id].used = "gpu", self.clock
            self.pages[id].users += 1
        if not self.has_room(needed - len(found)):
            for id in found:
                self.pages[id].users -= 1
            return None
        for at, id in enumerate(pages[len(found) :], len(found)):
            self.pages[id] = SlowPage(pages[at - 1] if at else -1, at, self.clock, users=1)
        self.running.append(Running(pages, needed - len(pages)))
        return on_gpu, len(found) - on_gpu

    def serve(self, request: Request, in_flight: int, hold_output: bool) -> Row:
        if len(self.running) >= in_flight:
            self.finish_oldest()
        pages = pages_of(request.runs)
        prompt = -(-request.prompt_tokens // self.page_tokens) if hold_output else len(pages)
        total = -(-(request.prompt_tokens + request.output_tokens) // self.page_tokens) if hold_output else len(pages)
        if total > self.gpu:
            return -1, 0
        while (hits := self.admit(pages, prompt)) is None:
            self.finish_oldest()
        mine = self.running[-1]
        for _ in range(total - prompt):
            while not self.has_room(1):
                self.finish_oldest()
            mine.own += 1
        gpu, host = hits
        if gpu + host > (request.prompt_tokens - 1) // self.page_tokens:
            return (gpu, host - 1) if host else (gpu - 1, host)
        return gpu, host

    def play(self, requests: list[Request], *, in_flight: int = 1, hold_output: bool = True) -> Iterator[Row]:
        """Rows of all requests; each prompt is spelled out page by page."""
        for request in requests:
            yield self.serve(request, in_flight, hold_output)
