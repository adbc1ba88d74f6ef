"""What does the copying kernel cost matrix products beside it, by its number of programs?

Copies of pages of 32 fragments of 2 KiB, in random order on both sides: their rate alone, as a share of one memcpy of 1 GiB, and
how much longer loops of bf16 products take beside them. The products' own kernels are listed: one that has a program on every
multiprocessor ends late whatever the copy takes from it.

Claim: beside one program, products take at most 1.05 times as long.

    python experiments/hardware/programs.py [--output DIR]      on a machine with a GPU: half a minute

Writes programs.md, and exits with 1 if the claim fails.
"""

import argparse
import json
import math
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from copies import GIB, HERE, KIB, LAYERS, Factors, Loop, Machine, calibration, copying, factors, memcpy_rates, table

from kvsim.substrate.hardware.tier_copy import WAYS, TierCopy

SHAPES = {"8192^3": (8192, 8192, 8192), "2048x8192x8192": (2048, 8192, 8192), "4096^3": (4096, 4096, 4096)}
"""Rows, columns and inner size."""
COUNTS = (1, 2, 4, 8, 16)
FRAGMENT_BYTES = 2 * KIB
GOAL = 1.05
"""How many times as long products may take."""


@dataclass(frozen=True)
class Cost:
    """So many programs in one direction: their share of memcpy's rate, and how many times as long each product takes."""

    programs: int
    way: str
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
    """Of each product: its kernel's name, programs, threads and registers of each, and bytes of shared memory."""
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
        for shape, event in zip(SHAPES, launched, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder for programs.md")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    machine = Machine(4 * GIB)
    rates = memcpy_rates(machine)
    products = [factors(*shape) for shape in SHAPES.values()]
    measured = list(costs(machine, rates, [Loop(*product) for product in products]))
    rows: list[list[object]] = [
        [cost.programs, cost.way, f"{cost.share:.3f}", *(f"{time:.3f}" for time in cost.times)] for cost in measured
    ]
    longest = max(time for cost in measured if cost.programs == 1 for time in cost.times)
    holds = longest <= GOAL
    multiprocessors = torch.cuda.get_device_properties(machine.device).multi_processor_count
    text = [
        "# Programs of the copying kernel beside products\n",
        f"{torch.cuda.get_device_name()}, {multiprocessors} multiprocessors, torch {torch.__version__}, "
        f"triton {triton.__version__}, Python {platform.python_version()}. Made by `python experiments/hardware/programs.py`, "
        "which says how it measures.\n",
        table(["programs", "way", "share of memcpy", *(f"time of {name}" for name in SHAPES)], rows),
        table(["product", "its kernel", "programs", "threads", "registers of a thread", "shared memory"], kernels(products)),
        table(
            ["claim", "measured", "goal", ""],
            [["products beside one program", f"{longest:.3f}", f"{GOAL:g}", "holds" if holds else "**fails**"]],
        ),
    ]
    print("\n".join(text))
    (chosen.output / "programs.md").write_text("\n".join(text))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
