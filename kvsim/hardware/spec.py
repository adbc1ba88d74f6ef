"""The performance of a machine: compute, memory, host link, disk."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kvsim.hardware.copy_rule import CopyRule
from kvsim.hardware.curves import ComputeCurves, DiskCurves, LinkCurves
from kvsim.hardware.noise import Noise
from kvsim.hardware.parallelism import DEGREES, Parallelism
from kvsim.hardware.tier_kinds import TIER_KINDS
from kvsim.numbers import SECONDS, Real, Whole, check_number, check_settings

RATES = (
    "flops_per_s",
    "memory_bytes_per_s",
    "host_to_device_bytes_per_s",
    "device_to_host_bytes_per_s",
    "both_directions_bytes_per_s",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "interconnect_bytes_per_s",
)
OPTIONAL_RATES = (
    "host_memory_bytes_per_s",
    "cluster_disk_read_bytes_per_s",
    "cluster_disk_write_bytes_per_s",
    "allreduce_bytes_per_s",
    "allreduce_peer_bytes_per_s",
    "all2all_bytes_per_s",
)

LATENCIES = (
    "host_latency_s",
    "copy_overhead_s",
    "disk_latency_s",
    "interconnect_latency_s",
    "allreduce_latency_s",
    "step_overhead_s",
    "leap_overhead_s",
    "copy_leap_s",
    "prefill_overhead_s",
    "request_overhead_s",
    "request_token_s",
)
LAUNCHES = ("prefill_launch_s", "chunk_launch_s", "decode_launch_s", "copy_launch_s")
OVERHEADS = ("step_overhead_s", "leap_overhead_s", "copy_leap_s", "prefill_overhead_s")
"""Parts of a step that are the host's, whatever the number of stages."""
LINKS = tuple([link for kind in TIER_KINDS for link in kind.links])
MAY_FAIL = {link for kind in TIER_KINDS for link in kind.links if kind.is_far}


@dataclass(frozen=True, kw_only=True)
class RankFault:
    """A fault of one tensor-parallel rank on one link: it is slow there, or pages fail."""

    rank: int
    """From 0."""
    link: str
    """Source and target, such as ``disk-cpu``."""
    speed: float = 1.0
    """Rate relative to the rank's share of the link."""
    share: float = 0.0
    """Probability that the rank fails to read a page, or to write it on the way down. Only disks fail."""

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise ValueError(f"rank_faults must name one of {', '.join(LINKS)} as link, not {self.link}")
        check_number("rank_faults.speed", Real(above=0, most=1), self.speed)
        check_number("rank_faults.share", Real(least=0, most=1), self.share)
        if self.share and self.link not in MAY_FAIL:
            raise ValueError(f"rank_faults can have a share only on links of the disk, not on {self.link}")
        if self.speed == 1 and not self.share:
            raise ValueError(
                f"rank_faults has an entry without a fault, rank {self.rank} on {self.link}: set speed below 1 or share above 0"
            )


