"""FastDeploy's cache, page by page: obvious and slow. A plain dictionary of pages; all else is counted when it is asked for.

It plays the rules that ``SwappingCache`` states; a tier that does not exist has no room. Storage is written through, by LRU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvsim.core.request import Request
from tests.workloads import pages_of

Row = tuple[int, ...]
"""Hit pages on the GPU, in CPU memory and, if there is storage, there; (-1, 0, ...) for a request that can never fit."""


@dataclass(eq=False)
class SlowPage:
    above: int
    """The page before it, -1 for the first one. Page ids name their prefix."""
    depth: int
    used: int
    place: str = "gpu"
    """gpu, host, or nowhere: then only storage has it."""
    users: int = 0
    is_stored: bool = False


@dataclass(eq=False)
class Running:
    pages: list[int]
    own: int = 0
    """Pages that are not in the cache: the partial page and the answer's."""
    answer: list[int] = field(default_factory=list)
    """Those that will be cached in the end."""


class SlowSwaps:
    def __init__(self, gpu: int, host: int = 0, storage: int = 0, *, page_tokens: int = 1, cache_output: bool = False) -> None:
        self.gpu, self.host, self.storage, self.page_tokens = gpu, host, storage, page_tokens
        self.cache_output = cache_output
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
                    self.delete(leaf)
        for id in leaving:
            self.pages[id].place = "host"
            if not self.host:
                self.delete(id)

    def delete(self, id: int) -> None:
        self.pages[id].place = "nowhere"
        if not self.pages[id].is_stored:
            del self.pages[id]

    def has_room(self, pages: int) -> bool:
        if self.gpu_room() < pages:
            self.evict(pages)
        return self.gpu_room() >= pages

    # --- requests ----------------------------------------------------------------------------------------------------

    def found(self, pages: list[int], places: tuple[str, ...]) -> list[int]:
        known = [id in self.pages and self.pages[id].place in places for id in pages]
        return pages[: [*known, False].index(False)]

    def finish_oldest(self) -> None:
        running = self.running.pop(0)
        if running.answer:
            self.cache_answer(running)
        self.store(running.pages)
        for id in running.pages:
            self.pages[id].users -= 1

    def cache_answer(self, running: Running) -> None:
        self.clock += 1
        for id in running.answer:
            above = running.pages[-1] if running.pages else -1
            page = self.pages.setdefault(id, SlowPage(above, len(running.pages), self.clock))
            page.place, page.used, page.users = "gpu", self.clock, page.users + 1
            running.pages.append(id)

    def store(self, pages: list[int]) -> None:
        """Copy a prompt to storage, a page at a time, once it has room for all or has lost all others."""
        missing = [id for id in pages if not self.pages[id].is_stored]
        while len(missing) > self.storage - sum(page.is_stored for page in self.pages.values()):
            stored = {id: page for id, page in self.pages.items() if page.is_stored and id not in pages}
            leaves = [id for id in stored if all(page.above != id for page in self.pages.values() if page.is_stored)]
            if not leaves:
                break
            leaf = min(leaves, key=lambda id: (stored[id].used, -stored[id].depth))
            self.pages[leaf].is_stored = False
            if self.pages[leaf].place == "nowhere":
                del self.pages[leaf]
        for id in missing[: self.storage - sum(page.is_stored for page in self.pages.values())]:
            self.pages[id].is_stored = True

    def admit(self, pages: list[int], needed: int) -> Row | None:
        """One attempt for a prompt of ``needed`` pages, of which ``pages`` are full."""
        if (self.host or self.storage) and not self.has_room(needed):
            return None
        self.clock += 1
        on_gpu = len(self.found(pages, ("gpu",)))
        known = len(self.found(pages, ("gpu", "host")))
        found = self.found(pages, ("gpu", "host", "nowhere"))
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
        return on_gpu, known - on_gpu, len(found) - known

    def serve(self, request: Request, in_flight: int, hold_output: bool) -> Row:
        if len(self.running) >= in_flight:
            self.finish_oldest()
        pages = pages_of(request.runs)
        prompt = -(-request.prompt_tokens // self.page_tokens) if hold_output else len(pages)
        total = -(-(request.prompt_tokens + request.output_tokens) // self.page_tokens) if hold_output else len(pages)
        if total > self.gpu:
            return -1, 0, 0
        while (hits := self.admit(pages, prompt)) is None:
            self.finish_oldest()
        mine = self.running[-1]
        for _ in range(total - prompt):
            while not self.has_room(1):
                self.finish_oldest()
            mine.own += 1
        mine.answer = pages_of(request.output_runs or ()) if self.cache_output else []
        gpu, host, stored = hits
        if sum(hits) > (request.prompt_tokens - 1) // self.page_tokens:
            return (gpu, host, stored - 1) if stored else (gpu, host - 1, 0) if host else (gpu - 1, 0, 0)
        return hits

    def play(self, requests: list[Request], *, in_flight: int = 1, hold_output: bool = True) -> Iterator[Row]:
        """Rows of all requests; each prompt is spelled out page by page."""
        for request in requests:
            yield self.serve(request, in_flight, hold_output)[: 3 if self.storage else 2]
