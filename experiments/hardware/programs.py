"""How fast is the copying kernel, and how much does it slow down concurrent matrix products, by its number of programs?

Alone: 1 GiB of pages of 32 fragments, in random order on both sides, as a share of one memcpy of 1 GiB. Measured from the call
to the last byte, and in a row of copies, where the host prepares one while the GPU still copies another; the difference is the
host's part. A storing kernel is limited to a rate just below the link's; it is also measured without the limit.

Next to products: fragments of 2 KiB, and the slowdown of loops of bf16 products. The products' own kernels are listed: a kernel
with a program on every multiprocessor finishes late however little the copy takes from it.

Claims, each a row of the last table:

kernel       in a row, fragments of 2 KiB or more: 0.92 to the GPU, 0.945 back without the limit
products     next to one program they take at most 1.05 times as long

    python experiments/hardware/programs.py [--output DIR]      on a machine with a GPU: a minute

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
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
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
    memcpy_rates,
    size,
    table,
)

from kvsim.copy_rule import CopyRule
from kvsim.substrate.hardware.tier_copy import WAYS, TierCopy, Way

PRODUCTS = SHAPES | {"4096^3": (4096, 4096, 4096)}
COUNTS = (1, 2, 4, 8, 16)
FRAGMENT_BYTES = 2 * KIB
SIZES = tuple(KIB << k for k in range(1, 11))
"""Fragments of the copies alone."""
ROW = 8
"""Copies in a row."""
GOALS = {"load": 0.92, "store": 0.945, "products": 1.05}
"""Lowest shares of memcpy's rate, and the largest slowdown of products."""
UNHELD_BYTES_PER_S = 1e15


@dataclass(frozen=True)
class Alone:
    """Shares of memcpy's rate: one copy from the call to its end, and copies in a row."""

    fragment_bytes: int
    way: Way
    is_held: bool
    share: float
    share_in_row: float


def alone(machine: Machine, rates: dict[str, float]) -> Iterator[Alone]:
    for fragment_bytes in SIZES:
        known = calibration(rates)
        for way, rule in (
            ("load", known),
            ("store", known),
            ("store", replace(known, store_bytes_per_s=UNHELD_BYTES_PER_S)),
        ):
            tiers = TierCopy(*machine.pools(fragment_bytes, LAYERS), rule)
            pages = GIB // tiers.page_bytes
            action = copying(tiers, way, *machine.lists(tiers.host.shape[0], pages), "kernel")
            whole, in_row = machine.seconds(action), seconds_in_row(machine, action)
            bytes_per_s = pages * tiers.page_bytes / rates[way]
            yield Alone(fragment_bytes, way, rule is known, bytes_per_s / whole, bytes_per_s / in_row)


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
class Cost:
    """A number of programs in one direction: its share of memcpy's rate, and the slowdown of each product."""

    programs: int
    way: Way
    share: float
    times: list[float]


def costs(machine: Machine, rates: dict[str, float], loops: list[Loop]) -> Iterator[Cost]:
    for programs in COUNTS:
        tiers = TierCopy(*machine.pools(FRAGMENT_BYTES, LAYERS), replace(calibration(rates), programs=programs))
        gpu_pages, host_pages = machine.lists(tiers.host.shape[0], tiers.host.shape[0] // 2)
        some = slice(GIB // tiers.page_bytes)
        for way in WAYS:
            seconds = machine.seconds(copying(tiers, way, gpu_pages[some], host_pages[some], "kernel"))
            beside = copying(tiers, way, gpu_pages, host_pages, "kernel")
            share = len(gpu_pages[some]) * tiers.page_bytes / seconds / rates[way]
            yield Cost(programs, way, share, [loop.slowdown(machine, beside) for loop in loops])


def kernels(products: list[Factors]) -> list[list[object]]:
    """For each product: its kernel's name, programs, threads per program, registers per thread, and bytes of shared memory."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for left, right, out in products:
            torch.mm(left, right, out=out)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    launched = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    names = ("registers per thread", "shared memory")
    return [
        [shape, event["name"], math.prod(event["args"]["grid"]), math.prod(event["args"]["block"])]
        + [event["args"][name] for name in names]
        for shape, event in zip(PRODUCTS, launched, strict=True)
    ]


def claims(by_size: list[Alone], measured: list[Cost]) -> list[tuple[str, float, float, bool]]:
    """(claim, worst measurement, goal, holds)."""
    rows = []
    for way, is_held in (("load", True), ("store", False)):
        worst = min(row.share_in_row for row in by_size if (row.way, row.is_held) == (way, is_held))
        rows.append((f"kernel in a row, {way}", worst, GOALS[way], worst >= GOALS[way]))
    longest = max(time for cost in measured if cost.programs == 1 for time in cost.times)
    return [*rows, ("products next to one program", longest, GOALS["products"], longest <= GOALS["products"])]


def alone_table(by_size: list[Alone]) -> str:
    header = ["fragment"]
    for kind in ("load", "store", "store, no limit"):
        header += [kind, f"{kind}, in a row"]
    rows: list[list[object]] = []
    for fragment_bytes in SIZES:
        row: list[object] = [size(fragment_bytes)]
        for measured in by_size:
            if measured.fragment_bytes == fragment_bytes:
                row += [f"{measured.share:.3f}", f"{measured.share_in_row:.3f}"]
        rows.append(row)
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
    measured = list(costs(machine, rates, [Loop(*product) for product in products]))
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
        table(
            ["programs", "way", "share of memcpy alone", *(f"time of {name}" for name in PRODUCTS)],
            [[cost.programs, cost.way, f"{cost.share:.3f}", *(f"{time:.3f}" for time in cost.times)] for cost in measured],
        ),
        table(["product", "its kernel", "programs", "threads", "registers per thread", "shared memory"], kernels(products)),
        "## Claims\n",
        claims_table(verdicts),
    ]
    print("\n".join(text))
    (chosen.output / "programs.md").write_text("\n".join(text))
    return 0 if all(holds for *_, holds in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
