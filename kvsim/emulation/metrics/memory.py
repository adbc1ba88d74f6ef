"""How full an emulated engine's memory is."""

from typing import NamedTuple

from kvsim.emulation.emulator import Emulator


class Memory(NamedTuple):
    """The GPU's tier, in pages."""

    capacity: int
    free: int
    evictable: int
    """Pages that are cached and that no request uses."""

    @property
    def used(self) -> int:
        """Pages that requests use."""
        return self.capacity - self.free - self.evictable

    @property
    def usage(self) -> float:
        """The share of the pages that requests use."""
        return self.used / self.capacity


def memory_of(emulator: Emulator) -> Memory:
    """Return how full the memory of an emulator's GPUs is."""
    gpus = [engine.gpu for engine in emulator.cluster.engines]
    return Memory(
        sum(gpu.pool.capacity for gpu in gpus),
        sum(gpu.pool.free for gpu in gpus),
        sum(gpu.evictable_pages + gpu.leaving_pages for gpu in gpus),
    )
