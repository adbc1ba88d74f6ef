"""What fits into an engine's GPUs: the model's weights, the KV of its GPU tier, and what the engine keeps free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.hardware.tier_kinds import kind_of
from kvsim.model.spec import ModelSpec
from kvsim.model.stages import stages_of
from kvsim.numbers import Real, check_settings
from kvsim.plans.capacity import bytes_of

AUTO = "auto"
SETTINGS = kind_of("gpu").settings
"""Settings of the GPU tier that ``capacity=auto`` reads."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What a stage of a pipeline has in the memory of its GPUs."""

    layers: int
    weights_bytes: int


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """The memory of an engine's GPUs under ``tiers.gpu.capacity=auto``, in bytes of all its GPUs together.

    As in vLLM, the KV gets ``gpu_memory_utilization`` of the memory without the weights and without what a step needs. vLLM
    measures the latter in a trial step of the largest batch (``determine_available_memory`` in its ``v1/worker/gpu_worker.py``);
    here it is ``workspace`` per GPU. Weights are spread evenly over the GPUs, or over those of each stage. A page has a part on
    every stage, so the stage with the least room for it decides how many there are (``get_kv_cache_configs`` in vLLM's
    ``v1/core/kv_cache_utils.py``).
    """

    gpus: int
    memory_bytes: int
    gpu_memory_utilization: float
    weights_bytes: int
    workspace_bytes: int
    states_bytes: int
    """Recurrent states with a capacity of their own."""
    adapters_bytes: int = 0
    """Places for LoRA adapters."""
    stages: list[StageMemory] = field(default_factory=list)
    """Those of a pipeline, if there is more than one."""
    kv_copies: int = 1
    """On how many GPUs of a stage each part of the KV is; ``ModelSpec.kv_copies``."""

    def __post_init__(self) -> None:
        check_settings(self, Real(above=0, most=1), "gpu_memory_utilization")

    @property
    def static_bytes(self) -> int:
        """What weights, states and KV may take; below 0 if the workspace does not fit."""
        return int(self.memory_bytes * self.gpu_memory_utilization) - self.workspace_bytes - self.adapters_bytes

    @property
    def kv_bytes(self) -> int:
        """What is left for KV, each copy counted once; below 0 if the weights alone do not fit."""
        if not self.stages:
            return (self.static_bytes - self.weights_bytes - self.states_bytes) // self.kv_copies
        there, layers = self.static_bytes // len(self.stages), sum(stage.layers for stage in self.stages)
        return min((there - stage.weights_bytes) * layers // stage.layers for stage in self.stages) // self.kv_copies


def auto_memory(
    node: Mapping[str, Any], model: ModelSpec, hardware: HardwareSpec, states_bytes: int, adapters_bytes: int
) -> GpuMemory:
    """Return the memory of an engine's GPUs by the settings of ``tiers.gpu``. Raises UsageError if nothing is left for KV."""
    stages = stage_memories(model, hardware)
    try:
        memory = GpuMemory(
            gpus=hardware.gpus,
            memory_bytes=hardware.total_memory_bytes,
            gpu_memory_utilization=node["gpu_memory_utilization"],
            weights_bytes=sum(stage.weights_bytes for stage in stages),
            workspace_bytes=bytes_of(node["workspace"]) * hardware.gpus,
            states_bytes=states_bytes,
            adapters_bytes=adapters_bytes,
            stages=stages if len(stages) > 1 else [],
            kv_copies=model.kv_copies(hardware.attention_gpus),
        )
    except ValueError as error:
        raise UsageError(f"tiers.gpu.{error}") from error
    if memory.kv_bytes <= 0:
        states = f", {gib(states_bytes)} of states" if states_bytes else ""
        states += f", {gib(adapters_bytes)} of adapters" if adapters_bytes else ""
        on_stage = " on one of the stages" if memory.stages else ""
        raise UsageError(
            f"tiers.gpu.capacity=auto: no room for KV{on_stage}: {gib(memory.weights_bytes)} of weights{states} and "
            f"{gib(memory.workspace_bytes)} of workspace take all of {memory.gpu_memory_utilization:g} x "
            f"{gib(memory.memory_bytes)} of {_gpus(hardware.gpus)}: set hardware.gpus higher"
        )
    return memory


def check_fits(model: ModelSpec, hardware: HardwareSpec, kv_bytes: int, states_bytes: int, adapters_bytes: int = 0) -> None:
    """Raise UsageError if the weights, adapters and what the GPU tier holds do not fit into an engine's GPUs, or a stage's."""
    stages, there = stage_memories(model, hardware), hardware.memory_bytes * hardware.stage_gpus
    copies = model.kv_copies(hardware.attention_gpus)
    kv_bytes *= copies
    for number, stage in enumerate(stages, start=1):
        kv, weights = kv_bytes * stage.layers // model.layers, stage.weights_bytes
        adapters = adapters_bytes * stage.layers // model.layers
        if weights + kv + states_bytes + adapters <= there:
            continue
        where = f" of stage {number}" if len(stages) > 1 else ""
        if weights >= there:
            raise UsageError(
                f"hardware.gpus: the model's weights{where} take {gib(weights)}, more than the {gib(there)} of "
                f"{_gpus(hardware.stage_gpus)}: set hardware.gpus higher, or model.weight_dtype_bytes lower"
            )
        states = f", {gib(states_bytes)} of states" if states_bytes else ""
        kv_text = f"{gib(kv)} of KV" + (f", with a copy on each of {copies} GPUs" if copies > 1 else "")
        places = f", {gib(adapters)} of LoRA adapters" if adapters else ""
        fewer = ", set engine.lora.max_loras lower" if adapters else ""
        raise UsageError(
            f"tiers.gpu.capacity: {kv_text}{states}{places} and {gib(weights)} of weights{where} do not fit into the "
            f"{gib(there)} of {_gpus(hardware.stage_gpus)}: set it lower, or to auto{fewer}, or set hardware.gpus higher"
        )


def stage_memories(model: ModelSpec, hardware: HardwareSpec) -> list[StageMemory]:
    """Return what each stage has; a single one has all.

    Where tokens are sent to their experts, every GPU has the shared ones. Where GPUs have requests of their own, each has all of
    the attention and of the input embeddings (SGLang's ``VocabParallelEmbedding`` under ``--enable-dp-attention``).
    """
    count, more = hardware.pipeline_parallel, hardware.stage_gpus - 1
    parts: Sequence[ModelSpec] = stages_of(model, count) if count > 1 else [model]
    copies, own = more * hardware.exchanges_tokens, more * hardware.attention_data_parallel
    return [
        StageMemory(
            layers=part.layers,
            weights_bytes=int(part.parameters * part.weight_dtype_bytes)
            + int(copies * part.shared_expert_bytes)
            + int(own * (part.mixer_bytes + part.table_bytes)),
        )
        for part in parts
    ]


def gib(n_bytes: int) -> str:
    """Format bytes in GiB."""
    return f"{n_bytes / 2**30:,.1f} GiB"


def _gpus(gpus: int) -> str:
    return f"{gpus} GPU{'s' * (gpus > 1)} (hardware.gpus)"
