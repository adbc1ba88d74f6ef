"""Links that carry pages between host memory and a disk file, one per direction."""

from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import Protocol

import numpy as np
import torch

from kvsim.substrate.hardware.memory.flight import Flight
from kvsim.substrate.hardware.orders import Answers
from kvsim.substrate.hardware.worker import Worker


class Disk(Protocol):
    """The interface of ``DiskFile`` that links use."""

    faults: dict[str, int]

    def recovered(self) -> dict[bytes, int]:
        """Return the slot of each page from earlier runs, by key."""

    def read(
        self, slots: np.ndarray, keys: list[bytes], host: np.ndarray, host_slots: np.ndarray, *, cancelled: Callable[[], bool]
    ) -> "Future[int]":
        """Read pages; the result is the number of complete pages that arrived, from the first on."""

    def write(
        self, slots: np.ndarray, keys: list[bytes], host: np.ndarray, host_slots: np.ndarray, *, cancelled: Callable[[], bool]
    ) -> "Future[int]":
        """Write pages; the result is the number of complete pages written, from the first on."""

    def close(self) -> None:
        """Stop all reads and writes."""


class DiskLink:
    """One direction between host memory and a disk file, one flight at a time; the disk file splits each among its threads."""

    def __init__(
        self, answers: Answers, disk: Disk, host: np.ndarray, keys: Callable[[np.ndarray], list[bytes]], *, is_read: bool
    ) -> None:
        self.answers = answers
        self.disk = disk
        self.host = host
        self.keys = keys
        self.is_read = is_read
        self._flights: dict[int, Flight] = {}
        name = "disk reads" if is_read else "disk writes"
        self._worker: Worker[Flight] = Worker(name, self._carry, self._fail, torch.device("cpu"))

    def send(self, flight: Flight) -> None:
        """Carry a flight after those sent before it; the answer is the number of pages that arrived, from the first on."""
        self._flights[flight.number] = flight
        self._worker.give(flight)

    def cancel(self, number: int) -> None:
        """End a flight soon, with the pages that have arrived by then."""
        if (flight := self._flights.get(number)) is not None:
            flight.is_cancelled = True

    def close(self) -> bool:
        """Drop all flights. Returns whether no copy is under way any more; only then is the pool released."""
        for flight in list(self._flights.values()):
            flight.is_cancelled = True
        if not self._worker.close():
            return False
        del self.host
        return True

    def _carry(self, flight: Flight) -> None:
        start_s, arrived = perf_counter(), 0
        if flight.pages and not flight.is_cancelled:
            arrived = self._call(flight).result()
        del self._flights[flight.number]
        self.answers.ended(flight.number, arrived, start_s, perf_counter())

    def _call(self, flight: Flight) -> "Future[int]":
        assert flight.page_ids is not None
        keys = self.keys(flight.page_ids)

        def cancelled() -> bool:
            return flight.is_cancelled

        if self.is_read:
            return self.disk.read(flight.sources, keys, self.host, flight.targets, cancelled=cancelled)
        return self.disk.write(flight.targets, keys, self.host, flight.sources, cancelled=cancelled)

    def _fail(self, flight: Flight, error: BaseException) -> None:
        self.answers.failed(error)
