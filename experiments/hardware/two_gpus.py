"""Do two GPUs with a process each share the host's memory without a wrong word, and without slowing each other down?

Claims, each a row of the table:

moves        at least 100,000 page movements between the GPUs and host memory and from GPU to GPU, each verified on a GPU
foreign      at least 10,000 of the loaded pages were written to host memory by the other process
wrong words  none
rates        to the GPUs, to the host and both ways: both GPUs together move at least 1.9 times what one moves
loss         when a process is killed in the middle of copies, its copies end and the other GPU goes on

    python experiments/hardware/two_gpus.py [--output DIR]                     on a machine with two GPUs: some minutes
    TRITON_INTERPRET=1 python experiments/hardware/two_gpus.py --tiny          on the CPU, where rates are shown but no claim

Writes two_gpus.md and two_gpus.json, and exits with 1 if a claim fails. A part that cannot run is named with its error; the
others still run.
"""

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from kvsim.substrate.hardware.device import find_device

DEVICE = find_device()  # before Triton is imported

import torch  # noqa: E402
from simpy import Event  # noqa: E402

from kvsim.engine.substrate import LOST  # noqa: E402
from kvsim.hardware.copy_rule import CopyRule  # noqa: E402
from kvsim.hardware.spec import HardwareSpec  # noqa: E402
from kvsim.kernels.page_copy import copy_pages  # noqa: E402
from kvsim.model.spec import ModelSpec  # noqa: E402
from kvsim.substrate.hardware.machine import Demand, open_machine  # noqa: E402
from kvsim.substrate.hardware.memory.gpu_pool import SEND_PROGRAMS  # noqa: E402
from kvsim.substrate.hardware.orders import ChunkPages, CopyOrder, StepOrder  # noqa: E402
from kvsim.substrate.hardware.substrate import HardwareSubstrate  # noqa: E402

HERE = Path(__file__).resolve().parent
NOTHING = np.empty(0, dtype=np.int64)
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured, and the goals of the claims."""

    model: ModelSpec
    page_tokens: tuple[int, ...]
    """Tokens per page, for each round of measurements."""
    gpu_bytes: int
    host_bytes: int
    moves: int
    foreign: int
    list_pages: int
    """Most pages per movement in the walk."""
    copy_bytes: int
    """Bytes per copy when rates are measured."""
    copies: int
    """Such copies per direction and GPU."""
    repeats: int
    empty_orders: int
    factor: float
    """Least rate of both GPUs together, as a multiple of one's."""
    walk_s: float = 100.0
    """Time after which a walk ends unfinished."""


FULL = Sizes(
    model=ModelSpec(
        layers=32, hidden_size=512, vocabulary=1024, heads=8, kv_heads=8, head_dim=128, mlp_width=512,
    ),
    page_tokens=(16, 2), gpu_bytes=6 * GIB, host_bytes=8 * GIB, moves=100_000, foreign=10_000, list_pages=128,
    copy_bytes=GIB // 2, copies=40, repeats=3, empty_orders=1000, factor=1.9,
)  # fmt: skip
TINY = Sizes(
    model=ModelSpec(
        layers=2, hidden_size=16, vocabulary=16, heads=2, kv_heads=1, head_dim=16, mlp_width=16,
        kv_dtype_bytes=4, weight_dtype_bytes=4,
    ),
    page_tokens=(4,), gpu_bytes=24 << 10, host_bytes=32 << 10, moves=150, foreign=15, list_pages=4,
    copy_bytes=8 << 10, copies=3, repeats=1, empty_orders=20, factor=0.0,
)  # fmt: skip


