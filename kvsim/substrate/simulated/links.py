"""Simulates links and disks by arithmetic on a virtual clock."""

from array import array
from collections import deque
from heapq import heappop, heappush
from typing import Any

import numpy as np

from kvsim.engine.link_use import LinkUse
from kvsim.substrate.simulated.agenda import Agenda, Happening, Moment
from kvsim.substrate.simulated.ranks import Split


class Flow:
    """Bytes on their way through a channel. ``event`` triggers when they have arrived; its value is the number that did."""

    __slots__ = (
        "bytes", "event", "unit_bytes", "split", "started_s", "ended_s", "joined_at", "is_cancelled", "request", "row"
    )  # fmt: skip

    def __init__(
        self, n_bytes: float, event: Happening, unit_bytes: int | None = None, split: Split | None = None, request: int = -1
    ) -> None:
        self.bytes = n_bytes
        self.request = request
        """Index of the request that the bytes belong to, for the record; -1 for none."""
        self.unit_bytes = unit_bytes
        self.split = split
        self.event = event
        self.started_s = self.ended_s = float("nan")
        """Times at which the first byte leaves and the last one arrives."""
        self.joined_at = 0.0
        self.is_cancelled = False
        self.row = -1
        """Where its row of ``LinkUse.intervals`` begins, once its last byte has left."""


class _Timer(Moment):
    """The end of the flow of a channel that ends first; void if another one has been set since."""

    __slots__ = ("channel", "number")

    def __init__(self, channel: "Channel", number: int) -> None:
        self.channel = channel
        self.number = number

    def happen(self) -> None:
        if self.number == self.channel.timers:
            self.channel.first_ends()


class Channel:
    """One direction of a link or a disk.

    fifo     flows are served one after another, each at full speed
    shared   all flows are served at once, in equal shares (processor sharing in virtual time: one event per flow,
             whatever their number)

    Channels that share a total (``Total``) slow each other down while several of them are busy.
    """

    def __init__(self, agenda: Agenda, bytes_per_s: float, latency_s: float, *, is_shared: bool = False) -> None:
        self.agenda = agenda
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.is_shared = is_shared
        self.use = LinkUse()
        self.totals: list[tuple[Total, int]] = []
        """What it shares with other channels, and its place among those of each."""
        self._queue: deque[Flow] | None = None
        """Those that wait for the others to leave; None before the first one."""
        self._active: list[tuple[float, int, Flow]] = []
        self._served = 0.0
        """Bytes that a flow active since the beginning would have been served so far."""
        self._rate = 0.0
        self._at = 0.0
        self._flows = 0
        self._targets = 0.0
        """Sum over the active flows of the value of ``_served`` at which each ends."""
        self._queued_bytes = 0.0
        self.timers = 0
        """Number of timers set so far; only the last one counts."""
        self._rows = array("d")
        """Those of ``LinkUse.intervals``, one after another, in the order in which flows left."""
        self._arrived_s = 0.0
        """When the last byte of the flow that left last arrives. With fifo, the next interval begins no earlier."""

    def send(self, n_bytes: float, unit_bytes: int | None = None, split: Split | None = None, request: int = -1) -> Flow:
        """Queue bytes of a request, if they belong to one; the flow's event triggers ``latency_s`` after the last byte has left.

        Its value is the number of bytes that arrived or, with ``unit_bytes``, of whole units. A ``split`` occupies the channel
        for its ``work_bytes``, to be given as ``n_bytes``, and says what its ranks have moved by then.
        """
        flow = Flow(n_bytes, Happening(self.agenda), unit_bytes, split, request)
        if self._active and not self.is_shared:
            if self._queue is None:
                self._queue = deque()
            self._queue.append(flow)
            self._queued_bytes += n_bytes
        else:
            self._advance()
            self._activate(flow)
        return flow

    def cancel(self, flow: Flow) -> None:
        """Stop a flow: its event triggers now, with the bytes that have left so far."""
        if flow.event.processed or flow.is_cancelled:
            return
        flow.is_cancelled = True
        if self._queue and flow in self._queue:
            self._queue.remove(flow)
            self._queued_bytes -= flow.bytes
            _end(flow, 0.0)
            return
        self._advance()
        entry = next((entry for entry in self._active if entry[2] is flow), None)
        if entry is None:
            self._end_now(flow)
            return
        self._active.remove(entry)
        self._active.sort()
        n_bytes = self._served - flow.joined_at
        self._leave(flow, n_bytes, self.agenda.now)
        _end(flow, n_bytes)

    def queued_s(self) -> float:
        """Return the seconds until everything sent so far has left, at the current rate."""
        if not self._active:
            return 0.0
        self._advance()
        return (self._targets - len(self._active) * self._served + self._queued_bytes) / self._rate

    def _advance(self) -> None:
        """Update ``_served`` to the current time."""
        now = self.agenda.now
        if self._active:
            self._served += (now - self._at) * self._rate / len(self._active)
        self._at = now

    def _activate(self, flow: Flow) -> None:
        was_idle = not self._active
        flow.started_s, flow.joined_at = self._at, self._served
        self._flows += 1
        self._targets += self._served + flow.bytes
        heappush(self._active, (self._served + flow.bytes, self._flows, flow))
        if was_idle:
            for total, place in self.totals:
                if place not in total.busy:  # otherwise, one flow follows another
                    total.join(place, self)
            self._notify_others()
        self._set_timer()

    def _notify_others(self) -> None:
        """Adjust the rates of busy channels that share a total, after this one has become busy or idle."""
        own = 1 if self._active else 0
        for total, _ in self.totals:
            if total.count > own:
                for channel in total.busy.values():
                    if channel is not self and channel._rate != channel._current_rate():
                        channel._advance()
                        channel._set_timer()

    def _current_rate(self) -> float:
        """Return the rate in bytes per second while the same channels are busy."""
        part = 1.0
        for total, _ in self.totals:
            if total.part < part:
                part = total.part
        return self.bytes_per_s * part

    def _set_timer(self) -> None:
        """Set a timer for the flow that ends first; earlier timers become void."""
        self.timers += 1
        self._rate = self._current_rate()
        left = max(0.0, self._active[0][0] - self._served) * len(self._active) / self._rate
        self.agenda.after(left, _Timer(self, self.timers))

    def first_ends(self) -> None:
        """Let the flow leave that ends first, which it does now."""
        if not self._active:
            return
        now = self._at = self.agenda.now
        target, _, flow = heappop(self._active)
        self._served = target
        self._leave(flow, flow.bytes, now + self.latency_s)
        _end(flow, flow.bytes, self.latency_s)

    def _leave(self, flow: Flow, n_bytes: float, arrival_s: float) -> None:
        """Record a flow that has left, and serve the next one."""
        use = self.use
        self._targets = self._targets - flow.joined_at - flow.bytes if self._active else 0.0
        moved = n_bytes if flow.split is None else flow.split.moved_bytes(n_bytes)
        use.bytes += round(moved)
        use.transfers += 1
        start_s = flow.started_s if self.is_shared else min(max(flow.started_s, self._arrived_s), arrival_s)
        flow.row, self._arrived_s = len(self._rows), arrival_s
        self._rows.extend((start_s, arrival_s, moved, flow.request))
        if self._queue and not self._active:
            self._queued_bytes -= self._queue[0].bytes
            self._activate(self._queue.popleft())
        elif self._active:
            self._set_timer()
        else:
            self.timers += 1
            for total, place in self.totals:
                total.leave(place)
            self._notify_others()

    def _end_now(self, flow: Flow) -> None:
        """Trigger the callbacks of the event of a flow that has left now, instead of when its last byte arrives."""
        late, now = flow.event, self.agenda.now
        if flow.ended_s <= now:
            return
        flow.event = Happening(self.agenda)
        flow.event.callbacks, late.callbacks = late.callbacks, []
        rows, row = self._rows, flow.row
        flow.ended_s = rows[row + 1] = now
        rows[row] = min(rows[row], now)
        flow.event.succeed(late.value)

    def used(self) -> LinkUse:
        """Return what the channel has carried, which then carries nothing more.

        It is busy from a flow's first byte until the last one has arrived.
        """
        use = self.use
        rows = np.frombuffer(self._rows).reshape(-1, 4) if self._rows else use.intervals
        starts = rows[:, 0]
        is_in_order = bool((starts[1:] > starts[:-1]).all())
        use.intervals = rows if is_in_order else rows[np.lexsort(rows.T[::-1])]
        use.busy_s = covered_s(use.intervals)
        return use