@dataclass(frozen=True, kw_only=True)
class RemoteStore:
    """A store over the network that all hosts share, and its rates: in each direction, for all of them together.

    Each page is ``ceil(page bytes / object_bytes)`` objects, requested one by one but many at a time, so that the latency counts
    once per transfer.
    """

    bytes_per_s: float
    latency_s: float
    """Time from the request of a transfer to its first byte."""
    requests_per_s: float | None = None
    """Objects read, or written, per second; None: no limit."""
    object_bytes: int | None = None
    """Size of the largest object; None: a page is one object, whatever its size."""

    def __post_init__(self) -> None:
        check_settings(self, Real(above=0), "bytes_per_s")
        check_settings(self, SECONDS, "latency_s")
        check_settings(self, Real(above=0), "requests_per_s", or_null=True)
        check_settings(self, Whole(1), "object_bytes", or_null=True)
        if self.object_bytes is not None and self.requests_per_s is None:
            raise ValueError("object_bytes has no effect without a limit of requests: set requests_per_s")

    def page_bytes_per_s(self, page_bytes: int) -> float:
        """Return the rate of whole pages, in bytes per second: that of the network or that of requests, whichever is lower."""
        if self.requests_per_s is None:
            return self.bytes_per_s
        objects = -(-page_bytes // (self.object_bytes or page_bytes))
        return min(self.bytes_per_s, self.requests_per_s / objects * page_bytes)


@dataclass(frozen=True, kw_only=True)
class HardwareSpec(Parallelism):
    """A GPU model, the number of GPUs that serve together, and their links to the host and its disk.

    Rates and sizes are per GPU, as on its datasheet. ``gpus`` GPUs work tensor-parallel: compute, memory, memory bandwidth
    and host link count ``gpus`` times, the disk once. Where GPUs have copies of KV (``ModelSpec.kv_copies``), each reads and
    moves its own; the disk has each page once. Steps wait for the GPUs to add up their parts (``allreduce_s``) if
    ``allreduce_bytes_per_s`` is given. Attributes named ``total`` and ``effective`` are for all GPUs together. With
    ``pipeline_parallel`` stages, the GPUs of each stage work so (``stage``).

    The GPUs (ranks) move their parts of a page over their own links. They are alike unless ``rank_jitter`` or ``rank_faults``
    says otherwise; then a page has arrived when the last rank has it.

    Rates are those of long copies and large matrix products. Where curves are given, simulated copies, reads, writes and
    steps take their times from the curves; policies always estimate with the plain rates.
    """

    flops_per_s: float
    """Peak rate of dense bf16 matrix products."""
    memory_bytes: int
    memory_bytes_per_s: float
    gpus: int = 1
    tensor_parallel: int | None = None
    """GPUs that share each layer. None: ``gpus / pipeline_parallel``."""
    pipeline_parallel: int = 1
    """Stages, each with a part of the layers and as many GPUs. So many steps are under way at a time, one behind the other."""
    expert_parallel: int = 1
    """Groups of the GPUs that share a layer, each with experts of its own; 1: all GPUs have a part of each expert."""
    expert_exchange: str = "allreduce"
    """One of ``EXCHANGES``."""
    expert_imbalance: float = 1.0
    """Tokens that the experts of the busiest group get, relative to the mean of all groups."""
    attention_data_parallel: bool = False
    """Whether each GPU that shares a layer has the KV of requests of its own (``--enable-dp-attention`` in SGLang). Otherwise all
    have a part of each request's, and the same part where there are more of them than KV heads; see ``ModelSpec.kv_copies``."""

    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float
    both_directions_bytes_per_s: float
    """Limit on the total rate while both directions are busy."""
    host_latency_s: float = 1e-5
    """Time from the request of a copy to its first byte."""
    copy_overhead_s: float = 0.0
    """Further latency of a copy between GPU and host in a serving engine, whose host submits it while it launches steps."""

    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    disk_latency_s: float = 1e-4

    host_memory_bytes_per_s: float | None = None
    """Limit on the total rate of the host links of all engines of one host; None: their links do not slow each other down."""
    cluster_disk_read_bytes_per_s: float | None = None
    """Rate of reads from a disk that all hosts share; None: as from a host's own."""
    cluster_disk_write_bytes_per_s: float | None = None
    interconnect_bytes_per_s: float = 50e9
    """Rate at which each GPU sends, and receives, pages between prefill and decode engines, and activations between the stages of
    a pipeline (NVLink, or RDMA over a network)."""
    interconnect_latency_s: float = 1e-5

    allreduce_bytes_per_s: float | None = None
    """Rate at which each GPU sends, and receives, activations during an all-reduce. None: it takes no time, or is part of what
    was measured."""
    allreduce_peer_bytes_per_s: float | None = None
    """Most that goes from one GPU to another, where each pair has a link of its own; fewer GPUs then send less. None: no limit,
    as over a switch."""
    allreduce_latency_s: float = 0.0
    """Time of each step of an all-reduce beyond its bytes: launch, synchronization, the way over the link."""
    allreduce_steps: int | None = None
    """Steps of an all-reduce, one after another. None: ``2 * (gpus - 1)``, a ring. 2: every GPU exchanges its parts with all
    others at once, over a switch or a link to each."""
    all2all_bytes_per_s: float | None = None
    """Rate at which each GPU sends, and receives, tokens on the way to their experts' GPUs, and results on the way back. None: as
    in an all-reduce."""
    all2all_latency_s: float | None = None
    """Time of each way beyond its bytes. None: that of a step of an all-reduce."""
    all2all_dispatch_bytes: int = 2
    """Bytes of an element on the way to experts: 2 for bf16, 1 for FP8. Results are bf16."""

    flops_efficiency: float = 1.0
    """Fraction of ``flops_per_s`` that large matrix products reach."""
    memory_efficiency: float = 1.0
    """Fraction of ``memory_bytes_per_s`` that long reads reach."""
    step_overhead_s: float = 5e-4
    """Time per step beyond compute and memory access: scheduling, launch, sampling."""
    leap_overhead_s: float = 0.0
    """Further time of a leap, which is one decode step or several in a row before the engine decides anew: it sends the steps to
    the GPU, with the pages of requests that have joined, and is notified of their end."""
    copy_leap_s: float = 0.0
    """Further time of a leap if copies from or to the GPU begin at the same time."""
    prefill_overhead_s: float = 0.0
    """Overhead of a step with prefill in addition to ``step_overhead_s``."""
    prefill_launch_s: float = 0.0
    """Time the host needs to launch the kernels of a step with one chunk, one by one: such a step takes at least this long, plus
    overhead. Decode steps are replayed as CUDA graphs."""
    chunk_launch_s: float = 0.0
    """Further time to launch the kernels of each further chunk of the step."""
    decode_launch_s: float = 0.0
    """Further time to launch the kernels of the requests that decode in the step, however many."""
    copy_launch_s: float = 0.0
    """Further time to launch a step with prefill if copies from or to the GPU begin at the same time: the host submits both."""
    request_overhead_s: float = 0.0
    """Time of a request in a server around its engine, on the way to the queue and of a token on the way back. In a simulation, a
    request enters the queue so much later than it arrives."""
    request_token_s: float = 0.0
    """The same for each token of its prompt, which the server reads, checks and hands on."""

    rank_jitter: float = 0.0
    """Spread of the ranks' speeds: each moves its part of a transfer at its rate times a factor drawn from ``1 - rank_jitter``
    to 1, evenly, anew for every transfer."""
    rank_faults: list[RankFault] = field(default_factory=list)
    """Ranks that are slow on a link or fail there; at most one entry per rank and link."""

    link_curves: LinkCurves | None = None
    """Measured by ``kvsim calibrate``, like the following three."""
    disk_curves: DiskCurves | None = None
    compute_curves: ComputeCurves | None = None
    copy_rule: CopyRule | None = None
    """How ``substrate=hardware`` copies pages. None: as on an H200."""
    noise: Noise | None = None
    """How far durations are apart. None: equal work takes equal time. Policies never know of it."""
    remote: RemoteStore | None = field(default=None, metadata={"tier": "remote"})
    """The store of a run with a remote tier, from the settings of that tier."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "memory_bytes", "gpus")
        check_settings(self, Real(above=0), *RATES)
        check_settings(self, Real(above=0), *OPTIONAL_RATES, or_null=True)
        check_settings(self, SECONDS, *LATENCIES, *LAUNCHES)
        check_settings(self, Whole(1), "allreduce_steps", or_null=True)
        check_settings(self, SECONDS, "all2all_latency_s", or_null=True)
        check_settings(self, Whole(1, 2), "all2all_dispatch_bytes")
        check_settings(self, Real(above=0, most=1), "flops_efficiency", "memory_efficiency")
        check_settings(self, Real(least=0, below=1), "rank_jitter")
        for name in ("host_to_device_bytes_per_s", "device_to_host_bytes_per_s"):
            number = Real(least=getattr(self, name))
            check_settings(self, number, "both_directions_bytes_per_s", hint=f"{name} is the rate of one direction alone")
        self._check_parallel()
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Raise ValueError for wrong ranks, and for settings of ranks on a single GPU."""
        if self.gpus == 1 and (self.rank_jitter or self.rank_faults):
            name = "rank_jitter" if self.rank_jitter else "rank_faults"
            raise ValueError(f"{name} has no effect with gpus=1, which has one rank: leave it out, or set gpus")
        seen = set()
        for fault in self.rank_faults:
            if not 0 <= fault.rank < self.gpus:
                raise ValueError(f"rank_faults has rank {fault.rank}, but gpus={self.gpus} means ranks 0 to {self.gpus - 1}")
            if (fault.rank, fault.link) in seen:
                raise ValueError(f"rank_faults has two entries for rank {fault.rank} on {fault.link}: make them one")
            seen.add((fault.rank, fault.link))

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

    def launch_s(self, chunks: int, decode_requests: int, *, has_copies: bool = False) -> float:
        """Return the time the host needs to launch a step with so many chunks, at least one, and decoding requests.

        ``has_copies``: copies from or to the GPU begin at the same time.
        """
        decode_s = self.decode_launch_s if decode_requests else 0.0
        copy_s = self.copy_launch_s if has_copies else 0.0
        return self.prefill_launch_s + (chunks - 1) * self.chunk_launch_s + decode_s + copy_s

    def leap_extra_s(self, times_formed: int = 1, *, has_copies: bool) -> float:
        """Return what a leap takes beyond its steps, which are formed so many times; ``has_copies`` as in ``launch_s``."""
        return times_formed * self.leap_overhead_s + (self.copy_leap_s if has_copies else 0.0)

    def request_s(self, prompt_tokens: int) -> float:
        """Return the time of a request in a server around the engine."""
        return self.request_overhead_s + self.request_token_s * prompt_tokens

    def stage(self, share: float) -> "HardwareSpec":
        """Return the machine of a stage that has a ``share`` of the layers: its GPUs, and a host that only launches it."""
        launches: dict[str, Any] = {name: share * getattr(self, name) for name in LAUNCHES}
        idle: dict[str, Any] = dict.fromkeys(OVERHEADS, 0.0)
        one = replace(self, gpus=self.stage_gpus, tensor_parallel=None, pipeline_parallel=1, rank_jitter=0.0, rank_faults=[])
        return replace(one, **idle, **launches)

    def host_s(self, *, has_prefill: bool, has_copies: bool) -> float:
        """Return what a step takes of the host beyond launches, if every decode step is formed by itself."""
        more_s = self.prefill_overhead_s if has_prefill else self.leap_extra_s(has_copies=has_copies)
        return self.step_overhead_s + more_s

    def without_launches(self) -> "HardwareSpec":
        """Return the same machine with a host that launches kernels at once."""
        return replace(self, prefill_launch_s=0.0, chunk_launch_s=0.0, decode_launch_s=0.0, copy_launch_s=0.0)

    def with_cluster_disk(self) -> "HardwareSpec":
        """Return the same machine with the disk that all hosts share in place of its own."""
        read = self.cluster_disk_read_bytes_per_s or self.disk_read_bytes_per_s
        write = self.cluster_disk_write_bytes_per_s or self.disk_write_bytes_per_s
        is_own = (read, write) == (self.disk_read_bytes_per_s, self.disk_write_bytes_per_s)
        curves = self.disk_curves if is_own else None
        return replace(self, disk_read_bytes_per_s=read, disk_write_bytes_per_s=write, disk_curves=curves)

    def read_link(self, tier: str, page_bytes: int) -> tuple[float, float]:
        """Return the rate of reads from a tier below host memory into host memory, in bytes/s, and their latency in seconds."""
        if self.remote is not None and tier == "remote":
            return self.remote.page_bytes_per_s(page_bytes), self.remote.latency_s
        return {"disk": (self.disk_read_bytes_per_s, self.disk_latency_s)}[tier]

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
        check_settings(self, SECONDS, "fixed_s", "prefill_token_s", "decode_request_s", "chunk_context_s", "decode_context_s")
        if not self.fixed_s + self.decode_request_s > 0:
            raise ValueError("fixed_s and decode_request_s are both 0: a decode step must take time")
        for name in ("leap_overhead_s", "copy_leap_s", "prefill_overhead_s", "allreduce_bytes_per_s", *LAUNCHES):
            if getattr(self, name):
                raise ValueError(f"{name} has no effect where step times are a formula: leave it out")
        for name in DEGREES:
            if getattr(self, name) > 1:
                raise ValueError(f"{name} has no effect where step times are a formula: leave it out")
        if self.compute_curves is not None:
            raise ValueError("compute_curves have no effect where step times are a formula: leave them out")
