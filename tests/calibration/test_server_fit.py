"""The fit of a machine to a server's steps finds the machine; from batches on a virtual clock, it predicts the others."""

import gzip
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsim.calibration.server.batches import BURST, MIXED, PROMPT
from kvsim.calibration.server.fit import best_first, curves_form, fit, fit_all, roofline_form
from kvsim.calibration.server.least_squares import Vector, least_squares
from kvsim.calibration.server.measure import LEAST_ROUNDS, REPEATS, MeasureSettings, measure
from kvsim.calibration.server.measurements import Measurements, Quality, Reading, read_measurements, readings, write_measurements
from kvsim.calibration.server.step_times import Point, batch_s, expected_s, points
from kvsim.core.request import Request
from kvsim.hardware.spec import HardwareSpec
from kvsim.results.observed import ObservedRun
from tests.calibration.virtual_server import VirtualServer

SERVER = ["model=llama3_8b", "page_tokens=16", "tiers.gpu.capacity=50GiB", "engine.max_running_requests=256"]
SETTINGS = MeasureSettings(seed=0, seconds=90, step_tokens=None, longest_tokens=None)
OVERHEADS = {"step_overhead_s": 2e-3, "prefill_overhead_s": 1e-3, "prefill_launch_s": 8e-3, "request_overhead_s": 5e-3}


def machine(**settings: float) -> HardwareSpec:
    return replace(VirtualServer(["hardware=h100", *SERVER]).plan.hardware, **settings)


START = machine()
TRUTH = machine(flops_efficiency=0.6, memory_efficiency=0.7, **OVERHEADS)


def measured_on(server: VirtualServer, hardware: HardwareSpec = TRUTH, settings: MeasureSettings = SETTINGS) -> Measurements:
    server.plan = replace(server.plan, hardware=hardware)
    return measure(server.facts, server.play, server.plan.model, START, settings, lambda _: None)


@pytest.fixture(scope="module")
def vllm() -> VirtualServer:
    return VirtualServer(["preset=vllm", "engine.max_batch_tokens=8192", *SERVER])


@pytest.fixture(scope="module")
def measured(vllm: VirtualServer) -> Measurements:
    return measured_on(vllm)


def test_a_line_is_fitted_within_bounds() -> None:
    x = np.arange(5.0)

    def residuals(values: Vector) -> Vector:
        return np.asarray(values[0] + values[1] * x - (3.0 - 2.0 * x), dtype=np.float64)

    free = least_squares(residuals, np.zeros(2), np.full(2, -10.0), np.full(2, 10.0))
    assert free == pytest.approx([3.0, -2.0])
    bound = least_squares(residuals, np.zeros(2), np.array([-10.0, 0.0]), np.full(2, 10.0))
    assert bound == pytest.approx([-1.0, 0.0], abs=1e-6)  # the mean, with the slope at its bound
    curved = least_squares(lambda values: np.array([np.exp(values[0]) - 5.0]), np.zeros(1), np.full(1, -9.0), np.full(1, 9.0))
    assert curved == pytest.approx([np.log(5.0)])


def test_readings_without_error_give_the_machine_back(vllm: VirtualServer, measured: Measurements) -> None:
    model, known = vllm.plan.model, points(measured)
    exact = expected_s(known, model, TRUTH)
    perfect = [Point(reading=timed(one.reading, seconds), works=one.works) for one, seconds in zip(known, exact, strict=True)]
    found = fit(roofline_form(START), perfect, model)
    assert max(map(abs, found.errors)) < 1e-3
    for name in ("flops_efficiency", "memory_efficiency", *OVERHEADS):
        assert getattr(found.hardware, name) == pytest.approx(getattr(TRUTH, name), rel=0.02, abs=5e-5)


def timed(reading: Reading, seconds: float) -> Reading:
    return Reading(
        batch=reading.batch, seconds=seconds, samples=3, error=0.0, cached_tokens=reading.cached_tokens,
        decoding_tokens=reading.decoding_tokens,
    )  # fmt: skip


