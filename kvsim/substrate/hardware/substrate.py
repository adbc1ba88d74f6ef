"""The hardware substrate: pages move between a GPU, pinned host memory and a disk file, and steps are really computed."""

import sys
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import torch
from simpy import Environment, Event

from kvsim.core.edge import Edge
from kvsim.core.transfer import Transfer
from kvsim.engine.job import Send
from kvsim.engine.outcome import LinkUse
from kvsim.engine.substrate import Work
from kvsim.substrate.hardware.compute import Compute, Leap
from kvsim.substrate.hardware.flight import Flight
from kvsim.substrate.hardware.links import Disk, Link
from kvsim.substrate.hardware.patterns import Patterns
from kvsim.substrate.hardware.pools import Pools
from kvsim.substrate.hardware.step_pages import NOTHING, StepPages, ids_of
from kvsim.substrate.hardware.wall_clock import WallClock

SWITCH_S = 5e-4
"""Time after which a thread that runs Python code yields to one that has work to submit."""


class HardwareSubstrate:
    """Combines pools, links and compute on one wall clock.

    The slots and pages of a transfer or step are read from nodes and leases when it is requested; threads carry it out. The
    engine's thread therefore never waits for the GPU or a disk, and only this class and ``StepPages`` read the cache's objects.
    """

    def __init__(
        self,
        clock: WallClock,
        *,
        pools: Pools,
        links: dict[str, Link],
        compute: Compute,
        pages: StepPages,
        patterns: Patterns,
        disk: Disk | None,
        scratch: Path | None = None,
    ) -> None:
        """``links`` are by name, such as ``gpu-cpu``. The folder ``scratch`` is removed at the end."""
        self.env: Environment = clock
        self.clock = clock
        self.pools = pools
        self.links = links
        self.compute_queue = compute
        self.pages = pages
        self.patterns = patterns
        self.disk = disk
        self.scratch = scratch
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self.flights: dict[Transfer, Flight] = {}
        self.moved_pages = dict.fromkeys(links, 0)
        self.restored_pages = 0
        """Number of pages that the disk tier started with."""

    def copy(self, transfer: Transfer) -> Event:
        """Implement the contract. Fewer pages than requested arrive if a disk fails to read or write, or after ``cancel``."""
        done = self.clock.expect()
        flight = self.flights[transfer] = Flight(
            sources=slots_in(transfer, transfer.source.index),
            targets=slots_in(transfer, transfer.target.index),
            page_ids=ids_of(tuple(run for node in transfer.nodes for run in node.runs)),
            done=done,
        )
        done.callbacks.append(lambda event: self._landed(transfer, flight, event))
        self.links[transfer.name].send(flight)
        return done

    def _landed(self, transfer: Transfer, flight: Flight, event: Event) -> None:
        del self.flights[transfer]
        arrived = int(event.value or 0)
        self.moved_pages[transfer.name] += arrived
        transfer.has_fault = arrived < flight.pages and not flight.is_cancelled

    def cancel(self, transfer: Transfer) -> None:
        if (flight := self.flights.get(transfer)) is not None:
            flight.is_cancelled = True

    def queued_s(self, edge: Edge) -> float:
        return self.links[f"{edge.lower.name}-{edge.upper.name}"].meter.queued_s()

    def compute(self, work: Work, loads: list[Transfer]) -> Event:
        done = self.clock.expect()
        self.compute_queue.send(
            Leap(
                chunks=self.pages.chunks(work),
                decodes=self.pages.decodes(work),
                loads=[self.flights[load] for load in loads if load in self.flights],
                steps=work.max_steps,
                stop=work.stop,
                done=done,
            )
        )
        return done

    def steps_done(self, work: Work, elapsed_s: float) -> int:
        return 0

    def hand_over(self, send: Send) -> Event:
        raise NotImplementedError("pages move between GPUs of several processes only")

    def withdraw(self, send: Send) -> None:
        raise NotImplementedError("pages move between GPUs of several processes only")

    def link_use(self) -> list[LinkUse]:
        used = [replace(link.meter.used(), name=name) for name, link in self.links.items()]
        return [use for use in used if use.transfers]

    def findings(self) -> dict[str, Any]:
        """Return pages moved and verified, wrong words, disk faults, and how far event handling fell behind the clock."""
        wrong_words, wrong_pages = self.patterns.wrong()
        device = self.pools.device
        return {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "verified_pages": self.patterns.verified_pages,
            "wrong_words": wrong_words,
            "wrong_pages": wrong_pages,
            "page_moves": {name: pages for name, pages in self.moved_pages.items() if pages},
            "restored_pages": self.restored_pages,
            "disk_faults": {} if self.disk is None else {name: count for name, count in self.disk.faults.items() if count},
            "most_behind_s": self.clock.most_behind_s,
        }

    def close(self) -> None:
        """End the threads and free the memory; the disk file stays unless it is in the scratch folder.

        This is not left to the garbage collector, because the next job of a sweep needs the memory.
        """
        for flight in self.flights.values():
            flight.is_cancelled = True
            flight.give_up()
        parts: list[Compute | Link] = [self.compute_queue, *self.links.values()]
        has_ended = [part.close() for part in parts]
        if self.disk is not None:
            self.disk.close()
        if all(has_ended):
            del self.patterns
            self.pools.close()
        remove(self.scratch)
        sys.setswitchinterval(self._switch_s)


def remove(folder: Path | None) -> None:
    """Remove a folder and its content, if one is given."""
    if folder is not None:
        rmtree(folder, ignore_errors=True)


def slots_in(transfer: Transfer, tier: int) -> np.ndarray:
    """Return the slots of a transfer's pages in a tier, in copy order."""
    return np.concatenate([NOTHING, *(node.slots[tier] for node in transfer.nodes)])
