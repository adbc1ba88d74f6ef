"""Tensor-parallel GPUs add up their parts of the activations twice in a layer, and nothing is computed meanwhile."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.engine.substrate import Work
from kvsim.hardware.curves import ComputeCurves
from kvsim.hardware.spec import HardwareSpec, LinearHardware
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.communication import ACTIVATION_BYTES, Communication
from kvsim.substrate.simulated.compute import Steps, step_times

MODEL = ModelSpec(layers=3, hidden_size=2, vocabulary=5, heads=4, kv_heads=4, head_dim=1, mlp_width=3)
"""Six all-reduces of 4 bytes a token."""
CURVES = ComputeCurves(linear=[[1.0, 60.0]], prefill_attention=[[1.0, 1.0, 8.0]], decode_attention=[[16.0, 4.0]])
RING = HardwareSpec(
    flops_per_s=1.0,
    memory_bytes=1,
    memory_bytes_per_s=1e9,
    gpus=4,
    host_to_device_bytes_per_s=1,
    device_to_host_bytes_per_s=1,
    both_directions_bytes_per_s=1,
    disk_read_bytes_per_s=1,
    disk_write_bytes_per_s=1,
    allreduce_bytes_per_s=3.0,
    allreduce_latency_s=10.0,
)
CHUNK, DECODE = Work(chunks=[(5, 10)]), Work(decode_requests=2, decode_context_tokens=50)
MACHINES = pytest.mark.parametrize("machine", [RING, replace(RING, compute_curves=CURVES)], ids=["roofline", "measured parts"])


def reduced_by_sending(numbers: list[list[float]]) -> tuple[list[list[float]], int, list[int]]:
    """Add up the rows of all ranks in a ring, one part a step; return every rank's sums, the steps, and the parts that each sent.

    Slow and literal: in each step, each rank sends one part to the next.
    """
    ranks = len(numbers)
    held, sent = [list(row) for row in numbers], [0] * ranks
    for step in range(ranks - 1):  # reduce-scatter
        passed = [(rank, (rank - step) % ranks, held[rank][(rank - step) % ranks]) for rank in range(ranks)]
        for rank, part, value in passed:
            held[(rank + 1) % ranks][part] += value
            sent[rank] += 1
    for step in range(ranks - 1):  # all-gather
        passed = [(rank, (rank + 1 - step) % ranks, held[rank][(rank + 1 - step) % ranks]) for rank in range(ranks)]
        for rank, part, value in passed:
            held[(rank + 1) % ranks][part] = value
            sent[rank] += 1
    return held, 2 * (ranks - 1), sent


@given(ranks=st.integers(2, 9))
def test_the_formula_is_the_time_of_a_ring_that_is_played(ranks: int) -> None:
    numbers = [[float(10 * rank + part) for part in range(ranks)] for rank in range(ranks)]
    held, steps, sent = reduced_by_sending(numbers)
    assert all(row == [sum(column) for column in zip(*numbers, strict=True)] for row in held)
    part_bytes = 6.0
    expected_s = steps * 10.0 + sent[0] * part_bytes / 3.0
    assert set(sent) == {sent[0]}
    assert replace(RING, gpus=ranks).allreduce_s(part_bytes * ranks) == pytest.approx(expected_s)


def test_a_ring_sends_every_part_but_its_own_twice() -> None:
    assert RING.allreduce_s(12.0) == 6 * 10.0 + 12.0 * 2 * 3 / 4 / 3.0
    assert replace(RING, gpus=2).allreduce_s(12.0) == 2 * 10.0 + 12.0 / 3.0


def test_over_a_switch_both_halves_are_one_step() -> None:
    assert replace(RING, allreduce_steps=2).allreduce_s(12.0) == 2 * 10.0 + 6.0


def test_with_a_link_to_each_other_gpu_fewer_gpus_send_less() -> None:
    mesh = replace(RING, allreduce_peer_bytes_per_s=0.5, allreduce_latency_s=0.0)
    assert mesh.allreduce_s(12.0) == 18.0 / 1.5
    assert replace(mesh, gpus=2).allreduce_s(12.0) == 12.0 / 0.5
    assert replace(mesh, gpus=16).allreduce_s(16.0) == 30.0 / 3.0, "the GPU's own rate is the limit"


def test_one_gpu_and_a_machine_without_a_rate_have_nothing_to_add_up() -> None:
    assert replace(RING, gpus=1).allreduce_s(12.0) == replace(RING, allreduce_bytes_per_s=None).allreduce_s(12.0) == 0.0


def steps(machine: HardwareSpec, model: ModelSpec = MODEL) -> Steps:
    return step_times(model, machine)


def added_s(machine: HardwareSpec, work: Work, count: int = 1) -> float:
    """What communication adds to steps."""
    silent = replace(machine, allreduce_bytes_per_s=None)
    return steps(machine).leap_s(work, count) - steps(silent).leap_s(work, count)


@MACHINES
def test_every_step_waits_for_two_sums_in_each_layer(machine: HardwareSpec) -> None:
    of_chunk_s, of_decode_s = 6 * RING.allreduce_s(5 * 2 * 2), 6 * RING.allreduce_s(2 * 2 * 2)
    assert of_chunk_s == 6 * (60 + 20 * 1.5 / 3) and of_decode_s == 6 * (60 + 8 * 1.5 / 3)
    assert added_s(machine, CHUNK) == pytest.approx(of_chunk_s)
    assert added_s(machine, DECODE) == pytest.approx(of_decode_s)
    assert added_s(machine, DECODE, 7) == pytest.approx(7 * of_decode_s)
    both = Work(chunks=CHUNK.chunks, decode_requests=2, decode_context_tokens=50)
    assert added_s(machine, both) == pytest.approx(6 * RING.allreduce_s(7 * 2 * 2))


@MACHINES
def test_the_launch_of_a_step_is_hidden_behind_its_communication(machine: HardwareSpec) -> None:
    unhidden_s = steps(machine).leap_s(CHUNK, 1)
    launching = replace(machine, prefill_launch_s=unhidden_s - 1.0 - machine.step_overhead_s)
    assert steps(launching).leap_s(CHUNK, 1) == unhidden_s
    slower = replace(machine, prefill_launch_s=unhidden_s + 1.0)
    assert steps(slower).leap_s(CHUNK, 1) == pytest.approx(unhidden_s + 1.0 + machine.step_overhead_s)


@MACHINES
def test_a_leap_with_communication_is_the_sum_of_its_steps(machine: HardwareSpec) -> None:
    each = [Work(decode_requests=2, decode_context_tokens=50 + 2 * step) for step in range(6)]
    assert steps(machine).leap_s(DECODE, 6) == pytest.approx(sum(steps(machine).leap_s(work, 1) for work in each))


@MACHINES
def test_without_a_rate_a_step_takes_as_long_as_ever(machine: HardwareSpec) -> None:
    silent = replace(machine, allreduce_bytes_per_s=None, allreduce_latency_s=0.0)
    known = replace(machine, allreduce_bytes_per_s=None, allreduce_latency_s=123.0, allreduce_steps=2)
    for work in (CHUNK, DECODE):
        assert steps(silent).leap_s(work, 1) == steps(known).leap_s(work, 1)


def test_blocks_without_an_mlp_have_one_sum() -> None:
    assert replace(MODEL, mlp_layers=1).allreduces == 3 + 1
    assert MODEL.allreduces == 6


def test_activations_are_in_bf16_whatever_the_weights_are() -> None:
    assert ACTIVATION_BYTES == 2
    quantized = replace(MODEL, weight_dtype_bytes=0.5)
    assert Communication(quantized, RING).step_s(DECODE) == Communication(MODEL, RING).step_s(DECODE)


def test_a_formula_for_steps_has_no_communication() -> None:
    terms = {"fixed_s": 1.0, "prefill_token_s": 1.0, "decode_request_s": 1.0, "chunk_context_s": 0.0, "decode_context_s": 0.0}
    rates = {name: getattr(RING, name) for name in ("flops_per_s", "memory_bytes", "memory_bytes_per_s", "gpus")}
    links = dict.fromkeys(("host_to_device_bytes_per_s", "device_to_host_bytes_per_s", "both_directions_bytes_per_s"), 1.0)
    disk = dict.fromkeys(("disk_read_bytes_per_s", "disk_write_bytes_per_s"), 1.0)
    with pytest.raises(ValueError, match="allreduce_bytes_per_s has no effect where step times are a formula"):
        LinearHardware(**rates, **links, **disk, **terms, allreduce_bytes_per_s=1.0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("allreduce_bytes_per_s", 0.0, "allreduce_bytes_per_s must be above 0, not 0.0"),
        ("allreduce_peer_bytes_per_s", -1.0, "allreduce_peer_bytes_per_s must be above 0, not -1.0"),
        ("allreduce_latency_s", -1.0, "allreduce_latency_s must be 0 or more, not -1.0"),
        ("allreduce_steps", 0, "allreduce_steps must be at least 1, not 0"),
    ],
)
def test_a_bad_setting_is_named(name: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RING, **{name: value})
