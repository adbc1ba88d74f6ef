"""A GPU that has rested prefills faster, until prefill has made it warm."""

from dataclasses import replace
from itertools import pairwise
from math import exp, log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.engine.substrate import Work
from kvsim.hardware.curves import ComputeCurves
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.compute import step_times
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from kvsim.substrate.simulated.warmth import WarmSteps, Warmth

MODEL = ModelSpec(layers=2, hidden_size=2, vocabulary=5, heads=2, kv_heads=1, head_dim=1, mlp_width=3)


def machine(share: float | None, warming_s: float = 2.0) -> HardwareSpec:
    """Without curves if there is no share."""
    curves: dict[str, Any] = {"linear": [[1, 120.0]], "prefill_attention": [[1, 1, 1e9]], "decode_attention": [[40, 20.0]]}
    return HardwareSpec(
        flops_per_s=1e9,
        memory_bytes=1,
        memory_bytes_per_s=1e9,
        host_to_device_bytes_per_s=100.0,
        device_to_host_bytes_per_s=100.0,
        both_directions_bytes_per_s=200.0,
        disk_read_bytes_per_s=20.0,
        disk_write_bytes_per_s=10.0,
        step_overhead_s=0.0,
        compute_curves=share and ComputeCurves(**curves, rested_prefill_share=share, warming_s=warming_s),
    )


@pytest.mark.parametrize("share", [1.0, None])
def test_rest_changes_nothing_unless_it_was_measured(share: float | None) -> None:
    warmth = Warmth(machine(share))
    assert [warmth.prefill_s(at_s, 3.0) for at_s in (0.0, 3.0, 90.0)] == [3.0] * 3


def test_the_first_step_after_a_rest_gains_most() -> None:
    warmth = Warmth(machine(0.5))
    first = warmth.prefill_s(10.0, 2.0)
    assert first == pytest.approx(2 - 0.5 * 2 * (1 - exp(-1)))
    second = warmth.prefill_s(10.0 + first, 2.0)
    assert second == pytest.approx(2 - 0.5 * exp(-first / 2) * 2 * (1 - exp(-1)))
    rested_s = 2 * log(2)
    cold = 1 - (1 - exp(-(first + second) / 2)) / 2
    third = warmth.prefill_s(10.0 + first + second + rested_s, 2.0)
    assert third == pytest.approx(2 - 0.5 * cold * 2 * (1 - exp(-1))), "half of the warmth is gone"


def test_a_step_waits_for_the_launch_of_what_it_has() -> None:
    """Prefill of a token takes a second on a warm GPU, and decoding with ten tokens of context 5."""
    hardware = replace(machine(0.5), prefill_launch_s=3.0, chunk_launch_s=4.0, decode_launch_s=2.0)
    steps = WarmSteps(step_times(MODEL, hardware), hardware)
    chunks = [(1, 0), (1, 0)]
    assert steps.leap_s(Work(chunks=chunks[:1]), 1, 0.0) == 3.0
    assert steps.leap_s(Work(chunks=chunks), 1, 10.0) == 7.0
    assert steps.leap_s(Work(chunks=chunks, decode_requests=1, decode_context_tokens=10), 1, 20.0) == 9.0
    copying = WarmSteps(step_times(MODEL, slow := replace(hardware, copy_launch_s=6.0)), slow)
    assert copying.leap_s(Work(chunks=chunks, has_copies=True), 1, 0.0) == 13.0
    decode = Work(decode_requests=1, decode_context_tokens=10)
    assert steps.leap_s(decode, 1, 30.0) == steps.steps.leap_s(decode, 1) < 6
    assert 5 < steps.leap_s(Work(chunks=[(9, 0)]), 1, 40.0) < 9


def test_overheads_are_as_long_on_a_rested_gpu() -> None:
    hardware = replace(machine(0.5), prefill_overhead_s=4.0, step_overhead_s=1.0)
    assert Warmth(hardware).prefill_s(0.0, 7.0) == pytest.approx(7 - 0.5 * 2 * (1 - exp(-1)))
    assert Warmth(hardware).prefill_s(0.0, 4.0) == 4.0


@given(
    share=st.floats(0.3, 1.0),
    warming_s=st.floats(0.01, 10.0),
    steps=st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.001, 5.0)), min_size=1, max_size=8),
)
def test_a_step_takes_between_its_time_on_a_rested_and_on_a_warm_gpu(
    share: float, warming_s: float, steps: list[tuple[float, float]]
) -> None:
    warmth, at_s = Warmth(machine(share, warming_s)), 0.0
    for rest_s, warm_s in steps:
        at_s += rest_s
        took_s = warmth.prefill_s(at_s, warm_s)
        assert share * warm_s * (1 - 1e-9) <= took_s <= warm_s
        at_s += took_s


@given(share=st.floats(0.3, 0.99), warming_s=st.floats(0.05, 10.0), warm_s=st.floats(0.001, 5.0))
def test_steps_without_a_pause_get_slower(share: float, warming_s: float, warm_s: float) -> None:
    warmth, at_s, times = Warmth(machine(share, warming_s)), 0.0, []
    for _ in range(6):
        times.append(warmth.prefill_s(at_s, warm_s))
        at_s += times[-1]
    assert all(before <= after * (1 + 1e-9) for before, after in pairwise(times))


def test_prefill_is_faster_after_a_rest_and_decoding_is_not() -> None:
    """Six tokens take 6 seconds on a warm GPU; a decode step of ten tokens of context 1 second and 4 of attention."""
    substrate = SimulatedSubstrate(MODEL, machine(0.5), 2, links="fifo")
    ended = []
    for work in (
        Work(chunks=[(6, 0)], max_steps=1),
        Work(chunks=[(6, 0)], max_steps=1),
        Work(decode_requests=1, decode_context_tokens=10, max_steps=1),
    ):
        substrate.env.run(substrate.compute(work, []))
        ended.append(substrate.env.now)
    warm = Warmth(machine(0.5))
    first = warm.prefill_s(0.0, 6.0)
    assert ended[0] == pytest.approx(first, rel=1e-4)
    assert ended[1] - ended[0] == pytest.approx(warm.prefill_s(first, 6.0), rel=1e-4)
    assert ended[2] - ended[1] == pytest.approx(substrate.steps.leap_s(Work(decode_requests=1, decode_context_tokens=10), 1))
    assert first < ended[1] - ended[0] < 6
