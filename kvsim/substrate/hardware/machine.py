"""Opens this machine for a run: checks its abilities, allocates memory, starts threads, warms up kernels."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from kvsim.copy_rule import CopyRule
from kvsim.errors import UsageError
from kvsim.hardware import HardwareSpec
from kvsim.model import ModelSpec
from kvsim.substrate.hardware.compute import Compute
from kvsim.substrate.hardware.disk_file import DiskFile
from kvsim.substrate.hardware.flight import Meter
from kvsim.substrate.hardware.links import Disk, DiskLink, HostLink, Link
from kvsim.substrate.hardware.page_names import PageNames
from kvsim.substrate.hardware.patterns import Patterns
from kvsim.substrate.hardware.pools import Pools
from kvsim.substrate.hardware.step_pages import StepPages
from kvsim.substrate.hardware.substrate import HardwareSubstrate, remove
from kvsim.substrate.hardware.tier_copy import TierCopy
from kvsim.substrate.hardware.transformer import ChunkSlots, DecodeSlots, Transformer, check_model
from kvsim.substrate.hardware.turn import Turn
from kvsim.substrate.hardware.wall_clock import WallClock

WARM_COPY_PAGES = (1, 2, 3, 5, 16, 17, 64, 256)
"""Numbers of pages to copy: separate kernels are compiled for few pages, many pages, and multiples of 16."""
WARM_CONTEXT_TOKENS = 1023
WARM_DECODES = (*range(1, 33), 64, 128, 256)
"""Numbers of decoding requests to warm up: the library chooses the kernels of their products on first use."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The requirements of a run. Capacities are in pages; 0 means that the tier is absent."""

    model: ModelSpec
    hardware: HardwareSpec
    """Its rates are assumed for links that have not carried anything yet; its ``copy_rule`` chooses the copy method."""
    page_tokens: int
    gpu_pages: int
    cpu_pages: int
    disk_pages: int
    max_batch_tokens: int
    max_running_requests: int
    is_layerwise: bool
    caches_output: bool
    seed: int
    page_ids: int
    """Upper limit (exclusive) of the trace's page ids."""
    key: Callable[[int], bytes]
    """Returns the key of a page on disk, the same in every run."""
    disk_folder: Path
    keeps_disk: bool
    """Whether the disk file is kept for the next run."""
    disk_threads: int


def open_machine(demand: Demand, device: torch.device) -> HardwareSubstrate:
    """Open the machine for a run. Raises UsageError for requirements that it cannot meet."""
    model, page_tokens = demand.model, demand.page_tokens
    with ExitStack() as undo:
        try:
            check_model(model, device)
        except ValueError as error:
            raise UsageError(f"model.{error}") from error
        pools = Pools(
            layers=model.layers,
            fragment_bytes=model.page_bytes(page_tokens) // model.layers,
            gpu_pages=demand.gpu_pages,
            cpu_pages=demand.cpu_pages,
            weight_bytes=int(model.parameters * model.weight_dtype_bytes),
            device=device,
        )
        undo.callback(pools.close)
        try:
            transformer = Transformer(model, pools.gpu, page_tokens, device=device, seed=demand.seed)
        except (ValueError, torch.OutOfMemoryError) as error:
            raise UsageError(f"model: {error}") from error
        disk, scratch = None, None
        if demand.disk_pages:
            disk = open_disk(demand, pools.page_bytes)
            scratch = None if demand.keeps_disk else demand.disk_folder
            undo.callback(remove, scratch)
            undo.callback(disk.close)
        clock, turn, patterns = WallClock(), Turn(device), Patterns(pools.gpu)
        names = PageNames(demand.page_ids, None if disk is None else demand.key)
        links = open_links(demand, clock, turn, pools, disk, names)
        compute = Compute(clock, transformer, patterns, names, turn, device)
        substrate = HardwareSubstrate(
            clock,
            pools=pools,
            links=links,
            compute=compute,
            pages=StepPages(page_tokens, caches_output=demand.caches_output),
            patterns=patterns,
            disk=disk,
            scratch=scratch,
        )
        undo.pop_all()
    if device.type == "cuda":
        warm_up(demand, substrate)
    return substrate


