"""The links of a cluster: a channel for each direction of each link, and the limits that several of them share."""

from collections.abc import Sequence

from kvsim.core.tier import DISK, GPU, Edge, Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.layout import Layout
from kvsim.engine.link_use import LinkUse
from kvsim.hardware.spec import HardwareSpec
from kvsim.hardware.tier_kinds import LEVELS
from kvsim.substrate.simulated.agenda import Agenda
from kvsim.substrate.simulated.links import Channel, Total

Rate = tuple[float, float]
"""Bytes per second, and latency in seconds."""


class Wiring:
    """The channels of all engines, found by the tiers that a transfer joins.

    Each engine has its own host link. Engines of one host share the rate of its memory, if that is limited, and all engines
    above a disk share the disk. All hosts share the remote store: one channel for its reads, one for its writes. Between disk
    and GPU, bytes pass the disk and the host link at the same time: at the rate of the slower one, after both latencies. Between
    prefill and decode engines, each engine sends and receives at the rate of the interconnect, whatever the number of engines at
    the other end.
    """

    def __init__(
        self, agenda: Agenda, hardware: HardwareSpec, page_bytes: int, layers: int, layout: Layout, mode: str, kv_copies: int = 1
    ) -> None:
        """``layers`` are those with attention; ``mode`` is ``fifo`` or ``shared``.

        ``kv_copies`` GPUs of an engine each move the same part of a page over their own links: its bytes, which count once,
        take so many times as long.
        """
        self.agenda = agenda
        self._is_shared = mode == "shared"
        self._read, self._write, disk_total = disk_rates(hardware, page_bytes)
        self._down, self._up, total = host_link(hardware, kv_copies * page_bytes / layers / hardware.stage_gpus, kv_copies)
        self._total, self._disk_total = total, disk_total
        self.state_speeds = self._state_speeds(kv_copies)
        """How many times as fast as KV a link carries recurrent states, of which GPUs have a part each, not copies."""
        self._host_bytes_per_s = (hardware.host_memory_bytes_per_s or 0.0) / kv_copies
        self._disks, self._hosts = layout.disks, layout.hosts
        self._disk_users, self._host_users = _users(layout.disks), _users(layout.hosts)
        """The engines above each disk, and those of each host."""
        self._engines: list[dict[str, Channel] | None] = [None] * layout.engines
        """The channels of each engine, by name; None until one of them, or of those that it shares a limit with, is asked for."""
        self.stores: dict[tuple[int, int], dict[str, Channel]] = {}
        """Channels between tiers below the GPUs, by the level and owner of the lower one; a disk's come with its engines'."""
        if hardware.remote is not None:
            rate = hardware.remote.page_bytes_per_s(page_bytes), hardware.remote.latency_s
            self.stores[LEVELS.index("remote"), 0] = self._remote_channels(rate)
        self.pairs = self._pairs(
            layout, (hardware.interconnect_bytes_per_s * hardware.gpus / kv_copies, hardware.interconnect_latency_s)
        )

    def _state_speeds(self, kv_copies: int) -> dict[str, float]:
        (read, _), (write, _), (down, _), (up, _) = self._read, self._write, self._down, self._up
        speeds = {
            "cpu-gpu": float(kv_copies),
            "gpu-cpu": float(kv_copies),
            "disk-gpu": min(read, kv_copies * down) / min(read, down),
            "gpu-disk": min(write, kv_copies * up) / min(write, up),
        }
        return speeds if kv_copies > 1 else {}

    def channel(self, transfer: Transfer) -> Channel:
        """Return the channel that carries a transfer."""
        return self._between(transfer.name, transfer.source, transfer.target)

    def reads(self, edge: Edge) -> Channel:
        """Return the channel that carries pages up over an edge."""
        return self._between(f"{edge.lower.name}-{edge.upper.name}", edge.lower, edge.upper)

    def _between(self, name: str, source: Tier, target: Tier) -> Channel:
        if source.level == GPU:
            return self.of_engine(source.owner)[name]
        if target.level == GPU:
            return self.of_engine(target.owner)[name]
        lower = source if source.level >= target.level else target
        return self.of_store(lower.level, lower.owner)[name]

    def of_engine(self, engine: int) -> dict[str, Channel]:
        """Return the channels of an engine, by name."""
        channels = self._engines[engine]
        return self._connect(engine) if channels is None else channels

    def of_store(self, level: int, owner: int) -> dict[str, Channel]:
        """Return the channels between tiers below the GPUs, by the level and owner of the lower one."""
        channels = self.stores.get((level, owner))
        if channels is None:
            self._connect(self._disk_users[owner][0])
            channels = self.stores[level, owner]
        return channels

    def _connect(self, engine: int) -> dict[str, Channel]:
        """Create the channels of an engine and of all that share a disk, or the limit of a host, with it. Returns its own."""
        engines = self._disk_users[self._disks[engine]]
        if self._host_bytes_per_s:
            engines = sorted({user for one in engines for user in self._host_users[self._hosts[one]]})
        for disk in sorted({self._disks[one] for one in engines}):
            self.stores[DISK, disk] = self._disk_channels(disk)
        made = {one: self._engine_channels(one, self.stores[DISK, self._disks[one]], self._total) for one in engines}
        for disk in sorted({self._disks[one] for one in engines}):
            self._limit_disk(self.stores[DISK, disk], [made[user] for user in self._disk_users[disk]])
        if self._host_bytes_per_s:
            for host in sorted({self._hosts[one] for one in engines}):
                self._limit_host([made[user] for user in self._host_users[host]])
        for one, channels in made.items():
            self._engines[one] = channels
        return made[engine]

    def used(self) -> list[LinkUse]:
        """Return what the channels have carried so far, without those that have carried nothing."""
        return [channel.used() for channel in self._all() if channel.use.transfers]

    def lanes(self) -> list[tuple[str, int]]:
        """Return the name and owner of each channel, in the order of ``used``."""
        for engine in range(len(self._engines)):
            self.of_engine(engine)
        return [(channel.use.name, channel.use.owner) for channel in self._all()]

    def _all(self) -> list[Channel]:
        groups = [group for group in self._engines if group is not None]
        channels = dict.fromkeys([channel for group in [*groups, *self.stores.values()] for channel in group.values()])
        channels.update(dict.fromkeys(self.pairs.values()))
        return list(channels)

    def _make(self, name: str, owner: int, rate: Rate) -> Channel:
        channel = Channel(self.agenda, *rate, is_shared=self._is_shared)
        channel.use.name, channel.use.owner = name, owner
        return channel

    def _disk_channels(self, disk: int) -> dict[str, Channel]:
        return {"disk-cpu": self._make("disk-cpu", disk, self._read), "cpu-disk": self._make("cpu-disk", disk, self._write)}

    def _remote_channels(self, rate: Rate) -> dict[str, Channel]:
        """Create the channels of the store that all hosts share. What comes from a disk is no faster than that is read."""
        (read, read_s), (bytes_per_s, latency_s) = self._read, rate
        rates = {"remote-cpu": rate, "cpu-remote": rate, "disk-remote": (min(read, bytes_per_s), read_s + latency_s)}
        return {name: self._make(name, 0, each) for name, each in rates.items()}

    def _engine_channels(self, engine: int, disk: dict[str, Channel], total: float) -> dict[str, Channel]:
        """Create an engine's channels, and limit them to what the host link carries in each direction and in both together."""
        (read, read_s), (write, write_s) = self._read, self._write
        (down, down_s), (up, up_s) = self._down, self._up
        rates = {
            "cpu-gpu": self._down,
            "gpu-cpu": self._up,
            "disk-gpu": (min(read, down), read_s + down_s),
            "gpu-disk": (min(write, up), write_s + up_s),
        }
        own = {name: self._make(name, engine, rate) for name, rate in rates.items()}
        channels = {"cpu-gpu": own["cpu-gpu"], "gpu-cpu": own["gpu-cpu"], **disk, **own}
        Total(total, *own.values())
        Total(down, own["cpu-gpu"], own["disk-gpu"])
        Total(up, own["gpu-cpu"], own["gpu-disk"])
        return channels

    def _limit_disk(self, own: dict[str, Channel], users: list[dict[str, Channel]]) -> None:
        """Limit all channels of a disk together, if both directions share a rate, and each direction over several engines."""
        reads = [own["disk-cpu"], *[channels["disk-gpu"] for channels in users]]
        writes = [own["cpu-disk"], *[channels["gpu-disk"] for channels in users]]
        if self._disk_total:
            Total(self._disk_total, *reads, *writes)
        if len(users) > 1:
            Total(self._read[0], *reads)
            Total(self._write[0], *writes)

    def _limit_host(self, users: list[dict[str, Channel]]) -> None:
        """Limit the host links of all engines of a host together."""
        Total(self._host_bytes_per_s, *[channels[name] for channels in users for name in ("cpu-gpu", "gpu-cpu")])

    def _pairs(self, layout: Layout, rate: Rate) -> dict[tuple[int, int], Channel]:
        """Create the channels between prefill and decode engines; each engine sends and receives at the given rate in all."""
        pairs = {pair: self._make("gpu-gpu", pair[0], rate) for pair in layout.pairs}
        for (_, receiver), channel in pairs.items():
            channel.use.receiver = receiver
        for sender in range(layout.prefill_engines):
            Total(rate[0], *[channel for pair, channel in pairs.items() if pair[0] == sender])
        for receiver in range(layout.prefill_engines, layout.engines) if pairs else ():
            Total(rate[0], *[channel for pair, channel in pairs.items() if pair[1] == receiver])
        return pairs


