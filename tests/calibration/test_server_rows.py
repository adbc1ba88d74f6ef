"""Rows of curves that are fitted to a server: whatever the factors are, a machine does what a GPU can."""

from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from kvsim.calibration.server.batches import PROMPT, Batch
from kvsim.calibration.server.fit import Fit, Summary, best_first
from kvsim.calibration.server.measurements import Reading
from kvsim.calibration.server.rows import FASTER, LONG_TOKENS, Rows, near
from kvsim.calibration.server.step_times import Point
from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.compute import step_times
from tests.servers.emulated import plan_of

PLAN = plan_of(["model=llama3_8b", "hardware=h200"])
MODEL: ModelSpec = PLAN.model
ROOFLINE = replace(PLAN.hardware, flops_efficiency=0.8, compute_curves=None, noise=None)
WORKS = [
    *(Work(chunks=[(tokens, start)]) for tokens in (16, 256, 1024, 2048, 8192) for start in (0, 2048, 16384)),
    *(Work(decode_requests=requests, decode_context_tokens=requests * 1024) for requests in (1, 16, 64)),
]
ROWS = Rows(PLAN.hardware, ROOFLINE, MODEL, WORKS)


def machine(seed: int) -> HardwareSpec:
    logs = np.random.default_rng(seed).uniform(-2.0, 2.0, ROWS.count)
    return replace(ROOFLINE, compute_curves=ROWS.curves(logs))


@pytest.mark.parametrize("seed", range(20))
def test_times_never_fall_with_more_tokens(seed: int) -> None:
    steps = step_times(MODEL, machine(seed))
    sizes = sorted({round(1.07**power) for power in range(145)})
    for start in (0, 300, 5000, 16384):
        seconds = [steps.leap_s(Work(chunks=[(tokens, start)], sampled_tokens=1), 1) for tokens in sizes]
        assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(seconds))
    for requests in (1, 8):
        works = [Work(decode_requests=requests, decode_context_tokens=requests * tokens) for tokens in sizes]
        seconds = [steps.leap_s(work, 1) for work in works]
        assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(seconds))


@pytest.mark.parametrize("seed", range(20))
def test_rates_stay_below_the_peaks(seed: int) -> None:
    curves = machine(seed).compute_curves
    assert curves is not None
    for flops_per_byte, rate in curves.linear:
        assert rate <= ROOFLINE.flops_per_s * (1 + 1e-12)
        assert rate / flops_per_byte <= ROOFLINE.memory_bytes_per_s * (1 + 1e-12)
    assert max(rate for *_, rate in curves.prefill_attention) <= ROOFLINE.flops_per_s


def test_long_contexts_are_read_at_most_a_tenth_faster_than_described() -> None:
    curves = ROWS.curves(np.full(ROWS.count, -2.0))
    layer_bytes = MODEL.kv_bytes_per_token / MODEL.attention_layers
    seconds = {round(n_bytes / layer_bytes): n_bytes / rate for n_bytes, rate in curves.decode_attention}
    assert seconds[65536] - seconds[16384] == pytest.approx(
        (65536 - LONG_TOKENS) * layer_bytes / (FASTER * PLAN.hardware.memory_bytes_per_s)
    )
    assert seconds[16384] == pytest.approx(16384 * layer_bytes / ROOFLINE.memory_bytes_per_s * np.exp(-2.0))


@pytest.mark.parametrize("has_own", [False, True])
def test_without_factors_several_gpus_take_the_time_of_their_roofline(has_own: bool) -> None:
    """Llama has eight KV heads: on sixteen GPUs, each is twice, or each GPU has all weights of the attention."""
    described = replace(ROOFLINE, gpus=16, attention_data_parallel=has_own)
    rows = Rows(replace(PLAN.hardware, gpus=16, attention_data_parallel=has_own), described, MODEL, WORKS)
    fitted = replace(described, compute_curves=rows.curves(np.zeros(rows.count)))
    one, long, longer = (Work(decode_requests=1, decode_context_tokens=tokens) for tokens in (1, 16384, 65536))
    by_curves, by_roofline = step_times(MODEL, fitted), step_times(MODEL, described)
    assert by_curves.leap_s(one, 1) == pytest.approx(by_roofline.leap_s(one, 1), rel=1e-3)
    (one_s, two_s), (own_s, own_two_s) = (
        [steps.leap_s(work, 1) for work in (long, longer)] for steps in (by_curves, by_roofline)
    )
    assert two_s - one_s == pytest.approx(own_two_s - own_s, rel=1e-6)


def test_rows_lie_near_what_was_measured() -> None:
    assert near((1, 16, 64, 128), [20, 90, 0]) == [1, 16, 64]  # 90 is nearer to 64 than to 128 in logarithms
    assert near((128, 1024), []) == [128]
    assert ROWS.tokens == [1, 16, 64, 256, 1024, 2048, 8192]
    assert (4096, 16384) in ROWS.chunks and 4096 not in ROWS.tokens


def test_neighbours_are_rows_of_the_same_part_side_by_side() -> None:
    rows = Rows(PLAN.hardware, ROOFLINE, MODEL, [Work(chunks=[(16, 0), (256, 768)]), *WORKS[-1:]])
    assert rows.tokens == [1, 64, 256] and rows.decodes == [128, 65536]
    assert rows.chunks == [(64, 256), (64, 1024), (256, 256), (256, 1024)]
    assert rows.neighbours() == [(0, 1), (1, 2), (3, 4), (3, 5), (4, 6), (5, 6), (7, 8)]


def test_one_large_error_counts_where_models_are_compared() -> None:
    reading = Reading(
        batch=Batch(kind=PROMPT, tokens=16, is_held_out=True),
        seconds=1.0,
        samples=3,
        error=0.0,
        cached_tokens=0,
        decoding_tokens=0,
    )
    known = [Point(reading=reading, works=WORKS[:1])] * 4
    one = Fit(name="", hardware=ROOFLINE, expected_s=[], errors=[0.0, 0.01, -0.01, 0.4], cost=0.0)
    found = one.summary(known, is_held_out=True)
    assert found == Summary(4, pytest.approx(0.01), 0.4)
    assert one.summary(known, is_held_out=False) == Summary(0, np.inf, np.inf)
    even = replace(one, errors=[0.1, -0.1, 0.1, 0.1])
    assert best_first([one, even], known) == [even, one]  # although its median is larger
    unsure = [*known[:3], replace(known[3], reading=msgspec.structs.replace(reading, error=0.1))]
    assert best_first([one, even], unsure) == [even, one]  # batches count alike, however well they were read
