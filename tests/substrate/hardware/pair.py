"""Two GPUs with a process each, over one small host pool and, if wanted, a disk."""

import os
from pathlib import Path

import numpy as np

from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.hardware.device import find_device

PAGE_TOKENS = 4
MODEL = ModelSpec(
    layers=2,
    hidden_size=16,
    vocabulary=16,
    heads=2,
    kv_heads=1,
    head_dim=16,
    mlp_width=16,
    kv_dtype_bytes=4,
    weight_dtype_bytes=4,
)
RATES = HardwareSpec(
    flops_per_s=1e12,
    memory_bytes=10**9,
    memory_bytes_per_s=1e12,
    host_to_device_bytes_per_s=1e9,
    device_to_host_bytes_per_s=1e9,
    both_directions_bytes_per_s=1e9,
    disk_read_bytes_per_s=1e9,
    disk_write_bytes_per_s=1e9,
)
NOTHING = np.empty(0, dtype=np.int64)


def demand(**changes):
    """What the tests require: 20 pages on each GPU, 30 on the host; a page has 1 KiB."""
    from kvsim.substrate.hardware.machine import Demand

    usual = {
        "model": MODEL,
        "hardware": RATES,
        "page_tokens": PAGE_TOKENS,
        "gpu_pages": 20,
        "cpu_pages": 30,
        "disk_pages": 0,
        "max_batch_tokens": 64,
        "max_running_requests": 4,
        "is_layerwise": True,
        "caches_output": False,
        "seed": 0,
        "page_ids": 1000,
        "key": lambda page: page.to_bytes(16, "little"),
        "disk_folder": Path(),
        "keeps_disk": False,
        "disk_threads": 1,
        "engines": 2,
    }
    return Demand(**usual | changes)


def opened(**changes):
    """Open the GPUs."""
    device = find_device()
    from kvsim.substrate.hardware.machine import open_machine

    return open_machine(demand(**changes), device)


def some(*numbers):
    return np.array(numbers, dtype=np.int64)


def step(substrate, gpu, slots, page_ids, *, is_fill=False, loads=(), steps=1, decodes=()):
    """Fill or verify pages in a step of one token. Returns the event of its end and the order's number."""
    from kvsim.substrate.hardware.orders import ChunkPages, StepOrder

    number, done = substrate.book.enter()
    chunk = ChunkPages(
        tokens=1,
        start=len(slots) * PAGE_TOKENS - 1,
        is_sampled=False,
        slots=slots,
        reused=NOTHING if is_fill else np.arange(len(slots)),
        reused_ids=NOTHING if is_fill else page_ids,
        filled_slots=slots if is_fill else NOTHING,
        filled_ids=page_ids if is_fill else NOTHING,
    )
    chunks = [chunk] if len(slots) else []
    substrate.gpus[gpu].compute(StepOrder(number=number, chunks=chunks, decodes=decodes, loads=loads, steps=steps))
    return done, number


def copy(substrate, gpu, gpu_slots, host_slots, *, is_load):
    """Copy pages between GPU and host. Returns the event of the end and the order's number."""
    from kvsim.substrate.hardware.orders import CopyOrder

    number, done = substrate.book.enter()
    substrate.gpus[gpu].copy(CopyOrder(number=number, is_load=is_load, gpu_slots=gpu_slots, host_slots=host_slots))
    return done, number


def run(substrate, process):
    """Run a SimPy process to its end and return its result."""
    ended = substrate.env.process(process)
    substrate.env.run()
    assert ended.processed and ended.ok
    return ended.value


def is_running(pid):
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
