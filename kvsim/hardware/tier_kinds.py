"""The one table of the kinds of tiers, from the top down. Everything that depends on what a tier is reads it here.

A new kind is a row here, its section under ``tiers`` in ``conf/config.yaml``, and the rates of its links in ``HardwareSpec``.
"""

from collections.abc import Iterable
from typing import NamedTuple

GPU_MEMORY, HOST_MEMORY, FILE, REMOTE = "gpu", "memory", "file", "remote"


class TierKind(NamedTuple):
    """What all tiers of one name have in common. Its level is its position in ``TIER_KINDS``."""

    name: str
    label: str
    """What messages call it."""
    medium: str
    scopes: tuple[str, ...]
    """Who may share one: nobody (``engine``), the engines of a ``host``, or all of a ``cluster``."""
    above: tuple[str, ...] = ()
    """The tiers that it may stand directly below, the default first; none for the top."""
    settings: tuple[str, ...] = ()
    """Settings that only this kind has."""
    has_states: bool = False
    """Whether recurrent states may have memory of their own there."""
    is_always_listed: bool = True
    """Whether results list it, whether a run has it or not."""
    reads_into: str = ""
    """The tier that its pages are read into; empty: the one directly above."""

    @property
    def links(self) -> list[str]:
        """Names of its links: source and target."""
        pairs = [(f"{self.name}-{self.reads_into or above}", f"{above}-{self.name}") for above in self.above]
        return list(dict.fromkeys([name for pair in pairs for name in pair]))

    @property
    def is_far(self) -> bool:
        """Whether it lies beyond host memory: reads take long enough to begin ahead of need, and single pages may fail."""
        return self.medium not in (GPU_MEMORY, HOST_MEMORY)


TIER_KINDS = (
    TierKind(
        name="gpu",
        label="GPU",
        medium=GPU_MEMORY,
        scopes=("engine",),
        settings=("gpu_memory_utilization", "workspace"),
        has_states=True,
    ),
    TierKind(
        name="cpu",
        label="CPU",
        medium=HOST_MEMORY,
        scopes=("host", "engine"),
        above=("gpu",),
        settings=("page_tokens",),
        has_states=True,
    ),
    TierKind(name="disk", label="disk", medium=FILE, scopes=("host", "cluster"), above=("cpu", "gpu")),
    TierKind(
        name="remote",
        label="remote store",
        medium=REMOTE,
        scopes=("cluster",),
        above=("disk", "cpu"),
        settings=("bytes_per_s", "latency_s", "requests_per_s", "object_bytes"),
        is_always_listed=False,
        reads_into="cpu",
    ),
)
LEVELS = tuple([kind.name for kind in TIER_KINDS])
"""Names of the levels, from the GPU down."""
ALWAYS = tuple([kind.name for kind in TIER_KINDS if kind.is_always_listed])
"""Tiers that every result lists, from the top down, whether the run has them or not."""
FIRST_FAR = next(kind.name for kind in TIER_KINDS if kind.is_far)


def kind_of(name: str) -> TierKind:
    """Return the row of a tier."""
    return TIER_KINDS[LEVELS.index(name)]


def levels_listed(levels: Iterable[int]) -> int:
    """Return how many levels a row of hits has in a run with tiers of these levels."""
    return max([len(ALWAYS), *[level + 1 for level in levels]])