def opened(sizes: Sizes, page_tokens: int) -> HardwareSubstrate:
    """Open two GPUs over one host pool."""
    page_bytes = sizes.model.page_bytes(page_tokens)
    rates = HardwareSpec(
        flops_per_s=1e15, memory_bytes=140 * GIB, memory_bytes_per_s=4e12, host_to_device_bytes_per_s=55e9,
        device_to_host_bytes_per_s=55e9, both_directions_bytes_per_s=90e9, disk_read_bytes_per_s=5e9,
        disk_write_bytes_per_s=5e9, copy_rule=CopyRule(),
    )  # fmt: skip
    demand = Demand(
        model=sizes.model, hardware=rates, page_tokens=page_tokens, gpu_pages=sizes.gpu_bytes // page_bytes,
        cpu_pages=sizes.host_bytes // page_bytes, disk_pages=0, max_batch_tokens=128, max_running_requests=4,
        is_layerwise=True, caches_output=False, seed=0, page_ids=0, key=lambda _: b"", disk_folder=Path(),
        keeps_disk=False, disk_threads=1, engines=2,
    )  # fmt: skip
    return open_machine(demand, DEVICE)


class Driver:
    """Gives orders to the GPUs and counts what they have moved."""

    def __init__(self, substrate: HardwareSubstrate, page_tokens: int) -> None:
        self.substrate, self.page_tokens = substrate, page_tokens
        self.book, self.env, self.page_bytes = substrate.book, substrate.env, substrate.page_bytes
        self.moved = {"store": 0, "load": 0, "send": 0}

    def copy(self, gpu: int, gpu_slots: np.ndarray, host_slots: np.ndarray, *, is_load: bool) -> Event:
        """Copy pages between a GPU and the host."""
        number, done = self.book.enter(pages=len(gpu_slots), page_bytes=self.page_bytes)
        self.substrate.gpus[gpu].copy(CopyOrder(number=number, is_load=is_load, gpu_slots=gpu_slots, host_slots=host_slots))
        done.callbacks.append(lambda event: self._count("load" if is_load else "store", event.value))
        return done

    def send(self, gpu: int, peer: int, sources: np.ndarray, targets: np.ndarray) -> Event:
        """Copy pages from one GPU to the other."""
        done = self.substrate.send_pages(gpu, peer, sources, targets)
        done.callbacks.append(lambda event: self._count("send", event.value))
        return done

    def _count(self, what: str, pages: int) -> None:
        self.moved[what] += pages

    def step(self, gpu: int, slots: np.ndarray, page_ids: np.ndarray, *, is_fill: bool) -> Event:
        """Fill pages with the words of their ids, or verify them, in a step of one token."""
        number, done = self.book.enter()
        chunk = ChunkPages(
            tokens=1,
            start=len(slots) * self.page_tokens - 1,
            is_sampled=False,
            slots=slots,
            reused=NOTHING if is_fill else np.arange(len(slots)),
            reused_ids=NOTHING if is_fill else page_ids,
            filled_slots=slots if is_fill else NOTHING,
            filled_ids=page_ids if is_fill else NOTHING,
        )
        self.substrate.gpus[gpu].compute(StepOrder(number=number, chunks=[chunk], decodes=[], loads=[], steps=1))
        return done

    def run(self, *processes: Any) -> None:
        """Run SimPy processes until all have ended."""
        for process in processes:
            self.env.process(process)
        self.env.run()


class Place:
    """The slots of a GPU or of the host: the id of the page in each, -1 if none, and which are in use."""

    def __init__(self, pages: int, draw: np.random.Generator) -> None:
        self.ids = np.full(pages, -1, dtype=np.int64)
        self.writers = np.full(pages, -1)
        self.is_used = np.zeros(pages, dtype=bool)
        self.draw = draw

    def take(self, is_wanted: np.ndarray, most: int) -> np.ndarray:
        """Mark up to ``most`` of the wanted slots that are not in use as used, and return them in random order."""
        slots = np.flatnonzero(is_wanted & ~self.is_used)
        taken = self.draw.permutation(slots)[:most]
        self.is_used[taken] = True
        return taken

    def give(self, *slots: np.ndarray) -> None:
        """Mark slots as not in use."""
        for some in slots:
            self.is_used[some] = False


