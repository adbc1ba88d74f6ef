"""The rule of the paper's simulator: blocks are objects of their own, and one counts as a hit wherever it is in its prompt.

Written from what its authors say of it (github.com/LauYeeYu/libCacheSim, libCacheSim/bin/prefixsim/README.md); it knows nothing
of kvsim's core. A request needs all of its blocks at once. Those found are counted first. Then other blocks leave, from anywhere,
until the missing ones fit; a request of more blocks than the cache is skipped. Samplers compare all blocks here, not 128: the
authors find that more than 512 change nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvsim.core.request import Request

Numbers = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Blocks:
    """What is known of the blocks that could leave, one value each."""

    position: Ids
    """In their prompts, from 0."""
    cost: Numbers
    """FLOPs to compute them, after all blocks before them."""
    last_use: Ids
    """Number of block accesses before the request that used them last."""
    next_use: Ids
    """The same of the request that uses them next; NEVER if there is none."""
    now: int

    @property
    def age(self) -> Numbers:
        return (self.now - self.last_use).astype(np.float64)

    @property
    def wait(self) -> Numbers:
        """Block accesses until the next use; infinite without one."""
        return np.where(self.next_use == NEVER, np.inf, self.next_use - self.now + self.position)


Score = Callable[[Blocks], Numbers]
SCORES: dict[str, Score] = {
    "lru": lambda blocks: blocks.last_use - blocks.position / (1 + blocks.position.max(initial=0)),
    "random_compute": lambda blocks: blocks.cost / blocks.age,
    "belady": lambda blocks: -blocks.wait,
    "belady_compute": lambda blocks: -blocks.wait / blocks.cost,
}
"""What a block is worth; the lowest leave first."""


@dataclass(frozen=True)
class Savings:
    """What was found in the cache, of what all served requests asked for."""

    hit_rate: float
    """Of blocks."""
    saved: float
    """Of FLOPs."""
    skipped: int
    """Requests with more blocks than the cache."""


def replay(requests: Sequence[Request], capacity: int, costs: Numbers, score: Score) -> Savings:
    """Play the full blocks of all prompts; ``costs`` are the FLOPs of a block by its position."""
    prompts = [ids_of(request) for request in requests]
    following, starts = next_uses(prompts)
    cache = FlatCache(capacity, 1 + max((int(ids.max()) for ids in prompts if len(ids)), default=0))
    found = asked = saved = total = 0.0
    skipped = 0
    for ids, ahead, now in zip(prompts, following, starts, strict=True):
        if len(ids) > capacity:
            skipped += 1
            continue
        here = costs[: len(ids)]
        hit = cache.find(ids)
        found, asked = found + np.count_nonzero(hit), asked + len(ids)
        saved, total = saved + float(here[hit].sum()), total + float(here.sum())
        cache.take(ids, here, ahead, now, score)
    return Savings(found / asked if asked else 0.0, saved / total if total else 0.0, skipped)


def ids_of(request: Request) -> Ids:
    """Return the ids of a prompt's blocks, in order."""
    parts = [np.arange(start, start + pages, dtype=np.int64) for start, pages in request.runs]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def next_uses(prompts: Sequence[Ids]) -> tuple[list[Ids], list[int]]:
    """Return when each block of each prompt is used next, and when each prompt begins, in block accesses before a request."""
    starts = np.concatenate(([0], np.cumsum([len(ids) for ids in prompts])))
    upcoming = np.full(1 + max((int(ids.max()) for ids in prompts if len(ids)), default=0), NEVER)
    following: list[Ids] = []
    for at in range(len(prompts) - 1, -1, -1):
        following.append(upcoming[prompts[at]])
        upcoming[prompts[at]] = starts[at]
    return following[::-1], [int(start) for start in starts[:-1]]


class FlatCache:
    """``capacity`` slots, each empty or with one block and what is known of it."""

    def __init__(self, capacity: int, blocks: int) -> None:
        self._slot_of = np.full(blocks, -1, dtype=np.int64)
        self._block = np.full(capacity, -1, dtype=np.int64)
        self._position = np.zeros(capacity, dtype=np.int64)
        self._cost = np.zeros(capacity)
        self._last = np.zeros(capacity, dtype=np.int64)
        self._next = np.zeros(capacity, dtype=np.int64)

    def find(self, ids: Ids) -> npt.NDArray[np.bool_]:
        return self._slot_of[ids] >= 0

    def take(self, ids: Ids, costs: Numbers, ahead: Ids, now: int, score: Score) -> None:
        """Bring in a request's missing blocks, in the place of others, and note the use of all."""
        missing = ids[self._slot_of[ids] < 0]
        empty = np.flatnonzero(self._block < 0)
        if (needed := len(missing) - len(empty)) > 0:
            empty = np.concatenate((empty, self._evict(ids, needed, now, score)))
        self._slot_of[missing] = empty[: len(missing)]
        self._block[empty[: len(missing)]] = missing
        slots = self._slot_of[ids]
        self._position[slots] = np.arange(len(ids))
        self._cost[slots], self._last[slots], self._next[slots] = costs, now, ahead

    def _evict(self, kept: Ids, needed: int, now: int, score: Score) -> Ids:
        """Empty the slots of the ``needed`` blocks of the lowest scores that are not among ``kept``, and return them."""
        free = self._block >= 0
        found = self._slot_of[kept]
        free[found[found >= 0]] = False
        slots = np.flatnonzero(free)
        known = Blocks(self._position[slots], self._cost[slots], self._last[slots], self._next[slots], now)
        victims = slots[np.argpartition(score(known), needed - 1)[:needed]]
        self._slot_of[self._block[victims]] = -1
        self._block[victims] = -1
        return victims
