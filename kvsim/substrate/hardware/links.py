"""Links that carry pages, one per direction, between GPU and host memory and between host memory and a disk file."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch

from kvsim.substrate.hardware.flight import Flight, Landing, Meter
from kvsim.substrate.hardware.tier_copy import TierCopy
from kvsim.substrate.hardware.turn import Turn
from kvsim.substrate.hardware.wall_clock import WallClock
from kvsim.substrate.hardware.worker import Worker


class Link(Protocol):
    """One direction of a link. Flights are carried in the order in which they are sent."""

    meter: Meter

    def send(self, flight: Flight) -> None:
        """Carry a flight; its event triggers at the end."""

    def warm_up(self, counts: Sequence[int]) -> None:
        """Copy each of these numbers of pages, so that no kernel has to be compiled later. Overwrites the pools."""

    def close(self) -> bool:
        """Drop queued flights. Returns whether no copy is under way any more; only then are the pools released."""


class HostLink:
    """One direction between GPU and host memory. One thread submits copies to this direction's stream, another waits for them."""

    def __init__(
        self, clock: WallClock, tiers: TierCopy, turn: Turn, meter: Meter, opposite: Meter, *, is_load: bool, is_layerwise: bool
    ) -> None:
        self.clock = clock
        self.tiers = tiers
        self.turn = turn
        self.meter = meter
        self.opposite = opposite
        self.is_load = is_load
        self.is_layerwise = is_layerwise
        device, name = tiers.device, "load" if is_load else "store"
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._ended_s = 0.0
        self._submitting: Worker[Flight] = Worker(f"{name} copies", self._submit, self._fail, device)
        self._waiting: Worker[tuple[Flight, torch.cuda.Event, torch.cuda.Event]] = Worker(
            f"{name} ends", self._wait, lambda task, error: self._fail(task[0], error), device
        )

    def send(self, flight: Flight) -> None:
        layers = self.tiers.layers
        if self.is_load:
            flight.layers_at_once = self.tiers.layerwise(flight.pages) if self.is_layerwise else layers
            flight.landings = [Landing() for _ in range(-(-layers // flight.layers_at_once))]
        self.meter.ask(flight.pages * self.tiers.page_bytes)
        self._submitting.give(flight)

    def warm_up(self, counts: Sequence[int]) -> None:
        def copy() -> None:
            with self._active():
                for pages in (np.arange(count) for count in counts):
                    for is_shared in (False, True):
                        if self.is_load:
                            self.tiers.load(pages, pages, is_shared=is_shared)
                            self.tiers.load(pages, pages, is_shared=is_shared, layers_at_once=1)
                        else:
                            self.tiers.store(pages, pages, is_shared=is_shared)

        self._submitting.call(copy)

    def close(self) -> bool:
        workers: list[Worker[Any]] = [self._submitting, self._waiting]
        has_ended = [worker.close() for worker in workers]
        if not all(has_ended):
            return False
        del self.tiers
        return True

    def _submit(self, flight: Flight) -> None:
        if flight.is_cancelled or not flight.pages:
            flight.give_up()
            self._end(flight, self.clock.elapsed_s(), 0)
            return
        start_s = self.clock.elapsed_s()
        with self._active():
            began = self._record()
            self._copy(flight)
            ended = self._record()
        if began is None or ended is None:
            self._end(flight, start_s, flight.pages)
        else:
            self._waiting.give((flight, began, ended))

    def _active(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def _record(self) -> "torch.cuda.Event | None":
        """Record an event in the stream; a thread that waits for it sleeps."""
        if self.stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def _copy(self, flight: Flight) -> None:
        with self.turn:
            if not self.is_load:
                self.tiers.store(flight.sources, flight.targets, is_shared=self.opposite.is_busy)
                return
            coming = iter(flight.landings)

            def submitted() -> None:
                landing = next(coming)
                landing.event = None if self.stream is None else self.stream.record_event()
                landing.submitted.set()

            self.tiers.load(
                flight.sources,
                flight.targets,
                is_shared=self.opposite.is_busy,
                layers_at_once=flight.layers_at_once,
                submitted=submitted,
            )

    def _wait(self, task: "tuple[Flight, torch.cuda.Event, torch.cuda.Event]") -> None:
        flight, began, ended = task
        ended.synchronize()
        taken_s = began.elapsed_time(ended) / 1e3
        self._end(flight, self.clock.elapsed_s() - taken_s, flight.pages)

    def _end(self, flight: Flight, start_s: float, arrived: int) -> None:
        now, page_bytes = self.clock.elapsed_s(), self.tiers.page_bytes
        start_s, self._ended_s = min(max(start_s, self._ended_s), now), now
        self.meter.book(start_s, now, arrived * page_bytes, flight.pages * page_bytes)
        self.clock.complete(flight.done, arrived)

    def _fail(self, flight: Flight, error: BaseException) -> None:
        flight.give_up()
        self.clock.fail(error)


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
        self,
        clock: WallClock,
        disk: Disk,
        host: np.ndarray,
        keys: Callable[[np.ndarray], list[bytes]],
        meter: Meter,
        *,
        is_read: bool,
    ) -> None:
        self.clock = clock
        self.disk = disk
        self.host = host
        self.keys = keys
        self.meter = meter
        self.is_read = is_read
        self._flight: Flight | None = None
        name = "disk reads" if is_read else "disk writes"
        self._worker: Worker[Flight] = Worker(name, self._carry, self._fail, torch.device("cpu"))

    def send(self, flight: Flight) -> None:
        self.meter.ask(flight.pages * self.host.shape[1])
        self._worker.give(flight)

    def warm_up(self, counts: Sequence[int]) -> None:
        """Do nothing: there are no kernels."""

    def close(self) -> bool:
        if (flight := self._flight) is not None:
            flight.is_cancelled = True
        if not self._worker.close():
            return False
        del self.host
        return True

    def _carry(self, flight: Flight) -> None:
        start_s, arrived = self.clock.elapsed_s(), 0
        self._flight = flight
        if flight.pages and not flight.is_cancelled:
            arrived = self._call(flight).result()
        page_bytes = self.host.shape[1]
        self.meter.book(start_s, self.clock.elapsed_s(), arrived * page_bytes, flight.pages * page_bytes)
        self.clock.complete(flight.done, arrived)

    def _call(self, flight: Flight) -> "Future[int]":
        keys = self.keys(flight.page_ids)

        def cancelled() -> bool:
            return flight.is_cancelled

        if self.is_read:
            return self.disk.read(flight.sources, keys, self.host, flight.targets, cancelled=cancelled)
        return self.disk.write(flight.targets, keys, self.host, flight.sources, cancelled=cancelled)

    def _fail(self, flight: Flight, error: BaseException) -> None:
        self.clock.fail(error)
