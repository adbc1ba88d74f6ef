"""Which settings have no effect on which command, and which ones the user has given.

To set one without effect is a mistake, and help leaves it out.
"""

from collections.abc import Iterable

ALLREDUCE = tuple([f"hardware.allreduce_{name}" for name in ("bytes_per_s", "peer_bytes_per_s", "latency_s", "steps")])
"""Settings of the communication of tensor-parallel GPUs, the one that makes it take time first."""
OF_EXPERTS = tuple(
    [f"hardware.{name}" for name in ("all2all_bytes_per_s", "all2all_latency_s", "all2all_dispatch_bytes", "expert_imbalance")]
)
"""Settings of the times of GPUs that have experts of their own, the rate first."""
SCALING = ("autoscaling", "cluster.min_engines", "cluster.initial_engines", "cluster.start_s")
"""How many engines serve."""
SAMPLE = ("sample", "sample_draws")
"""Samples of a trace."""
QUEUES = ", where queues depend on all requests: a part of them does not tell how long they are"
NO_CLOCK = ", which has no clock: requests wait for nothing"
SAME_REQUESTS = ", which compares runs of the same requests"
WHY = {
    ("replay", "admission"): NO_CLOCK,
    ("validate", "admission"): SAME_REQUESTS,
    ("validate server", "admission"): SAME_REQUESTS,
    ("leaderboard", "admission"): SAME_REQUESTS,
    ("simulate", "sample"): QUEUES,
    ("saturate", "sample"): QUEUES,
    ("plan", "sample"): QUEUES,
}
"""By command and setting, a reason that is not plain from the command; it follows "has no effect on"."""
WITHOUT_EFFECT = {
    "simulate": (
        "replay", "curve", "print_tree", "validate", "server", "results", "saturate", "shadow", "serve", "plan", "leaderboard",
        "train", *SAMPLE,
    ),
    "saturate": (
        "replay", "curve", "print_tree", "validate", "server", "results", "timeline", "events", "logger", "sweep.objective",
        "shadow", "serve", "plan", "leaderboard", "train", *SAMPLE,
    ),
    "plan": (
        "replay", "curve", "print_tree", "validate", "server", "results", "timeline", "events", "logger", "sweep", "shadow",
        "serve", "substrate", "disk", *SCALING, "cluster.prefill", "cluster.decode", "cluster.decode_routing",
        "saturate.tolerance", "saturate.most_runs", "saturate.price_per_hour", "leaderboard", "train", *SAMPLE,
    ),
    "replay": (
        "engine", "cluster", "routing", "scheduling", "autoscaling", "substrate", "disk", "curve", "timeline", "validate",
        "server", "results", "slo", "saturate", "hardware.rank_jitter", "hardware.rank_faults", "hardware.noise", *ALLREDUCE,
        *OF_EXPERTS, "rules.cache_chunks", "shadow", "serve", "plan", "leaderboard", "train", "admission",
    ),
    "validate": (
        "replay", "curve", "print_tree", "substrate", "logger", "events", "slo", "saturate", "shadow", "serve", "plan",
        "leaderboard", "train", "admission", *SCALING, *ALLREDUCE, *OF_EXPERTS, *SAMPLE,
    ),
    "validate server": (
        "replay", "curve", "print_tree", "substrate", "disk", "logger", "timeline", "events", "slo", "saturate", "sweep",
        "validate.measured", "validate.link_bytes", "shadow", "serve", "plan", "leaderboard", "train", *SCALING, *SAMPLE,
        "admission",
    ),
    "curve": (
        "engine", "hardware", "drive", "network", "substrate", "disk", "replay", "tiers", "eviction", "placement",
        "prefetch", "checkpoint", "routing", "scheduling", "autoscaling", "cluster", "preset", "print_tree", "timeline", "events",
        "logger", "sweep.objective", "validate", "server", "results", "slo", "saturate", "rules.cache_chunks", "shadow",
        "serve", "plan", "leaderboard", "train", *SAMPLE, "admission",
    ),
    "leaderboard": (
        "curve", "print_tree", "validate", "server", "results", "saturate", "shadow", "serve", "plan", "timeline", "events",
        "logger", "sweep", "slo", "substrate", "disk", "train", "admission", *SAMPLE,
    ),
    "train": (
        "engine", "cluster", "routing", "scheduling", "autoscaling", "substrate", "disk", "curve", "timeline", "validate",
        "server", "results", "slo", "saturate", "shadow", "serve", "plan", "leaderboard", "eviction", "events", "logger", "sweep",
        "print_tree", "warmup", *SAMPLE, "admission",
    ),
    "shadow": (
        "trace", "engine", "cluster", "routing", "scheduling", "autoscaling", "substrate", "disk", "curve", "timeline", "events",
        "validate", "server", "results", "slo", "saturate", "sweep", "warmup", "print_tree", "hardware.rank_jitter",
        "hardware.rank_faults", "hardware.noise", *ALLREDUCE, *OF_EXPERTS, "rules.cache_chunks", "serve", "plan", "leaderboard",
        "train", *SAMPLE, "admission",
    ),
    "serve": (
        "trace", "replay", "curve", "print_tree", "validate", "server", "results", "saturate", "slo", "sweep", "substrate",
        "disk", "warmup", "timeline", "events", "output", "logger", "routing", *SCALING, "cluster.prefill", "cluster.decode",
        "cluster.decode_routing", "cluster.failures", "cluster.workers", "engine.reset_at_s", "engine.speculation", "engine.lora",
        "shadow", "plan", "leaderboard", "train", *SAMPLE,
    ),
}  # fmt: skip
"""By command, groups and settings; a section stands for all below it. ``validate server`` is ``kvsim validate`` with a server, or
with results of one."""


def keys_of(overrides: Iterable[str]) -> set[str]:
    """The keys that overrides set."""
    return {override.lstrip("+~").split("=", 1)[0] for override in overrides}


def given(keys: set[str], name: str) -> str | None:
    """The first of the user's override keys that is ``name`` or below it."""
    return next((key for key in sorted(keys) if key == name or key.startswith(f"{name}.")), None)
