"""Which method copies pages between GPU and host fastest, and how much does it slow down concurrent computation?

Everything is timed from the call to the arrival of the last byte: checking and uploading the page lists, launches, gathering and
scattering. Page lists are in random order on both sides. Rates are shares of one memcpy of 1 GiB of pinned memory, measured in
the same run. Before any timing, every method is checked on awkward sizes and lists: all bytes of both pools must be right.

Claims, each a row of the last table:

kernel       fragments of 2 KiB or more: 0.92 to the GPU, 0.945 back, with 16 programs or fewer
copy engine  host pages of 1 MiB or more: 0.96 each way, with the better of staged and memcpy
both ways    fragments of 2 KiB or more: 0.88 of two concurrent memcpys, with the best pair of methods
GEMM         a loop of bf16 matrix products takes at most 1.05 times as long next to the copies

    python experiments/hardware/copies.py [--output DIR]      on a machine with a GPU: four to five minutes
    TRITON_INTERPRET=1 python experiments/hardware/copies.py --tiny      checks and a few small timings on the CPU

Writes copies.csv and copies.md, and exits with 1 if a check or, on a GPU, a claim fails.
"""

import argparse
import csv
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # Streams that share a hardware queue wait for each other.

import torch
import triton

from kvsim.calibration import method_rates
from kvsim.calibration.method_rates import derived_rule
from kvsim.hardware.copy_rule import METHODS, CopyRule, Method
from kvsim.substrate.hardware.memory.tier_copy import WAYS, TierCopy, Way

HERE = Path(__file__).resolve().parent
LAYERS = 32
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MEMCPY_BYTES = GIB


@dataclass(frozen=True)
class Cell:
    """One timed case; rates are shares of memcpy's."""

    way: Way
    method: Method
    fragment_bytes: int
    layers: int
    fragments: int
    seconds: float
    share: float

    @property
    def page_bytes(self) -> int:
        return self.fragment_bytes * self.layers


