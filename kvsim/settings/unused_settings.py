"""Which settings have no effect on which command, and which ones the user has given.

To set one without effect is a mistake, and help leaves it out.
"""

from collections.abc import Iterable

WITHOUT_EFFECT = {
    "simulate": ("replay", "curve", "print_tree", "validate", "server", "results", "saturate", "shadow"),
    "saturate": (
        "replay", "curve", "print_tree", "validate", "server", "results", "timeline", "events", "logger", "sweep.objective",
        "shadow",
    ),
    "replay": (
        "engine", "cluster", "routing", "scheduling", "substrate", "disk", "curve", "timeline", "validate", "server",
        "results", "slo", "saturate", "hardware.rank_jitter", "hardware.rank_faults", "hardware.noise", "rules.cache_chunks",
        "shadow",
    ),
    "validate": ("replay", "curve", "print_tree", "substrate", "logger", "events", "slo", "saturate", "shadow"),
    "validate server": (
        "replay", "curve", "print_tree", "substrate", "disk", "logger", "timeline", "events", "slo", "saturate", "sweep",
        "validate.measured", "validate.link_bytes", "shadow",
    ),
    "curve": (
        "engine", "hardware", "substrate", "disk", "replay", "tiers", "eviction", "placement", "prefetch", "checkpoint",
        "routing", "scheduling", "cluster", "preset", "print_tree", "timeline", "events", "logger", "sweep.objective", "validate",
        "server", "results", "slo", "saturate", "rules.cache_chunks", "shadow",
    ),
    "shadow": (
        "trace", "engine", "cluster", "routing", "scheduling", "substrate", "disk", "curve", "timeline", "events", "validate",
        "server", "results", "slo", "saturate", "sweep", "warmup", "print_tree", "logger", "hardware.rank_jitter",
        "hardware.rank_faults", "hardware.noise", "rules.cache_chunks",
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
