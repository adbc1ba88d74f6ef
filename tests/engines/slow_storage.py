"""A slow model of SGLang's storage in time: what is read and written, batch by batch, while others have their turn."""

from dataclasses import dataclass

from kvsim.core.request import Request
from tests.engines.slow_unified import Part, Path, SlowUnified
from tests.workloads import pages_of

NEVER = float("inf")


@dataclass(eq=False)
class Asked:
    """What storage is asked for one prompt, and reads for it."""

    owner: "Waiting"
    first: int
    span: int
    part: Part | None
    pages: int = 0
    slots: int = 0
    arrived: int = 0
    begun: int = 0
    reading: bool = False
    stopped: bool = False


@dataclass(eq=False)
class Kept:
    """What is written to storage."""

    part: Part
    done: int = 0


class Waiting:
    def __init__(self, request: Request, size: int) -> None:
        self.index, self.tokens, self.arrival_s = request.index, request.prompt_tokens, request.arrival_s
        self.prompt: Path = tuple(pages_of(request.runs))
        self.sought = self.prompt[: (request.prompt_tokens - 1) // size]
        self.asked: Asked | None = None
        self.found = self.retries = self.first = self.brought = 0
        self.deadline = NEVER
        self.polled = self.expired = False
        self.due: int | None = None
        self.kept = 0
        self.hits = (-1, -1, -1)
        self.token_s = 0.0


class SlowStorage(SlowUnified):
    def __init__(
        self, gpu: int, cpu: int, disk: int, *, write: str, batch: int, stop: str, base_s: float, min_tokens: int,
        fraction: float, unmatched: bool, host_s: float, read_s: float, write_s: float, layers: int, page_tokens: int = 4,
    ) -> None:  # fmt: skip
        super().__init__(gpu, cpu, write=write, storage=1, page_tokens=page_tokens)
        self.disk_pages, self.batch, self.stop, self.base_s, self.min_tokens = disk, batch, stop, base_s, min_tokens
        self.limit, self.unmatched, self.layers = fraction * cpu, unmatched, layers
        self.host_s, self.read_s, self.write_s = host_s, read_s, write_s
        self.now, self.down_free, self.up_free = 0.0, 0.0, 0.0
        self.order: list[Path] = []
        """The pages in storage, those used least recently first."""
        self.slots = 0
        """Of the host, in no node."""
        self.in_flight = 0
        self.reads: list[Asked] = []
        self.writes: list[Kept] = []
        self.read_end = self.write_end = NEVER
        self.read_now: list[Path] = []
        self.write_now: list[Path] = []
        self.read_done: list[Asked] = []
        self.write_done: list[Kept] = []

    # --- storage -----------------------------------------------------------------------------------------------------------

    def host_free(self) -> int:
        return super().host_free() - self.slots

    def leading(self, pages: list[Path]) -> int:
        found = 0
        while found < len(pages) and pages[found] in self.order:
            found += 1
        return found

    def refresh(self, pages: list[Path]) -> None:
        known = [page for page in pages if page in self.order]
        self.order = [page for page in self.order if page not in known] + known[::-1]

    def put(self, pages: list[Path]) -> None:
        pages = pages[: self.disk_pages]
        self.refresh(pages)
        new = [page for page in pages if page not in self.order]
        self.order = self.order[max(0, len(self.order) + len(new) - self.disk_pages) :] + new[::-1]

    def pages(self, path: Path, start: int, end: int) -> list[Path]:
        return [path[: at + 1] for at in range(start, end)]

    def start_read(self) -> None:
        self.read_end = NEVER
        while self.reads and self.read_end == NEVER:
            read = self.reads[0]
            here = self.pages(read.owner.sought, read.first + read.begun, read.first + min(read.pages, read.begun + self.batch))
            found = here[: self.leading(here)]
            if found and not read.stopped:
                self.read_now, self.read_end = found, self.now + self.read_s * len(found)
                read.begun = read.pages if len(found) < len(here) else read.begun + len(here)
            else:
                self.refresh(self.pages(read.owner.sought, read.first, read.first + read.pages))
                self.read_done.append(self.reads.pop(0))

    def start_write(self) -> None:
        self.write_end = NEVER
        while self.writes and self.write_end == NEVER:
            (path, start), done = self.writes[0].part, self.writes[0].done
            here = self.pages(path, start + done, min(len(path), start + done + self.batch))
            lacking = len([page for page in here[: self.disk_pages] if page not in self.order])
            self.writes[0].done += len(here)
            if lacking:
                self.write_now, self.write_end = here, self.now + self.write_s * lacking
            elif here:
                self.put(here)
            else:
                self.refresh(self.pages(path, start, len(path)))
                self.write_done.append(self.writes.pop(0))

    def advance(self, until: float) -> None:
        """Let storage work up to a time."""
        while min(self.read_end, self.write_end) <= until:
            self.now = min(self.read_end, self.write_end)
            if self.read_end <= self.write_end:
                self.reads[0].arrived += 0 if self.reads[0].stopped else len(self.read_now)
                self.start_read()
            else:
                self.put(self.write_now)
                self.start_write()
        self.now = until