class Machine:
    """Two buffers, one on each side; pools are views of them."""

    def __init__(self, pool_bytes: int) -> None:
        self.has_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.has_gpu else "cpu")
        self.pool_bytes = pool_bytes
        self.gpu = torch.empty(pool_bytes, dtype=torch.uint8, device=self.device).random_(0, 256)
        self.host = torch.empty(pool_bytes, dtype=torch.uint8, pin_memory=self.has_gpu)
        self.host.copy_(self.gpu)
        self.rng = np.random.default_rng(0)
        self.threads = ThreadPoolExecutor(2)
        self.streams = [torch.cuda.Stream() for _ in range(2)] if self.has_gpu else []

    def pools(self, fragment_bytes: int, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View both buffers as pools of pages of this shape."""
        pages = self.pool_bytes // (fragment_bytes * layers)
        end = pages * layers * fragment_bytes
        return self.gpu[:end].view(layers, pages, fragment_bytes), self.host[:end].view(pages, layers, fragment_bytes)

    def lists(self, pool_pages: int, pages: int) -> tuple[np.ndarray, np.ndarray]:
        return self.rng.permutation(pool_pages)[:pages], self.rng.permutation(pool_pages)[:pages]

    def wait(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], None], repeats: int = 5) -> float:
        """Median time from the call to the end of the work that it started."""
        action()
        times = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            action()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def beside(self, *actions: Callable[[], None]) -> None:
        """Start each action from its own thread in its own stream; the current stream waits for all of them."""
        if not self.has_gpu:
            for action in actions:
                action()
            return
        caller = torch.cuda.current_stream()

        def start(stream: torch.cuda.Stream, action: Callable[[], None]) -> None:
            with torch.cuda.stream(stream):
                stream.wait_stream(caller)
                action()

        list(self.threads.map(start, self.streams, actions))
        for stream in self.streams:
            caller.wait_stream(stream)


def check(machine: Machine, fragment_sizes: list[int]) -> int:
    """Compare all bytes of both pools after copies by every method; return the number of cases."""
    cases = 0
    for fragment_bytes in fragment_sizes:
        for layers, pages in ((1, 1), (3, 7), (2, 33)):
            gpu = torch.randint(0, 256, (layers, 40, fragment_bytes), dtype=torch.uint8, device=machine.device)
            host = torch.randint(0, 256, (50, layers, fragment_bytes), dtype=torch.uint8)
            host = host.pin_memory() if machine.has_gpu else host
            tiers = TierCopy(gpu, host, CopyRule(), lanes=2, lane_bytes=8 * layers * fragment_bytes)
            for method in METHODS:
                for ours, theirs in page_lists(machine.rng, pages):
                    cases += 1
                    compare(machine, tiers, ours, theirs, method)
    machine.wait()
    return cases


def page_lists(rng: np.random.Generator, pages: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Lists of GPU and host pages: random, descending, contiguous, with gaps."""
    yield rng.permutation(40)[:pages], rng.permutation(50)[:pages]
    yield np.arange(pages)[::-1], np.arange(50 - pages, 50)
    yield np.arange(3, 3 + pages), np.arange(7, 7 + pages)
    yield rng.permutation(40)[:pages], np.sort(rng.permutation(50)[:pages])


def compare(machine: Machine, tiers: TierCopy, gpu_pages: np.ndarray, host_pages: np.ndarray, method: Method) -> None:
    """Store, then load into other pages; all other bytes must stay unchanged."""
    expected = tiers.host.clone()
    expected[host_pages] = tiers.gpu[gpu_pages.tolist()].cpu()
    tiers.store(gpu_pages, host_pages, method)
    machine.wait()
    if not torch.equal(expected, tiers.host):
        sys.exit(f"store by {method} went wrong: {tuple(tiers.gpu.shape)}, {gpu_pages} to {host_pages}")
    back = np.roll(gpu_pages, 1)
    loaded = tiers.gpu.clone()
    loaded[back.tolist()] = tiers.host[host_pages].to(machine.device)
    tiers.load(host_pages, back, method)
    machine.wait()
    if not torch.equal(loaded, tiers.gpu):
        sys.exit(f"load by {method} went wrong: {tuple(tiers.gpu.shape)}, {host_pages} to {back}")


def memcpy_rates(machine: Machine) -> dict[str, float]:
    """Bytes per second of one large memcpy each way, and of both at once."""
    half = min(MEMCPY_BYTES, machine.pool_bytes // 2)

    def load() -> None:
        machine.gpu[:half].copy_(machine.host[:half], non_blocking=True)

    def store() -> None:
        machine.host[half : 2 * half].copy_(machine.gpu[half : 2 * half], non_blocking=True)

    return {
        "load": half / machine.seconds(load),
        "store": half / machine.seconds(store),
        "both": 2 * half / machine.seconds(lambda: machine.beside(load, store)),
    }


def measure(machine: Machine, rates: dict[str, float], fragment_sizes: list[int], counts: list[int]) -> Iterator[Cell]:
    """Time every size, number of fragments, method and direction that fits into half a pool."""
    for fragment_bytes in fragment_sizes:
        for layers in sorted({min(LAYERS, count) for count in counts}):
            tiers = TierCopy(*machine.pools(fragment_bytes, layers), calibration(rates))
            for count in [count for count in counts if min(LAYERS, count) == layers]:
                pages = max(1, count // layers)
                if 2 * pages > tiers.host.shape[0]:
                    continue
                gpu_pages, host_pages = machine.lists(tiers.host.shape[0], pages)
                for method in METHODS:
                    for way in WAYS:
                        seconds = machine.seconds(copying(tiers, way, gpu_pages, host_pages, method), 3)
                        share = pages * tiers.page_bytes / seconds / rates[way]
                        yield Cell(way, method, fragment_bytes, layers, pages * layers, seconds, share)


def measure_reach(machine: Machine, rates: dict[str, float], fragment_sizes: list[int], total_bytes: int) -> Iterator[Cell]:
    """Time copies of ``total_bytes`` in pages of every size."""
    for fragment_bytes in fragment_sizes:
        tiers = TierCopy(*machine.pools(fragment_bytes, LAYERS), calibration(rates))
        pages = total_bytes // tiers.page_bytes
        gpu_pages, host_pages = machine.lists(tiers.host.shape[0], pages)
        for method in METHODS:
            for way in WAYS:
                seconds = machine.seconds(copying(tiers, way, gpu_pages, host_pages, method), 5)
                share = pages * tiers.page_bytes / seconds / rates[way]
                yield Cell(way, method, fragment_bytes, LAYERS, pages * LAYERS, seconds, share)


def copying(
    tiers: TierCopy, way: str, gpu_pages: np.ndarray, host_pages: np.ndarray, method: Method, *, is_shared: bool = False
) -> Callable[[], None]:
    if way == "load":
        return lambda: tiers.load(host_pages, gpu_pages, method, is_shared=is_shared)
    return lambda: tiers.store(gpu_pages, host_pages, method, is_shared=is_shared)


def calibration(rates: dict[str, float]) -> CopyRule:
    """The default methods, with a pace of stores beside loads that fits this link."""
    return replace(CopyRule(), store_beside_load_bytes_per_s=0.45 * rates["both"])


@dataclass(frozen=True)
class Pair:
    """Copies in both directions at once; the share is relative to two concurrent memcpys."""

    fragment_bytes: int
    load: Method
    store: Method
    pace: float
    share: float


def measure_pairs(machine: Machine, rates: dict[str, float], fragment_sizes: list[int], total_bytes: int) -> Iterator[Pair]:
    """Time all pairs of methods; a storing kernel runs at several paces, given as shares of half of ``both``."""
    for fragment_bytes in fragment_sizes:
        pools = machine.pools(fragment_bytes, LAYERS)
        count = total_bytes // (fragment_bytes * LAYERS)
        lists = [np.split(list_, 2) for list_ in machine.lists(pools[1].shape[0], 2 * count)]
        for store in METHODS:
            for pace in (0.80, 0.85, 0.90, 0.95, 1.0) if store == "kernel" else (1.0,):
                rate = pace * rates["both"] / 2
                tiers = TierCopy(*pools, replace(CopyRule(), store_beside_load_bytes_per_s=rate))
                for load in METHODS:
                    ways = (
                        copying(tiers, "store", lists[0][0], lists[1][0], store, is_shared=True),
                        copying(tiers, "load", lists[0][1], lists[1][1], load, is_shared=True),
                    )
                    seconds = machine.seconds(lambda ways=ways: machine.beside(*ways), 3)  # type: ignore[misc]
                    yield Pair(fragment_bytes, load, store, pace, 2 * count * tiers.page_bytes / seconds / rates["both"])


@dataclass(frozen=True)
class Beside:
    """Slowdown of a loop of matrix products next to copies."""

    product: str
    way: str
    method: str
    fragment_bytes: int
    slowdown: float


def leave_multiprocessors(count: int) -> None:
    """Make matrix products leave ``count`` multiprocessors free, as far as torch and cuBLASLt can."""
    torch.backends.cuda.preferred_blas_library("cublaslt" if count else "default")
    torch._C._set_sm_carveout_experimental(count or None)


SHAPES = {"8192^3": (8192, 8192, 8192), "2048x8192x8192": (2048, 8192, 8192)}
"""Rows, columns and inner size of the products."""
Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Both factors of a product, and its result."""


def factors(rows: int, columns: int, inner: int) -> Factors:
    """Random bf16 matrices on the GPU."""
    left, right = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((rows, inner), (inner, columns)))
    return left, right, torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)


def measure_products(machine: Machine, rates: dict[str, float], fragment_sizes: list[int]) -> Iterator[Beside]:
    for product, shape in SHAPES.items():
        loop = Loop(*factors(*shape))
        yield Beside(product, "-", "nothing", 0, loop.slowdown(machine, lambda: None))
        half = machine.pool_bytes // 2
        sides = {"load": (machine.gpu[:half], machine.host[:half]), "store": (machine.host[:half], machine.gpu[:half])}
        for way, (to, source) in sides.items():
            one = loop.slowdown(machine, lambda to=to, source=source: to.copy_(source, non_blocking=True))  # type: ignore[misc]
            yield Beside(product, way, "one memcpy", 0, one)
        for fragment_bytes in fragment_sizes:
            tiers = TierCopy(*machine.pools(fragment_bytes, LAYERS), calibration(rates))
            gpu_pages, host_pages = machine.lists(tiers.host.shape[0], tiers.host.shape[0] // 2)
            for method in METHODS if fragment_bytes >= 256 * KIB else METHODS[:2]:
                for way in WAYS:
                    action = copying(tiers, way, gpu_pages, host_pages, method)
                    yield Beside(product, way, method, fragment_bytes, loop.slowdown(machine, action))
        tiers = TierCopy(*machine.pools(2 * KIB, LAYERS), calibration(rates))
        gpu_pages, host_pages = machine.lists(tiers.host.shape[0], tiers.host.shape[0] // 2)
        leave_multiprocessors(8)
        for way in WAYS:
            action = copying(tiers, way, gpu_pages, host_pages, "kernel")
            yield Beside(f"{product}, 8 multiprocessors free", way, "kernel", 2 * KIB, loop.slowdown(machine, action))
        leave_multiprocessors(0)


class Loop:
    """A loop of products: segments of 20 ms with copies alternate with segments without, so clock drift affects both."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        self.product = lambda: torch.mm(left, right, out=out)
        self.stream, self.copies = torch.cuda.Stream(), torch.cuda.Stream()
        self.repeats = 10
        self.repeats = max(1, round(0.02 / (self.segments([None])[0] / 10)))

    def segments(self, beside: list[Callable[[], None] | None]) -> list[float]:
        """Seconds of each segment of the loop next to an action or None, all queued before the GPU starts."""
        copies, marks = self.copies, []
        with torch.cuda.stream(self.stream):
            for _ in range(self.repeats):
                self.product()
            for action in beside:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                if action is not None:
                    copies.wait_event(start)
                    with torch.cuda.stream(copies):
                        action()
                for _ in range(self.repeats):
                    self.product()
                end.record()
                self.stream.wait_stream(copies)
                marks.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in marks]

    def slowdown(self, machine: Machine, action: Callable[[], None]) -> float:
        """Median over five segments next to ``action``, each relative to the mean of its two neighbours without."""
        action()
        machine.wait()
        times = self.segments([None, action] * 5 + [None])
        return statistics.median(2 * times[k] / (times[k - 1] + times[k + 1]) for k in range(1, 11, 2))


def derive(reach: list[Cell], pairs: list[Pair], rates: dict[str, float]) -> CopyRule:
    """The launcher's rule: use copy engines from the smallest size on at which they suffice."""
    return derived_rule(
        {(cell.way, cell.method, cell.fragment_bytes): cell.share for cell in reach},
        [
            method_rates.Pair(pair.fragment_bytes, pair.load, pair.pace * rates["both"] / 2, pair.share)
            for pair in pairs
            if pair.store == "kernel" and pair.load != "memcpy"
        ],
        layers=LAYERS,
    )


def table(header: list[str], rows: list[list[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(value) for value in line) + " |" for line in lines) + "\n"


def size(n_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if n_bytes >= unit:
            return f"{n_bytes // unit} {name}"
    return "-"


def matrix_tables(cells: list[Cell], reach: list[Cell]) -> str:
    """For each direction: the fastest method of each cell with its share, then the shares of every method for equal bytes."""
    parts = []
    counts = sorted({cell.fragments for cell in cells})
    sizes = sorted({cell.fragment_bytes for cell in cells})
    for way in WAYS:
        rows: list[list[object]] = []
        for fragment_bytes in sizes:
            row: list[object] = [size(fragment_bytes)]
            for count in counts:
                here = [c for c in cells if (c.way, c.fragment_bytes, c.fragments) == (way, fragment_bytes, count)]
                best = max(here, key=lambda cell: cell.share, default=None)
                row.append(f"{best.method} {best.share:.3f}" if best else "")
            rows.append(row)
        parts.append(f"### Fastest, {way}\n\n" + table(["fragment", *(f"{count:,}" for count in counts)], rows))
        rows = []
        for fragment_bytes in sizes:
            shares = {c.method: c.share for c in reach if (c.way, c.fragment_bytes) == (way, fragment_bytes)}
            rows.append([size(fragment_bytes), *(f"{shares[method]:.3f}" for method in METHODS)])
        total = reach[0].fragments * reach[0].fragment_bytes
        parts.append(f"### {size(total)}, {way}\n\n" + table(["fragment", *METHODS], rows))
    return "\n".join(parts)


def claims(reach: list[Cell], pairs: list[Pair], besides: list[Beside]) -> list[tuple[str, float, float, bool]]:
    """(claim, measured, goal, holds), with the worst result over all sizes of a claim."""
    rows = []
    for way, goal in (("load", 0.92), ("store", 0.945)):
        worst = min(c.share for c in reach if (c.way, c.method) == (way, "kernel") and c.fragment_bytes >= 2 * KIB)
        rows.append((f"kernel, {way}, fragments of 2 KiB and more", worst, goal, worst >= goal))
        sizes = {c.fragment_bytes for c in reach if c.page_bytes >= MIB}
        worst = min(max(c.share for c in reach if c.way == way and c.fragment_bytes == n and c.method != "kernel") for n in sizes)
        rows.append((f"copy engine, {way}, host pages of 1 MiB and more", worst, 0.96, worst >= 0.96))
    for fragment_bytes in sorted({pair.fragment_bytes for pair in pairs if pair.fragment_bytes >= 2 * KIB}):
        best = max((pair for pair in pairs if pair.fragment_bytes == fragment_bytes), key=lambda pair: pair.share)
        how = f"load by {best.load}, store by {best.store}" + (f" at pace {best.pace:g}" if best.store == "kernel" else "")
        rows.append((f"both ways, fragments of {size(fragment_bytes)}: {how}", best.share, 0.88, best.share >= 0.88))
    for product in sorted({beside.product for beside in besides}):
        for method in METHODS:
            slowdowns = [b.slowdown for b in besides if (b.product, b.method) == (product, method)]
            if not slowdowns:
                continue
            worst = max(slowdowns)
            rows.append((f"GEMM {product} next to {method}", worst, 1.05, worst <= 1.05))
    return rows


def claims_table(rows: list[tuple[str, float, float, bool]]) -> str:
    """The table of (claim, measured, goal, holds)."""
    return table(
        ["claim", "measured", "goal", ""],
        [[claim, f"{value:.3f}", f"{goal:g}", "holds" if holds else "**fails**"] for claim, value, goal, holds in rows],
    )


def report(
    machine: Machine,
    rates: dict[str, float],
    cells: list[Cell],
    reach: list[Cell],
    pairs: list[Pair],
    besides: list[Beside],
    compared: int,
) -> tuple[str, bool]:
    """The page, and whether all claims hold."""
    name = torch.cuda.get_device_name() if machine.has_gpu else "no GPU, interpreter"
    text = [
        "# Copies between GPU and host\n",
        f"{name}, torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}. Made by "
        "`python experiments/hardware/copies.py`, which explains the measurement; all cells are in copies.csv. "
        f"Before that, {compared} copies were compared byte by byte.\n",
        table(["memcpy of 1 GiB", "GB/s"], [[way, f"{rate / 1e9:.1f}"] for way, rate in rates.items()]),
        f"## Methods\n\nShares of memcpy, {LAYERS} layers, by fragment size and number of fragments.\n",
        matrix_tables(cells, reach),
    ]
    rule = derive(reach, pairs, rates)
    text.append(
        "## The rule\n\n" + table(["`CopyRule`", ""], [[k, f"{v:.4g}" if v > 1e9 else v] for k, v in asdict(rule).items()])
    )
    rows = [
        [size(p.fragment_bytes), p.load, p.store, f"{p.pace:g}" if p.store == "kernel" else "-", f"{p.share:.3f}"] for p in pairs
    ]
    text.append("## Both ways at once\n\n" + table(["fragment", "load", "store", "pace", "share of both memcpys"], rows))
    if not besides:
        return "\n".join(text), True
    rows = [[b.product, b.way, b.method, size(b.fragment_bytes), f"{b.slowdown:.3f}"] for b in besides]
    text.append("## A loop of products next to the copies\n\n" + table(["product", "way", "method", "fragment", "time"], rows))
    verdicts = claims(reach, pairs, besides)
    text.append("## Claims\n\n" + claims_table(verdicts))
    return "\n".join(text), all(holds for *_, holds in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for copies.csv and copies.md")
    chosen = parser.parse_args()
    machine = Machine(4 * MIB if chosen.tiny else 4 * GIB)
    if not chosen.tiny and not machine.has_gpu:
        parser.error("no GPU found; use --tiny with TRITON_INTERPRET=1")
    start = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - start:5.0f} s  {what}", flush=True)

    compared = check(machine, [512, 1040] if chosen.tiny else [512, 528, 1040, 2048, 18432, 65536 + 16])
    say(f"{compared} copies compared")
    rates = memcpy_rates(machine)
    say(f"memcpy {rates}")
    sizes = [KIB, 2 * KIB] if chosen.tiny else [KIB << k for k in range(11)]
    counts = [16, 128] if chosen.tiny else [16, 128, 1024, 8192, 32768, 100_000]
    cells = list(measure(machine, rates, sizes, counts))
    say("matrix")
    total_bytes = 64 * KIB if chosen.tiny else MEMCPY_BYTES
    reach = list(measure_reach(machine, rates, sizes, total_bytes))
    say("reach")
    pair_sizes = [KIB, 2 * KIB] if chosen.tiny else [KIB << k for k in (0, 1, 2, 3, 5, 7, 10)]
    pairs = list(measure_pairs(machine, rates, pair_sizes, total_bytes))
    say("both ways")
    besides = list(measure_products(machine, rates, [2 * KIB, 32 * KIB, 256 * KIB])) if machine.has_gpu else []
    say("products")
    text, holds = report(machine, rates, cells, reach, pairs, besides, compared)
    chosen.output.mkdir(parents=True, exist_ok=True)
    (chosen.output / "copies.md").write_text(text)
    with (chosen.output / "copies.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(cells[0])))
        writer.writeheader()
        writer.writerows(
            asdict(cell) | {"seconds": f"{cell.seconds:.3e}", "share": f"{cell.share:.4f}"} for cell in [*cells, *reach]
        )
    print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