def _users(numbers: Sequence[int]) -> dict[int, list[int]]:
    """Return the engines by the number that is given for each, of its disk or host."""
    users: dict[int, list[int]] = {}
    for engine, number in enumerate(numbers):
        users.setdefault(number, []).append(engine)
    return users


def disk_rates(hardware: HardwareSpec, page_bytes: int) -> tuple[Rate, Rate, float]:
    """Return rate and latency of reads, the same of writes, and the total rate of both, 0 if they do not share one."""
    read, write, latency_s = hardware.disk_read_bytes_per_s, hardware.disk_write_bytes_per_s, hardware.disk_latency_s
    if (disk := hardware.disk_curves) is None:
        return (read, latency_s), (write, latency_s), 0.0
    read, write = disk.read_bytes_per_s(page_bytes), disk.write_bytes_per_s(page_bytes)
    return (read, latency_s), (write, latency_s), disk.total_bytes_per_s(page_bytes) or 0.0


def host_link(hardware: HardwareSpec, fragment_bytes: float, kv_copies: int = 1) -> tuple[Rate, Rate, float]:
    """Return rate and latency to the GPUs, rate and latency to the host, and the total rate while both directions are busy.

    Of bytes that ``kv_copies`` GPUs each move over links of their own, and that count once.
    """
    more_s = hardware.copy_overhead_s
    if (links := hardware.link_curves) is None:
        latency_s = hardware.host_latency_s + more_s
        to_device = hardware.total_host_to_device_bytes_per_s / kv_copies, latency_s
        to_host = hardware.total_device_to_host_bytes_per_s / kv_copies, latency_s
        return to_device, to_host, hardware.total_both_directions_bytes_per_s / kv_copies
    gpus = hardware.gpus / kv_copies
    (down, down_s), (up, up_s) = links.to_device(fragment_bytes), links.to_host(fragment_bytes)
    return (down * gpus, down_s + more_s), (up * gpus, up_s + more_s), links.total_bytes_per_s(fragment_bytes) * gpus