def test_every_batch_is_read_in_every_round(measured: Measurements) -> None:
    found = readings(measured)
    assert len(found) == len(measured.batches) and {one.batch.kind for one in found} >= {PROMPT, BURST, MIXED}
    assert not any(played.is_disturbed for played in measured.played)
    assert {played.round for played in measured.played} >= set(range(LEAST_ROUNDS))


LATE_S = 0.08
"""By how much a client is late."""


class LateClient(VirtualServer):
    """Sends the last request of each batch first."""

    def play(self, requests: Sequence[Request], page_tokens: int) -> ObservedRun:
        last = {one.after: one.index for one in requests}
        late = [one.after >= 0 and last[one.after] != one.index for one in requests]
        return super().play(
            [replace(one, delay_s=one.delay_s + LATE_S * is_late) for one, is_late in zip(requests, late, strict=True)],
            page_tokens,
        )


def test_no_batch_is_lost_where_the_last_request_of_one_ends_first() -> None:
    measured = measured_on(LateClient(["preset=vllm", "engine.max_batch_tokens=8192", *SERVER]))
    assert not any(played.is_disturbed for played in measured.played)
    assert Quality.of(measured)[:4:2] == (len(measured.batches), 0)


def test_the_fit_predicts_batches_that_it_has_not_seen(vllm: VirtualServer, measured: Measurements) -> None:
    found = fit(roofline_form(START), points(measured), vllm.plan.model)
    held_out = found.summary(points(measured), is_held_out=True)
    assert held_out.batches == 16 and held_out.median < 0.005 and held_out.most < 0.02
    assert found.hardware.request_overhead_s == pytest.approx(5e-3, abs=3e-4)


@pytest.mark.parametrize("pads_chunks", [False, True])
def test_whether_chunks_are_padded_is_as_told(pads_chunks: bool, vllm: VirtualServer, measured: Measurements) -> None:
    form = curves_form(START, START, points(measured), vllm.plan.model, 1, pads_chunks=pads_chunks)
    curves = form.machine(np.array([one.start for one in form.parameters])).compute_curves
    assert curves is not None and curves.pads_chunks is pads_chunks


SUMMING_START = machine(memory_bytes_per_s=4.8e12)


@pytest.fixture(scope="module")
def summing() -> HardwareSpec:
    """A machine whose parts add up."""
    own = VirtualServer(["preset=vllm", "hardware=h200_measured", *SERVER]).plan.hardware
    assert own.compute_curves is not None
    curves = replace(own.compute_curves, repeated_context_share=0.5, repeated_context_bytes=30e6)
    return replace(own, noise=None, leap_overhead_s=0.0, request_overhead_s=4e-3, compute_curves=curves)


@pytest.fixture(scope="module")
def summed(vllm: VirtualServer, summing: HardwareSpec) -> list[Point]:
    """What was read of it."""
    return points(measured_on(vllm, summing))


def test_a_machine_whose_parts_add_up_is_met_by_curves(vllm: VirtualServer, summing: HardwareSpec, summed: list[Point]) -> None:
    """With its own tiles: some forty numbers are fitted, which takes seconds."""
    model, true = vllm.plan.model, summing.compute_curves
    assert true is not None
    roofline = fit(roofline_form(SUMMING_START), summed, model)
    curves = fit(curves_form(SUMMING_START, roofline.hardware, summed, model, true.prefill_tile_tokens), summed, model)
    assert best_first([roofline, curves], summed) == [curves, roofline]
    held_out = curves.summary(summed, is_held_out=True)
    assert held_out.median < 0.015 and held_out.most < 0.1
    found = curves.hardware.compute_curves
    assert found is not None
    assert found.rested_prefill_share == pytest.approx(true.rested_prefill_share, abs=0.1) != 1
    assert found.warming_s == pytest.approx(true.warming_s, rel=0.3)
    assert found.repeated_context_share == pytest.approx(true.repeated_context_share, abs=0.1)
    assert found.repeated_context_bytes == pytest.approx(true.repeated_context_bytes, rel=0.3)
    assert roofline.summary(summed, is_held_out=True).median > 1.5 * held_out.median


