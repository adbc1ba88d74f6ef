"""Calibration finds how a GPU warms up, from steps one after another and after rests."""

import math
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvsim.hardware import HardwareSpec  # noqa: E402
from kvsim.hardware_curves import ComputeCurves  # noqa: E402
from kvsim.model import ModelSpec  # noqa: E402
from kvsim.substrate.hardware.calibration import Calibration, Sizes  # noqa: E402
from kvsim.substrate.hardware.stopwatch import Stopwatch  # noqa: E402
from kvsim.substrate.hardware.warming import FEWEST, TIMES_S, coldness, warming  # noqa: E402
from kvsim.substrate.simulated.warmth import Warmth  # noqa: E402

MODEL = ModelSpec(layers=1, hidden_size=2, vocabulary=5, heads=2, kv_heads=1, head_dim=1, mlp_width=3)
Bursts = list[tuple[float, float]]
ROW: Bursts = [(0.0, 1.5)]
TURNS: Bursts = [(2.0, 0.1), (0.05, 0.3), (0.4, 0.05), (0.02, 0.8), (0.1, 0.2), (0.8, 0.4), (0.01, 0.05), (0.2, 0.6)]


def course(share: float, warming_s: float, warm_s: float, bursts: Bursts) -> list[tuple[float, float]]:
    """What the simulation says of rests, in seconds, each followed by steps one after another."""
    curves = ComputeCurves(
        linear=[[1, 1]], prefill_attention=[[1, 1, 1]], decode_attention=[[1, 1]], rested_prefill_share=share, warming_s=warming_s
    )
    spec = HardwareSpec(
        flops_per_s=1, memory_bytes=1, memory_bytes_per_s=1, host_to_device_bytes_per_s=1, device_to_host_bytes_per_s=1,
        both_directions_bytes_per_s=1, disk_read_bytes_per_s=1, disk_write_bytes_per_s=1, step_overhead_s=0,
        compute_curves=curves,
    )  # fmt: skip
    warmth, at_s, steps = Warmth(spec), 0.0, []
    for rest_s, busy_s in bursts:
        at_s += rest_s
        until_s = at_s + busy_s
        while at_s < until_s:
            steps.append((at_s, warmth.prefill_s(at_s, warm_s)))
            at_s += steps[-1][1]
    return steps


def in_a_row(times: list[float]) -> list[tuple[float, float]]:
    """Steps that take these times, one after another."""
    return list(zip(accumulate(times, initial=0.0), times, strict=False))


@pytest.mark.parametrize("bursts", [ROW, TURNS], ids=["row", "turns"])
@pytest.mark.parametrize(("share", "warming_s"), [(0.95, 0.5), (0.85, 0.07), (0.9, 0.2)])
def test_what_was_simulated_is_found_again(share: float, warming_s: float, bursts: Bursts) -> None:
    found, time_s = warming(course(share, warming_s, warm_s=0.06, bursts=bursts))
    assert found == pytest.approx(share, abs=0.012)
    assert time_s == pytest.approx(warming_s, rel=0.2)


def test_a_gpu_that_rest_does_not_make_faster() -> None:
    assert warming(in_a_row([0.06] * 20)) == (1.0, TIMES_S[-1])
    assert warming(in_a_row([0.08, 0.07] + [0.06] * 20)) == (1.0, TIMES_S[-1]), "slower at first"
    assert warming(in_a_row([0.01] * (FEWEST - 1))) == (1.0, TIMES_S[-1]), "too few to tell"


def test_the_coldness_during_each_step() -> None:
    """A rested GPU works for a second, rests for one and works for another; what is left of each second is 1 / e."""
    e = math.exp(-1)
    assert coldness([(5.0, 1.0), (7.0, 1.0)], 1.0) == pytest.approx([1 - e, (1 - (1 - e) * e) * (1 - e)])


def test_a_course_begins_after_a_rest_and_goes_on_for_a_while() -> None:
    watch, calls = Stopwatch(torch.device("cpu"), 1), []
    course = watch.course(lambda: calls.append(1), rest_s=0.0, seconds=0.02)
    assert len(course) == len(calls) > 1 and 0.02 <= sum(seconds for _, seconds in course) < 5
    assert all(begin_s + seconds == pytest.approx(end_s) for (begin_s, seconds), (end_s, _) in pairwise(course))
    assert len(watch.course(lambda: calls.append(1), rest_s=0.0, seconds=0.0)) == 1


def test_bursts_of_steps_follow_rests_of_all_lengths() -> None:
    """Drawn evenly by their logarithms: as many below a tenth of a second as above it, give or take. The first rest is the
    longest, which the model takes for granted."""
    sizes = Sizes()
    calibration = Calibration(MODEL, 16, Path(), device=torch.device("cpu"), seed=1, say=print)
    calibration.sizes = sizes
    bursts = calibration.bursts()
    rests, busy = zip(*bursts, strict=True)
    assert len(bursts) == sizes.bursts and rests[0] == max(rests) == sizes.rests_s[1]
    assert min(rests) > sizes.rests_s[0] and sizes.bursts_s[0] < min(busy) < max(busy) < sizes.bursts_s[1]
    assert sum(rest < 0.1 for rest in rests) == pytest.approx(sizes.bursts / 2, rel=0.5)
    assert len({*rests, *busy}) == 2 * sizes.bursts and calibration.bursts() == bursts
