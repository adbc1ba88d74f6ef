"""Calibration finds how a GPU warms up, from steps one after another and after rests."""

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

pytest.importorskip("torch")

from kvsim.calibration.warming import FEWEST, TimedStep, Warming, coldness, least_deviations, warming
from kvsim.hardware.curves import ComputeCurves
from kvsim.hardware.spec import HardwareSpec
from kvsim.substrate.simulated.warmth import Warmth

Bursts = list[tuple[float, float]]
ROW: Bursts = [(0.0, 1.5)]
TURNS: Bursts = [(2.0, 0.1), (0.05, 0.3), (0.4, 0.05), (0.02, 0.8), (0.1, 0.2), (0.8, 0.4), (0.01, 0.05), (0.2, 0.6)]
LENGTHS_S = (0.06, 0.21, 0.1)
"""Durations of steps on a busy GPU, in turn."""


def course(share: float, warming_s: float, bursts: Bursts) -> list[TimedStep]:
    """What the simulation says of rests, in seconds, each followed by steps one after another."""
    curves = ComputeCurves(
        linear=[[1, 1]], prefill_attention=[[1, 1, 1]], decode_attention=[[1, 1]], rested_prefill_share=share, warming_s=warming_s
    )
    spec = HardwareSpec(
        flops_per_s=1, memory_bytes=1, memory_bytes_per_s=1, host_to_device_bytes_per_s=1, device_to_host_bytes_per_s=1,
        both_directions_bytes_per_s=1, disk_read_bytes_per_s=1, disk_write_bytes_per_s=1, step_overhead_s=0,
        compute_curves=curves,
    )  # fmt: skip
    warmth, at_s, steps = Warmth(spec), 0.0, list[TimedStep]()
    for rest_s, work_s in bursts:
        at_s += rest_s
        until_s = at_s + work_s
        while at_s < until_s:
            busy_s = LENGTHS_S[len(steps) % len(LENGTHS_S)]
            steps.append(TimedStep(at_s, warmth.prefill_s(at_s, busy_s), busy_s))
            at_s += steps[-1].took_s
    return steps


def in_a_row(times: list[float]) -> list[TimedStep]:
    """Steps that take these times, one after another, where 0.06 are expected of each."""
    return [TimedStep(begin_s, took_s, 0.06) for begin_s, took_s in zip(accumulate(times, initial=0.0), times, strict=False)]


@pytest.mark.parametrize("bursts", [ROW, TURNS], ids=["row", "turns"])
@pytest.mark.parametrize(("share", "warming_s"), [(0.95, 0.5), (0.85, 0.07), (0.9, 0.2)])
@pytest.mark.parametrize("overhead_s", [0.0, 0.003])
def test_what_was_simulated_is_found_again(share: float, warming_s: float, bursts: Bursts, overhead_s: float) -> None:
    found = warming([replace(step, took_s=step.took_s + overhead_s) for step in course(share, warming_s, bursts)])
    assert found.overhead_s == pytest.approx(overhead_s, abs=0.0002)
    assert found.rested_share == pytest.approx(share, abs=0.006)
    assert found.time_s == pytest.approx(warming_s, rel=0.1)


@pytest.mark.parametrize(("short", "overhead_s"), [(4, 0.001), (2, 0.0)])
def test_a_long_step_counts_for_more_than_a_short_one_but_not_by_its_length(short: int, overhead_s: float) -> None:
    """Of steps on a busy GPU, nine take what is expected, and some of a ninth of their length a millisecond more: three times the
    weight each."""
    long = TimedStep(0.0, 100.0, 100.0, counts=False)
    lengths = [(0.09, 0.09)] * 9 + [(0.01, 0.011)] * short
    begins_s = accumulate((took_s for _, took_s in lengths), initial=100.0)
    steps = [TimedStep(begin_s, took_s, busy_s) for begin_s, (busy_s, took_s) in zip(begins_s, lengths, strict=False)]
    found = warming([long, *steps])
    assert (found.overhead_s, found.rested_share) == pytest.approx((overhead_s, 1.0), abs=1e-9)


def test_nothing_is_found_if_rest_would_take_all_of_a_step() -> None:
    """The first of ten steps takes a thousandth of what is expected, whatever the time constant."""
    assert warming([TimedStep(0.0, 6e-5, 0.06), *in_a_row([6e-5] * 9)]) == Warming()


@pytest.mark.parametrize("seed", range(8))
def test_the_smallest_sum_of_deviations(seed: int) -> None:
    """No other pair of factors, on a grid around those found, misses by less."""
    random = np.random.default_rng(seed)
    first, second = random.random(6), -random.random(6)
    target = random.choice([-1.0, 0.3, 1.0]) * first + random.choice([-1.0, 0.4, 2.0]) * second + 0.3 * random.normal(size=6)
    error, a, b = least_deviations(first, second, target)
    assert min(a, b) >= 0
    assert error == pytest.approx(
        sum(abs(a * one + b * two - wanted) for one, two, wanted in zip(first, second, target, strict=True))
    )
    for other in np.linspace(0.0, 3.0, 61):
        for another in np.linspace(0.0, 3.0, 61):
            assert np.abs(other * first + another * second - target).sum() >= error - 1e-12


def test_an_interrupted_step_tells_nothing_but_warms_the_gpu() -> None:
    """A step that takes a second, and one that does not count, in the middle of a row: what follows finds the GPU warm."""
    steps = course(0.9, 0.2, [*TURNS, (1.0, 0.2)])
    row = course(0.9, 0.2, [(0.0, 1.0)])
    begin_s = steps[-1].begin_s + steps[-1].took_s
    for long in (TimedStep(begin_s, 1.0, 0.06), TimedStep(begin_s, 1.0, 0.9, counts=False)):
        warm = [TimedStep(begin_s + 1.0 + step.begin_s, step.busy_s, step.busy_s) for step in row]
        found = warming([*steps, long, *warm])
        assert (found.rested_share, found.time_s) == pytest.approx((0.9, 0.2), rel=0.08)


def test_a_gpu_that_rest_does_not_make_faster() -> None:
    assert warming(in_a_row([0.06] * 20)) == Warming()
    slower_at_first = warming(in_a_row([0.066, 0.063] + [0.06] * 20))
    assert (slower_at_first.rested_share, slower_at_first.time_s) == (1.0, Warming().time_s)
    too_few = in_a_row([0.06 - 0.01 * 0.5**at for at in range(FEWEST - 1)])
    assert warming(too_few) == warming([]) == Warming()


def test_the_coldness_during_each_step() -> None:
    """A rested GPU works for a second, rests for one and works for another; what is left of each second is 1 / e."""
    e, steps = math.exp(-1), [TimedStep(5.0, 1.0, 1.0), TimedStep(7.0, 1.0, 1.0)]
    assert coldness(steps, 1.0) == pytest.approx([1 - e, (1 - (1 - e) * e) * (1 - e)])
