"""How fast is the copying kernel, and how much does it slow down concurrent matrix products, by its number of programs?

Alone: 1 GiB of pages of 32 fragments, in random order on both sides, as a share of one memcpy of 1 GiB. Measured from the call
to the last byte, with everything that the host does before and after the launch, and in a row of copies, where the host prepares
one while the GPU still copies another. What was copied is compared.

Next to products: fragments of 2 KiB, and loops of bf16 products, relative to the same loops alone on the whole GPU. Their kernels
have a program on every multiprocessor, so the one that shares its multiprocessor ends late, however little the copy takes: a
program that only waits shows this price. All is repeated with products that leave multiprocessors free, which has a price of its
own: their time next to nothing. Stores are also held back to a rate just below memcpy's.

Claims, each a row of the last table:

kernel       fragments of 2 KiB or more, from the call to the last byte and in a row: 0.92 to the GPU, 0.945 back
products     next to one program they take at most 1.05 times as long

    python experiments/hardware/programs.py [--output DIR]      on a machine with a GPU: a minute and a half

Writes programs.md, and exits with 1 if a claim fails.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from copies import (
    GIB,
    HERE,
    KIB,
    LAYERS,
    SHAPES,
    Factors,
    Loop,
    Machine,
    calibration,
    claims_table,
    copying,
    factors,
    leave_multiprocessors,
    memcpy_rates,
    size,
    table,
)

from kvsim.hardware.copy_rule import CopyRule
from kvsim.kernels.page_copy import wait_until
from kvsim.substrate.hardware.memory.tier_copy import WAYS, TierCopy, Way

PRODUCTS = SHAPES | {"4096^3": (4096, 4096, 4096)}
COUNTS = (1, 2, 4, 8)
FREE = (0, 4)
"""Multiprocessors that products leave free."""
FRAGMENT_BYTES = 2 * KIB
SIZES = tuple(KIB << k for k in range(1, 11))
"""Fragments of the copies alone."""
ROW = 8
"""Copies in a row."""
CHECKED_BYTES = 64 << 20
"""Bytes of each copy that are compared afterwards."""
GOALS = {"load": 0.92, "store": 0.945, "products": 1.05}
"""Lowest shares of memcpy's rate, and the largest slowdown of products."""
PACE = 0.945
"""Rate of stores that are held back, as a share of memcpy's."""
WAIT_S = 0.04
"""Time for which a program waits: longer than a segment of a loop."""


@triton.jit
def waiting_kernel(wait_ns):
    wait_until(wait_until(tl.zeros([], tl.int64)) + wait_ns)


@dataclass(frozen=True)
class Alone:
    """Shares of memcpy's rate: one copy from the call to its end, and copies in a row."""

    fragment_bytes: int
    way: Way
    share: float
    share_in_row: float


def alone(machine: Machine, rates: dict[str, float]) -> Iterator[Alone]:
    for fragment_bytes in SIZES:
        tiers = TierCopy(*machine.pools(fragment_bytes, LAYERS), calibration(rates))
        pages = GIB // tiers.page_bytes
        for way in WAYS:
            lists = machine.lists(tiers.host.shape[0], pages)
            action = copying(tiers, way, *lists, "kernel")
            whole, in_row = machine.seconds(action, 9), seconds_in_row(machine, action)
            check_copied(tiers, *lists)
            bytes_per_s = pages * tiers.page_bytes / rates[way]
            yield Alone(fragment_bytes, way, bytes_per_s / whole, bytes_per_s / in_row)


