"""Channels: bytes over a rate, first come first served or in equal shares, alone or with others that take their part."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.substrate.simulated.clock import VirtualClock
from kvsim.substrate.simulated.links import Channel, Flow, Total

Plan = list[tuple[float, float]]
"""Transfers as (time of asking, bytes)."""

Totals = Sequence[tuple[float, tuple[int, ...]]]


def seconds(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-6)


class Bench:
    """Channels, by default one of 10 bytes a second, and what happens on them when.

    ``totals`` has pairs of a rate and the numbers of the channels that share it.
    """

    def __init__(self, *rates: float, totals: Totals = (), is_shared: bool = False, latency_s: float = 0.0) -> None:
        self.env = VirtualClock()
        self.channels = [Channel(self.env.agenda, rate, latency_s, is_shared=is_shared) for rate in rates or (10.0,)]
        for total, among in totals:
            Total(total, *[self.channels[number] for number in among])
        self.flows: dict[str, Flow] = {}
        self.ended: dict[str, tuple[float, float]] = {}
        """When each transfer ended, and how many bytes had arrived."""

    def send(self, name: str, at: float, n_bytes: float, *, channel: int = 0) -> None:
        def start(_: object) -> None:
            self.flows[name] = flow = self.channels[channel].send(n_bytes)
            flow.event.callbacks.append(lambda event: self.ended.update({name: (self.env.now, event.value)}))

        self.env.timeout(at).callbacks.append(start)

    def cancel(self, name: str, at: float, *, channel: int = 0) -> None:
        self.env.timeout(at).callbacks.append(lambda _: self.channels[channel].cancel(self.flows[name]))

    def run(self) -> dict[str, tuple[float, float]]:
        self.env.run()
        return self.ended

    def ends(self) -> list[float]:
        """When the transfers ended, in the order in which they were made."""
        self.run()
        return [self.ended[name][0] for name in self.flows]


def test_latency_delays_the_end_but_not_the_next_transfer() -> None:
    bench = Bench(latency_s=0.5)
    bench.send("a", 0, 50)
    bench.send("b", 0, 50)
    assert bench.ends() == seconds([5.5, 10.5])


def test_a_channel_is_busy_until_the_last_byte_has_arrived() -> None:
    bench = Bench(latency_s=0.5)
    bench.send("a", 0, 50)
    bench.send("b", 0, 50)
    bench.send("c", 20, 10)
    bench.run()
    use = bench.channels[0].used()
    assert use.busy_s == seconds(10.5 + 1.5)
    assert use.intervals[:, :2].ravel().tolist() == seconds([0, 5.5, 5.5, 10.5, 20, 21.5]), "one after another"


@pytest.mark.parametrize("is_shared", [False, True])
def test_nothing_to_carry_takes_no_time(is_shared: bool) -> None:
    bench = Bench(is_shared=is_shared)
    bench.send("a", 1, 0)
    bench.send("b", 2, 20)
    bench.send("c", 3, 0)
    assert bench.run()["a"] == (1, 0)
    assert bench.ended["b"] == seconds((4, 20))
    assert bench.ended["c"] == seconds((3 if is_shared else 4, 0))
    assert bench.channels[0].used().transfers == 3


def test_cancelling_twice_or_too_late_does_nothing() -> None:
    bench = Bench()
    bench.send("a", 0, 50)
    bench.cancel("a", 2)
    bench.cancel("a", 3)
    bench.send("b", 10, 10)
    bench.cancel("b", 12)
    assert bench.run() == {"a": (2, 20), "b": (11, 10)}


def test_intervals_are_in_order_of_start() -> None:
    bench = Bench(is_shared=True)
    bench.send("long", 0, 50)
    bench.send("short", 2, 10)
    bench.run()
    assert bench.channels[0].used().intervals.tolist() == [[0, 6, 50, -1], [2, 4, 10, -1]]


# --- against a slow simulation ---


class Fluid:
    """All channels in the plainest way: all rates are constant until something happens; then everything is reckoned anew."""

    def __init__(
        self, plans: list[Plan], cancels: dict[tuple[int, int], float], rates: list[float], totals: Totals, shared: bool
    ) -> None:
        self.left = [[float(n_bytes) for _, n_bytes in plan] for plan in plans]
        self.arrivals = [[at for at, _ in plan] for plan in plans]
        self.cancels = cancels
        self.rates = rates
        self.totals = totals
        self.is_shared = shared
        self.ends: dict[tuple[int, int], float] = {}
        self.busy = [0.0] * len(rates)
        self.now = 0.0

    def open(self, channel: int) -> list[int]:
        """Transfers that have been asked for and not ended."""
        flows = [at for at, asked in enumerate(self.arrivals[channel]) if asked <= self.now and (channel, at) not in self.ends]
        return sorted(flows, key=lambda flow: (self.arrivals[channel][flow], flow))

    def speeds(self) -> dict[tuple[int, int], float]:
        queues = [self.open(channel) for channel in range(len(self.rates))]
        speeds = {}
        for channel, queue in enumerate(queues):
            rate = self.rates[channel]
            for total, among in self.totals:
                busy = [other for other in among if queues[other]]
                if channel in among and len(busy) > 1:
                    rate = min(rate, self.rates[channel] * total / sum(self.rates[other] for other in busy))
            served = queue if self.is_shared else queue[:1]
            speeds |= {(channel, flow): rate / len(served) for flow in served}
        return speeds

    def run(self) -> None:
        times = sorted({at for plan in self.arrivals for at in plan} | set(self.cancels.values()))
        while True:
            self.now_end()
            speeds = self.speeds()
            later = [at for at in times if at > self.now]
            ends = [self.now + self.left[channel][flow] / speed for (channel, flow), speed in speeds.items()]
            if not later and not ends:
                return
            moment = min(later[:1] + ends)
            for (channel, flow), speed in speeds.items():
                self.left[channel][flow] -= speed * (moment - self.now)
            for channel in {channel for channel, _ in speeds}:
                self.busy[channel] += moment - self.now
            self.now = moment

    def now_end(self) -> None:
        """Note what has ended by now."""
        for channel, flows in enumerate(self.left):
            for flow, left in enumerate(flows):
                key = (channel, flow)
                asked = self.arrivals[channel][flow] <= self.now
                if asked and key not in self.ends and (left <= 1e-9 or self.cancels.get(key, 1e9) <= self.now):
                    self.ends[key] = self.now


TIMES = st.integers(0, 30)
PLANS = st.lists(st.tuples(TIMES, st.integers(1, 100)), max_size=6)


TOTALS = st.lists(
    st.tuples(st.sampled_from([8.0, 10.0, 15.0, 50.0]), st.sets(st.integers(0, 2), min_size=2).map(tuple)), max_size=3
)


@settings(max_examples=200)
@given(
    plans=st.lists(PLANS, min_size=3, max_size=3),
    cancels=st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 5)), st.floats(0.1, 40.0), max_size=3),
    rates=st.tuples(st.just(10.0), st.sampled_from([7.0, 10.0, 13.0]), st.sampled_from([2.0, 10.0])),
    totals=TOTALS,
    is_shared=st.booleans(),
)
def test_channels_agree_with_a_slow_simulation(
    plans: list[Plan], cancels: dict[tuple[int, int], float], rates: tuple[float, ...], totals: Totals, is_shared: bool
) -> None:
    cancels = {
        key: at
        for key, at in cancels.items()
        if key[1] < len(plans[key[0]]) and at > plans[key[0]][key[1]][0] and at != round(at)
    }
    fluid = Fluid(plans, cancels, list(rates), totals, is_shared)
    fluid.run()
    bench = Bench(*rates, totals=totals, is_shared=is_shared)
    for channel, plan in enumerate(plans):
        for flow, (at, n_bytes) in enumerate(plan):
            bench.send(f"{channel} {flow}", at, n_bytes, channel=channel)
    for (channel, flow), at in cancels.items():
        bench.cancel(f"{channel} {flow}", at, channel=channel)
    bench.run()
    assert len(bench.ended) == sum(map(len, plans))
    for (channel, flow), end in fluid.ends.items():
        arrived = plans[channel][flow][1] - fluid.left[channel][flow]
        assert bench.ended[f"{channel} {flow}"] == seconds((end, arrived))
    for channel, plan in enumerate(plans):
        use = bench.channels[channel].used()
        carried = sum(n_bytes for _, n_bytes in plan) - sum(fluid.left[channel])
        assert use.bytes == pytest.approx(carried, abs=len(plan))
        assert use.intervals[:, 2].sum() == seconds(carried)
        assert use.busy_s == seconds(fluid.busy[channel])
        assert use.busy_s == seconds(covered(use.intervals))


def covered(intervals: np.ndarray) -> float:
    """Seconds during which at least one interval holds."""
    total, until = 0.0, -1.0
    for start, end, _, _ in intervals.tolist():
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_channel_knows_how_long_it_takes_to_carry_what_it_was_given(is_shared: bool) -> None:
    bench = Bench(is_shared=is_shared, latency_s=1.0)
    bench.send("a", 0, 50)
    bench.send("b", 1, 30)
    bench.send("c", 2, 40)
    bench.cancel("c", 3)
    left: dict[float, float] = {}
    for at in (0.0, 0.5, 1.5, 2.5, 7.0, 20.0):
        bench.env.timeout(at + 1e-9).callbacks.append(lambda _, at=at: left.update({at: bench.channels[0].queued_s()}))
    bench.run()
    # 12 s of bytes are given, of which c takes back 4 s (fifo) or, shared, what its third of the second from 2 to 3 left of it.
    after = 8.0 if not is_shared else 8.0 + 1 / 3
    assert left == seconds({0.0: 5.0, 0.5: 4.5, 1.5: 6.5, 2.5: 9.5, 7.0: after - 7.0, 20.0: 0.0})
