"""The roofline: a step takes as long as its FLOPs or its memory traffic, whichever is longer, and an overhead."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.compute import Roofline
from tests.substrate.simulated.works import altered

MODEL = ModelSpec(layers=1, hidden_size=2, vocabulary=5, heads=2, kv_heads=1, head_dim=1, mlp_width=3)
"""Attention 12 weights, MLP 18, lm_head 10: 60 FLOPs a token and 20 for one that is sampled, 8 a pair, 4 bytes of KV a token,
80 bytes of weights."""


def roofline(
    flops_per_s: float = 1.0,
    memory_bytes_per_s: float = 1e9,
    overhead_s: float = 0.0,
    model: ModelSpec = MODEL,
    launch_s: float = 0.0,
    prefill_overhead_s: float = 0.0,
    leap_overhead_s: float = 0.0,
    copy_launch_s: float = 0.0,
    copy_leap_s: float = 0.0,
) -> Roofline:
    hardware = HardwareSpec(
        flops_per_s=flops_per_s,
        memory_bytes=1,
        memory_bytes_per_s=memory_bytes_per_s,
        host_to_device_bytes_per_s=1,
        device_to_host_bytes_per_s=1,
        both_directions_bytes_per_s=1,
        disk_read_bytes_per_s=1,
        disk_write_bytes_per_s=1,
        step_overhead_s=overhead_s,
        prefill_launch_s=launch_s,
        prefill_overhead_s=prefill_overhead_s,
        leap_overhead_s=leap_overhead_s,
        copy_launch_s=copy_launch_s,
        copy_leap_s=copy_leap_s,
    )
    return Roofline(model, hardware)


def test_a_chunk_multiplies_its_tokens_and_attends_to_all_before_them() -> None:
    work = Work(chunks=[(3, 10)])
    pairs = 11 + 12 + 13
    assert roofline().leap_s(work, 1) == 3 * 60 + 8 * pairs


def test_a_step_with_prefill_takes_its_launch_at_least() -> None:
    chunk, decode = Work(chunks=[(1, 0)]), Work(decode_requests=1, decode_context_tokens=0)
    assert roofline(launch_s=100.0, overhead_s=1.0).leap_s(chunk, 1) == 101
    assert roofline(launch_s=50.0, overhead_s=1.0).leap_s(chunk, 1) == 60 + 8 + 1
    assert roofline(launch_s=50.0, overhead_s=1.0, prefill_overhead_s=9.0).leap_s(chunk, 1) == 60 + 8 + 1 + 9
    assert roofline(launch_s=100.0, overhead_s=1.0, prefill_overhead_s=9.0).leap_s(decode, 2) == 2 * (60 + 20 + 1) + 8


def test_decode_steps_in_a_row_have_the_overhead_of_a_leap_once_and_prefill_has_none() -> None:
    chunk, decode = Work(chunks=[(1, 0)], decode_requests=1), Work(decode_requests=1, decode_context_tokens=0)
    known, leaping = roofline(overhead_s=1.0), roofline(overhead_s=1.0, leap_overhead_s=7.0)
    assert [leaping.leap_s(decode, steps) - known.leap_s(decode, steps) for steps in (1, 2, 5)] == [7, 7, 7]
    assert leaping.leap_s(chunk, 1) == known.leap_s(chunk, 1)
    assert leaping.steps_by(decode, leaping.leap_s(decode, 3), 9) == (3, leaping.leap_s(decode, 3))


def test_steps_of_a_leap_that_are_formed_one_by_one_have_the_overhead_of_a_leap_each() -> None:
    decode = Work(decode_requests=1, decode_context_tokens=0, has_copies=True)
    known, leaping = roofline(overhead_s=1.0), roofline(overhead_s=1.0, leap_overhead_s=7.0, copy_leap_s=20.0)
    each = altered(decode, forms_each_step=True)
    assert [leaping.leap_s(each, steps) - known.leap_s(decode, steps) for steps in (1, 2, 5)] == [27, 34, 55]


def test_copies_that_begin_with_a_step_delay_its_launch() -> None:
    chunk, decode = Work(chunks=[(1, 0)], has_copies=True), Work(decode_requests=1, has_copies=True)
    steps = roofline(launch_s=50.0, copy_launch_s=30.0, copy_leap_s=20.0, leap_overhead_s=7.0)
    assert steps.leap_s(chunk, 1) == 80 and steps.leap_s(altered(chunk, has_copies=False), 1) == 60 + 8
    assert roofline(launch_s=30.0, copy_launch_s=30.0).leap_s(chunk, 1) == 60 + 8, "the GPU takes longer"
    alone = altered(decode, has_copies=False)
    assert [steps.leap_s(decode, count) - steps.leap_s(alone, count) for count in (1, 5)] == [20, 20]


def test_a_step_reads_all_weights_and_the_keys_and_values_of_what_it_attends_to() -> None:
    work = Work(chunks=[(3, 10)], decode_requests=2, decode_context_tokens=50)
    assert roofline(flops_per_s=1e9, memory_bytes_per_s=1).leap_s(work, 1) == 80 + 4 * (10 + 3 + 2 + 50)


def test_each_gpu_reads_its_own_copy_of_the_keys_and_values() -> None:
    """One KV head on 4 GPUs, which read 4 bytes a second together: all of it each, and a quarter of the weights."""
    one = roofline(flops_per_s=1e9, memory_bytes_per_s=1).hardware
    work = Work(chunks=[(3, 10)], decode_requests=2, decode_context_tokens=50)
    assert Roofline(MODEL, replace(one, gpus=4)).leap_s(work, 1) == 80 / 4 + 4 * (10 + 3 + 2 + 50)
    own = replace(one, gpus=4, attention_data_parallel=True)
    assert Roofline(MODEL, own).leap_s(work, 1) == (80 + 3 * 24 + 4 * (10 + 3 + 2 + 50)) / 4, "and all weights of attention"


def test_a_state_is_read_and_written_once_for_each_chunk_and_decoding_request() -> None:
    hybrid = ModelSpec(
        layers=2,
        hidden_size=2,
        vocabulary=5,
        heads=2,
        kv_heads=1,
        head_dim=1,
        mlp_width=3,
        recurrent_layers=1,
        state_heads=1,
        state_key_dim=3,
        state_value_dim=5,
        recurrent_in_width=1,
        state_flops_per_element=1.0,
    )
    roof = roofline(flops_per_s=1e9, memory_bytes_per_s=1, model=hybrid)
    work = Work(chunks=[(3, 10), (1, 0)], decode_requests=2, decode_context_tokens=50)
    without_state = hybrid.weight_bytes(6) + 4 * (10 + 3 + 1 + 2 + 50)
    assert roof.leap_s(work, 1) == without_state + 2 * (3 * 5 * 4) * 4


def test_a_decode_step_multiplies_samples_and_attends_once_a_request() -> None:
    work = Work(decode_requests=2, decode_context_tokens=50)
    assert roofline().leap_s(work, 1) == 2 * (60 + 20) + 8 * 50


def test_the_slower_side_counts_and_the_overhead_is_added() -> None:
    work = Work(chunks=[(1, 0)])
    assert roofline(flops_per_s=1, memory_bytes_per_s=1, overhead_s=0.5).leap_s(work, 1) == max(68, 84) + 0.5
    assert roofline(flops_per_s=0.5, memory_bytes_per_s=1, overhead_s=0.5).leap_s(work, 1) == max(136, 84) + 0.5


WORK = st.builds(Work, decode_requests=st.integers(1, 300), decode_context_tokens=st.integers(0, 100_000))
RATES = st.floats(1.0, 1e6)


def slowly(roof: Roofline, work: Work, steps: int) -> float:
    """Step by step."""
    contexts = [work.decode_context_tokens + step * work.decode_requests for step in range(steps)]
    return sum(roof.leap_s(Work(decode_requests=work.decode_requests, decode_context_tokens=tokens), 1) for tokens in contexts)


@settings(max_examples=200)
@given(work=WORK, steps=st.integers(1, 200), flops_per_s=RATES, bytes_per_s=RATES, overhead_s=st.sampled_from([0.0, 0.1, 10.0]))
def test_a_leap_is_the_sum_of_its_steps(
    work: Work, steps: int, flops_per_s: float, bytes_per_s: float, overhead_s: float
) -> None:
    roof = roofline(flops_per_s, bytes_per_s, overhead_s)
    assert roof.leap_s(work, steps) == pytest.approx(slowly(roof, work, steps), rel=1e-9)


@pytest.mark.parametrize("bytes_per_s", [0.05, 0.1, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 1.0])
def test_a_leap_may_pass_from_one_side_of_the_roofline_to_the_other(bytes_per_s: float) -> None:
    work = Work(decode_requests=1, decode_context_tokens=0)
    roof = roofline(1.0, bytes_per_s)
    for steps in range(1, 60):
        assert roof.leap_s(work, steps) == pytest.approx(slowly(roof, work, steps), rel=1e-12)


@settings(max_examples=200)
@given(work=WORK, steps=st.integers(1, 100), flops_per_s=RATES, bytes_per_s=RATES, fraction=st.floats(0.0, 1.2))
def test_a_leap_that_is_stopped_ends_with_the_step_under_way(
    work: Work, steps: int, flops_per_s: float, bytes_per_s: float, fraction: float
) -> None:
    roof = roofline(flops_per_s, bytes_per_s)
    elapsed_s = roof.leap_s(work, steps) * fraction
    expected = next((done for done in range(1, steps) if roof.leap_s(work, done) >= elapsed_s), steps)
    assert roof.steps_by(work, elapsed_s, steps) == (expected, roof.leap_s(work, expected))
