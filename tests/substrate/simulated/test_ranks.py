"""Ranks that are not alike: each brings whole pages at its own speed, and the slowest decides when a transfer ends."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.hardware.spec import HardwareSpec, RankFault
from kvsim.substrate.simulated.clock import VirtualClock
from kvsim.substrate.simulated.links import Channel
from kvsim.substrate.simulated.ranks import Ranks, Split

PAGE = 1000
"""Bytes of a page. By default, a channel carries one page a second."""


def machine(**changes: Any) -> HardwareSpec:
    rates = ("flops_per_s", "memory_bytes_per_s", "host_to_device_bytes_per_s", "device_to_host_bytes_per_s")
    rates += ("both_directions_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")
    return HardwareSpec(**(dict.fromkeys(rates, 1.0) | {"memory_bytes": 1} | changes))


@dataclass(kw_only=True)
class Plan:
    """A transfer: when it is sent and cancelled, and what its ranks are like."""

    at: int
    pages: int
    speeds: list[Fraction]
    limits: list[int] | None = None
    cancel_at: Fraction | None = None


Results = list[tuple[float, list[int]]]
"""The end of each transfer and the pages of each rank."""


def carried(plans: list[Plan], *, pages_per_s: int = 1, is_shared: bool = False) -> tuple[Results, Channel]:
    env = VirtualClock()
    channel = Channel(env.agenda, pages_per_s * PAGE, 0.0, is_shared=is_shared)
    results: Results = [(0.0, [])] * len(plans)

    def send(number: int, plan: Plan) -> None:
        split = Split(plan.pages, PAGE, [float(speed) for speed in plan.speeds], plan.limits)
        flow = channel.send(split.work_bytes, PAGE, split)
        flow.event.callbacks.append(lambda event: end(number, plan, event.value))
        if plan.cancel_at is not None:
            env.timeout(float(plan.cancel_at) - env.now).callbacks.append(lambda _: channel.cancel(flow))

    def end(number: int, plan: Plan, value: Any) -> None:
        results[number] = env.now, [value] * len(plan.speeds) if isinstance(value, int) else value

    for number, plan in enumerate(plans):
        env.timeout(plan.at).callbacks.append(lambda _, number=number, plan=plan: send(number, plan))
    env.run()
    return results, channel


@pytest.mark.parametrize(
    ("limits", "carried_pages", "expected"),
    [
        ([8, 3], 8, True),
        ([8, 3], 6, True),
        ([8, 3], 5.9, False),  # the slow rank, at half speed, has not come to its fourth page
        ([3, 8], 5, False),  # the fast rank has failed, but what the slow one lacks comes first
        ([3, 8], 8, True),
        ([0, 8], 1, True),
        (None, 5, False),
    ],
)
def test_a_page_has_failed_if_it_is_the_first_that_some_rank_lacks(
    limits: list[int] | None, carried_pages: float, expected: bool
) -> None:
    split = Split(8, PAGE, [1.0, 0.5], limits)
    split.arrived(carried_pages * PAGE)
    assert split.failed == expected


# --- what is drawn ---


def test_ranks_that_are_alike_are_not_looked_at() -> None:
    fault = RankFault(rank=1, link="disk-cpu", speed=0.5)
    ranks = Ranks(machine(gpus=2, rank_faults=[fault]), 0)
    assert ranks.split("cpu-disk", 8, PAGE) is None
    split = ranks.split("disk-cpu", 8, PAGE)
    assert split is not None and (split.speeds, split.limits, split.work_bytes) == ([1.0, 0.5], None, 16 * PAGE)


def test_jitter_slows_every_rank_of_every_transfer_by_up_to_its_size() -> None:
    """The slowest of 4 factors from 0.5 to 1 is 0.6 on average: 1 - 0.5 * 4 / 5."""
    ranks = Ranks(machine(gpus=4, rank_jitter=0.5), 0)
    splits = [ranks.split("cpu-gpu", 10, PAGE) for _ in range(2000)]
    speeds = [split.speeds for split in splits if split is not None]
    assert len(speeds) == 2000 and all(0.5 < speed <= 1 for some in speeds for speed in some)
    assert sum(map(sum, speeds)) / 8000 == pytest.approx(0.75, abs=0.005)
    assert sum(map(min, speeds)) / 2000 == pytest.approx(0.6, abs=0.005)


def test_a_share_is_the_probability_that_a_page_fails() -> None:
    """All 3 pages of a transfer arrive with probability 0.9^3, the first alone with 0.9 * 0.1."""
    ranks = Ranks(machine(gpus=2, rank_faults=[RankFault(rank=0, link="disk-cpu", share=0.1)]), 0)
    splits = [ranks.split("disk-cpu", 3, PAGE) for _ in range(5000)]
    arrived = [3 if split is None or split.limits is None else split.limits[0] for split in splits]
    assert arrived.count(3) / 5000 == pytest.approx(0.729, abs=0.02)
    assert arrived.count(1) / 5000 == pytest.approx(0.09, abs=0.01)
    assert all(split is not None and (split.limits or [3, 3])[1] == 3 for split in splits)


def test_the_seed_decides_what_is_drawn() -> None:
    def drawn(seed: int) -> list[Any]:
        ranks = Ranks(machine(gpus=2, rank_jitter=0.3, rank_faults=[RankFault(rank=1, link="disk-cpu", share=0.2)]), seed)
        splits = [ranks.split("disk-cpu", 9, PAGE) for _ in range(5)]
        return [(split.speeds, split.limits) for split in splits if split is not None]

    assert drawn(1) == drawn(1) != drawn(2)


# --- against a slow model ---


class SlowRanks:
    """The ranks of every transfer one by one, page by page: rates are constant from one moment to the next."""

    def __init__(self, plans: list[Plan], pages_per_s: int, is_shared: bool) -> None:
        self.plans = plans
        self.pages_per_s = pages_per_s
        self.is_shared = is_shared
        self.now = Fraction(0)
        self.moved = [[Fraction(0)] * len(plan.speeds) for plan in plans]
        self.ends: dict[int, Fraction] = {}

    def limit(self, number: int, rank: int) -> int:
        plan = self.plans[number]
        return plan.pages if plan.limits is None else plan.limits[rank]

    def has_ended(self, number: int) -> bool:
        plan = self.plans[number]
        is_cancelled = plan.cancel_at is not None and plan.cancel_at <= self.now
        return is_cancelled or all(done == self.limit(number, rank) for rank, done in enumerate(self.moved[number]))

    def served(self) -> list[int]:
        """The transfers that are served now, after those that end now have been noted."""
        while True:
            open_ones = [number for number, plan in enumerate(self.plans) if plan.at <= self.now and number not in self.ends]
            open_ones.sort(key=lambda number: (self.plans[number].at, number))
            ended = [number for number in open_ones if self.has_ended(number) and self.is_due(number, open_ones)]
            if not ended:
                return open_ones if self.is_shared else open_ones[:1]
            self.ends |= dict.fromkeys(ended, self.now)

    def is_due(self, number: int, open_ones: list[int]) -> bool:
        """Whether a transfer can end: in its turn or, if it is cancelled, at any time."""
        cancel_at = self.plans[number].cancel_at
        return self.is_shared or number == open_ones[0] or (cancel_at is not None and cancel_at <= self.now)

    def run(self) -> list[tuple[Fraction, list[int]]]:
        while True:
            served = self.served()
            if len(self.ends) == len(self.plans):
                return [(self.ends[number], [int(pages) for pages in moved]) for number, moved in enumerate(self.moved)]
            rates = {
                (number, rank): self.pages_per_s * speed / len(served)
                for number in served
                for rank, speed in enumerate(self.plans[number].speeds)
                if self.moved[number][rank] < self.limit(number, rank)
            }
            moments = [Fraction(plan.at) for plan in self.plans] + [plan.cancel_at for plan in self.plans if plan.cancel_at]
            next_pages = [
                self.now + (int(self.moved[number][rank]) + 1 - self.moved[number][rank]) / rate
                for (number, rank), rate in rates.items()
            ]
            moment = min([at for at in moments if at > self.now] + next_pages)
            for (number, rank), rate in rates.items():
                self.moved[number][rank] += rate * (moment - self.now)
            self.now = moment


SPEEDS = st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(3, 4), Fraction(1, 5)])


@st.composite
def transfers(draw: st.DrawFn) -> list[Plan]:
    ranks = draw(st.integers(2, 4))
    plans = []
    for _ in range(draw(st.integers(1, 4))):
        at, pages = draw(st.integers(0, 20)), draw(st.integers(1, 30))
        fails = draw(st.booleans())
        limits = [draw(st.sampled_from([pages, draw(st.integers(0, pages))])) for _ in range(ranks)] if fails else None
        cancel_at = at + Fraction(draw(st.integers(1, 200)), 7) if draw(st.booleans()) else None
        speeds = [draw(SPEEDS) for _ in range(ranks)]
        plans.append(Plan(at=at, pages=pages, speeds=speeds, limits=limits, cancel_at=cancel_at))
    return plans


@settings(max_examples=200)
@given(plans=transfers(), is_shared=st.booleans())
def test_transfers_by_rank_agree_with_a_slow_model(plans: list[Plan], is_shared: bool) -> None:
    slow = SlowRanks(plans, 3, is_shared)
    expected = slow.run()
    results, channel = carried(plans, pages_per_s=3, is_shared=is_shared)
    for (end, pages), (slow_end, slow_pages) in zip(results, expected, strict=True):
        assert end == pytest.approx(float(slow_end), abs=1e-6)
        assert pages == slow_pages
    n_bytes = sum(float(sum(moved)) / len(moved) for moved in slow.moved) * PAGE
    assert channel.used().bytes == pytest.approx(n_bytes, abs=len(plans))
    assert not channel._active and isinstance(channel.queued_s(), float)