def open_disk(demand: Demand, page_bytes: int) -> DiskFile:
    """Open the disk file. Raises UsageError if the folder cannot be used or the disk is full."""
    try:
        return DiskFile(demand.disk_folder, pages=demand.disk_pages, page_bytes=page_bytes, threads=demand.disk_threads)
    except ValueError as error:
        raise UsageError(f"disk.folder: {error}") from error
    except OSError as error:
        raise UsageError(f"tiers.disk: {error.filename or demand.disk_folder}: {error.strerror}") from error


def open_links(
    demand: Demand,
    clock: WallClock,
    turn: Turn,
    pools: Pools,
    disk: Disk | None,
    names: PageNames,
) -> dict[str, Link]:
    """Create the links between the existing tiers, by name."""
    links: dict[str, Link] = {}
    spec = demand.hardware
    if pools.host is not None:
        tiers = TierCopy(pools.gpu, pools.host, spec.copy_rule or CopyRule())
        down, up = Meter(spec.device_to_host_bytes_per_s), Meter(spec.host_to_device_bytes_per_s)
        links["cpu-gpu"] = HostLink(clock, tiers, turn, up, down, is_load=True, is_layerwise=demand.is_layerwise)
        links["gpu-cpu"] = HostLink(clock, tiers, turn, down, up, is_load=False, is_layerwise=False)
    if disk is not None:
        reads, writes = Meter(spec.disk_read_bytes_per_s), Meter(spec.disk_write_bytes_per_s)
        links["disk-cpu"] = DiskLink(clock, disk, pools.rows, names.keys, reads, is_read=True)
        links["cpu-disk"] = DiskLink(clock, disk, pools.rows, names.keys, writes, is_read=False)
    return links


def warm_up(demand: Demand, substrate: HardwareSubstrate) -> None:
    """Compile and load everything a run will need before its clock starts, in the threads that will use it.

    Overwrites the pools. Raises UsageError if the largest step does not fit into memory next to the pools.
    """
    device, most = substrate.pools.device, substrate.pools.gpu.shape[1]

    def steps() -> None:
        transformer, patterns = substrate.compute_queue.transformer, substrate.patterns
        for count in (count for count in WARM_COPY_PAGES if count <= most):
            slots = torch.arange(count, dtype=torch.int32, device=device)
            patterns.fill(slots, slots.long())
            patterns.verify(slots, slots.long())
        patterns.verified_pages = 0
        longest = max(2 * demand.max_batch_tokens, WARM_CONTEXT_TOKENS)
        table = torch.arange(-(-longest // demand.page_tokens), dtype=torch.int32, device=device) % most
        transformer.warm_up_products(demand.max_batch_tokens)
        for tokens in warm_sizes(demand.max_batch_tokens):
            for chunk in (
                (tokens, 0),
                (tokens, tokens),
                (tokens - 3, 0),
                (tokens - 3, 5),
            ):  # even and odd sizes, at the start of a prompt and later
                transformer.step([ChunkSlots(*chunk, table)], [], None, sampled_tokens=1)
        for decodes in (count for count in WARM_DECODES if count <= demand.max_running_requests):
            transformer.step([], [DecodeSlots(WARM_CONTEXT_TOKENS, table)] * decodes, None)
        transformer.record_decodes(demand.max_running_requests)
        torch.cuda.synchronize(device)

    try:
        substrate.compute_queue.warm_up(steps)
        for link in substrate.links.values():
            link.warm_up([count for count in WARM_COPY_PAGES if count <= min(demand.gpu_pages, demand.cpu_pages)])
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        substrate.close()
        raise UsageError(f"tiers.gpu.capacity leaves too little memory for a step: {error}; decrease it") from error
    except BaseException:
        substrate.close()
        raise


def warm_sizes(most: int) -> Sequence[int]:
    """Return numbers of prompt tokens to warm up, doubling from 16 to ``most``."""
    sizes = [16]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes
