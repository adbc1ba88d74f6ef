"""Opens this machine for a run: checks its abilities, allocates memory, starts GPUs and disk."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvsim.errors import UsageError
from kvsim.hardware.copy_rule import CopyRule
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.hardware.disk.disk_file import DiskFile
from kvsim.substrate.hardware.disk.disk_link import DiskLink
from kvsim.substrate.hardware.disk.passage import BUFFERS, buffer_pages, buffers_of
from kvsim.substrate.hardware.local_gpu import LocalGpu
from kvsim.substrate.hardware.memory.host_pool import HostPool, check_host_room, shared_file
from kvsim.substrate.hardware.model.rank_share import rank_share
from kvsim.substrate.hardware.model.transformer import check_model
from kvsim.substrate.hardware.orders import Gpu, GpuDemand
from kvsim.substrate.hardware.page_names import PageNames
from kvsim.substrate.hardware.process.gpu_processes import GpuProcesses
from kvsim.substrate.hardware.process.order_book import OrderBook, Party
from kvsim.substrate.hardware.step_check import StepCheck
from kvsim.substrate.hardware.step_pages import StepPages
from kvsim.substrate.hardware.substrate import HardwareSubstrate, remove
from kvsim.substrate.hardware.wall_clock import WallClock


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The requirements of a run. Capacities are in pages; 0 means that the tier is absent.

    Each engine has its own GPU tier of ``gpu_pages``; the other tiers serve all engines.
    """

    model: ModelSpec
    hardware: HardwareSpec
    """Its rates are assumed for links that have not carried anything yet; its ``copy_rule`` chooses the copy method."""
    page_tokens: int
    gpu_pages: int
    cpu_pages: int
    disk_pages: int
    unit_pages: int = 1
    """Pages of the GPU that a page of the CPU tiers has; ``cpu_pages`` is a multiple."""
    max_batch_tokens: int
    max_running_requests: int
    is_layerwise: bool
    caches_output: bool
    seed: int
    page_ids: int
    """Upper limit (exclusive) of the trace's page ids."""
    key: Callable[[int], bytes] | None
    """Returns the key of a page on disk, the same in every run; None without a disk."""
    disk_folder: Path
    keeps_disk: bool
    """Whether the disk file is kept for the next run."""
    disk_threads: int
    is_disk_below_gpu: bool = False
    """Whether the disk is directly below the GPUs, whose pages then pass through buffers in the host's pool."""
    engines: int = 1
    cpu_tiers: int = 1
    """CPU tiers of ``cpu_pages`` each: one for all engines, or one per engine."""
    ranks: int = 1
    """GPUs per engine; each has its share of the KV heads of every page."""
    gpu_states: int = 0
    """Recurrent states that each engine's own tier of states has; 0 if they are saved in pages, or if there are none."""
    cpu_states: int = 0
    """States of each CPU tier's own tier of states."""
    detached_states: int = 0
    """States that each engine keeps when their pages have left the GPU."""

    @property
    def has_processes(self) -> bool:
        """Whether each GPU has a process of its own."""
        return self.engines * self.ranks > 1

    @property
    def buffer_pages(self) -> int:
        """Pages of a buffer between GPUs and disk; 0 without any."""
        return buffer_pages(self.model.page_bytes(self.page_tokens), self.gpu_pages) if self.is_disk_below_gpu else 0

    @property
    def buffers(self) -> list[list[np.ndarray]]:
        """Pages of the host's pool that are such buffers, after those of the CPU tiers."""
        return buffers_of(self.cpu_pages * self.cpu_tiers, self.buffer_pages)

    @property
    def host_pages(self) -> int:
        """Pages of the host's pool: of all CPU tiers, and of the buffers."""
        return self.cpu_pages * self.cpu_tiers + 2 * BUFFERS * self.buffer_pages

    @property
    def host_states(self) -> int:
        """States of all CPU tiers that have their own tier of states."""
        return self.cpu_states * self.cpu_tiers


def open_machine(demand: Demand, device: torch.device) -> HardwareSubstrate:
    """Open the machine for a run. Raises UsageError for requirements that it cannot meet.

    A single GPU is one of this process. Several have a process each, and share the host's memory.
    """
    check(demand, device)
    page_bytes, book = demand.model.page_bytes(demand.page_tokens), OrderBook(WallClock())
    with ExitStack() as undo:
        disk, scratch = None, None
        if demand.disk_pages:
            disk = open_disk(demand, page_bytes)
            scratch = None if demand.keeps_disk else demand.disk_folder
            undo.callback(remove, scratch)
            undo.callback(disk.close)
        names = PageNames(demand.page_ids, None if disk is None else demand.key)
        setting = "tiers.cpu.capacity" if demand.cpu_pages else "tiers.disk.below=gpu"
        if (host := open_host(demand, "host", demand.host_pages, page_bytes, setting)) is not None:
            undo.callback(host.close)
        state_bytes = demand.model.state_bytes
        if (host_states := open_host(demand, "states", demand.host_states, state_bytes, "tiers.cpu.states")) is not None:
            undo.callback(host_states.close)
        disk_links: dict[bool, DiskLink] = {}
        if disk is not None and host is not None:
            answers = Party(book, -1)
            disk_links = {read: DiskLink(answers, disk, host.rows, names.keys, is_read=read) for read in (True, False)}
            for link in disk_links.values():
                undo.callback(link.close)
        hosts = host, host_states
        opened, close_gpus = open_gpus(demand, names, hosts, book, device)
        substrate = HardwareSubstrate(
            book,
            gpus=opened,
            ranks=demand.ranks,
            close_gpus=close_gpus,
            pages=[StepPages(demand.page_tokens, caches_output=demand.caches_output) for _ in range(demand.engines)],
            page_tokens=demand.page_tokens,
            page_bytes=page_bytes,
            rates=demand.hardware,
            steps=StepCheck(demand.model, demand.hardware, demand.engines),
            device=str(device),
            hosts=[pool for pool in hosts if pool is not None],
            disk=disk,
            disk_links=disk_links,
            buffers=demand.buffers,
            scratch=scratch,
        )
        undo.pop_all()
    return substrate


