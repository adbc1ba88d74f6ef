"""Links that carry pages to and from a GPU, one per direction."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import torch

from kvsim.substrate.hardware.memory.flight import Flight, Landing
from kvsim.substrate.hardware.memory.gpu_pool import PeerPools
from kvsim.substrate.hardware.memory.tier_copy import TierCopy
from kvsim.substrate.hardware.orders import Answers
from kvsim.substrate.hardware.turn import Turn
from kvsim.substrate.hardware.worker import Worker


class Link(ABC):
    """One direction of a link to or from a GPU. Flights are carried in the order in which they are sent, whole or not at all.

    One thread submits copies to this direction's stream, another waits for them.
    """

    def __init__(self, name: str, answers: Answers, turn: Turn, device: torch.device) -> None:
        self.answers = answers
        self.turn = turn
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._under_way: dict[int, Flight] = {}
        self._ended_s = 0.0
        self._submitting: Worker[Flight] = Worker(f"{name} copies", self._submit, self._fail, device)
        self._waiting: Worker[tuple[Flight, torch.cuda.Event, torch.cuda.Event]] = Worker(
            f"{name} ends", self._wait, lambda task, error: self._fail(task[0], error), device
        )

    @property
    def is_busy(self) -> bool:
        """Whether flights are queued or under way."""
        return bool(self._under_way)

    def flight(self, number: int) -> Flight | None:
        """Return a flight that has not ended."""
        return self._under_way.get(number)

    def send(self, flight: Flight) -> None:
        """Carry a flight; the answer is the number of pages that arrived."""
        self._under_way[flight.number] = flight
        self._submitting.give(flight)

    def cancel(self, number: int) -> None:
        """Drop a flight that has not been submitted to the GPU."""
        if (flight := self._under_way.get(number)) is not None:
            flight.is_cancelled = True

    def warm_up(self, counts: Sequence[int]) -> None:
        """Copy each of these numbers of pages, so that no kernel has to be compiled later. Overwrites the pools."""

        def copy() -> None:
            with self._active():
                for count in counts:
                    self._copy_some(np.arange(count))

        self._submitting.call(copy)

    def close(self) -> bool:
        """Drop queued flights. Returns whether no copy is under way any more; only then are the pools released."""
        for flight in list(self._under_way.values()):
            flight.is_cancelled = True
            flight.give_up()
        workers: list[Worker[Any]] = [self._submitting, self._waiting]
        has_ended = [worker.close() for worker in workers]
        return all(has_ended)

    @abstractmethod
    def _copy(self, flight: Flight) -> None:
        """Submit a flight's copies to the current stream."""

    @abstractmethod
    def _copy_some(self, pages: np.ndarray) -> None:
        """Submit copies of these pages in every way that a flight may take."""

    def _submit(self, flight: Flight) -> None:
        for precedes in flight.after:
            precedes.wait()
        start_s = perf_counter()
        if flight.is_cancelled or not flight.pages:
            flight.give_up()
            self._end(flight, start_s, 0)
            return
        with self._active():
            began = self._record()
            with self.turn:
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

    def _wait(self, task: "tuple[Flight, torch.cuda.Event, torch.cuda.Event]") -> None:
        flight, began, ended = task
        ended.synchronize()
        taken_s = began.elapsed_time(ended) / 1e3
        self._end(flight, perf_counter() - taken_s, flight.pages)

    def _end(self, flight: Flight, start_s: float, arrived: int) -> None:
        now = perf_counter()
        start_s, self._ended_s = min(max(start_s, self._ended_s), now), now
        del self._under_way[flight.number]
        self.answers.ended(flight.number, arrived, start_s, now)

    def _fail(self, flight: Flight, error: BaseException) -> None:
        flight.give_up()
        self.answers.failed(error)


class HostLink(Link):
    """One direction between GPU and host memory; ``is_opposite_busy`` says whether the other one carries pages.

    ``states`` copies recurrent states that have pools of their own.
    """

    def __init__(
        self,
        answers: Answers,
        tiers: TierCopy,
        turn: Turn,
        is_opposite_busy: Callable[[], bool],
        *,
        is_load: bool,
        is_layerwise: bool,
        states: TierCopy | None = None,
    ) -> None:
        super().__init__("load" if is_load else "store", answers, turn, tiers.device)
        self.tiers, self.states = tiers, states
        self.is_opposite_busy = is_opposite_busy
        self.is_load = is_load
        self.is_layerwise = is_layerwise

    def send(self, flight: Flight) -> None:
        if self.is_load:
            tiers = self._tiers_of(flight)
            layers = tiers.layers
            flight.layers_at_once = tiers.layerwise(flight.pages) if self.is_layerwise else layers
            flight.landings = [Landing() for _ in range(-(-layers // flight.layers_at_once))]
        super().send(flight)

    def close(self) -> bool:
        if not super().close():
            return False
        del self.tiers, self.states
        return True

    def _tiers_of(self, flight: Flight) -> TierCopy:
        if not flight.of_states:
            return self.tiers
        assert self.states is not None
        return self.states

    def _copy(self, flight: Flight) -> None:
        is_shared, tiers = self.is_opposite_busy(), self._tiers_of(flight)
        if not self.is_load:
            tiers.store(flight.sources, flight.targets, is_shared=is_shared)
            return
        coming = iter(flight.landings)

        def submitted() -> None:
            landing = next(coming)
            landing.event = None if self.stream is None else self.stream.record_event()
            landing.submitted.set()

        tiers.load(flight.sources, flight.targets, is_shared=is_shared, layers_at_once=flight.layers_at_once, submitted=submitted)

    def _copy_some(self, pages: np.ndarray) -> None:
        for tiers, is_shared in product([self.tiers] if self.states is None else [self.tiers, self.states], (False, True)):
            own = pages[pages < min(tiers.gpu.shape[0], tiers.host_pages)]
            if self.is_load:
                tiers.load(own, own, is_shared=is_shared)
                tiers.load(own, own, is_shared=is_shared, layers_at_once=1)
            else:
                tiers.store(own, own, is_shared=is_shared)


class PeerLink(Link):
    """Sends pages to other GPUs."""

    def __init__(self, answers: Answers, peers: PeerPools, turn: Turn, device: torch.device) -> None:
        super().__init__("peer", answers, turn, device)
        self.peers = peers

    def close(self) -> bool:
        if not super().close():
            return False
        self.peers.close()
        del self.peers
        return True

    def _copy(self, flight: Flight) -> None:
        self.peers.send(flight.peer, flight.sources, flight.targets)

    def _copy_some(self, pages: np.ndarray) -> None:
        for peer in self.peers.pools:
            self.peers.send(peer, pages, pages)
