"""What is known of a configuration that is to be started on a server."""

from dataclasses import dataclass

from kvsim.model.stages import layers_of_stages
from kvsim.plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A configuration to start: its plan, and the sizes of an engine, in bytes of KV, each copy counted once."""

    plan: Plan
    cpu_bytes: int
    disk_bytes: int

    @property
    def tensor_parallel(self) -> int:
        return self.plan.hardware.stage_gpus

    @property
    def pipeline_parallel(self) -> int:
        return self.plan.hardware.pipeline_parallel

    @property
    def expert_parallel(self) -> int:
        return self.plan.hardware.expert_parallel

    def per_gpu(self, n_bytes: int) -> tuple[int, int]:
        """Return what a GPU has of an engine's pages, as a fraction: of a stage with the most layers, if there are several.

        Where several GPUs have copies of KV, so does the host memory of each.
        """
        layers, copies = layers_of_stages(self.plan.model.layers, self.pipeline_parallel), self.kv_copies
        return n_bytes * copies * max(layers), sum(layers) * self.tensor_parallel

    @property
    def has_own_requests(self) -> bool:
        """Whether each GPU has the attention of requests of its own."""
        return self.plan.hardware.attention_data_parallel

    @property
    def kv_copies(self) -> int:
        """Copies of KV below the GPUs where each GPU keeps its own."""
        return self.plan.model.kv_copies(self.plan.hardware.attention_gpus)

    @property
    def copies_of_shared(self) -> int:
        """Copies of KV below the GPUs where these share what all of them have."""
        return self.plan.model.shared_kv_copies(self.plan.hardware.attention_gpus, self.pipeline_parallel)

    @property
    def kv_bytes(self) -> int | None:
        """What the GPU tier has; None if that is what the weights leave, or unlimited."""
        capacity = self.plan.tiers[0].capacity_pages
        is_given = self.plan.gpu_memory is None and capacity is not None
        return (capacity or 0) * self.plan.page_bytes if is_given else None

    @property
    def static_fraction(self) -> float | None:
        """Share of the memory for weights and KV; None unless the weights decide how much is for KV."""
        memory = self.plan.gpu_memory
        return None if memory is None else memory.static_bytes / memory.memory_bytes

    def choice(self, key: str) -> str:
        """Return the name that was chosen from a group, or for a tier; that of all tiers if it has none of its own."""
        choices = self.plan.choices
        return choices.get(key, choices.get(key.partition("@")[0], ""))
