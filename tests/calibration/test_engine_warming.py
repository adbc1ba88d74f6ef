"""The workload that shows how a GPU warms up, and the steps of it that count."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.calibration.engine_warming import INTERPRETED, Rests, between, timed_steps, warmed
from kvsim.calibration.warming import TimedStep
from kvsim.engine.recorder import Batch
from kvsim.hardware.curves import ComputeCurves
from tests.commands.small_machine import MACHINE, MODEL


@pytest.mark.parametrize("page_tokens", [1, 16, 4096, 100_000])
def test_rows_without_a_rest_and_prompts_that_follow_one(page_tokens: int) -> None:
    rests = Rests(turns=2, row=3, rested=40)
    requests = rests.requests(page_tokens)
    assert [request.after for request in requests] == list(range(-1, 85)), "each after the answer before"
    row = [request for at in (0, 43) for request in requests[at : at + 3]]
    assert {(request.delay_s, request.output_tokens) for request in row} == {(0.0, 1)}
    rested = [request for request in requests if request not in row]
    delays = [request.delay_s for request in rested]
    assert 0.01 < min(delays) < 0.03 and 0.4 < max(delays) < 1.0 and np.median(delays) == pytest.approx(0.1, rel=0.5)
    assert {request.output_tokens for request in rested} == {1, 2, 10, 40}
    lengths = [request.prompt_tokens for request in requests]
    assert 1024 <= min(lengths) < 1200 and 7000 < max(lengths) <= rests.batch_tokens == 8192
    assert np.median(lengths) == pytest.approx(2900, rel=0.15)
    pages = [page for request in requests for first, count in request.runs for page in range(first, first + count)]
    assert len(pages) == len(set(pages)) == sum(length // page_tokens for length in lengths)
    most = max(-(-(request.prompt_tokens + request.output_tokens) // page_tokens) for request in requests)
    assert rests.memory_pages(requests, page_tokens) == 2 * most


def test_requests_are_drawn_by_seed() -> None:
    first, again, other = (
        [(request.prompt_tokens, request.output_tokens, request.delay_s) for request in Rests(seed=seed).requests(16)]
        for seed in (0, 0, 1)
    )
    assert first == again != other
    assert {request.delay_s for request in INTERPRETED.requests(16)} == {0.0}


def test_only_prompts_alone_count_that_take_longer_than_their_launch() -> None:
    """Three tokens take 248 seconds and 5 of overhead, nine tokens 540 + 360 + 20. The first three steps never count."""
    machine = replace(MACHINE, step_overhead_s=5.0)
    early = [Batch(at, at + 255.0, 1, 3, 0, 0, 1) for at in (-900.0, -600.0, -300.0)]
    batches = [
        *early, Batch(0.0, 250.0, 1, 3, 0, 0, 1), Batch(300.0, 1100.0, 1, 9, 0, 0, 1), Batch(1100.0, 1200.0, 0, 0, 1, 9, 1),
        Batch(1300.0, 2465.0, 1, 9, 1, 9, 1),
    ]  # fmt: skip
    left_out = [TimedStep(batch.start_s, 250.0, 248.0, False) for batch in early]
    short, long = TimedStep(0.0, 245.0, 248.0), TimedStep(300.0, 795.0, 920.0)
    beside = TimedStep(1300.0, 1160.0, 920.0 + 80.0 + 72.0, False)
    assert timed_steps(batches, MODEL, machine) == [*left_out, short, long, beside]
    slow = replace(machine, prefill_launch_s=170.0)
    assert timed_steps(batches, MODEL, slow) == [*left_out, replace(short, busy_s=248.0, counts=False), long, beside]


def test_the_overhead_of_prefill_is_no_part_of_its_launch() -> None:
    """Steps of a GPU that rest does not make faster, each with two seconds beyond what is expected of it."""
    curves = ComputeCurves(linear=[[1, 1]], prefill_attention=[[1, 1, 1]], decode_attention=[[1, 1]])
    machine = replace(MACHINE, prefill_launch_s=170.0, compute_curves=curves)
    steps = [TimedStep(1000.0 * at, 300.0 + 50.0 * (at % 3) + 2.0, 300.0 + 50.0 * (at % 3)) for at in range(12)]
    found = warmed(machine, steps)
    assert (found.prefill_overhead_s, found.prefill_launch_s) == pytest.approx((2.0, 168.0))
    assert warmed(replace(machine, prefill_launch_s=1.0), steps).prefill_launch_s == 0.0
    few = warmed(machine, steps[:3])
    assert (few.prefill_overhead_s, few.prefill_launch_s) == (0.0, 170.0)


def test_a_number_between_two_others_by_their_logarithms() -> None:
    assert between(0.01, 1.0, 0.5) == pytest.approx(0.1)
    assert (between(2.0, 8.0, 0.0), between(2.0, 8.0, 1.0)) == pytest.approx((2.0, 8.0))
    assert between(0.0, 1.0, 0.5) == 0.0