def open_host(demand: Demand, name: str, pages: int, page_bytes: int, setting: str) -> HostPool | None:
    """Allocate one of the host's pools, unless it is empty; shared if several processes need it.

    Raises UsageError, which names the ``setting``, if memory is insufficient.
    """
    if not pages:
        return None
    file = shared_file(name, pages * page_bytes) if demand.has_processes else None
    return HostPool(pages, page_bytes, file, setting=setting)


def check(demand: Demand, device: torch.device) -> None:
    """Raise UsageError for a model that there are no kernels for, and for more GPUs or host memory than there are."""
    model, gpus = demand.model, demand.engines * demand.ranks
    try:
        check_model(model, device)
        rank_share(model, demand.ranks)
    except ValueError as error:
        raise UsageError(f"model.{error}") from error
    if device.type == "cuda" and gpus > torch.cuda.device_count():
        raise UsageError(
            f"cluster.engines={demand.engines} with hardware.gpus={demand.ranks} needs {gpus} GPUs, but this machine has "
            f"{torch.cuda.device_count()}: decrease them"
        )
    own = gpu_demand(demand, PageNames(0), (None, None), 0)
    gpu_bytes = demand.engines * (demand.gpu_pages * own.page_bytes * demand.ranks + own.state_bytes)
    host_bytes = demand.host_pages * model.page_bytes(demand.page_tokens) + demand.host_states * model.state_bytes
    check_host_room(gpu_bytes, host_bytes, int(model.parameters * model.weight_dtype_bytes) * demand.engines, device)


Hosts = tuple[HostPool | None, HostPool | None]
"""The host's pools of pages and of states."""


def open_gpus(
    demand: Demand, names: PageNames, hosts: Hosts, book: OrderBook, device: torch.device
) -> tuple[Sequence[Gpu], Callable[[], bool]]:
    """Open all GPUs, and return them and what closes them. A single one stays in this process."""
    demands = [gpu_demand(demand, names, hosts, number) for number in range(demand.engines * demand.ranks)]
    if demand.has_processes:
        processes = GpuProcesses(demands, [Party(book, own.number) for own in demands], device)
        for host in hosts:
            if host is not None:
                host.close_file()
        return processes.gpus, processes.close
    gpu = LocalGpu(demands[0], hosts[0], Party(book, 0), device, hosts[1])
    try:
        gpu.warm_up()
    except BaseException:
        gpu.close()
        raise
    return [gpu], gpu.close


def gpu_demand(demand: Demand, names: PageNames, hosts: Hosts, number: int) -> GpuDemand:
    """Return what is required of one of the GPUs."""
    host, host_states = hosts
    return GpuDemand(
        number=number,
        model=rank_share(demand.model, demand.ranks),
        page_tokens=demand.page_tokens,
        gpu_pages=demand.gpu_pages,
        cpu_pages=demand.host_pages,
        unit_pages=demand.unit_pages,
        copy_rule=demand.hardware.copy_rule or CopyRule(),
        max_batch_tokens=demand.max_batch_tokens,
        max_running_requests=demand.max_running_requests,
        is_layerwise=demand.is_layerwise,
        seed=demand.seed,
        names=names,
        rank=number % demand.ranks,
        ranks=demand.ranks,
        host_file=None if host is None else host.file,
        gpu_states=demand.gpu_states,
        cpu_states=demand.host_states,
        kept_states=demand.detached_states,
        host_states_file=None if host_states is None else host_states.file,
    )


def open_disk(demand: Demand, page_bytes: int) -> DiskFile:
    """Open the disk file. Raises UsageError if the folder cannot be used or the disk is full."""
    try:
        return DiskFile(demand.disk_folder, pages=demand.disk_pages, page_bytes=page_bytes, threads=demand.disk_threads)
    except ValueError as error:
        raise UsageError(f"disk.folder: {error}") from error
    except OSError as error:
        raise UsageError(f"tiers.disk: {error.filename or demand.disk_folder}: {error.strerror}") from error
