"""Is there a faster way to copy pages between GPU and host than kvsim's, or one that slows down concurrent products less?

Pages are those of Llama 3 8B: 16 tokens (32 fragments of 64 KiB) and 64 tokens (256 KiB), and the share of 16 tokens that one of
eight GPUs has (8 KiB). They lie in runs of 1 to 64 neighbours on both sides; the runs are in random order. All rates are shares
of one memcpy of 1 GiB in the same process, from the call to the last byte. What each way has moved is compared, byte by byte.

kernel          kvsim's copying kernel                      staged      kvsim's way through a buffer on the GPU
batch           one call for the copies of many fragments   each        a call of the driver for each fragment
pages           a two-dimensional copy for each page: its 32 fragments are the rows
runs            a two-dimensional copy for each run in each layer: its pages are the rows
batch of pages  kvsim's `memcpy`: the same, all pages in one call
tiles           a kernel of many small programs; ``TMA``: by tensor descriptors. With ``carveout``, multiprocessors stay set up
                for kernels with much shared memory, so that a program finds room beside a product

Tables: all ways by run length; kernels by their shape; single tokens in CPU pages of 256 (LightLLM's), by run length, with a copy
for each run; and every way beside a loop of bf16 products: how much longer these take while it copies, and how fast it copies.
What a driver or a kernel might not support is tried in a process of its own before.

    python experiments/hardware/copy_variants.py --output DIR [--seconds 280]        on a machine with a GPU
    python experiments/hardware/copy_variants.py --output DIR --only coarse,alone --merge DIR/copy_variants.json
                                                                                     some tables, added to those of a file
    TRITON_INTERPRET=1 python experiments/hardware/copy_variants.py --tiny           small sizes, on the CPU

Writes copy_variants.json and copy_variants.md after every table. A way that fails is listed with the reason, and the others go
on. The page begins with copy_variants_findings.md. Exits with 1 if a byte was wrong.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # Streams that share a hardware queue wait for each other.

import torch
import triton
from copies import GIB, HERE, KIB, LAYERS, MIB, SHAPES, Machine, copying, memcpy_rates, table
from copy_engines import Engines
from copy_jobs import Action, Job, Products
from copy_kernels import Compiled, Shape, let_descriptors_allocate

from kvsim.hardware.copy_rule import CopyRule
from kvsim.substrate.hardware.memory.tier_copy import WAYS, TierCopy, Way

FINDINGS = HERE / "copy_variants_findings.md"
PAGES = {"16 tokens": 64 * KIB, "64 tokens": 256 * KIB, "16 tokens, one of 8 GPUs": 8 * KIB}
"""Bytes of a fragment."""
RUNS = (1, 2, 4, 16, 64)
COARSE_RUNS = (1, 16, 64, 256)
COARSE_PAGES, TOKEN_FRAGMENT_BYTES = 256, 4 * KIB
LEAN = Shape(programs=132, tile_bytes=8 * KIB, warps=1, stages=1, is_descriptor=True, has_carveout=True)
SHAPES_ALONE = (
    *(Shape(programs=count, tile_bytes=32 * KIB) for count in (1, 2, 4, 8, 16, 33, 66, 132)),
    *(Shape(programs=4, tile_bytes=size * KIB) for size in (4, 8, 16, 64)),
    *(Shape(programs=count, tile_bytes=16 * KIB, warps=8, stages=2) for count in (4, 8, 16)),
    Shape(programs=8, tile_bytes=16 * KIB, load=".cg"), Shape(programs=8, tile_bytes=16 * KIB, load=".cv"),
    Shape(programs=8, tile_bytes=16 * KIB, store=".cs"), Shape(programs=8, tile_bytes=16 * KIB, store=".wt"),
    Shape(programs=8, tile_bytes=16 * KIB, evict="evict_first"),
    *(Shape(programs=count, tile_bytes=2 * KIB, warps=1, stages=1, registers=32) for count in (33, 66, 132, 264)),
    *(Shape(programs=count, tile_bytes=size * KIB, warps=1, stages=1, is_descriptor=True)
      for count in (4, 16, 66, 132) for size in (8, 16, 32)),
    Shape(programs=4, tile_bytes=16 * KIB, stages=4, is_descriptor=True),
)  # fmt: skip
SHAPES_BESIDE = (
    Shape(programs=4, tile_bytes=32 * KIB), Shape(programs=4, tile_bytes=32 * KIB, pace=0.85),
    Shape(programs=132, tile_bytes=2 * KIB, warps=1, stages=1, registers=32),
    Shape(programs=132, tile_bytes=2 * KIB, warps=1, stages=1, registers=32, has_carveout=True),
    Shape(programs=132, tile_bytes=KIB, warps=1, stages=1, registers=32, has_carveout=True, pace=0.9),
    Shape(programs=132, tile_bytes=8 * KIB, warps=1, stages=1, is_descriptor=True), LEAN,
    Shape(programs=66, tile_bytes=8 * KIB, warps=1, stages=1, is_descriptor=True, has_carveout=True),
    Shape(programs=33, tile_bytes=8 * KIB, warps=1, stages=1, is_descriptor=True, has_carveout=True),
    Shape(programs=16, tile_bytes=8 * KIB, warps=1, stages=1, is_descriptor=True, has_carveout=True),
    Shape(programs=132, tile_bytes=4 * KIB, warps=1, stages=1, is_descriptor=True, has_carveout=True),
)  # fmt: skip
TABLES = ("beside", "shapes", "coarse", "alone")
"""In the order in which they are measured; the first needs a GPU."""
PROBES = ("TMA load", "TMA store")
MOST_CALLS = 4096
"""Ways with more calls of the driver than this are left out."""
Row = dict[str, Any]


class Study:
    """All tables, as far as the time suffices."""

    def __init__(self, machine: Machine, options: argparse.Namespace, unsupported: dict[str, str]) -> None:
        self.machine, self.is_tiny, self.unsupported = machine, options.tiny, unsupported
        self.ends = time.perf_counter() + options.seconds
        self.rates = memcpy_rates(machine)
        self.tiers: TierCopy | None = None
        self.wrong: list[str] = []
        self.failed: dict[str, str] = {}
        self.compared = 0

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.ends

    def fragment(self, n_bytes: int) -> int:
        return min(n_bytes, KIB) if self.is_tiny else n_bytes

    def job(self, fragment_bytes: int, run: int, way: Way, total_bytes: int) -> Job:
        """Return lists of runs of neighbours, in random order on both sides. Ends the job before."""
        if self.tiers is not None:
            self.tiers.close()
        self.tiers = tiers = TierCopy(*self.machine.pools(fragment_bytes, LAYERS), CopyRule())
        count = max(1, min(total_bytes, self.machine.pool_bytes // 2) // tiers.page_bytes // run)
        run = min(run, tiers.host.shape[0])
        lists = [self.machine.rng.permutation(tiers.host.shape[0] // run)[:count] for _ in range(2)]
        pages = [(firsts[:, None] * run + np.arange(run)).ravel() for firsts in lists]
        return Job(self.machine, tiers, way, *pages, run, self.rates[way])

    def rows(self, table_name: str) -> list[Row]:
        """Return a table, as far as it could be measured."""
        found: list[Row] = []
        try:
            found.extend(getattr(self, table_name)())
        except Exception as error:
            self.failed[f"rest of {table_name}"] = reason(error)
        return found

    def measured(self, name: str, measure: Callable[[], Row]) -> Iterator[Row]:
        """Yield what one way is measured to do; if it fails, note why."""
        try:
            yield measure()
        except Exception as error:
            self.failed[name] = reason(error)

    def timed(self, name: str, job: Job, action: Action) -> float:
        """Check a way, then return its rate as a share of memcpy's."""
        self.compared += 1
        if not job.check(action):
            self.wrong.append(name)
        return job.n_bytes / self.machine.seconds(action, 3 if self.is_tiny else 5) / job.bytes_per_s

    def share(self, name: str, job: Job, action: Action, case: Row) -> Iterator[Row]:
        """Yield a case with the share of memcpy's rate that a way reaches."""
        yield from self.measured(name, lambda: {**case, "share": self.timed(name, job, action)})

    def next_to(self, loop: Products, job: Job, action: Action, case: Row) -> Row:
        """Return a case with the time of products next to a way, and the way's share of memcpy's rate meanwhile."""
        slower, rate = loop.beside(action, job.n_bytes)
        return {**case, "time": slower, "share": rate / job.bytes_per_s}

    def supports(self, name: str, way: Way) -> bool:
        return not self.machine.has_gpu or f"{name} {way}" not in self.unsupported

    def ways(self, job: Job) -> Iterator[tuple[str, Action]]:
        """Yield all ways to copy, by name."""
        engines = Engines(job.tiers, job.way, job.gpu_pages, job.host_pages, job.run)
        for name, method in (("kernel", "kernel"), ("staged", "staged"), ("batch of pages", "memcpy")):
            yield name, copying(job.tiers, job.way, job.gpu_pages, job.host_pages, method)  # type: ignore[arg-type]
        yield "batch", engines.batch
        pages, layers = len(job.gpu_pages), job.tiers.layers
        if pages * layers <= MOST_CALLS:
            yield "each", engines.each
        if pages <= MOST_CALLS:
            yield "pages", engines.pages
        if job.run > 1 and pages // job.run * layers <= MOST_CALLS:
            yield "runs", engines.runs
        if self.supports("TMA", job.way) and self.machine.has_gpu:
            yield "TMA", job.tiles(LEAN)

    def alone(self) -> Iterator[Row]:
        total = 64 * KIB if self.is_tiny else 512 * MIB
        for pages, n_bytes in PAGES.items():
            for run in RUNS:
                for size in (total, total // 32) if pages == "16 tokens" else (total,):
                    for way in WAYS:
                        if self.is_late:
                            return
                        job = self.job(self.fragment(n_bytes), run, way, size)
                        for name, action in self.ways(job):
                            case = {"pages": pages, "run": run, "bytes": job.n_bytes, "way": way, "name": name}
                            yield from self.share(
                                f"{name}, {way}, {pages}, {job.n_bytes} bytes, runs of {run}", job, action, case
                            )

    def shapes(self) -> Iterator[Row]:
        total = 64 * KIB if self.is_tiny else 512 * MIB
        for shape in SHAPES_ALONE[:: 8 if self.is_tiny else 1]:
            for way in WAYS:
                if self.is_late:
                    return
                if shape.is_descriptor and not (self.supports("TMA", way) and self.machine.has_gpu):
                    continue
                job, seen = self.job(self.fragment(64 * KIB), 1, way, total), list[Compiled | None]()
                for row in self.share(f"{shape.name}, {way}", job, job.tiles(shape, seen), {"way": way, "name": shape.name}):
                    yield {**row, **asdict(shape), **described(seen)}

    def coarse(self) -> Iterator[Row]:
        """Single tokens on the GPU, in runs, and CPU pages of 256."""
        unit = 4 if self.is_tiny else COARSE_PAGES
        fragment_bytes = self.fragment(TOKEN_FRAGMENT_BYTES)
        pages = self.machine.pool_bytes // (fragment_bytes * LAYERS) // unit * unit
        end = pages * LAYERS * fragment_bytes
        gpu = self.machine.gpu[:end].view(LAYERS, pages, fragment_bytes)
        host = self.machine.host[:end].view(pages // unit, LAYERS, unit * fragment_bytes)
        tiers = TierCopy(gpu, host, CopyRule(), unit_pages=unit)
        for run in [run for run in COARSE_RUNS if run <= unit]:
            for way in WAYS:
                if self.is_late:
                    return
                order = self.machine.rng.permutation(pages // run)[: pages // run // 4]
                gpu_pages = (order[:, None] * run + np.arange(run)).ravel()
                larger = self.machine.rng.permutation(pages // unit)[: -(-len(gpu_pages) // unit)]
                host_pages = (larger[:, None] * unit + np.arange(unit)).ravel()[: len(gpu_pages)]
                job = Job(self.machine, tiers, way, gpu_pages, host_pages, run, self.rates[way])
                engines = Engines(tiers, way, gpu_pages, job.host_indices(), run)
                ways = {"kernel": copying(tiers, way, gpu_pages, host_pages, "kernel"), "merged": engines.merged}
                for name, action in ways.items():
                    case = {"run": run, "bytes": job.n_bytes, "way": way, "name": name}
                    yield from self.share(f"{name}, {way}, coarse, runs of {run}", job, action, case)

    def beside(self) -> Iterator[Row]:
        """Products next to each way."""
        for product, shape in list(SHAPES.items())[::-1]:
            loop = Products(*shape)
            cases = [("16 tokens", 1), ("16 tokens", 16), ("64 tokens", 1), ("16 tokens, one of 8 GPUs", 1)]
            for pages, run in cases if product == list(SHAPES)[-1] else cases[:1]:
                for way in WAYS:
                    if self.is_late:
                        return
                    job = self.job(PAGES[pages], run, way, 512 * MIB)
                    ways = [(name, action) for name, action in self.ways(job) if name != "TMA"]
                    if run == 1 and pages != "64 tokens":
                        shapes = [one for one in SHAPES_BESIDE if not one.is_descriptor or self.supports("TMA", way)]
                        ways += [(one.name, job.tiles(one)) for one in shapes]
                    for name, action in ways:
                        case = {"product": product, "pages": pages, "run": run, "way": way, "name": name}
                        measure = partial(self.next_to, loop, job, action, case)
                        yield from self.measured(f"{name}, {way}, {pages}, runs of {run}, beside {product}", measure)


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def described(seen: list[Compiled | None]) -> Row:
    """What the compiler made of a kernel."""
    one = seen[0] if seen else None
    return {"used_registers": one.registers, "shared_bytes": one.shared_bytes} if one else {}


# What may not be supported


def probe(name: str) -> int:
    """Try one way on small pools; return 0 if all bytes are right."""
    machine = Machine(64 * MIB)
    let_descriptors_allocate(machine.device)
    way = name.rpartition(" ")[2]
    tiers = TierCopy(*machine.pools(64 * KIB, LAYERS), CopyRule())
    lists = machine.lists(tiers.host.shape[0], 8)
    job = Job(machine, tiers, way, *lists, 1, 50e9)  # type: ignore[arg-type]
    return 0 if job.check(job.tiles(LEAN)) else 3


def unsupported_ones() -> dict[str, str]:
    """Return why a way is not supported, by its name."""
    with ThreadPoolExecutor(len(PROBES)) as threads:
        return {name: why for name, why in zip(PROBES, threads.map(reason_against, PROBES), strict=True) if why}


def reason_against(name: str) -> str:
    """Try a way in a process of its own; return why it is not supported, or nothing."""
    command = [sys.executable, str(Path(__file__).resolve()), "--probe", name]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return "does not end within 60 s"
    if tried.returncode == 3:
        return "wrong bytes"
    lines = tried.stderr.strip().splitlines()
    return (lines or [f"exit code {tried.returncode}"])[-1] if tried.returncode else ""


# The page


def page(found: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    compared = f"{found['compared']} copies were compared byte by byte; wrong: {', '.join(found['wrong']) or 'none'}."
    text = [f"# Ways to copy pages\n\n{found['device']}. {compared}\n"]
    if FINDINGS.exists():
        text.append(FINDINGS.read_text())
    for run in found["runs"]:
        rates = [[way, f"{rate / 1e9:.1f}"] for way, rate in run["rates"].items()]
        text.append(table([f"memcpy of 1 GiB, for {', '.join(run['tables'])} ({run['versions']})", "GB/s"], rates))
    for title in ("unsupported", "failed"):
        if found[title]:
            text.append(table([title, "why"], [[name, why] for name, why in found[title].items()]))
    keys = {
        "alone": ("pages", "way", "bytes", "run"), "coarse": ("way", "bytes", "run"), "shapes": ("name",),
    }  # fmt: skip
    for name, of in keys.items():
        if found.get(name):
            columns = "way" if name == "shapes" else "name"
            text.append(f"## {name.capitalize()}: shares of memcpy\n\n" + pivot(found[name], of, columns, ("share",)))
    if found.get("beside"):
        text.append("## Beside products: their time, and the copy's share of memcpy\n")
        text.append(pivot(found["beside"], ("product", "pages", "run", "name"), "way", ("time", "share")))
    return "\n".join(text)


def pivot(rows: list[Row], of: tuple[str, ...], columns: str, values: tuple[str, ...]) -> str:
    """Return a table with a line for each combination of ``of`` and a column for each value of ``columns``."""
    heads = list(dict.fromkeys(row[columns] for row in rows))
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        cell = ", ".join(f"{row[value]:.3f}" for value in values)
        lines.setdefault(tuple(row[key] for key in of), {})[row[columns]] = cell
    return table([*of, *heads], [[*key, *(cells.get(head, "") for head in heads)] for key, cells in lines.items()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU")
    parser.add_argument("--seconds", type=float, default=280, help="begin no further measurement after so many seconds")
    parser.add_argument("--only", type=table_names, default=list(TABLES), help="tables to measure, with commas between them")
    parser.add_argument("--merge", type=Path, help="an earlier copy_variants.json, whose other tables are kept")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for copy_variants.json and copy_variants.md")
    parser.add_argument("--probe", choices=PROBES, help="only try whether this works")
    options = parser.parse_args()
    if options.probe:
        return probe(options.probe)
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no GPU found; use --tiny with TRITON_INTERPRET=1")
    began = time.perf_counter()
    unsupported = unsupported_ones() if torch.cuda.is_available() else {}
    machine = Machine(8 * MIB if options.tiny else 2 * GIB)
    let_descriptors_allocate(machine.device)
    device = torch.cuda.get_device_name() if machine.has_gpu else "no GPU, interpreter"
    names = [name for name in options.only if machine.has_gpu or name != "beside"]
    found = earlier(options.merge, device, names) if options.merge else {"runs": [], "compared": 0, "wrong": [], "failed": {}}
    options.seconds -= time.perf_counter() - began
    study = Study(machine, options, unsupported)
    run: Row = {"tables": [], "rates": study.rates, "versions": f"torch {torch.__version__}, triton {triton.__version__}"}
    found |= {"device": device, "unsupported": unsupported, "runs": [*found["runs"], run]}
    options.output.mkdir(parents=True, exist_ok=True)
    before = found["compared"], found["wrong"], found["failed"]
    for name in names:
        found[name] = study.rows(name)
        run["tables"].append(name)
        found["compared"] = before[0] + study.compared
        found |= {"wrong": before[1] + study.wrong, "failed": before[2] | study.failed}
        (options.output / "copy_variants.json").write_text(json.dumps(found) + "\n")
        (options.output / "copy_variants.md").write_text(page(found))
        print(f"{time.perf_counter() - began:5.0f} s  {name}, {len(found[name])} rows", flush=True)
    print(page(found))
    return 1 if study.wrong else 0


def table_names(text: str) -> list[str]:
    """Return the tables of a list in the order in which they are measured."""
    if unknown := set(text.split(",")) - set(TABLES):
        raise argparse.ArgumentTypeError(f"there is no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    return [name for name in TABLES if name in text.split(",")]


def earlier(path: Path, device: str, names: list[str]) -> dict[str, Any]:
    """Return the measurements of a file, without the tables that are measured anew. Exits if it is of another kind of GPU."""
    found: dict[str, Any] = json.loads(path.read_text())
    if found["device"] != device:
        raise SystemExit(f"{path} was measured on {found['device']}, not on {device}: measure all tables here")
    for run in found["runs"]:
        run["tables"] = [name for name in run["tables"] if name not in names]
    found["runs"] = [run for run in found["runs"] if run["tables"]]
    return found


if __name__ == "__main__":
    sys.exit(main())
