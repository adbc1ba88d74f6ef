"""The performance of a machine: compute, memory, host link, disk."""

from dataclasses import dataclass
from functools import cached_property
from math import inf

from kvsim.copy_rule import CopyRule
from kvsim.hardware_curves import ComputeCurves, DiskCurves, LinkCurves

RATES_AND_SIZES = (
    "flops_per_s",
    "memory_bytes",
    "memory_bytes_per_s",
    "gpus",
    "host_to_device_bytes_per_s",
    "device_to_host_bytes_per_s",
    "both_directions_bytes_per_s",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "interconnect_bytes_per_s",
)


LATENCIES = (
    "host_latency_s",
    "disk_latency_s",
    "interconnect_latency_s",
    "step_overhead_s",
    "prefill_overhead_s",
    "prefill_launch_s",
)


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """A GPU model, the number of GPUs that serve together, and their links to the host and its disk.

    Rates and sizes are per GPU, as on its datasheet. ``gpus`` GPUs work tensor-parallel: compute, memory, memory bandwidth
    and host link count ``gpus`` times, the disk once. This assumes that the KV is spread evenly over the GPUs; replicated KV
    (more GPUs than KV heads) and communication between GPUs are not modelled. Attributes named ``total`` and ``effective``
    are for all GPUs together.

    Rates are those of long copies and large matrix products. Where curves are given, simulated copies, reads, writes and
    steps take their times from the curves; policies always estimate with the plain rates.
    """

    flops_per_s: float
    """Peak rate of dense bf16 matrix products."""
    memory_bytes: int
    memory_bytes_per_s: float
    gpus: int = 1

    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float
    both_directions_bytes_per_s: float
    """Limit on the total rate while both directions are busy."""
    host_latency_s: float = 1e-5
    """Time from the request of a copy to its first byte."""

    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    disk_latency_s: float = 1e-4

    host_memory_bytes_per_s: float | None = None
    """Limit on the total rate of the host links of all engines of one host; None: their links do not slow each other down."""
    interconnect_bytes_per_s: float = 50e9
    """Rate at which each GPU sends, and receives, pages between prefill and decode engines (NVLink, or RDMA over a network)."""
    interconnect_latency_s: float = 1e-5

    flops_efficiency: float = 1.0
    """Fraction of ``flops_per_s`` that large matrix products reach."""
    memory_efficiency: float = 1.0
    """Fraction of ``memory_bytes_per_s`` that long reads reach."""
    step_overhead_s: float = 5e-4
    """Time per step beyond compute and memory access: scheduling, launch, sampling."""
    prefill_overhead_s: float = 0.0
    """Overhead of a step with prefill in addition to ``step_overhead_s``."""
    prefill_launch_s: float = 0.0
    """Time the host needs to launch the kernels of a step with prefill one by one: such a step takes at least this long, plus
    overhead. Decode steps are replayed as CUDA graphs."""

    link_curves: LinkCurves | None = None
    """Measured by ``kvsim calibrate``, like the following three."""
    disk_curves: DiskCurves | None = None
    compute_curves: ComputeCurves | None = None
    copy_rule: CopyRule | None = None
    """How ``substrate=hardware`` copies pages. None: as on an H200."""

    def __post_init__(self) -> None:
        for name in RATES_AND_SIZES:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.host_memory_bytes_per_s is not None and not self.host_memory_bytes_per_s > 0:
            raise ValueError(f"host_memory_bytes_per_s must be above 0, not {self.host_memory_bytes_per_s}")
        for name in LATENCIES:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("flops_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}")
        fastest = max(self.host_to_device_bytes_per_s, self.device_to_host_bytes_per_s)
        if self.both_directions_bytes_per_s < fastest:
            raise ValueError(
                f"both_directions_bytes_per_s must be at least {fastest:g}, the rate of one direction alone, "
                f"not {self.both_directions_bytes_per_s:g}"
            )

    @cached_property
    def effective_flops_per_s(self) -> float:
        """Rate of large matrix products, all GPUs."""
        return self.flops_per_s * self.flops_efficiency * self.gpus

    @cached_property
    def effective_memory_bytes_per_s(self) -> float:
        """Rate of long reads from GPU memory, all GPUs."""
        return self.memory_bytes_per_s * self.memory_efficiency * self.gpus

    @cached_property
    def total_memory_bytes(self) -> int:
        """Memory of all GPUs."""
        return self.memory_bytes * self.gpus

    @cached_property
    def total_host_to_device_bytes_per_s(self) -> float:
        """Rate of copies from host memory to all GPUs."""
        return self.host_to_device_bytes_per_s * self.gpus

    @cached_property
    def total_device_to_host_bytes_per_s(self) -> float:
        """Rate of copies from all GPUs to host memory."""
        return self.device_to_host_bytes_per_s * self.gpus

    @cached_property
    def total_both_directions_bytes_per_s(self) -> float:
        """Limit on the total rate of both directions, all GPUs."""
        return self.both_directions_bytes_per_s * self.gpus

    def step_s(self, flops: float, n_bytes: float) -> float:
        """Seconds of a step that does ``flops`` and reads ``n_bytes`` from GPU memory: the slower of the two, plus overhead.

        This is the roofline model (Williams, Waterman and Patterson, 2009).
        """
        return max(flops / self.effective_flops_per_s, n_bytes / self.effective_memory_bytes_per_s) + self.step_overhead_s


@dataclass(frozen=True, kw_only=True)
class LinearHardware(HardwareSpec):
    """A machine whose step times are a formula, for comparing schedules: the sum of five terms, in seconds.

    Links, disk and policies' estimates use the other attributes, as for any machine.
    """

    fixed_s: float
    """Per step."""
    prefill_token_s: float
    """Per prompt token computed."""
    decode_request_s: float
    """Per decoding request."""
    chunk_context_s: float
    """Per token of a prefill chunk and token of its prompt before the chunk."""
    decode_context_s: float
    """Per cached token that a decoding request attends over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fixed_s", "prefill_token_s", "decode_request_s", "chunk_context_s", "decode_context_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not self.fixed_s + self.decode_request_s > 0:
            raise ValueError("fixed_s and decode_request_s are both 0: a decode step must take time")
        if self.compute_curves is not None:
            raise ValueError("compute_curves have no effect where step times are a formula: leave them out")
