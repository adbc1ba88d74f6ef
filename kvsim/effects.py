"""Which settings have no effect on which command: to set one of them is a mistake, and help leaves them out."""

WITHOUT_EFFECT = {
    "simulate": ("replay", "curve", "print_tree", "validate", "saturate"),
    "saturate": (
        "replay", "curve", "print_tree", "validate", "timeline", "events", "logger", "sweep.objective",
    ),
    "replay": (
        "engine", "cluster", "routing", "scheduling", "substrate", "disk", "curve", "timeline", "validate", "slo", "saturate",
        "hardware.rank_jitter", "hardware.rank_faults", "hardware.noise",
    ),
    "validate": ("replay", "curve", "print_tree", "substrate", "logger", "events", "slo", "saturate"),
    "curve": (
        "engine", "hardware", "substrate", "disk", "replay", "tiers", "eviction", "placement", "prefetch", "checkpoint",
        "routing", "scheduling", "cluster", "preset", "print_tree", "timeline", "events", "logger", "sweep.objective", "validate",
        "slo", "saturate",
    ),
}  # fmt: skip
"""By command, groups and settings; a section stands for all below it."""
