"""One GPU's share of a model whose heads and matrices are divided among several (tensor parallelism)."""

import mmap
from collections.abc import Callable
from dataclasses import replace
from time import sleep

import numpy as np

from kvsim.model.spec import ModelSpec
from kvsim.substrate.hardware.memory.host_pool import mapped

POLL_S = 2e-5
"""Time between two looks at what the other ranks have done."""


def rank_share(model: ModelSpec, ranks: int) -> ModelSpec:
    """Return the model that one rank computes: its heads, and its columns or rows of the other matrices.

    Raises ValueError unless the ranks can share the model equally.
    """
    if ranks == 1:
        return model
    for name in ("recurrent_layers", "kv_latent_dim"):
        if getattr(model, name):
            raise ValueError(f"{name}: on hardware, one GPU computes such a model: set hardware.gpus=1")
    divided = ["heads", "kv_heads", "vocabulary"]
    divided += [name for name in ("mlp_width", "expert_width") if getattr(model, name)]
    for name in divided:
        if getattr(model, name) % ranks:
            raise ValueError(f"{name}={getattr(model, name)} cannot be shared by hardware.gpus={ranks}")
    return replace(model, **{name: getattr(model, name) // ranks for name in divided})


class Lockstep:
    """Keeps the ranks of an engine together: each waits for the slowest at the end of a step, and all end a leap there.

    ``file`` has one number per rank, the steps that it has done, and the number of the step after which the first rank ended a
    leap. All ranks get the same orders.
    """

    def __init__(self, file: int | None, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._count = 0
        self._map: mmap.mmap | None = None if file is None else mapped(lockstep_bytes(ranks), file)
        self._numbers = np.zeros(ranks + 1, np.int64) if self._map is None else np.frombuffer(self._map, np.int64)

    def ends(self, is_stopped: bool, gives_up: Callable[[], bool]) -> bool:
        """Call this after a step: waits for all ranks, and returns whether the leap ends here.

        Only the first rank's ``is_stopped`` counts. ``gives_up`` says that nothing is worth waiting for any more.
        """
        self._count += 1
        if self.ranks == 1:
            return is_stopped
        if self.rank == 0 and is_stopped:
            self._numbers[self.ranks] = self._count
        self._numbers[self.rank] = self._count
        while self._numbers[: self.ranks].min() < self._count:
            if gives_up():
                return True
            sleep(POLL_S)
        return bool(self._numbers[self.ranks] == self._count)

    def of_rank(self, patterns: np.ndarray) -> np.ndarray:
        """Return numbers that differ from rank to rank, so that no rank's share of a page is taken for another's."""
        return patterns * self.ranks + self.rank if self.ranks > 1 else patterns


def lockstep_bytes(ranks: int) -> int:
    """Return the size of the file that the ranks of an engine share."""
    return 8 * (ranks + 1)