@pytest.mark.long
def test_the_form_and_the_tiles_of_a_machine_are_found(
    vllm: VirtualServer, measured: Measurements, summing: HardwareSpec, summed: list[Point]
) -> None:
    known, model, true = points(measured), vllm.plan.model, summing.compute_curves
    best, other = fit_all(known, model, START)
    assert (best.name, other.name) == ("roofline", "curves") and other.summary(known, is_held_out=True).median < 0.03
    best, other = fit_all(summed, model, SUMMING_START)
    assert (best.name, other.name) == ("curves", "roofline")
    found = best.hardware.compute_curves
    assert found is not None and true is not None and found.prefill_tile_tokens == true.prefill_tile_tokens == 128


def test_a_server_faster_than_its_machine_has_a_higher_peak(vllm: VirtualServer, measured: Measurements) -> None:
    slow = machine(flops_per_s=400e12, memory_bytes_per_s=2e12, flops_efficiency=1.0, memory_efficiency=1.0)
    found = fit(roofline_form(slow), points(measured), vllm.plan.model).hardware
    assert found.flops_efficiency == found.memory_efficiency == 1.0
    assert found.flops_per_s == pytest.approx(TRUTH.effective_flops_per_s, rel=0.03)
    assert found.memory_bytes_per_s == pytest.approx(TRUTH.effective_memory_bytes_per_s, rel=0.03)


def test_an_engine_that_computes_prompts_apart_is_fitted_as_well() -> None:
    server = VirtualServer(["preset=sglang", "page_tokens=16", "engine.max_batch_tokens=8192", *SERVER], engine="sglang")
    measured = measured_on(server, replace(TRUTH, request_overhead_s=3e-3))
    assert not measured.joins_prompts
    best = fit(roofline_form(START), points(measured), server.plan.model)
    assert best.summary(points(measured), is_held_out=True).median < 0.02
    assert best.hardware.request_overhead_s == pytest.approx(3e-3, abs=5e-4)


def test_measurements_are_read_back_as_they_were(measured: Measurements, tmp_path: Path) -> None:
    path, packed = tmp_path / "one.measured.json", tmp_path / "one.measured.json.gz"
    path.write_bytes(write_measurements(measured))
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_measurements(path) == read_measurements(packed) == measured


def test_a_round_takes_time_only_for_batches_that_are_not_known_well(vllm: VirtualServer) -> None:
    begin = vllm.plays
    measured = measured_on(vllm, settings=replace(SETTINGS, seconds=0.0))
    assert vllm.plays - begin == LEAST_ROUNDS
    for at, batch in enumerate(measured.batches):
        assert sum(played.batch == at for played in measured.played) == LEAST_ROUNDS * REPEATS[batch.kind]


def test_without_held_out_batches_the_fitted_ones_choose(vllm: VirtualServer, measured: Measurements) -> None:
    fitted = [point for point in points(measured) if not point.reading.batch.is_held_out]
    close = fit(roofline_form(START), fitted, vllm.plan.model)
    far = replace(close, name="far", errors=[2 * error for error in close.errors])
    found = best_first([far, close], fitted)
    assert [one.name for one in found] == ["roofline", "far"] and found[0].summary(fitted, is_held_out=True).batches == 0


def test_what_a_batch_is_expected_to_take_is_what_it_takes(vllm: VirtualServer, measured: Measurements) -> None:
    known = points(measured)
    assert [one.reading.seconds for one in known] == pytest.approx(expected_s(known, vllm.plan.model, TRUTH), rel=0.02)
    guessed = [batch_s(one.reading.batch, measured, vllm.plan.model, TRUTH) for one in known if one.reading.batch.kind != BURST]
    assert [one.reading.seconds for one in known if one.reading.batch.kind != BURST] == pytest.approx(guessed, rel=0.02)
