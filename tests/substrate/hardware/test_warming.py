"""Calibration finds how a GPU warms up, from steps one after another."""

import pytest

torch = pytest.importorskip("torch")

from kvsim.hardware import HardwareSpec  # noqa: E402
from kvsim.hardware_curves import ComputeCurves  # noqa: E402
from kvsim.substrate.hardware.stopwatch import Stopwatch  # noqa: E402
from kvsim.substrate.hardware.warming import FEWEST, TIMES_S, warming  # noqa: E402
from kvsim.substrate.simulated.warmth import Warmth  # noqa: E402


def course(share: float, warming_s: float, warm_s: float, seconds: float) -> list[float]:
    """What the simulation says of steps one after another."""
    curves = ComputeCurves(
        linear=[[1, 1]], prefill_attention=[[1, 1, 1]], decode_attention=[[1, 1]], rested_prefill_share=share, warming_s=warming_s
    )
    spec = HardwareSpec(
        flops_per_s=1, memory_bytes=1, memory_bytes_per_s=1, host_to_device_bytes_per_s=1, device_to_host_bytes_per_s=1,
        both_directions_bytes_per_s=1, disk_read_bytes_per_s=1, disk_write_bytes_per_s=1, step_overhead_s=0,
        compute_curves=curves,
    )  # fmt: skip
    warmth, at_s, times = Warmth(spec), 0.0, []
    while at_s < seconds:
        times.append(warmth.prefill_s(at_s, warm_s))
        at_s += times[-1]
    return times


@pytest.mark.parametrize(("share", "warming_s"), [(0.95, 0.5), (0.85, 0.07), (0.9, 0.2)])
def test_what_was_simulated_is_found_again(share: float, warming_s: float) -> None:
    found, time_s = warming(course(share, warming_s, warm_s=0.06, seconds=1.5))
    assert found == pytest.approx(share, abs=0.012)
    assert time_s == pytest.approx(warming_s, rel=0.2)


def test_a_gpu_that_rest_does_not_make_faster() -> None:
    assert warming([0.06] * 20) == (1.0, TIMES_S[-1])
    assert warming([0.08, 0.07] + [0.06] * 20) == (1.0, TIMES_S[-1]), "slower at first"
    assert warming([0.01] * (FEWEST - 1)) == (1.0, TIMES_S[-1]), "too few to tell"


def test_a_course_begins_after_a_rest_and_goes_on_for_a_while() -> None:
    watch, calls = Stopwatch(torch.device("cpu"), 1), []
    times = watch.course(lambda: calls.append(1), rest_s=0.0, seconds=0.02)
    assert len(times) == len(calls) > 1 and 0.02 <= sum(times) < 5
    assert len(watch.course(lambda: calls.append(1), rest_s=0.0, seconds=0.0)) == 1