class Walk:
    """Moves pages at random, several movements at a time on each GPU, and verifies every page that has arrived on a GPU."""

    def __init__(self, driver: Driver, sizes: Sizes, gpu_pages: int, host_pages: int) -> None:
        self.driver, self.sizes = driver, sizes
        self.draw = np.random.default_rng(7)
        self.gpus = [Place(gpu_pages, self.draw) for _ in range(2)]
        self.host = Place(host_pages, self.draw)
        self.next_id = 0
        self.foreign = 0
        self.deadline = perf_counter() + sizes.walk_s

    @property
    def is_done(self) -> bool:
        enough = sum(self.driver.moved.values()) >= self.sizes.moves and self.foreign >= self.sizes.foreign
        return enough or perf_counter() > self.deadline

    def walker(self, gpu: int) -> Iterator[Event]:
        """A process of one GPU."""
        while not self.is_done:
            most = int(self.draw.integers(1, self.sizes.list_pages + 1))
            ways = [self.fill, self.store, self.store, self.load, self.load, self.send]
            yield from ways[self.draw.integers(len(ways))](gpu, most)
            yield self.driver.env.timeout(0)

    def fill(self, gpu: int, most: int) -> Iterator[Event]:
        """Compute new pages."""
        own = self.gpus[gpu]
        slots = own.take(own.ids == own.ids, most)
        if len(slots):
            ids = self.next_id + np.arange(len(slots))
            self.next_id += len(slots)
            yield self.driver.step(gpu, slots, ids, is_fill=True)
            own.ids[slots] = ids
        own.give(slots)

    def store(self, gpu: int, most: int) -> Iterator[Event]:
        """Write pages to host memory."""
        own, host = self.gpus[gpu], self.host
        sources = own.take(own.ids >= 0, most)
        targets = host.take(host.ids == host.ids, len(sources))
        if count := len(targets):
            yield self.driver.copy(gpu, sources[:count], targets, is_load=False)
            host.ids[targets], host.writers[targets] = own.ids[sources[:count]], gpu
        own.give(sources)
        host.give(targets)

    def load(self, gpu: int, most: int) -> Iterator[Event]:
        """Load pages, mostly those that the other process has written, and verify them."""
        own, host = self.gpus[gpu], self.host
        wanted = host.ids >= 0
        if self.draw.random() < 0.7:
            wanted &= host.writers != gpu
        sources = host.take(wanted, most)
        targets = own.take(own.ids == own.ids, len(sources))
        if count := len(targets):
            yield self.driver.copy(gpu, targets, sources[:count], is_load=True)
            own.ids[targets] = host.ids[sources[:count]]
            self.foreign += int((host.writers[sources[:count]] != gpu).sum())
        host.give(sources)
        yield from self.verify(gpu, targets)

    def send(self, gpu: int, most: int) -> Iterator[Event]:
        """Send pages to the other GPU, and verify them there."""
        own, other = self.gpus[gpu], self.gpus[1 - gpu]
        sources = own.take(own.ids >= 0, most)
        targets = other.take(other.ids == other.ids, len(sources))
        if count := len(targets):
            yield self.driver.send(gpu, 1 - gpu, sources[:count], targets)
            other.ids[targets] = own.ids[sources[:count]]
        own.give(sources)
        yield from self.verify(1 - gpu, targets)

    def verify(self, gpu: int, slots: np.ndarray) -> Iterator[Event]:
        """Verify pages that have just arrived, and let others have their slots."""
        own = self.gpus[gpu]
        if len(slots):
            yield self.driver.step(gpu, slots, own.ids[slots], is_fill=False)
        own.give(slots)


def walk(driver: Driver, sizes: Sizes, gpu_pages: int, host_pages: int) -> dict[str, Any]:
    """Move pages at random, and return what was moved and verified."""
    walk, before = Walk(driver, sizes, gpu_pages, host_pages), dict(driver.moved)
    began = perf_counter()
    driver.run(*(walk.walker(gpu) for gpu in (0, 1) for _ in range(4)))
    found = driver.substrate.findings()
    moved = {name: pages - before[name] for name, pages in driver.moved.items()}
    return {
        "seconds": perf_counter() - began, "moved": moved, "moves": sum(moved.values()), "foreign": walk.foreign,
        "verified_pages": found["verified_pages"], "wrong_words": found["wrong_words"], "wrong_pages": found["wrong_pages"],
    }  # fmt: skip


