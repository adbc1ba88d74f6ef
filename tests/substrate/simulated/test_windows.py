"""Steps of a model in which some layers have a sliding window read and compute what is in it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engine.substrate import Work
from kvsim.hardware.curves import ComputeCurves
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.compute import MeasuredParts, Steps
from tests.substrate.simulated.test_compute import MODEL as ONE_LAYER
from tests.substrate.simulated.test_compute import roofline
from tests.substrate.simulated.test_measured import CURVES, machine

FOUR: dict[str, Any] = {"layers": 4, "hidden_size": 2, "vocabulary": 5, "heads": 2, "kv_heads": 1, "head_dim": 1, "mlp_width": 3}
MODEL = ModelSpec(**FOUR, sliding_window_layers=3, sliding_window_tokens=10)
"""Four layers with 8 FLOPs a pair and 4 bytes a token each: one with full attention, three with a window of 10 tokens."""


def test_queries_attend_to_what_is_in_the_window() -> None:
    """Tokens 9, 10, 11 and 12 attend to that many, or to 10: a mean of (42 + 3 * 39) / 4 pairs a layer."""
    assert MODEL.attention_pairs(4, 8) == (9 + 10 + 11 + 12 + 3 * (9 + 10 + 10 + 10)) / 4
    assert MODEL.attention_pairs(5, 0) == 15
    assert MODEL.attention_pairs(2, 100) == (101 + 102 + 3 * 20) / 4


@given(tokens=st.integers(1, 60), start=st.integers(0, 60), window=st.integers(2, 40))
def test_pairs_are_those_of_each_query(tokens: int, start: int, window: int) -> None:
    model = ModelSpec(**FOUR, sliding_window_layers=1, sliding_window_tokens=window)
    contexts = [start + number for number in range(1, tokens + 1)]
    slow = sum(3 * context + min(context, window) for context in contexts) / 4
    assert model.attention_pairs(tokens, start) == pytest.approx(slow)


def test_a_chunk_computes_pairs_in_the_window_and_reads_its_prefix_there() -> None:
    flops = 4 * MODEL.linear_flops_per_token + 8 * (42 + 3 * 39)
    assert roofline(model=MODEL).first_step(Work(chunks=[(4, 8)])) == (flops, 4 * (4 * 8 + 4 * 4) + MODEL.weight_bytes(4))
    _, n_bytes = roofline(model=MODEL).first_step(Work(chunks=[(4, 50)]))
    assert n_bytes == 4 * (50 + 3 * 10 + 4 * 4) + MODEL.weight_bytes(4)


def test_decoding_requests_read_a_window_each_by_their_mean_context() -> None:
    _, n_bytes = roofline(model=MODEL).first_step(Work(decode_requests=2, decode_context_tokens=100))
    assert n_bytes == 4 * (100 + 3 * 20 + 4 * 2) + MODEL.weight_bytes(2)


WORK = st.builds(Work, decode_requests=st.integers(1, 300), decode_context_tokens=st.integers(0, 10_000))
RATES = st.floats(1.0, 1e6)


def slowly(steps_of: Steps, work: Work, steps: int) -> float:
    contexts = [work.decode_context_tokens + step * work.decode_requests for step in range(steps)]
    works = [Work(decode_requests=work.decode_requests, decode_context_tokens=tokens) for tokens in contexts]
    return sum(steps_of.leap_s(one, 1) for one in works)


@settings(max_examples=100)
@given(work=WORK, steps=st.integers(1, 100), flops_per_s=RATES, bytes_per_s=RATES, window=st.integers(2, 100))
def test_a_leap_is_the_sum_of_its_steps(work: Work, steps: int, flops_per_s: float, bytes_per_s: float, window: int) -> None:
    model = ModelSpec(**FOUR, sliding_window_layers=3, sliding_window_tokens=window)
    roof = roofline(flops_per_s, bytes_per_s, model=model)
    assert roof.leap_s(work, steps) == pytest.approx(slowly(roof, work, steps), rel=1e-9)


@settings(max_examples=100)
@given(work=WORK, steps=st.integers(1, 100), window=st.integers(2, 100))
def test_a_leap_by_measured_parts_is_the_sum_of_its_steps(work: Work, steps: int, window: int) -> None:
    model = ModelSpec(**FOUR, sliding_window_layers=3, sliding_window_tokens=window)
    parts = MeasuredParts(model, machine(compute_curves=ComputeCurves(**CURVES), step_overhead_s=0.0))
    assert parts.leap_s(work, steps) == pytest.approx(slowly(parts, work, steps), rel=1e-9)


def test_windows_as_long_as_the_context_change_nothing() -> None:
    wide = ModelSpec(layers=1, hidden_size=2, vocabulary=5, heads=2, kv_heads=1, head_dim=1, mlp_width=3,
                     sliding_window_layers=1, sliding_window_tokens=10**9)  # fmt: skip
    work = Work(chunks=[(3, 10), (2, 5)], decode_requests=3, decode_context_tokens=77)
    assert roofline(model=wide).leap_s(work, 1) == roofline(model=ONE_LAYER).leap_s(work, 1)
    curves = machine(compute_curves=ComputeCurves(**CURVES))
    seconds = MeasuredParts(ONE_LAYER, curves).leap_s(work, 1)
    assert MeasuredParts(wide, curves).leap_s(work, 1) == pytest.approx(seconds, rel=1e-12)


def test_measured_checks_of_drafts_compute_what_is_in_the_windows() -> None:
    """Ten tokens more of context are read by the layer without a window alone, by each of the five tokens of a step."""
    slow = machine(compute_curves=ComputeCurves(**CURVES), flops_per_s=1e-3)
    before, after = [
        MeasuredParts(MODEL, slow).leap_s(Work(decode_requests=1, decode_context_tokens=tokens, tokens_per_decode=5), 1)
        for tokens in (1000, 1010)
    ]
    more = 5 * 10 * MODEL.decode_attention_flops_per_pair / 4
    assert after - before == pytest.approx(more / slow.effective_flops_per_s, rel=1e-6)