def check_copied(tiers: TierCopy, gpu_pages: np.ndarray, host_pages: np.ndarray) -> None:
    """Exit unless the pages at the ends of both lists are equal."""
    last = slice(-max(1, CHECKED_BYTES // tiers.page_bytes), None)
    if not torch.equal(tiers.gpu[gpu_pages[last].tolist()].cpu(), tiers.host[host_pages[last].tolist()]):
        sys.exit(f"the kernel copied wrong bytes, with pages of {tiers.layers} fragments of {tiers.fragment_bytes} bytes")


def seconds_in_row(machine: Machine, action: Callable[[], None]) -> float:
    """Seconds per copy in a row; a copy before the row keeps the GPU busy until the host is ahead."""
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        action()
        start.record()
        for _ in range(ROW):
            action()
        end.record()
        machine.wait()
        times.append(start.elapsed_time(end) / 1e3 / ROW)
    return statistics.median(times)


@dataclass(frozen=True)
class Neighbour:
    """What products run beside; a copy has its share of memcpy's rate when alone."""

    name: str
    programs: int
    action: Callable[[], None]
    share: float | None = None


def neighbours(machine: Machine, rates: dict[str, float]) -> Iterator[Neighbour]:
    yield Neighbour("nothing", 0, lambda: None)
    yield Neighbour("a program that waits", 1, lambda: waiting_kernel[(1,)](int(1e9 * WAIT_S), num_warps=1))
    for programs in COUNTS:
        for way in WAYS:
            yield copy_beside(machine, rates, way, programs, is_paced=False)
    yield copy_beside(machine, rates, "store", CopyRule().programs, is_paced=True)


def copy_beside(machine: Machine, rates: dict[str, float], way: Way, programs: int, *, is_paced: bool) -> Neighbour:
    rule = replace(CopyRule(), programs=programs, store_beside_load_bytes_per_s=PACE * rates[way])
    tiers = TierCopy(*machine.pools(FRAGMENT_BYTES, LAYERS), rule)
    gpu_pages, host_pages = machine.lists(tiers.host.shape[0], tiers.host.shape[0] // 2)
    some = slice(GIB // tiers.page_bytes)
    seconds = machine.seconds(copying(tiers, way, gpu_pages[some], host_pages[some], "kernel", is_shared=is_paced))
    check_copied(tiers, gpu_pages[some], host_pages[some])
    return Neighbour(
        name=f"{way}, held back" if is_paced else way,
        programs=programs,
        action=copying(tiers, way, gpu_pages, host_pages, "kernel", is_shared=is_paced),
        share=len(gpu_pages[some]) * tiers.page_bytes / seconds / rates[way],
    )


@dataclass(frozen=True)
class Cost:
    """Times of the products next to something, relative to those of products alone on the whole GPU."""

    free: int
    beside: Neighbour
    times: list[float]


def costs(machine: Machine, beside: list[Neighbour], loops: list[Loop]) -> Iterator[Cost]:
    for free in FREE:
        prices = [price(loop, free) for loop in loops]
        with products_leave(free):
            for one in beside:
                yield Cost(free, one, [own * loop.slowdown(machine, one.action) for own, loop in zip(prices, loops, strict=True)])


@contextmanager
def products_leave(free: int) -> Iterator[None]:
    """Let products leave multiprocessors free."""
    leave_multiprocessors(free)
    try:
        yield
    finally:
        leave_multiprocessors(0)


def price(loop: Loop, free: int) -> float:
    """Median time of a loop that leaves multiprocessors free, relative to the same loop on the whole GPU."""
    ratios = []
    for _ in range(5 if free else 0):
        whole = loop.segments([None])[0]
        with products_leave(free):
            ratios.append(loop.segments([None])[0] / whole)
    return statistics.median(ratios) if ratios else 1.0


def kernel_row(name: str, product: Factors, free: int) -> list[object]:
    """The longest kernel of a product: its name, programs, threads per program, registers per thread, bytes of shared memory."""
    left, right, out = product
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with products_leave(free), torch.profiler.profile(activities=activities) as profile:
        torch.mm(left, right, out=out)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    longest = max((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["dur"])
    known = longest["args"]
    sizes = [math.prod(known["grid"]), math.prod(known["block"]), known["registers per thread"], known["shared memory"]]
    return [free, name, longest["name"], *sizes]


def claims(by_size: list[Alone], measured: list[Cost]) -> list[tuple[str, float, float, bool]]:
    """(claim, worst measurement, goal, holds)."""
    rows = []
    for way in WAYS:
        shares = [(row.share, row.share_in_row) for row in by_size if row.way == way]
        for name, worst in zip(("from the call to the last byte", "in a row"), map(min, zip(*shares, strict=True)), strict=True):
            rows.append((f"kernel, {way}, {name}", worst, GOALS[way], worst >= GOALS[way]))
    longest = max(time for cost in measured if (cost.free, cost.beside.programs) == (0, 1) for time in cost.times)
    return [*rows, ("products next to one program", longest, GOALS["products"], longest <= GOALS["products"])]


def alone_table(by_size: list[Alone]) -> str:
    header = ["fragment"]
    for way in WAYS:
        header += [way, f"{way}, in a row"]
    rows: list[list[object]] = []
    for fragment_bytes in SIZES:
        row: list[object] = [size(fragment_bytes)]
        for measured in by_size:
            if measured.fragment_bytes == fragment_bytes:
                row += [f"{measured.share:.3f}", f"{measured.share_in_row:.3f}"]
        rows.append(row)
    return table(header, rows)


def costs_table(measured: list[Cost]) -> str:
    header = [
        "multiprocessors left free",
        "next to",
        "programs",
        "share of memcpy alone",
        *(f"time of {name}" for name in PRODUCTS),
    ]
    rows: list[list[object]] = []
    for cost in measured:
        share = "" if cost.beside.share is None else f"{cost.beside.share:.3f}"
        rows.append([cost.free, cost.beside.name, cost.beside.programs, share, *(f"{time:.3f}" for time in cost.times)])
    return table(header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder for programs.md")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU found")
    machine = Machine(4 * GIB)
    rates = memcpy_rates(machine)
    by_size = list(alone(machine, rates))
    products = [factors(*shape) for shape in PRODUCTS.values()]
    measured = list(costs(machine, list(neighbours(machine, rates)), [Loop(*product) for product in products]))
    verdicts = claims(by_size, measured)
    multiprocessors = torch.cuda.get_device_properties(machine.device).multi_processor_count
    text = [
        "# Programs of the copying kernel\n",
        f"{torch.cuda.get_device_name()}, {multiprocessors} multiprocessors, torch {torch.__version__}, "
        f"triton {triton.__version__}, Python {platform.python_version()}. Made by `python experiments/hardware/programs.py`, "
        "which explains the measurement. "
        f"memcpy of 1 GiB: {rates['load'] / 1e9:.1f} GB/s to the GPU, {rates['store'] / 1e9:.1f} back.\n",
        f"## Alone, {CopyRule().programs} programs\n",
        alone_table(by_size),
        "## Next to products\n",
        costs_table(measured),
        table(
            ["left free", "product", "its kernel", "programs", "threads", "registers per thread", "shared memory"],
            [kernel_row(*named, free) for free in FREE for named in zip(PRODUCTS, products, strict=True)],
        ),
        "## Claims\n",
        claims_table(verdicts),
    ]
    print("\n".join(text))
    chosen.output.mkdir(parents=True, exist_ok=True)
    (chosen.output / "programs.md").write_text("\n".join(text))
    return 0 if all(holds for *_, holds in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
