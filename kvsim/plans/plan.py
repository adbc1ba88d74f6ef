"""What a run is made of: a checked plan, from the objects that the configuration describes."""

from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from kvsim.core.rules import Rules
from kvsim.engine.engine import EngineSettings
from kvsim.engine.layout import Layout
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.plans.cluster_settings import ClusterSettings
from kvsim.plans.command_settings import DiskSettings, SaturateSettings, SweepSettings
from kvsim.plans.gpu_memory import GpuMemory
from kvsim.plans.sampling import Sampling
from kvsim.policies.admission.base import AdmissionPolicy
from kvsim.policies.autoscaling.base import AutoscalingPolicy
from kvsim.policies.checkpoint.base import CheckpointPolicy
from kvsim.policies.copies import copied
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.prefetch.base import PrefetchPolicy
from kvsim.policies.routing.base import RoutingPolicy
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.replaying.settings import ReplaySettings
from kvsim.results.logger import Logger
from kvsim.results.slo import Slo
from kvsim.results.tolerances import ValidationSettings
from kvsim.trace.base import TraceSource

Config = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """One tier of the run."""

    name: str
    capacity_pages: int | None
    """None: unlimited."""
    eviction: EvictionPolicy
    placement: PlacementPolicy | None
    """Decides which pages are written down into this tier; None for the GPU."""
    above: str = ""
    """Name of the tier directly above, from which pages are written down; empty for the GPU."""
    reads_into: str = ""
    """Name of the tier that its pages are read into; empty for the GPU."""
    unit_pages: int = 1
    """Pages of the plan's ``page_tokens`` that this tier stores as one larger page."""
    scope: str = "engine"
    """Which engines share the tier: those of one ``host``, all of a ``cluster``, or none (``engine``)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a run needs, checked. Policies are not bound yet."""

    trace: TraceSource
    page_tokens: int
    tiers: list[TierPlan]
    """From the GPU down."""
    prefetch: PrefetchPolicy
    checkpoint: CheckpointPolicy
    routing: RoutingPolicy
    scheduling: SchedulingPolicy
    autoscaling: AutoscalingPolicy
    admission: AdmissionPolicy | None
    """None: every request is admitted."""
    states: list[int | None] | None
    """Capacity for recurrent states of the GPU and the CPU (None: unlimited); None if states share the pages' capacity."""
    model: ModelSpec
    hardware: HardwareSpec
    engine: EngineSettings
    rules: Rules
    cluster: ClusterSettings
    layout: Layout
    """The engines that these settings describe."""
    decode_routing: RoutingPolicy
    """Chooses the engine that decodes, where other engines compute prompts."""
    rules_note: str
    """If kvsim's own rules stand in for those of an engine, a line that says so."""
    replay: ReplaySettings
    substrate: str
    disk: DiskSettings
    warmup: float
    seed: int
    print_tree: bool
    print_steps: bool
    """Whether the tree is printed after each step, not only at the end."""
    timeline: bool
    events: bool
    logger: Logger
    slo: Slo
    saturate: SaturateSettings
    sweep: SweepSettings
    validation: ValidationSettings
    output: Path
    config: Config
    """The resolved configuration for the record, without settings that do not affect the result, such as the folder."""
    sampling: Sampling | None = None
    """What share of the trace a replay plays; None: all of it."""
    gpu_memory: GpuMemory | None = None
    """How an engine's GPU memory is divided; None unless the size of its GPU tier was chosen by that (``capacity=auto``)."""
    model_note: str = ""
    """If the model was read from a file, a line that says what was understood."""
    choices: dict[str, str] = field(default_factory=dict)
    """The name that was chosen from each group: what tables call the policies. Has no influence on the result."""

    def with_answers(self, cache_output: bool) -> "Plan":
        """Return the plan with answers that are cached, or are not."""
        recorded = {**self.config, "rules": {**self.config["rules"], "cache_output": cache_output}}
        return replace(self, rules=replace(self.rules, cache_output=cache_output), config=recorded)

    def with_own_policies(self) -> "Plan":
        """Return the plan with copies of its policies, for one more run of it. They must not be bound yet."""
        tiers = [replace(tier, eviction=copied(tier.eviction), placement=copied(tier.placement)) for tier in self.tiers]
        names = ("prefetch", "checkpoint", "scheduling", "routing", "decode_routing", "autoscaling", "admission")
        return replace(self, tiers=tiers, **{name: copied(getattr(self, name)) for name in names})

    def begun(self, command: str) -> Config:
        """Return the fields of a result that are known before the run."""
        return {"command": command, "config": self.config, "choices": self.choices, "seed": self.seed}

    def owner(self, name: str, engine: int) -> int:
        """Return the number that tells an engine's tier of this name from others of the same name."""
        scope = next(tier.scope for tier in self.tiers if tier.name == name)
        if scope == "engine":
            return engine
        return self.layout.hosts[engine] if scope == "host" else 0

    def group(self, engine: int) -> int:
        """Return a number that is equal for engines that share a tier, directly or through others."""
        scopes = [tier.scope for tier in self.tiers]
        if "cluster" in scopes:
            return 0
        return self.layout.hosts[engine] if "host" in scopes else engine

    @property
    def page_bytes(self) -> int:
        """Bytes of KV that a slot of a page takes."""
        return self.rules.page_bytes(self.model, self.page_tokens)

    @property
    def is_scaled(self) -> bool:
        """Whether a policy starts and stops engines."""
        return self.autoscaling.asked_every_s != inf

    @property
    def may_refuse(self) -> bool:
        """Whether a policy may refuse requests."""
        return self.admission is not None and self.admission.is_asked

    @property
    def start_s(self) -> float:
        """Seconds that an engine takes to start: as set, or to read its weights from the disk and copy them to its GPUs."""
        if self.cluster.start_s is not None:
            return self.cluster.start_s
        rate = min(self.hardware.disk_read_bytes_per_s, self.hardware.total_host_to_device_bytes_per_s)
        return self.model.parameters * self.model.weight_dtype_bytes / rate

    @property
    def reads_hardware(self) -> bool:
        """Whether a policy decides by the rates of the machine."""
        policies = [self.prefetch, *(tier.eviction for tier in self.tiers), *(tier.placement for tier in self.tiers)]
        return any(getattr(policy, "reads_hardware", False) for policy in policies)

    @property
    def total_pages(self) -> int | None:
        """Capacity of all tiers of all engines together; None if one is unlimited."""
        total = 0
        for tier in self.tiers:
            if tier.capacity_pages is None:
                return None
            total += tier.capacity_pages * len({self.owner(tier.name, engine) for engine in range(self.layout.engines)})
        return total