class Total:
    """A limit on the total rate of several channels, such as the two directions of PCIe.

    While more than one of them is busy, each gets a part of the total in proportion to its own rate.
    """

    def __init__(self, bytes_per_s: float, *channels: Channel) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy: dict[int, Channel] = {}
        """Those that are busy, by their places among the channels, in order."""
        self.count = 0
        """Their number."""
        self.part = 1.0
        """The fraction of its own rate that each busy channel gets now."""
        for place, channel in enumerate(channels):
            channel.totals.append((self, place))

    def join(self, place: int, channel: Channel) -> None:
        """Take note that a channel has become busy."""
        self.busy[place] = channel
        self.count += 1
        if self.count > 1:
            self.busy = dict(sorted(self.busy.items()))
            self._divide()

    def leave(self, place: int) -> None:
        """Take note that a channel has become idle."""
        del self.busy[place]
        self.count -= 1
        if self.count:
            self._divide()

    def _divide(self) -> None:
        """Divide the total among those that are busy."""
        bytes_per_s = 0.0
        for channel in self.busy.values():
            bytes_per_s += channel.bytes_per_s
        self.part = min(1.0, self.bytes_per_s / bytes_per_s) if self.count > 1 else 1.0


def covered_s(intervals: np.ndarray) -> float:
    """Return the seconds covered by intervals (start_s, end_s, ...), in order of start."""
    start, end = intervals[:, 0], np.maximum.accumulate(intervals[:, 1])
    since = np.concatenate((start[:1], end[:-1]))
    return float(np.sum(np.subtract(end, np.maximum(start, since, out=since), out=since)))


def _end(flow: Flow, n_bytes: float, delay_s: float = 0.0) -> None:
    """Trigger the flow's event after ``delay_s``, with the bytes, whole units or pages by rank that have arrived."""
    event = flow.event
    flow.ended_s = event.agenda.now + delay_s
    value: Any = n_bytes
    if flow.split is not None:
        value = flow.split.arrived(n_bytes)
    elif flow.unit_bytes is not None:
        value = int((n_bytes + 0.5) // flow.unit_bytes)
    event.succeed_after(delay_s, value)
