"""The way between a GPU and a disk directly below it: through pinned memory, part by part."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from simpy import Environment, Event, Resource, Store

from kvsim.substrate.hardware.under_way import UnderWay

BUFFER_BYTES = 32 << 20
"""Size of a buffer; at least one page."""
BUFFERS = 2
"""Buffers of each direction: one is filled while the other is emptied."""


@dataclass(eq=False, kw_only=True)
class Passing:
    """The pages of a transfer when it was requested; a part of it is a slice of these lists."""

    gpu: int
    """Number of the engine."""
    gpu_slots: np.ndarray
    disk_slots: np.ndarray
    page_ids: np.ndarray
    began_s: float = 0.0
    """Time at which its turn came."""
    is_short: bool = False
    """Whether the first half of its way ended early, but not because of ``cancel``."""
    is_cancelled: bool = False
    half_way: UnderWay | None = None
    """The part that is on the first half of its way."""

    def cancel(self, number: int) -> None:
        """End the transfer soon, with the pages that have arrived by then. It has no number."""
        self.is_cancelled = True
        if self.half_way is not None:
            self.half_way.cancel()


Half = Callable[[Passing, slice, np.ndarray], UnderWay]
"""Begins to move a part of a transfer between one end of its way and these pages of the host's pool. The value of its end is the
number of pages that arrived, from the first on."""


class Passage:
    """One direction. Transfers pass one after another, each in parts of the size of a buffer.

    A part goes the second half of its way while the next one goes the first half.
    """

    def __init__(self, env: Environment, buffers: Sequence[np.ndarray], first: Half, second: Half) -> None:
        """``buffers`` are pages of the host's pool, as many in each."""
        self._env, self._first, self._second = env, first, second
        self._pages = len(buffers[0])
        self._turns = Resource(env)
        self._buffers = Store(env)
        self._buffers.items.extend(buffers)

    def carry(self, passing: Passing) -> Generator[Event, Any, int]:
        """Carry a transfer, as a process. Its value is the number of pages that arrived, from the first on."""
        ends: list[tuple[int, Event]] = []
        with self._turns.request() as turn:
            yield turn
            passing.began_s = self._env.now
            for start in range(0, len(passing.gpu_slots), self._pages):
                part = slice(start, min(start + self._pages, len(passing.gpu_slots)))
                buffer = yield self._buffers.get()
                half_way = 0 if passing.is_cancelled else (yield from self._bring(passing, part, buffer))
                ends.append((part.stop - start, self._take(passing, start, buffer, half_way)))
                if half_way < part.stop - start:
                    break
        arrived, is_whole = 0, True
        for pages, end in ends:
            value = yield end
            arrived += value if is_whole else 0
            is_whole = is_whole and value == pages
        return arrived

    def _bring(self, passing: Passing, part: slice, buffer: np.ndarray) -> Generator[Event, Any, int]:
        """Move a part into a buffer. Returns the pages that arrived there."""
        passing.half_way = self._first(passing, part, buffer[: part.stop - part.start])
        pages: int = yield passing.half_way.done
        passing.half_way = None
        passing.is_short = pages < part.stop - part.start and not passing.is_cancelled
        return pages

    def _take(self, passing: Passing, start: int, buffer: np.ndarray, pages: int) -> Event:
        """Move the first pages of a part from a buffer, which is then free. Returns the event of the end."""
        part = slice(start, start + pages)
        end = self._second(passing, part, buffer[:pages]).done if pages else self._env.timeout(0, 0)
        end.callbacks.append(partial(self._free, buffer))
        return end

    def _free(self, buffer: np.ndarray, _: Event) -> None:
        self._buffers.put(buffer)


def buffer_pages(page_bytes: int, most: int) -> int:
    """Return the pages of a buffer, ``most`` at most."""
    return max(1, min(BUFFER_BYTES // page_bytes, most))


def buffers_of(first: int, pages: int) -> list[list[np.ndarray]]:
    """Return the buffers of both directions, of ``pages`` pages each, in the host's pool from page ``first`` on."""
    return [[np.arange(pages) + first + (way * BUFFERS + number) * pages for number in range(BUFFERS)] for way in range(2)]
