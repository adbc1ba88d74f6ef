"""What a machine can do: compute, memory, the link to the host, the disk."""

from dataclasses import dataclass
from functools import cached_property

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
)


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """One GPU model, how many of them serve together, and what connects them to the host and its disk.

    Rates and sizes are those of one GPU, as its datasheet gives them. ``gpus`` work tensor-parallel: compute, memory,
    memory bandwidth and host link count ``gpus`` times, the disk once. That holds while the KV is spread evenly over
    the GPUs; with more GPUs than KV heads it would be stored in copies, which is not modelled. Nor is communication
    between GPUs. Attributes named ``total`` and ``effective`` are those of all GPUs.

    Rates are those of long copies and large products. Where curves are given, simulated copies, reads, writes and steps take
    what the curves say of their size; policies estimate by the rates above.
    """

    flops_per_s: float
    """Peak of dense bf16 matrix products."""
    memory_bytes: int
    memory_bytes_per_s: float
    gpus: int = 1

    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float
    both_directions_bytes_per_s: float
    """Limit of the sum while both directions are busy."""
    host_latency_s: float = 1e-5
    """From asking for a copy to its first byte."""

    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    disk_latency_s: float = 1e-4

    flops_efficiency: float = 1.0
    """Fraction of the peak that large matrix products reach."""
    memory_efficiency: float = 1.0
    """Fraction of the peak that long reads reach."""
    step_overhead_s: float = 5e-4
    """Time of a step that is neither compute nor memory: scheduling, launch, sampling."""
    prefill_overhead_s: float = 0.0
    """What steps with prefill take of such time beyond ``step_overhead_s``."""
    prefill_launch_s: float = 0.0
    """What the host takes to launch the kernels of a step with prefill, one by one: such a step takes no less, and its overhead.
    Decode steps are replayed as CUDA graphs."""

    link_curves: LinkCurves | None = None
    """Measured, as ``kvsim calibrate`` does, like those below."""
    disk_curves: DiskCurves | None = None
    compute_curves: ComputeCurves | None = None
    copy_rule: CopyRule | None = None
    """How ``substrate=hardware`` copies pages; None: as on an H200."""

    def __post_init__(self) -> None:
        for name in RATES_AND_SIZES:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("host_latency_s", "disk_latency_s", "step_overhead_s", "prefill_overhead_s", "prefill_launch_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("flops_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a fraction: it must be above 0 and at most 1, not {getattr(self, name)}")
        fastest = max(self.host_to_device_bytes_per_s, self.device_to_host_bytes_per_s)
        if self.both_directions_bytes_per_s < fastest:
            raise ValueError(
                f"both_directions_bytes_per_s must be at least {fastest:g}, the rate of one direction alone, "
                f"not {self.both_directions_bytes_per_s:g}"
            )

    @cached_property
    def effective_flops_per_s(self) -> float:
        """What matrix products reach on all GPUs."""
        return self.flops_per_s * self.flops_efficiency * self.gpus

    @cached_property
    def effective_memory_bytes_per_s(self) -> float:
        """What reads from GPU memory reach on all GPUs."""
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
        """Limit of the sum of both directions, all GPUs."""
        return self.both_directions_bytes_per_s * self.gpus

    def step_s(self, flops: float, n_bytes: float) -> float:
        """Seconds of a step that does ``flops`` and reads ``n_bytes`` from GPU memory: the slower of both, and overhead.

        This is the roofline model (Williams, Waterman and Patterson, 2009).
        """
        return max(flops / self.effective_flops_per_s, n_bytes / self.effective_memory_bytes_per_s) + self.step_overhead_s
