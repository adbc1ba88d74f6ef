"""The memory of this machine that many simulated engines take: a run that cannot have it is refused before it takes any."""

import os

from kvsim.errors import UsageError
from kvsim.plans.cluster_settings import ClusterSettings
from kvsim.substrate.hardware.memory.available import available_bytes, gib

ENGINE_BYTES = 24_000
"""Of each engine, at the least: its tiers, queue, links and process."""
PAIR_BYTES = 12
"""For each two engines of a host, at the least: they may share tiers, so all their tiers have one tree."""
FEW_BYTES = 1 << 20
"""What every machine has."""


def check_memory(cluster: ClusterSettings) -> None:
    """Raise UsageError for more engines than this machine has memory for. What requests and pages take is not counted."""
    hosts = cluster.total // cluster.per_host
    needed = cluster.total * ENGINE_BYTES + hosts * cluster.per_host**2 * PAIR_BYTES
    if needed > FEW_BYTES and needed > (available := _available_bytes()):
        key = "cluster.prefill + cluster.decode" if cluster.prefill else "cluster.engines"
        raise UsageError(
            f"{key} is {cluster.total:,}: that many simulated engines take at least {gib(needed)} of memory, and this machine "
            f"has {gib(available)} available: use fewer engines, or fewer on each host (cluster.engines_per_host)"
        )


def _available_bytes() -> int:
    try:
        return available_bytes()
    except (OSError, LookupError, ValueError):  # no Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
