"""Steps of a run, summed up beside what the machine's description expects of them."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from kvsim.engine.substrate import Work
from kvsim.hardware.curves import ComputeCurves
from kvsim.hardware.spec import LinearHardware
from kvsim.substrate.hardware.step_check import StepCheck
from kvsim.substrate.simulated.warmth import Warmth
from tests.calibration.test_engine_overhead import MACHINE, MODEL
from tests.engine.small import HARDWARE

FORMULA = LinearHardware(
    **HARDWARE, fixed_s=1.0, prefill_token_s=0.5, decode_request_s=2.0, chunk_context_s=0.0, decode_context_s=0.0
)


def test_steps_are_summed_up_by_kind_and_size() -> None:
    check = StepCheck(MODEL, FORMULA, 1)
    check.add(Work(chunks=[(100, 0)]), 1, 0.0, 60.0)
    check.add(Work(chunks=[(50, 0), (78, 0)]), 1, 60.0, 130.0)
    check.add(Work(chunks=[(129, 0)]), 1, 130.0, 200.0)
    check.add(Work(chunks=[(10, 0)], decode_requests=1), 1, 200.0, 210.0)
    check.add(Work(decode_requests=2, max_steps=9), 9, 210.0, 250.0)
    check.add(Work(decode_requests=2, max_steps=9), 1, 250.0, 256.0)
    assert [(row["kind"], row["least"], row["leaps"], row["steps"]) for row in check.rows()] == [
        ("both", 1, 1, 1), ("decode", 1, 1, 1), ("decode", 2, 1, 9), ("prefill", 1, 2, 2), ("prefill", 129, 1, 1),
    ]  # fmt: skip
    assert [(row["measured_s"], row["expected_s"]) for row in check.rows()] == [
        (10.0, 1.0 + 5.0 + 2.0), (6.0, 5.0), (40.0, 9 * 5.0), (130.0, 2.0 + 114.0), (70.0, 1.0 + 64.5),
    ]  # fmt: skip


def test_each_engine_warms_up_by_itself() -> None:
    curves = ComputeCurves(
        linear=[[1, 1.0]], prefill_attention=[[1, 1, 1.0]], decode_attention=[[1, 1.0]], rested_prefill_share=0.5, warming_s=100.0
    )
    machine = replace(MACHINE, compute_curves=curves)
    check, warmth = StepCheck(MODEL, machine, 2), Warmth(machine)
    first_s, second_s = warmth.prefill_s(0.0, 248.0), warmth.prefill_s(300.0, 248.0)
    for engine, at_s in ((0, 0.0), (1, 300.0), (0, 300.0)):
        check.add(Work(chunks=[(3, 0)], sampled_tokens=1, engine=engine), 1, at_s, at_s + 300.0)
    assert first_s < second_s
    assert check.rows()[0]["expected_s"] == pytest.approx(2 * first_s + second_s)
