"""What fits into an engine's GPUs: the model's weights, the KV of its GPU tier, and what the engine keeps free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.hardware.tier_kinds import kind_of
from kvsim.model.spec import ModelSpec
from kvsim.numbers import Real, check_settings
from kvsim.plans.capacity import bytes_of

AUTO = "auto"
SETTINGS = kind_of("gpu").settings
"""Settings of the GPU tier that ``capacity=auto`` reads."""


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """The memory of an engine's GPUs under ``tiers.gpu.capacity=auto``, in bytes of all its GPUs together.

    As in vLLM, the KV gets ``gpu_memory_utilization`` of the memory without the weights and without what a step needs. vLLM
    measures the latter in a trial step of the largest batch (``determine_available_memory`` in its ``v1/worker/gpu_worker.py``);
    here it is ``workspace`` per GPU. Weights are spread evenly over the GPUs.
    """

    gpus: int
    memory_bytes: int
    gpu_memory_utilization: float
    weights_bytes: int
    workspace_bytes: int
    states_bytes: int
    """Recurrent states with a capacity of their own."""

    def __post_init__(self) -> None:
        check_settings(self, Real(above=0, most=1), "gpu_memory_utilization")

    @property
    def kv_bytes(self) -> int:
        """What is left for KV; below 0 if the weights alone do not fit."""
        usable = int(self.memory_bytes * self.gpu_memory_utilization)
        return usable - self.weights_bytes - self.workspace_bytes - self.states_bytes


def auto_memory(node: Mapping[str, Any], model: ModelSpec, hardware: HardwareSpec, states_bytes: int) -> GpuMemory:
    """Return the memory of an engine's GPUs by the settings of ``tiers.gpu``. Raises UsageError if nothing is left for KV."""
    try:
        memory = GpuMemory(
            gpus=hardware.gpus,
            memory_bytes=hardware.total_memory_bytes,
            gpu_memory_utilization=node["gpu_memory_utilization"],
            weights_bytes=weights_bytes(model),
            workspace_bytes=bytes_of(node["workspace"]) * hardware.gpus,
            states_bytes=states_bytes,
        )
    except ValueError as error:
        raise UsageError(f"tiers.gpu.{error}") from error
    if memory.kv_bytes <= 0:
        states = f" and {gib(states_bytes)} of states" if states_bytes else ""
        raise UsageError(
            f"tiers.gpu.capacity=auto: no room for KV: {gib(memory.weights_bytes)} of weights{states} and "
            f"{gib(memory.workspace_bytes)} of workspace take all of {memory.gpu_memory_utilization:g} x "
            f"{gib(memory.memory_bytes)} of {_gpus(hardware)}: set hardware.gpus higher"
        )
    return memory


def check_fits(model: ModelSpec, hardware: HardwareSpec, kv_bytes: int, states_bytes: int) -> None:
    """Raise UsageError if the weights and what the GPU tier holds do not fit into an engine's GPUs."""
    there, weights = hardware.total_memory_bytes, weights_bytes(model)
    if weights + kv_bytes + states_bytes <= there:
        return
    if weights >= there:
        raise UsageError(
            f"hardware.gpus: the model's weights take {gib(weights)}, more than the {gib(there)} of {_gpus(hardware)}: set "
            "hardware.gpus higher, or model.weight_dtype_bytes lower"
        )
    states = f" and {gib(states_bytes)} of states" if states_bytes else ""
    raise UsageError(
        f"tiers.gpu.capacity: {gib(kv_bytes)} of KV{states} and {gib(weights)} of weights do not fit into the {gib(there)} of "
        f"{_gpus(hardware)}: set it lower, or to auto, or set hardware.gpus higher"
    )


def weights_bytes(model: ModelSpec) -> int:
    """Return the bytes of all weights."""
    return int(model.parameters * model.weight_dtype_bytes)


def gib(n_bytes: int) -> str:
    """Format bytes in GiB."""
    return f"{n_bytes / 2**30:,.1f} GiB"


def _gpus(hardware: HardwareSpec) -> str:
    return f"{hardware.gpus} GPU{'s' * (hardware.gpus > 1)} (hardware.gpus)"
