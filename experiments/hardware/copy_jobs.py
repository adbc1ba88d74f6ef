"""What copy_variants.py measures: lists of pages that are copied and compared, and products that run beside."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from copies import Machine, factors
from copy_kernels import Compiled, Shape, copy_tiles, prepare

from kvsim.substrate.hardware.memory.page_list import upload_page_lists
from kvsim.substrate.hardware.memory.tier_copy import TierCopy, Way

Action = Callable[[], None]


@dataclass(frozen=True)
class Job:
    """Lists of pages to copy between the pools, in one direction."""

    machine: Machine
    tiers: TierCopy
    way: Way
    gpu_pages: np.ndarray
    host_pages: np.ndarray
    run: int
    bytes_per_s: float

    @property
    def n_bytes(self) -> int:
        return len(self.gpu_pages) * self.tiers.page_bytes

    def tiles(self, shape: Shape, seen: list[Compiled | None] | None = None) -> Action:
        """Return a copy by a kernel of this shape; its compiled form is appended to ``seen``."""
        lists = upload_page_lists(self.gpu_pages, self.host_pages, device=self.machine.device)
        sides = (self.tiers.gpu, lists[0]), (self.tiers.host, lists[1])
        source, target = sides[::-1] if self.way == "load" else sides
        if shape.has_carveout:  # in force from the next launch on
            few = [(pool, pages[:1]) for pool, pages in (source, target)]
            prepare(copy_tiles(*few, shape, self.bytes_per_s), shape)

        def action() -> None:
            compiled = copy_tiles(source, target, shape, self.bytes_per_s)
            if seen is not None and not seen:
                seen.append(prepare(compiled, shape))

        return action

    def check(self, action: Action) -> bool:
        """Copy new content; return whether all of it has arrived."""
        gpu = torch.from_numpy(self.gpu_pages.astype(np.int64)).to(self.machine.device)
        if self.way == "load":
            self.tiers.gpu[gpu] = 0
            self.machine.wait()
            action()
            self.machine.wait()
            return torch.equal(self.tiers.gpu[gpu], self.hosted(gpu))
        fresh = torch.empty((len(gpu), *self.tiers.gpu.shape[1:]), dtype=torch.uint8, device=gpu.device).random_(0, 256)
        self.tiers.gpu[gpu] = fresh
        self.machine.wait()
        action()
        self.machine.wait()
        return torch.equal(fresh, self.hosted(gpu))

    def hosted(self, like: torch.Tensor) -> torch.Tensor:
        """The pages of the host in GPU memory, brought there by one memcpy of the whole pool."""
        pages = torch.from_numpy(self.host_indices()).to(like.device)
        whole = self.machine.host.to(like.device)
        host = self.tiers.host
        return torch.as_strided(whole, host.shape, host.stride())[pages]

    def host_indices(self) -> np.ndarray:
        """The list as indices of ``tiers.host``, whose entries may begin inside larger pages."""
        units, fragments = self.tiers.unit_pages, self.tiers.unit_fragments
        pages = self.host_pages.astype(np.int64)
        return pages if units == 1 else pages // units * fragments + pages % units


class Products:
    """A loop of products, recorded so that the host launches it in one call, however long it takes to submit copies."""

    SECONDS = 0.06
    COPIES = 3
    REPEATS = 3

    def __init__(self, rows: int, columns: int, inner: int) -> None:
        left, right, out = factors(rows, columns, inner)
        self.stream, self.copies = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            for _ in range(10):
                torch.mm(left, right, out=out)
        torch.cuda.synchronize()
        count = max(1, round(self.SECONDS / (2 * rows * columns * inner / 600e12)))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for _ in range(count):
                torch.mm(left, right, out=out)

    def segment(self, action: Action | None) -> tuple[float, float]:
        """Return the seconds of the loop, and of the copies beside it."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        with torch.cuda.stream(self.stream):
            marks[0].record()
            self.graph.replay()
            marks[1].record()
        with torch.cuda.stream(self.copies):
            if action is not None:
                self.copies.wait_event(marks[0])
                marks[2].record()
                for _ in range(self.COPIES):
                    action()
                marks[3].record()
        torch.cuda.synchronize()
        copies_s = marks[2].elapsed_time(marks[3]) / 1e3 if action is not None else 0.0
        return marks[0].elapsed_time(marks[1]) / 1e3, copies_s

    def beside(self, action: Action, n_bytes: int) -> tuple[float, float]:
        """Return how many times as long the products take while the copies run, and the copies' bytes per second meanwhile."""
        self.segment(action)
        ratios, rates = [], []
        before_s, _ = self.segment(None)
        for _ in range(self.REPEATS):
            with_s, copies_s = self.segment(action)
            after_s, _ = self.segment(None)
            alone_s = (before_s + after_s) / 2
            lost_s = with_s - alone_s
            ratios.append(with_s / alone_s if copies_s >= with_s else copies_s / max(copies_s - lost_s, 1e-9))
            rates.append(self.COPIES * n_bytes / copies_s)
            before_s = after_s
        return statistics.median(ratios), statistics.median(rates)