def rates(driver: Driver, sizes: Sizes, gpu_pages: int, host_pages: int) -> list[dict[str, Any]]:
    """Return the GB/s of one GPU and of both, in each direction and in both, and from GPU to GPU."""
    pages = max(1, min(sizes.copy_bytes // driver.page_bytes, gpu_pages // 4, host_pages // 8))

    def stream(gpu: int, way: str) -> Iterator[Event]:
        """Keep two copies of the direction under way."""
        part = np.arange(pages) + (pages if way == "store" else 0)
        host = part + gpu * (host_pages // 2)
        waiting: list[Event] = []
        for _ in range(sizes.copies):
            if way == "send":
                waiting.append(driver.send(gpu, 1 - gpu, part, part + 2 * pages))
            else:
                waiting.append(driver.copy(gpu, part, host, is_load=way == "load"))
            if len(waiting) > 2:
                yield waiting.pop(0)
        yield driver.env.all_of(waiting)

    def seconds(streams: list[tuple[int, str]]) -> float:
        began = perf_counter()
        driver.run(*(stream(*each) for each in streams))
        return perf_counter() - began

    rows = []
    for name, ways in (("to GPU", ["load"]), ("to host", ["store"]), ("both ways", ["load", "store"]), ("GPU to GPU", ["send"])):
        row: dict[str, Any] = {"direction": name, "page_bytes": driver.page_bytes}
        for case, gpus in (("gpu0", (0,)), ("gpu1", (1,)), ("both", (0, 1))):
            streams = [(gpu, way) for gpu in gpus for way in ways]
            seconds(streams)  # warms up
            taken_s = median(seconds(streams) for _ in range(sizes.repeats))
            row[case] = len(streams) * sizes.copies * pages * driver.page_bytes / taken_s / 1e9
        row["factor"] = row["both"] / max(row["gpu0"], row["gpu1"])
        rows.append(row)
    return rows


def latency(driver: Driver, sizes: Sizes) -> dict[str, float]:
    """Return microseconds from an order to its answer: an empty copy, and a step of one token."""
    taken: dict[str, list[float]] = {"empty copy": [], "step": []}

    def orders() -> Iterator[Event]:
        slot = np.arange(1)
        for _ in range(sizes.empty_orders):
            for name, give in (
                ("empty copy", lambda: driver.copy(0, NOTHING, NOTHING, is_load=True)),
                ("step", lambda: driver.step(0, slot, slot, is_fill=True)),
            ):
                began = perf_counter()
                yield give()
                taken[name].append(1e6 * (perf_counter() - began))

    driver.run(orders())
    return {
        f"{name}, {what}": float(np.percentile(times, share))
        for name, times in taken.items()
        for what, share in (("median", 50), ("99th percentile", 99))
    }


def loss(driver: Driver, gpu_pages: int) -> dict[str, Any]:
    """Kill the first process in the middle of copies. Return what became of them, and how soon; the second one then verifies."""
    substrate, found = driver.substrate, {}
    pages = np.arange(max(1, gpu_pages // 8))
    lost: list[tuple[int, float]] = []
    substrate.on_worker_lost = lambda engine: lost.append((engine, perf_counter()))

    def copies() -> Iterator[Event]:
        yield driver.step(0, pages, pages, is_fill=True)
        yield driver.copy(0, pages, pages, is_load=False)
        waiting = [driver.copy(0, pages, pages + len(pages) * (n % 2), is_load=n % 2 == 0) for n in range(8)]
        step = driver.step(0, pages, pages, is_fill=False)
        beside = driver.copy(1, pages, pages + 4 * len(pages), is_load=False)
        killed = perf_counter()
        os.kill(substrate.gpus[0].pid, signal.SIGKILL)
        yield driver.env.all_of([*waiting, step, beside])
        found["arrived"] = [event.value for event in waiting]
        found["step"] = step.value
        found["beside"] = beside.value
        found["noticed_ms"] = 1e3 * (lost[0][1] - killed)
        yield driver.copy(1, pages, pages, is_load=True)
        yield driver.step(1, pages, pages, is_fill=False)

    driver.run(copies())
    after = substrate.findings()
    found |= {"lost": [engine for engine, _ in lost], "wrong_words_after": after["wrong_words"], "pages": len(pages)}
    found["holds"] = (
        found["lost"] == [0]
        and found["arrived"][-1] == 0
        and found["step"] in (LOST, 1)
        and found["beside"] == len(pages)
        and found["wrong_words_after"] == 0
    )
    return found


def kernel_rates(sizes: Sizes, page_tokens: int) -> list[dict[str, float]]:
    """Return the GB/s of plain copies and of the kernel between the GPUs, by number of programs; empty without two GPUs."""
    if torch.cuda.device_count() < 2:
        return []
    layers, page_bytes = sizes.model.layers, sizes.model.page_bytes(page_tokens)
    pages = sizes.copy_bytes // page_bytes
    pools = [torch.zeros(layers, pages, page_bytes // layers, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in (0, 1)]
    listed = torch.arange(pages, dtype=torch.int32, device="cuda:0")
    source, target = (pool.transpose(0, 1) for pool in pools)
    rows = []

    def rate(action: Callable[[], object]) -> float:
        action()
        torch.cuda.synchronize(0)
        began = perf_counter()
        for _ in range(10):
            action()
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        return 10 * pages * page_bytes / (perf_counter() - began) / 1e9

    rows.append({"programs": 0, "gb_per_s": rate(lambda: pools[1].copy_(pools[0]))})  # also enables the access
    for programs in (4, 8, 16, 32, 64, 132):
        rows.append({
            "programs": programs,
            "gb_per_s": rate(lambda programs=programs: copy_pages(source, target, listed, listed, programs=programs)),
        })  # fmt: skip
    return rows


class Record:
    """Runs the parts, keeps what they found, and writes it after each of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {"device": [str(DEVICE)], "torch": torch.__version__, "failures": {}}
        if DEVICE.type == "cuda":
            self.found["device"] = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
        folder.mkdir(parents=True, exist_ok=True)

    def part(self, name: str, action: Callable[[], Any]) -> Any:
        """Run a part; an error ends only this part."""
        began = perf_counter()
        try:
            self.found[name] = action()
            print(f"{name}: {perf_counter() - began:.1f} s", json.dumps(self.found[name], default=str)[:1500], flush=True)
        except BaseException as error:
            self.found["failures"][name] = f"{type(error).__name__}: {error}"
            print(f"{name} FAILED after {perf_counter() - began:.1f} s", flush=True)
            traceback.print_exc()
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            (self.folder / "two_gpus.json").write_text(json.dumps(self.found, indent=1, default=str) + "\n")
        return self.found.get(name)


def claims(found: dict[str, Any], sizes: Sizes) -> list[tuple[str, str, str, bool]]:
    """(claim, measured, goal, holds)"""
    rows = []
    for tokens in sizes.page_tokens:
        own = found.get(f"walk {tokens}") or {"moves": 0, "foreign": 0, "verified_pages": 0, "wrong_words": -1}
        label = f"pages of {tokens} tokens"
        rows += [
            (f"{label}: movements", f"{own['moves']:,}", f">= {sizes.moves:,}", own["moves"] >= sizes.moves),
            (f"{label}: loads of the other's pages", f"{own['foreign']:,}", f">= {sizes.foreign:,}",
             own["foreign"] >= sizes.foreign),
            (f"{label}: wrong words in {own['verified_pages']:,} pages", f"{own['wrong_words']:,}", "0", own["wrong_words"] == 0),
        ]  # fmt: skip
    for row in (found.get(f"rates {sizes.page_tokens[0]}") or [])[:3]:
        goal = sizes.factor
        rows.append((f"{row['direction']}: both GPUs", f"{row['factor']:.2f} x one", f">= {goal} x", row["factor"] >= goal))
    rows.append(("loss of a process", "as it should" if (found.get("loss") or {}).get("holds") else "not as it should", "",
                 bool((found.get("loss") or {}).get("holds"))))  # fmt: skip
    rows.append(("parts that failed", ", ".join(found["failures"]) or "none", "none", not found["failures"]))
    return rows


def page(found: dict[str, Any], rows: list[tuple[str, str, str, bool]], sizes: Sizes) -> str:
    """The text of two_gpus.md."""
    lines = ["# Two GPUs, a process each, over one host pool", "", f"{', '.join(found['device'])}. Made by "
             "`python experiments/hardware/two_gpus.py`, which says what is measured.", "",
             "| claim | measured | goal | |", "|---|---|---|---|"]  # fmt: skip
    lines += [f"| {claim} | {value} | {goal} | {'holds' if holds else '**fails**'} |" for claim, value, goal, holds in rows]
    for tokens in sizes.page_tokens:
        measured = found.get(f"rates {tokens}") or []
        lines += ["", f"Rates in GB/s, pages of {tokens} tokens, {sizes.model.page_bytes(tokens) / 2**10:,.0f} KiB "
                  f"({sizes.model.page_bytes(tokens) / sizes.model.layers / 2**10:,.1f} KiB per layer)", "",
                  "| direction | GPU 0 | GPU 1 | both | both / one |", "|---|---|---|---|---|"]  # fmt: skip
        lines += [
            f"| {r['direction']} | {r['gpu0']:.2f} | {r['gpu1']:.2f} | {r['both']:.2f} | {r['factor']:.2f} |" for r in measured
        ]
    if kernels := found.get("kernel rates"):
        lines += ["", f"From GPU to GPU in one process, GB/s by programs of the kernel ({SEND_PROGRAMS} are used)", "",
                  "| programs | GB/s |", "|---|---|"]  # fmt: skip
        lines += [f"| {row['programs'] or 'plain copy'} | {row['gb_per_s']:.1f} |" for row in kernels]
    if times := found.get("latency"):
        lines += ["", "| from an order to its answer | us |", "|---|---|"]
        lines += [f"| {name} | {us:.0f} |" for name, us in times.items()]
    if gone := found.get("loss"):
        lines += ["", f"The loss of a killed process was reported after {gone['noticed_ms']:.1f} ms."]
    return "\n".join(lines) + "\n"


def measure(record: Record, sizes: Sizes, page_tokens: int, *, is_last: bool) -> None:
    """Open both GPUs and run every part that needs them."""
    began = perf_counter()
    substrate = opened(sizes, page_tokens)
    record.found[f"open {page_tokens}"] = perf_counter() - began
    page_bytes = sizes.model.page_bytes(page_tokens)
    gpu_pages, host_pages = sizes.gpu_bytes // page_bytes, sizes.host_bytes // page_bytes
    driver = Driver(substrate, page_tokens)
    try:
        record.part(f"walk {page_tokens}", lambda: walk(driver, sizes, gpu_pages, host_pages))
        record.part(f"rates {page_tokens}", lambda: rates(driver, sizes, gpu_pages, host_pages))
        if is_last:
            record.part("latency", lambda: latency(driver, sizes))
            record.part("loss", lambda: loss(driver, gpu_pages))
    finally:
        began = perf_counter()
        substrate.close()
        record.found[f"close {page_tokens}"] = perf_counter() - began


def main(arguments: list[str] | None = None) -> int:
    """Run all parts and write both files. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU")
    parser.add_argument("--moves", type=int, help="page movements per walk")
    parser.add_argument("--output", type=Path, default=HERE, metavar="DIR", help="folder for two_gpus.md and two_gpus.json")
    chosen = parser.parse_args(arguments)
    sizes = TINY if chosen.tiny else FULL
    if chosen.moves:
        sizes = replace(sizes, moves=chosen.moves, foreign=min(sizes.foreign, chosen.moves // 10))
    record = Record(chosen.output)
    for tokens in sizes.page_tokens:
        is_last = tokens == sizes.page_tokens[-1]
        record.part(f"pages of {tokens} tokens", lambda tokens=tokens, is_last=is_last: measure(
            record, sizes, tokens, is_last=is_last))  # fmt: skip
    record.part("kernel rates", lambda: kernel_rates(sizes, sizes.page_tokens[0]))
    rows = claims(record.found, sizes)
    text = page(record.found, rows, sizes)
    print(text)
    (chosen.output / "two_gpus.md").write_text(text)
    return 0 if all(holds for *_, holds in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
