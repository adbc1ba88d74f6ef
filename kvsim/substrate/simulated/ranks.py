"""How tensor-parallel ranks carry a transfer: each moves its part of every page, at its own speed, until a page fails on it."""

import numpy as np

from kvsim.hardware.spec import HardwareSpec, RankFault
from kvsim.substrate.simulated.noise import LinkFactors, NoiseSource

STREAM = 2**32
"""Second word of the seed: a random stream that nothing else draws from."""
NO_FAULTS: list[RankFault] = []


class Split:
    """One transfer as its ranks carry it.

    All ranks start together. In the time in which the link could carry ``n_bytes``, a rank of speed ``s`` moves its part of
    ``s * n_bytes``, but no more than its part of the transfer, or of the pages before the one that fails. ``work_bytes`` is what
    the link could carry until the last rank has ended: for that long it is occupied.
    """

    __slots__ = ("failed", "limits", "pages", "slot_bytes", "speeds", "work_bytes")

    def __init__(self, pages: int, slot_bytes: int, speeds: list[float], limits: list[int] | None = None) -> None:
        """``speeds`` are relative to the link's rate, one per rank; ``limits`` are the pages after which each rank fails."""
        self.pages = pages
        self.slot_bytes = slot_bytes
        self.speeds = speeds
        self.limits = limits
        if limits is None:
            self.work_bytes = pages * slot_bytes / min(speeds)
        else:
            self.work_bytes = max([limit * slot_bytes / speed for limit, speed in zip(limits, speeds, strict=True)])
        self.failed = False
        """Whether the first page that some rank lacks failed there; set by ``arrived``."""

    def arrived(self, n_bytes: float) -> "int | list[int]":
        """Return the whole pages of each rank when the link could have carried ``n_bytes``; one number if every rank has all."""
        if self.limits is None and n_bytes >= self.work_bytes:
            return self.pages
        limits = self.limits or [self.pages] * len(self.speeds)
        arrived = [
            min(limit, int((speed * n_bytes + 0.5) // self.slot_bytes)) for limit, speed in zip(limits, self.speeds, strict=True)
        ]
        lowest = min(arrived)
        self.failed = any(pages == limit == lowest < self.pages for pages, limit in zip(arrived, limits, strict=True))
        return arrived

    def moved_bytes(self, n_bytes: float) -> float:
        """Return the bytes that the ranks together have moved when the link could have carried ``n_bytes``."""
        limits = self.limits or [self.pages] * len(self.speeds)
        parts = [min(limit * self.slot_bytes, speed * n_bytes) for limit, speed in zip(limits, self.speeds, strict=True)]
        return sum(parts) / len(parts)


class Ranks:
    """Draws, for every transfer, the speed of each rank and the page at which it fails, if it does.

    speed   1 less up to ``rank_jitter``, evenly distributed, times the rank's own ``speed`` on that link (``rank_faults``),
            divided by the transfer's factor, which all ranks share (``noise``)
    fault   each page fails on the rank with probability ``share``; its transfer ends there, and the failure takes no time
    """

    def __init__(self, hardware: HardwareSpec, seed: int) -> None:
        self.jitter = hardware.rank_jitter
        self._count = hardware.gpus
        self._random = np.random.default_rng([seed, STREAM])
        self._noise = None if hardware.noise is None else LinkFactors(NoiseSource(hardware.noise, seed))
        self._faults: dict[str, list[RankFault]] = {}
        for fault in hardware.rank_faults:
            self._faults.setdefault(fault.link, []).append(fault)

    def split(self, link: str, pages: int, slot_bytes: int, owner: int = 0) -> Split | None:
        """Split a transfer over a link of an engine or a disk, such as ``disk-cpu``, among the ranks.

        Return None if all ranks carry it at the link's rate.
        """
        faults = self._faults.get(link, NO_FAULTS)
        if not self.jitter and not faults and self._noise is None:
            return None
        speeds = [1.0] * self._count
        if self.jitter:
            speeds = [1.0 - self.jitter * drawn for drawn in self._random.random(self._count).tolist()]
        for fault in faults:
            speeds[fault.rank] *= fault.speed
        if self._noise is not None:
            factor = self._noise.draw(link, owner)
            speeds = [speed / factor for speed in speeds]
        return Split(pages, slot_bytes, speeds, self._limits(faults, pages))

    def _limits(self, faults: list[RankFault], pages: int) -> list[int] | None:
        """Return the pages after which each rank fails; None if none does."""
        limits = [pages] * self._count
        for fault in faults:
            if fault.share:
                limits[fault.rank] = min(pages, int(self._random.geometric(fault.share)) - 1)
        return limits if min(limits) < pages else None
