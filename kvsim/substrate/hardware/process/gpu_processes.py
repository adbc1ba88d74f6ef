"""The GPUs of this host, each with a process of its own."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from kvsim.substrate.hardware.memory.host_pool import shared_file
from kvsim.substrate.hardware.model.rank_share import lockstep_bytes
from kvsim.substrate.hardware.orders import Answers, GpuDemand
from kvsim.substrate.hardware.process.remote_gpu import PATIENCE_S, RemoteGpu


class GpuProcesses:
    """Starts one process for each of ``demands``, connects them, and warms them up, all at the same time.

    No shared memory has a name: it is gone once all processes have ended, this one included, in whatever way. A process ends
    when this one has.
    """

    def __init__(self, demands: Sequence[GpuDemand], answers: Sequence[Answers], device: torch.device) -> None:
        """Raises UsageError if a GPU cannot meet its demand, and GpuLost if a process ends meanwhile."""
        self.gpus: list[RemoteGpu] = []
        pools = [] if device.type == "cuda" else [shared_file(f"gpu{own.number}", pool_bytes(own)) for own in demands]
        if pools:
            demands = [replace(own, pool_file=file) for own, file in zip(demands, pools, strict=True)]
        steps = [shared_file("steps", lockstep_bytes(demands[0].ranks)) for own in demands if own.ranks > 1 and own.rank == 0]
        if steps:
            demands = [replace(own, step_file=steps[own.number // own.ranks]) for own in demands]
        shared = {file for own in demands for file in (own.host_file, own.host_states_file) if file is not None}
        files = [*pools, *steps, *shared]
        try:
            for own, answer in zip(demands, answers, strict=True):
                self.gpus.append(RemoteGpu(own.number, answer, files))
            addresses = self._all("open", [(own, len(demands)) for own in demands])
            numbered = dict(enumerate(addresses))
            self._all("connect", [({n: found for n, found in numbered.items() if n != own.number},) for own in demands])
            self._all("warm_up", [()] * len(demands))
        except BaseException:
            self.close()
            raise
        finally:
            for file in (*pools, *steps):
                os.close(file)

    def close(self) -> bool:
        """End all processes. Returns True: none of them accesses the host's pool any more."""
        for gpu in self.gpus:
            gpu.is_closing = True
        for disconnected in [gpu.call("disconnect") for gpu in self.gpus]:
            with suppress(TimeoutError):
                disconnected.exception(PATIENCE_S)
        for gpu in self.gpus:
            gpu.call("close")
        return all(gpu.close() for gpu in self.gpus)

    def _all(self, method: str, arguments: "Sequence[tuple[Any, ...]]") -> list[Any]:
        """Call a method of all processes at the same time, and wait for all results."""
        calls = [gpu.call(method, *own) for gpu, own in zip(self.gpus, arguments, strict=True)]
        return [call.result() for call in calls]


def pool_bytes(demand: GpuDemand) -> int:
    """Return the bytes of a GPU's pool."""
    return demand.gpu_pages * demand.page_bytes
