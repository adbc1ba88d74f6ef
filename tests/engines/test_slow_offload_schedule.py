"""The slow model of vLLM's scheduler with CPU offloading and async scheduling equals what the engine recorded."""

from pathlib import Path

import pytest

from kvsim.api import load_trace
from kvsim.hardware.spec import LinearHardware
from tests.engine.small import HARDWARE
from tests.engines.recorded_schedules import BLOCK_BYTES, CASES, RUNS, Recorded, assert_same_rows, recorded
from tests.engines.slow_offload_schedule import Offloading, SlowOffloadSchedule

FORMULA = LinearHardware(
    **HARDWARE, fixed_s=5e-3, prefill_token_s=2e-5, decode_request_s=1e-5, chunk_context_s=2.5e-9, decode_context_s=1e-8
)
BLOCK = 16


def slow_schedule(run: Recorded) -> SlowOffloadSchedule:
    settings = run.settings
    offloading = None
    if settings["cpu_tokens"]:
        chunk = int(settings["blocks_per_chunk"])
        offloading = Offloading(
            chunks=int(settings["cpu_tokens"]) // BLOCK // chunk,
            policy=settings["eviction_policy"],
            threshold=int(settings["store_threshold"]),
            blocks_per_chunk=chunk,
            prompt_only=settings["offload_prompt_only"] == "true",
            load_block_s=BLOCK_BYTES / float(settings["load_bytes_per_s"]),
            store_block_s=BLOCK_BYTES / float(settings["store_bytes_per_s"]),
            latency_s=float(settings["latency_s"]),
        )
    limits = int(settings["max_batched_tokens"]), int(settings["max_num_seqs"])
    is_async = settings["async_scheduling"] == "on"
    return SlowOffloadSchedule(
        FORMULA, BLOCK, int(settings["capacity_tokens"]) // BLOCK, *limits, is_async=is_async, offloading=offloading
    )


def check(run: Recorded) -> None:
    settings, model = run.settings, slow_schedule(run)
    limit = int(settings["limit"]) if settings["limit"] else None
    trace = load_trace("mooncake", path=str(run.trace), rate=float(settings["rate"]), limit=limit, answers="unique")
    rows = model.run(trace.requests, names_answers=True)
    assert_same_rows([(gpu * BLOCK, cpu * BLOCK, *rest) for gpu, cpu, *rest in rows], run.rows)  # type: ignore[misc]
    if run.steps:
        assert model.steps == [pytest.approx(step, rel=0, abs=1e-6) for step in run.steps]
        assert sorted(model.copied) == [pytest.approx(copy, rel=0, abs=1e-6) for copy in sorted(run.copies)]


@pytest.mark.parametrize("name", CASES)
def test_recorded_cases_are_those_of_the_slow_model(shared: Path, name: str) -> None:
    check(recorded(shared, name))


LARGE = ("mooncake", "arc")
"""Runs of which the slow model takes seconds. ARC, thresholds, chunks and answers have cases of their own."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * any(word in name for word in LARGE)) for name in RUNS]
)
def test_recorded_schedules_are_those_of_the_slow_model(shared: Path, name: str) -> None:
    check(recorded(shared, name))
