"""The hardware substrate: pages move between GPUs, host memory and a disk file, and steps are really computed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from simpy import Environment, Event

from kvsim.core.tier import CPU, DISK, GPU, Edge, Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.job import Send
from kvsim.engine.link_use import LinkUse
from kvsim.engine.substrate import Work, request_of
from kvsim.hardware.spec import HardwareSpec
from kvsim.substrate.hardware.disk.disk_link import Disk, DiskLink
from kvsim.substrate.hardware.disk.passage import Passage, Passing
from kvsim.substrate.hardware.memory.flight import Flight, Meter
from kvsim.substrate.hardware.memory.host_pool import HostPool
from kvsim.substrate.hardware.orders import NOTHING, CopyOrder, Gpu, SendOrder, StateOrder, StepOrder
from kvsim.substrate.hardware.process.order_book import OrderBook
from kvsim.substrate.hardware.process.remote_gpu import GpuLost
from kvsim.substrate.hardware.step_check import StepCheck
from kvsim.substrate.hardware.step_pages import StepPages, ids_of, slots_of
from kvsim.substrate.hardware.under_way import UnderWay


class HardwareSubstrate:
    """Combines GPUs, the host's memory and its disk on one wall clock.

    Engine ``e`` computes on the GPUs ``e * ranks`` to ``e * ranks + ranks - 1``; each has its share of every page, and a copy
    ends when it has ended on all of them. The slots and pages of a transfer or step are read from nodes and leases when it is
    requested; other threads or processes carry it out. The engine's thread therefore never waits for a GPU or a disk, and only
    this class and ``StepPages`` read the cache's objects.
    """

    def __init__(
        self,
        book: OrderBook,
        *,
        gpus: Sequence[Gpu],
        ranks: int,
        close_gpus: Callable[[], bool],
        pages: Sequence[StepPages],
        page_tokens: int,
        page_bytes: int,
        rates: HardwareSpec,
        steps: StepCheck,
        device: str,
        hosts: Sequence[HostPool],
        disk: Disk | None,
        disk_links: dict[bool, DiskLink],
        buffers: Sequence[Sequence[np.ndarray]],
        scratch: Path | None = None,
    ) -> None:
        """``pages`` has one entry per engine; ``disk_links`` are by whether they read. ``buffers`` are pages of the host's pool,
        for writes to a disk directly below the GPUs, and for reads. ``rates`` are assumed for links that have carried nothing
        yet; ``steps`` receives the duration of each step. The folder ``scratch`` is removed at the end."""
        self.book, self.clock = book, book.clock
        book.on_lost = self._lost
        self.env: Environment = book.clock
        self.gpus, self.ranks, self.close_gpus = gpus, ranks, close_gpus
        self.pages, self.page_tokens, self.page_bytes = pages, page_tokens, page_bytes
        self.rates, self.steps, self.device = rates, steps, device
        self.hosts, self.disk, self.disk_links, self.scratch = hosts, disk, disk_links, scratch
        self.passages = {
            False: Passage(self.env, buffers[0], self._order_store, self._order_write),
            True: Passage(self.env, buffers[1], self._order_read, self._order_load),
        }
        """The ways from GPUs to the disk (False), and back."""
        self.meters: dict[tuple[str, int], Meter] = {}
        """By link, such as ``gpu-cpu``, and the number of its engine or disk, once it has been used."""
        self.moved_pages: dict[str, int] = {}
        self.restored_pages = 0
        """Number of pages that the disk tier started with."""
        self.on_worker_lost: Callable[[int], None] | None = None
        """Called on the clock's thread with the number of an engine that has lost a GPU, before what the GPU was asked for ends.
        Without it, or without an engine that is left, a loss ends the run."""
        self.lost_gpus: list[int] = []
        self._under_way: dict[Transfer, UnderWay] = {}
        self._state_orders: dict[int, tuple[int, bool, np.ndarray]] = {}
        """Engine, whether states have a pool of their own, and slots there, of the orders for states that have not ended."""

    def request_s(self, prompt_tokens: int) -> float:
        """Return 0: there is no server."""
        return 0.0

    # Copies

    def copy(self, transfer: Transfer) -> Event:
        """Begin a transfer. Fewer pages than requested arrive if a disk fails to read or write, after ``cancel``, or if a GPU
        is lost."""
        sources, targets = (self._places(transfer, tier) for tier in (transfer.source, transfer.target))
        there = len(sources) - len(targets)  # pages that a load from larger pages begins with, and that the GPU has
        sources = sources[there:]
        is_up, levels = not transfer.goes_down, {transfer.source.level, transfer.target.level}
        upper, lower = (targets, sources) if is_up else (sources, targets)
        if levels == {GPU, DISK}:
            return self._pass(transfer, upper, lower)
        booked = {
            "meter": self._meter(transfer.source, transfer.target),
            "combined": partial(one_or_all, there=there),
            "pages": len(sources),
            "page_bytes": transfer.target.slot_bytes or self.page_bytes,
            "request": request_of(transfer),
        }
        if GPU in levels:
            gpu = transfer.target if is_up else transfer.source
            order = self._order_copy(gpu.owner, upper, lower, is_load=is_up, of_states=gpu.slot_bytes is not None, **booked)
        else:
            order = self._order_disk(lower, upper, page_ids_of(transfer), is_read=is_up, **booked)
        order.is_state = bool(transfer.nodes) and transfer.nodes[0].is_state
        self._under_way[transfer] = order
        order.done.callbacks.append(lambda event: self._landed(transfer, there + len(sources), there, event))
        return order.done

    def _order_copy(
        self, engine: int, gpu_slots: np.ndarray, host_slots: np.ndarray, *, is_load: bool, of_states: bool = False, **booked: Any
    ) -> UnderWay:
        """Order a copy between the GPUs of an engine and the host's pool."""
        number, done = self.book.enter(parties=self.ranks, **booked)
        order = CopyOrder(
            number=number,
            is_load=is_load,
            gpu_slots=gpu_slots,
            host_slots=host_slots,
            of_states=of_states,
            after=self._state_orders_of(engine, gpu_slots, in_own_pool=of_states),
        )
        ranks = self._gpus_of(engine)
        for rank in ranks:
            rank.copy(order)
        return UnderWay(number, ranks, done)

    def _order_disk(
        self, slots: np.ndarray, host_slots: np.ndarray, page_ids: np.ndarray, *, is_read: bool, **booked: Any
    ) -> UnderWay:
        """Order a copy between the disk and the host's pool."""
        number, done = self.book.enter(**booked)
        link, (sources, targets) = self.disk_links[is_read], (slots, host_slots) if is_read else (host_slots, slots)
        link.send(Flight(number=number, sources=sources, targets=targets, page_ids=page_ids))
        return UnderWay(number, [link], done)

    def _pass(self, transfer: Transfer, gpu_slots: np.ndarray, disk_slots: np.ndarray) -> Event:
        """Copy pages between a GPU and the disk directly below it."""
        gpu = transfer.source if transfer.goes_down else transfer.target
        passing = Passing(gpu=gpu.owner, gpu_slots=gpu_slots, disk_slots=disk_slots, page_ids=page_ids_of(transfer))
        meter, asked = self._meter(transfer.source, transfer.target), len(gpu_slots) * self.page_bytes
        meter.ask(asked)
        done = self.env.process(self.passages[not transfer.goes_down].carry(passing))

        def landed(event: Event) -> None:
            del self._under_way[transfer]
            arrived: Any = event.value
            self._count(transfer.name, arrived)
            transfer.has_fault = not transfer.goes_down and passing.is_short
            meter.book(passing.began_s, self.env.now, arrived * self.page_bytes, asked, request_of(transfer))

        done.callbacks.append(landed)
        self._under_way[transfer] = UnderWay(-1, [passing], done)
        return done

    def _order_load(self, passing: Passing, part: slice, host_slots: np.ndarray) -> UnderWay:
        return self._order_copy(passing.gpu, passing.gpu_slots[part], host_slots, is_load=True)

    def _order_store(self, passing: Passing, part: slice, host_slots: np.ndarray) -> UnderWay:
        return self._order_copy(passing.gpu, passing.gpu_slots[part], host_slots, is_load=False)

    def _order_read(self, passing: Passing, part: slice, host_slots: np.ndarray) -> UnderWay:
        return self._order_disk(passing.disk_slots[part], host_slots, passing.page_ids[part], is_read=True)

    def _order_write(self, passing: Passing, part: slice, host_slots: np.ndarray) -> UnderWay:
        return self._order_disk(passing.disk_slots[part], host_slots, passing.page_ids[part], is_read=False)

    def follows(self, load: Transfer) -> bool:
        """Pages of a disk arrive whole, and some may not arrive at all."""
        return load.source.level != DISK

    def _landed(self, transfer: Transfer, pages: int, there: int, event: Event) -> None:
        order = self._under_way.pop(transfer)
        answer: Any = event.value
        arrived: int = answer if isinstance(answer, int) else min(answer)
        self._count(transfer.name if transfer.target.slot_bytes is None else f"{transfer.name} states", max(0, arrived - there))
        transfer.has_fault = transfer.source.level == DISK and arrived < pages and not order.is_cancelled

    def cancel(self, transfer: Transfer) -> None:
        if (order := self._under_way.get(transfer)) is not None:
            order.cancel()

    def _order_states(self, engine: int) -> None:
        """Order the copies of states that the cache's decisions require, before anything else uses their slots."""
        states = self.pages[engine].states
        if states is None or not states.pending:
            return
        copies = states.taken()
        number, done = self.book.enter()
        slots = np.concatenate([copy.saved for copy in copies])
        self._state_orders[number] = engine, states.in_own_pool, slots
        done.callbacks.append(lambda _: self._states_copied(number))
        self._gpus_of(engine)[0].copy_states(StateOrder(number=number, copies=copies))

    def _states_copied(self, number: int) -> None:
        del self._state_orders[number]

    def _state_orders_of(self, engine: int, slots: np.ndarray, *, in_own_pool: bool) -> list[int]:
        """Return the orders for states under way that read or write some of these slots."""
        self._order_states(engine)
        return [
            number
            for number, (owner, is_own, used) in self._state_orders.items()
            if owner == engine and is_own == in_own_pool and np.isin(used, slots).any()
        ]

    def send_pages(self, from_engine: int, to_engine: int, sources: np.ndarray, targets: np.ndarray, request: int = -1) -> Event:
        """Copy pages from one engine's GPU tier to another's. The event's value is the number that arrived, all or none.

        The lists have one slot per page. The receiver verifies a page when a request first uses it, like any other.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} pages cannot go to {len(targets)} slots")
        meter = self.meters.setdefault(("gpu-gpu", from_engine), Meter(self.rates.memory_bytes_per_s))
        number, done = self.book.enter(
            parties=self.ranks, meter=meter, pages=len(sources), page_bytes=self.page_bytes, request=request
        )
        for peer, gpu in enumerate(self._gpus_of(from_engine), to_engine * self.ranks):
            gpu.send(SendOrder(number=number, peer=peer, sources=sources, targets=targets))
        done.callbacks.append(lambda event: self._count("gpu-gpu", event.value))
        return done

    def steps_done(self, work: Work, elapsed_s: float) -> int:
        return 0

    def hand_over(self, send: Send) -> Event:
        """Send what is left of a computed prompt's KV, which is all of it: layers are sent once the whole prompt is computed."""
        assert send.source is not None
        pages = slice(send.next_token // self.page_tokens, -(-send.tokens // self.page_tokens))
        sources, targets = slots_of(send.source)[pages], slots_of(send.target)[pages]
        return self.send_pages(send.sender, send.receiver, sources, targets, send.target.request.index)

    def withdraw(self, send: Send) -> None:
        """Do nothing: one of the processes is gone, and what the other one sends or receives is soon over."""

    def _places(self, transfer: Transfer, tier: Tier) -> np.ndarray:
        """Return the slots of a transfer's pages in a tier; those of the CPU tiers follow each other in the host's pool."""
        slots, unit = slots_in(transfer, tier.index), tier.unit_pages
        return slots + tier.owner * (tier.pool.capacity // unit * unit) if tier.level == CPU else slots

    def _count(self, link: str, pages: int) -> None:
        self.moved_pages[link] = self.moved_pages.get(link, 0) + pages

    def _gpus_of(self, engine: int) -> Sequence[Gpu]:
        return self.gpus[engine * self.ranks : (engine + 1) * self.ranks]

    def _meter(self, source: Tier, target: Tier) -> Meter:
        """Return the meter of the link from one tier to another: that of a GPU, or of a disk below host memory."""
        levels = source.level, target.level
        key = f"{source.name}-{target.name}", (source if levels in ((GPU, CPU), (GPU, DISK), (DISK, CPU)) else target).owner
        if (meter := self.meters.get(key)) is None:
            spec = self.rates
            rates = {(GPU, CPU): spec.device_to_host_bytes_per_s, (CPU, GPU): spec.host_to_device_bytes_per_s}
            of_disk = spec.disk_read_bytes_per_s if source.level == DISK else spec.disk_write_bytes_per_s
            meter = self.meters[key] = Meter(rates.get(levels, of_disk))
        return meter

    def queued_s(self, edge: Edge) -> float:
        return self._meter(edge.lower, edge.upper).queued_s()

    # Steps

    def compute(self, work: Work, loads: list[Transfer]) -> Event:
        pages, gpus = self.pages[work.engine], self._gpus_of(work.engine)
        self._order_states(work.engine)
        number, done = self.book.enter(parties=self.ranks)
        awaited = [self._under_way[load] for load in loads if load in self._under_way]
        if awaited:
            self._note_stall(work, awaited, done)
        else:
            if self.steps.counts_repeated:
                work.count_repeated(self.page_tokens)
            began_s = self.env.now
            done.callbacks.append(lambda event: self._note_step(work, event, began_s))
        order = StepOrder(
            number=number,
            chunks=pages.chunks(work),
            decodes=pages.decodes(work),
            loads=[load.number for load in awaited if not load.is_state],
            state_loads=[load.number for load in awaited if load.is_state],
            steps=work.max_steps,
        )
        for gpu in gpus:
            gpu.compute(order)
        if work.stop is not None and work.max_steps > 1:
            self._stop_after(work.stop, number, gpus)
        return done

    def _note_step(self, work: Work, done: Event, began_s: float) -> None:
        steps: Any = done.value
        if isinstance(steps, int) and steps > 0:
            self.steps.add(work, steps, began_s, self.env.now)

    def _note_stall(self, work: Work, awaited: Sequence[UnderWay], done: Event) -> None:
        """Set ``work.stalled_s``: the seconds from now until the last of the loads has landed, or the step has ended."""
        began_s, left = self.env.now, len(awaited)

        def landed(_: Event) -> None:
            nonlocal left
            left -= 1
            if not left and not done.processed:
                work.stalled_s = self.env.now - began_s

        def ended(_: Event) -> None:
            if left:
                work.stalled_s = self.env.now - began_s

        for load in awaited:
            load.done.callbacks.append(landed)
        done.callbacks.append(ended)

    def _stop_after(self, stop: Event, number: int, gpus: Sequence[Gpu]) -> None:
        """Stop a leap when an event occurs."""

        def end(_: Event) -> None:
            if self.book.is_open(number):
                for gpu in gpus:
                    gpu.stop(number)

        if stop.processed:
            end(stop)
        else:
            stop.callbacks.append(end)

    # The loss of a GPU

    def on_loss(self, lost: Callable[[int], None]) -> None:
        self.on_worker_lost = lost

    def _lost(self, gpu: int) -> None:
        self.lost_gpus.append(gpu)
        lost_engines = {lost // self.ranks for lost in self.lost_gpus}
        if self.on_worker_lost is None or len(lost_engines) == len(self.pages):
            raise self.gpus[gpu].loss()
        engine = gpu // self.ranks
        first = engine * self.ranks
        others = [number for number in range(first, first + self.ranks) if number not in self.lost_gpus]
        for number in others:
            self.gpus[number].abandon()
        if len(others) == self.ranks - 1:
            self.on_worker_lost(engine)

    # The record

    def link_use(self) -> list[LinkUse]:
        used = [replace(meter.used(), name=name, owner=owner) for (name, owner), meter in self.meters.items()]
        return [use for use in used if use.transfers]

    def findings(self) -> dict[str, Any]:
        """Return pages and states moved and verified, wrong words, disk faults, how far event handling fell behind the clock, and
        the durations of steps.

        What a lost GPU has verified is not known.
        """
        reports = []
        for number, gpu in enumerate(self.gpus):
            if number not in self.lost_gpus:
                try:
                    reports.append(gpu.report())
                except GpuLost:
                    self.lost_gpus.append(number)
        return {
            "device": reports[0].device if reports else self.device,
            "gpus": len(self.gpus),
            "lost_gpus": sorted(self.lost_gpus),
            "verified_pages": sum(report.verified_pages for report in reports) // self.ranks,
            "wrong_words": sum(report.wrong_words for report in reports),
            "wrong_pages": sum(report.wrong_pages for report in reports),
            "verified_states": sum(report.verified_states for report in reports),
            "wrong_states": sum(report.wrong_states for report in reports),
            "page_moves": {name: pages for name, pages in self.moved_pages.items() if pages},
            "restored_pages": self.restored_pages,
            "disk_faults": {} if self.disk is None else {name: count for name, count in self.disk.faults.items() if count},
            "most_behind_s": self.clock.most_behind_s,
            "steps": self.steps.rows(),
        }

    def close(self) -> None:
        """End the threads and processes and free the memory; the disk file stays unless it is in the scratch folder.

        This is not left to the garbage collector, because the next job of a sweep needs the memory.
        """
        has_ended = [self.close_gpus(), *[link.close() for link in self.disk_links.values()]]
        if self.disk is not None:
            self.disk.close()
        if all(has_ended):
            for host in self.hosts:
                host.close()
        remove(self.scratch)


def one_or_all(values: list[int], there: int = 0) -> int | list[int]:
    """Return the pages that arrived: one number, or one per rank. If any did, so many more were ``there`` before."""
    pages = [value + there if value else 0 for value in values]
    return pages[0] if len(pages) == 1 else pages


def page_ids_of(transfer: Transfer) -> np.ndarray:
    """Return the ids of a transfer's pages, in copy order."""
    return ids_of(tuple(extent for node in transfer.nodes for extent in node.runs))


def remove(folder: Path | None) -> None:
    """Remove a folder and its content, if one is given."""
    if folder is not None:
        rmtree(folder, ignore_errors=True)


def slots_in(transfer: Transfer, tier: int) -> np.ndarray:
    """Return the slots of a transfer's pages in a tier, in copy order."""
    return np.concatenate([NOTHING, *(node.slots[tier] for node in transfer.nodes)])
