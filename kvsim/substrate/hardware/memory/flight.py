"""Copies under way, and counters of what a link has carried."""

from dataclasses import dataclass, field
from threading import Event as Flag
from threading import Lock

import numpy as np
import torch

from kvsim.engine.link_use import LinkUse
from kvsim.substrate.hardware.turn import Turn


class Landing:
    """A part of a load: some layers of its pages. ``submitted`` is set once the GPU has the copy; ``event`` marks its end."""

    def __init__(self) -> None:
        self.submitted = Flag()
        self.event: torch.cuda.Event | None = None
        """Stays None on a CPU, where submitted copies are complete."""


@dataclass(eq=False, kw_only=True)
class Flight:
    """The pages of a transfer when it was submitted; afterwards its nodes may be split and slots may change owner."""

    number: int
    """Number of the order, under which its end is reported."""
    sources: np.ndarray
    """Slots in the source tier, int64, in the order in which the pages arrive."""
    targets: np.ndarray
    page_ids: np.ndarray | None = None
    """Ids of the pages, for copies from or to a disk."""
    peer: int = -1
    """Number of the GPU that the pages are sent to."""
    of_states: bool = False
    """Whether the slots are those of the pools of states."""
    after: list[Flag] = field(default_factory=list)
    """Set when what must precede this copy has ended."""
    layers_at_once: int = 0
    """Layers per landing, for loads."""
    landings: list[Landing] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def pages(self) -> int:
        return len(self.sources)

    def await_layer(self, layer: int, stream: "torch.cuda.Stream | None", turn: Turn) -> None:
        """Make work submitted to ``stream`` from now on wait until the load's ``layer`` has landed.

        The caller waits only until the copy is submitted to the GPU.
        """
        if not self.landings:
            return
        landing = self.landings[layer // self.layers_at_once]
        if not landing.submitted.is_set():
            with turn.given_up():
                landing.submitted.wait()
        if landing.event is not None and stream is not None:
            stream.wait_event(landing.event)

    def await_end(self, stream: "torch.cuda.Stream | None", turn: Turn) -> None:
        """As ``await_layer``, for all layers."""
        if self.landings:
            self.await_layer(len(self.landings) * self.layers_at_once - 1, stream, turn)

    def give_up(self) -> None:
        """Release every thread that waits for a landing."""
        for landing in self.landings:
            landing.submitted.set()


class Meter:
    """Counts what one direction of a link has carried and still has to carry. Any thread may call its methods."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        """Rate assumed until something has been carried."""
        self._asked_bytes = self._answered_bytes = 0
        self._use = LinkUse()
        self._busy_until_s = 0.0
        self._intervals: list[tuple[float, float, float, int]] = []
        self._lock = Lock()

    def ask(self, n_bytes: int) -> None:
        """Record that ``n_bytes`` are to be carried."""
        with self._lock:
            self._asked_bytes += n_bytes

    def book(self, start_s: float, end_s: float, n_bytes: int, asked_bytes: int, request: int = -1) -> None:
        """Record that ``n_bytes`` of ``asked_bytes``, of a request if given, were carried in this interval, and no more will."""
        with self._lock:
            self._answered_bytes += asked_bytes
            use = self._use
            use.bytes += n_bytes
            use.transfers += 1
            use.busy_s += max(0.0, end_s - max(start_s, self._busy_until_s))
            self._busy_until_s = max(self._busy_until_s, end_s)
            self._intervals.append((start_s, end_s, n_bytes, request))

    @property
    def is_busy(self) -> bool:
        """Whether bytes are queued or under way."""
        return self._asked_bytes > self._answered_bytes

    def queued_s(self) -> float:
        """Return the seconds until all requested bytes are carried, at the rate so far."""
        with self._lock:
            rate = self._use.bytes / self._use.busy_s if self._use.bytes and self._use.busy_s else self._bytes_per_s
            return (self._asked_bytes - self._answered_bytes) / rate

    def used(self) -> LinkUse:
        """Return what was carried so far."""
        with self._lock:
            self._use.intervals = np.array(sorted(self._intervals), dtype=float).reshape(-1, 4)
            return self._use
