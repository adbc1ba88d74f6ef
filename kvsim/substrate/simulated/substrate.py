"""The simulated substrate: links, disk and compute on SimPy's virtual clock."""

from math import isnan
from typing import Any

from simpy import Environment, Event

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.transfer import Transfer
from kvsim.engine.outcome import LinkUse
from kvsim.engine.substrate import Work
from kvsim.hardware import HardwareSpec
from kvsim.model import ModelSpec
from kvsim.substrate.simulated.compute import step_times
from kvsim.substrate.simulated.links import Channel, Flow, Total
from kvsim.substrate.simulated.ranks import Ranks
from kvsim.substrate.simulated.warmth import Warmth


@mypyc_attr(allow_interpreted_subclasses=True)
class SimulatedSubstrate:
    """Simulates a channel for each direction between two tiers, and the duration of steps on the GPU.

    Rates are the machine's, or those of its curves at the run's page size. Between disk and GPU, bytes pass the disk and the
    host link at the same time: at the rate of the slower one, after both latencies.
    """

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, page_tokens: int, *, links: str, seed: int = 0) -> None:
        self.env = Environment()
        self.page_bytes = model.page_bytes(page_tokens)
        self.layers = model.layers
        self.steps = step_times(model, hardware)
        self.warmth = Warmth(hardware)
        fragment_bytes = self.page_bytes / model.attention_layers / hardware.gpus
        self.channels = self._channels(hardware, fragment_bytes, links == "shared")
        self.ranks = Ranks(hardware, seed) if hardware.rank_jitter or hardware.rank_faults else None
        """None: all ranks are alike and move the same pages at any time."""
        self.flows: dict[Transfer, Flow] = {}

    def _channels(self, hardware: HardwareSpec, fragment_bytes: float, is_shared: bool) -> dict[str, Channel]:
        (down, down_s), (up, up_s), total = self._host_link(hardware, fragment_bytes)
        read, write, disk_s = hardware.disk_read_bytes_per_s, hardware.disk_write_bytes_per_s, hardware.disk_latency_s
        if disk := hardware.disk_curves:
            read, write = disk.read_bytes_per_s(self.page_bytes), disk.write_bytes_per_s(self.page_bytes)
        rates = {
            "cpu-gpu": (down, down_s),
            "gpu-cpu": (up, up_s),
            "disk-cpu": (read, disk_s),
            "cpu-disk": (write, disk_s),
            "disk-gpu": (min(read, down), disk_s + down_s),
            "gpu-disk": (min(write, up), disk_s + up_s),
        }
        channels = {name: Channel(self.env, *rate, is_shared=is_shared) for name, rate in rates.items()}

        def share(bytes_per_s: float, *names: str) -> None:
            Total(bytes_per_s, *[channels[name] for name in names])

        share(total, "cpu-gpu", "gpu-cpu", "disk-gpu", "gpu-disk")
        share(down, "cpu-gpu", "disk-gpu")
        share(up, "gpu-cpu", "gpu-disk")
        if disk and (disk_total := disk.total_bytes_per_s(self.page_bytes)):
            share(disk_total, "disk-cpu", "cpu-disk", "disk-gpu", "gpu-disk")
        return channels

    @staticmethod
    def _host_link(hardware: HardwareSpec, fragment_bytes: float) -> tuple[tuple[float, float], tuple[float, float], float]:
        """Return rate and latency to the GPU, rate and latency to the host, and the total rate while both directions are busy."""
        if (links := hardware.link_curves) is None:
            to_device = hardware.total_host_to_device_bytes_per_s, hardware.host_latency_s
            to_host = hardware.total_device_to_host_bytes_per_s, hardware.host_latency_s
            return to_device, to_host, hardware.total_both_directions_bytes_per_s
        (down, down_s), (up, up_s) = links.to_device(fragment_bytes), links.to_host(fragment_bytes)
        gpus = hardware.gpus
        return (down * gpus, down_s), (up * gpus, up_s), links.total_bytes_per_s(fragment_bytes) * gpus

    def copy(self, transfer: Transfer) -> Event:
        """Implement the contract. Pages arrive in order, so a cancelled copy has brought the first pages completely."""
        slot_bytes = transfer.target.slot_bytes or self.page_bytes
        if self.ranks is None:
            flow = self.channels[transfer.name].send(transfer.pages * slot_bytes, slot_bytes)
        else:
            flow = self._send_by_rank(transfer, slot_bytes, self.ranks)
        self.flows[transfer] = flow

        def arrived(_: Event) -> None:
            del self.flows[transfer]
            if flow.split is not None:
                transfer.has_fault = flow.split.failed and not transfer.goes_down and not isnan(flow.started_s)

        flow.event.callbacks.append(arrived)
        return flow.event

    def _send_by_rank(self, transfer: Transfer, slot_bytes: int, ranks: Ranks) -> Flow:
        """Send a transfer that occupies its link until the slowest rank has ended."""
        pages, channel = transfer.pages, self.channels[transfer.name]
        split = ranks.split(transfer.name, pages, slot_bytes)
        n_bytes = pages * slot_bytes if split is None else split.work_bytes
        return channel.send(n_bytes, slot_bytes, split)

    def cancel(self, transfer: Transfer) -> None:
        if transfer in self.flows:
            self.channels[transfer.name].cancel(self.flows[transfer])

    def queued_s(self, link: str) -> float:
        return self.channels[link].queued_s()

    def compute(self, work: Work, loads: list[Transfer]) -> Event:
        done = self.env.event()
        flows = [self.flows[load] for load in loads if load in self.flows] if loads else []
        if flows:
            self._compute_behind(work, flows, done)
        elif work.max_steps == 1:
            return self.env.timeout(self._step_s(work), 1)
        else:
            self._leap(work, done)
        return done

    def _step_s(self, work: Work) -> float:
        """Return the seconds of one step that begins now."""
        seconds = self.steps.leap_s(work, 1)
        return self.warmth.prefill_s(self.env.now, seconds) if work.chunks else seconds

    def _leap(self, work: Work, done: Event) -> None:
        """Take several steps in one event, unless ``work.stop`` triggers: then the leap ends at the next step boundary."""
        began = self.env.now

        def stop(_: Event) -> None:
            if not done.triggered:
                steps = self.steps.steps_by(work, self.env.now - began, work.max_steps)
                self._end_after(began + self.steps.leap_s(work, steps) - self.env.now, done, steps)

        self._end_after(self.steps.leap_s(work, work.max_steps), done, work.max_steps)
        if work.stop is not None:
            if work.stop.processed:
                stop(work.stop)
            else:
                work.stop.callbacks.append(stop)

    def _end_after(self, seconds: float, done: Event, steps: int) -> None:
        """Trigger ``done`` with ``steps`` after some seconds, unless it has triggered before."""

        def end(_: Event) -> None:
            if not done.triggered:
                done.succeed(steps)

        self.env.timeout(max(0.0, seconds)).callbacks.append(end)

    def _compute_behind(self, work: Work, flows: list[Flow], done: Event) -> None:
        """Take one step while its loads land. Layers land evenly, so the step ends at the latest of three times.

        start + all compute; first layer landed + all compute; last layer landed + one layer's compute
        """
        compute_s, began, waiting = self._step_s(work), self.env.now, len(flows)

        def landed(_: Event) -> None:
            nonlocal waiting
            waiting -= 1
            if waiting:
                return
            end = began + compute_s
            for flow in flows:
                first = flow.started_s + (flow.ended_s - flow.started_s) / self.layers
                end = max(end, first + compute_s, flow.ended_s + compute_s / self.layers)
            self._end_after(end - self.env.now, done, 1)

        for flow in flows:
            flow.event.callbacks.append(landed)

    def link_use(self) -> dict[str, LinkUse]:
        return {name: channel.used() for name, channel in self.channels.items() if channel.use.transfers}

    def findings(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
