"""The KV that a server's host memory has room for, each copy counted once, where the server says its size in bytes.

vLLM     ``cpu_bytes_to_use`` is of all workers of an engine: ``v1/kv_offload/cpu/spec.py`` divides it by the bytes of a block on
         all of them, copies of KV included, and ``SimpleCPUOffloadConnector`` gives each worker its share. Since 0.27.0 (not yet
         in 0.26.0), ``OffloadingConnector`` keeps latents once where the workers are processes of one host (``replicated_layout``
         in ``offloading/config.py``; ``--distributed-executor-backend mp``, which is the default there).
SGLang   ``hicache_host_total_tokens`` is in tokens, which count once, whatever the ranks have copies of: each rank's pool has its
         part of every token (``HostKVCache.size`` in ``mem_cache/pool_host/base.py``). ``hicache_size``, in GB for each rank, and
         ``hicache_ratio``, of the tokens on the GPU, decide that number and are not read.
LMCache  ``max_local_cpu_size`` is in GiB for each worker that stores. It stands in LMCache's own file, which no server tells.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.numbers import LARGEST
from kvsim.results.observed import ServerFacts

GIB = 2**30
LATENTS_ONCE = (0, 27)
"""The first version of vLLM whose workers share latents."""
SHARES: Mapping[str, tuple[object, ...]] = {
    "kv_transfer_config.kv_connector": (None, "OffloadingConnector"),
    "parallel_config.distributed_executor_backend": (None, "mp"),
    "parallel_config.nnodes": (None, 1),
}
"""The values of vLLM's flags with which they do; None: the server does not say."""


@dataclass(frozen=True)
class HostBytes:
    """A flag that is the size in bytes of an engine's CPU tier."""

    name: str
    """As in ``ServerFacts.settings``."""
    copies: Callable[[ServerFacts, ModelSpec, HardwareSpec], int]
    """How many copies of KV that memory has."""

    def told(self, settings: Mapping[str, object]) -> int | None:
        """Return what a server says; None if it has no such tier, or does not say."""
        size = settings.get(self.name)
        if isinstance(size, bool) or not isinstance(size, int | float) or not 1 <= size <= LARGEST:
            return None
        return int(size)


def copies_in_vllm(facts: ServerFacts, model: ModelSpec, hardware: HardwareSpec) -> int:
    """Return how many copies of KV vLLM keeps in host memory."""
    gpus = hardware.attention_gpus
    is_new = facts.number is None or facts.number >= LATENTS_ONCE
    shares = is_new and all(facts.settings.get(name) in values for name, values in SHARES.items())
    return model.shared_kv_copies(gpus, hardware.pipeline_parallel) if shares else model.kv_copies(gpus)


def as_capacity(n_bytes: int) -> str:
    """Return a size as settings take it, to the byte."""
    return f"{n_bytes}B" if n_bytes % GIB else f"{n_bytes // GIB}GiB"
