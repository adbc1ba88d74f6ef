"""The traffic on a run's links."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(slots=True, kw_only=True)
class LinkUse:
    """Traffic on one link.

    ``intervals`` has one row (start_s, end_s, bytes, request) per transfer, in order of start. The request is the index of the
    one that pages are read or sent for, or whose prompt is written down; -1 if there is none.
    """

    name: str = ""
    """Source and target, such as ``gpu-cpu``."""
    owner: int = 0
    """Number of the engine whose GPU the link leads from or to; of the disk, for its own links."""
    receiver: int = -1
    """Number of the engine whose GPU a link between two GPUs leads to."""
    lanes: int = 1
    """Number of links counted together."""
    bytes: int = 0
    transfers: int = 0
    busy_s: float = 0.0
    intervals: np.ndarray = field(default_factory=lambda: np.empty((0, 4)))

    @property
    def is_of_engine(self) -> bool:
        """Whether one of its ends is the GPU of an engine."""
        return "gpu" in self.name


def joined(lanes: Sequence[LinkUse]) -> dict[str, LinkUse]:
    """Return the traffic of all links of the same name together, by name."""
    links: dict[str, LinkUse] = {}
    intervals: dict[str, list[np.ndarray]] = {}
    for lane in lanes:
        intervals.setdefault(lane.name, []).append(lane.intervals)
        known = links.get(lane.name)
        if known is None:
            links[lane.name] = replace(lane)
            continue
        known.bytes += lane.bytes
        known.transfers += lane.transfers
        known.busy_s += lane.busy_s
        known.lanes += lane.lanes
    for name, link in links.items():
        if len(intervals[name]) > 1:
            rows = np.concatenate(intervals[name])
            link.intervals = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    return links
