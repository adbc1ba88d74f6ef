"""What a step took longer than its parts, of batches whose times are known."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.calibration.engine_overhead import (
    COPIES,
    LONG_TOKENS,
    SHORT_TOKENS,
    Course,
    Played,
    Workload,
    build_cache,
    build_tiers,
    copy_overhead_s,
    excess_s,
    serve,
    with_copies,
    with_launches,
    with_step_overheads,
)
from kvsim.calibration.engine_warming import Rests, timed_steps, warmed
from kvsim.calibration.machine_noise import step_times
from kvsim.core.request import Request
from kvsim.engine.engine import EngineSettings
from kvsim.engine.link_use import LinkUse
from kvsim.engine.recorder import Batch
from kvsim.hardware.curves import ComputeCurves
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.commands.small_machine import MACHINE, MODEL

LLAMA = ModelSpec(
    layers=32, hidden_size=4096, vocabulary=128_256, heads=32, kv_heads=8, head_dim=128, mlp_width=14_336
)  # fmt: skip


def test_what_exceeds_the_known_parts_of_a_step() -> None:
    """A decode step takes 60 + 20 seconds, and 8 more for each cached token; two of them 160 + 8."""
    batches = [Batch(0.0, 80.0 + more, 0, 0, 1, 0, 1) for more in (1.0, 3.0, 50.0)]
    assert excess_s(batches, MODEL, MACHINE) == pytest.approx([1.0, 3.0, 50.0])
    assert excess_s([Batch(10.0, 10.0 + 168.0 + 4.0, 0, 0, 1, 0, 2)], MODEL, MACHINE) == pytest.approx([2.0])


def test_a_chunk_is_known_too() -> None:
    """Three tokens from the start: 3 * 60 FLOPs, 8 for each of 6 pairs, 20 for the token that is sampled."""
    assert excess_s([Batch(0.0, 180.0 + 48.0 + 20.0 + 7.0, 1, 3, 0, 0, 1)], MODEL, MACHINE) == pytest.approx([7.0])


def test_overheads_of_steps() -> None:
    """Rows of decode steps leave 2 a step and single ones 7, so a row has 5 once. A short prompt takes 164 seconds."""
    row = Batch(0.0, 80.0 * 10 + 8.0 * 45 + 20.0, 0, 0, 1, 0, 10)
    together = Batch(0.0, 160.0 * 10 + 16.0 * 45 + 20.0, 0, 0, 2, 0, 10)
    step, short = Batch(0.0, 87.0, 0, 0, 1, 0, 1), Batch(0.0, 164.0, 1, SHORT_TOKENS, 0, 0, 1)
    found = with_step_overheads(replace(MACHINE, prefill_overhead_s=8.0), MODEL, [row, together, step, short])
    assert (found.step_overhead_s, found.leap_overhead_s) == pytest.approx((2.0, 5.0))
    assert (found.prefill_overhead_s, found.prefill_launch_s) == pytest.approx((0.0, 162.0))


def test_overheads_are_not_negative() -> None:
    """Three decode steps take 264 seconds, one 80."""
    batches = [Batch(0.0, 255.0, 0, 0, 1, 0, 3), Batch(0.0, 0.5, 0, 0, 1, 0, 1)]
    found = with_step_overheads(MACHINE, MODEL, batches)
    assert (found.step_overhead_s, found.leap_overhead_s) == (0.0, 0.0)


def test_the_overhead_of_copies_is_what_rate_and_latency_leave() -> None:
    """At 4 bytes and after 2 seconds; loads do not count, nor what has been measured before."""
    machine = replace(
        MACHINE, device_to_host_bytes_per_s=4.0, both_directions_bytes_per_s=4.0, host_latency_s=2.0, copy_overhead_s=9.0
    )
    stores = np.array([[0.0, 2.0 + 3.0 + more, 12.0, at] for at, more in enumerate((0.5, 1.0, 8.0))])
    links = [LinkUse(name="gpu-cpu", intervals=stores), LinkUse(name="cpu-gpu", intervals=np.array([[0.0, 90.0, 1.0, 0]] * 9))]
    assert copy_overhead_s(machine, 1.0, links, 5) == pytest.approx(1.0)
    assert copy_overhead_s(machine, 1.0, links, 2) == pytest.approx(0.75), "those of the first two requests"
    assert copy_overhead_s(machine, 1.0, links[1:], 5) == 0.0
    assert copy_overhead_s(machine, 1.0, [LinkUse(name="gpu-cpu", intervals=stores - [0, 4.5, 0, 0])], 5) == 0.0


def test_what_copies_add_to_the_launch_of_a_step_and_to_a_leap() -> None:
    """A prompt of 9 tokens takes 540 + 360 + 20 seconds, or a launch of 1,000, and 3 of overhead; a decode step after it 80,
    8 for each cached token, and 3 of overhead."""
    machine = replace(MACHINE, step_overhead_s=1.0, leap_overhead_s=2.0, prefill_overhead_s=2.0, prefill_launch_s=1000.0)

    def prompts(*more_s: float, tokens: int = 9) -> list[Batch]:
        return [Batch(0.0, 1003.0 + more, 1, tokens, 0, 0, 1) for more in more_s]

    def decodes(*more_s: float, tokens: int = 9) -> list[Batch]:
        return [Batch(0.0, 80.0 + 8.0 * tokens + 3.0 + more, 0, 0, 1, tokens, 1) for more in more_s]

    others = [Batch(0.0, 900.0, 0, 0, 1, 9, 2), Batch(0.0, 900.0, 0, 0, 2, 9, 1), Batch(0.0, 900.0, 2, 30, 1, 99, 1)]
    single = [
        *prompts(0.0, 2.0, 90.0),
        *prompts(500.0, tokens=5),
        *decodes(1.0, 4.0, 5.0),
        *decodes(70.0, tokens=2),
        *decodes(70.0, tokens=10),
        *others,
    ]
    stores = [LinkUse(name="gpu-cpu")]
    copying = Played(batches=[*prompts(60.0, 5.0, 8.0, 6.0), *single], links=stores)
    alone = [*prompts(0.0), *prompts(0.0, tokens=5), *decodes(0.5, 1.5, 9.0), *decodes(60.0, tokens=5), *others]
    found = with_copies(machine, MODEL, copying, 4, alone)
    assert (found.copy_launch_s, found.copy_leap_s) == pytest.approx((4.0, 2.5))
    assert replace(found, copy_launch_s=0.0, copy_leap_s=0.0) == machine
    longer = [*prompts(0.0, tokens=12), *decodes(0.0, tokens=12)]
    assert with_copies(machine, MODEL, copying, 4, longer).copy_leap_s == pytest.approx(4.0), "after other prompts"
    assert with_copies(machine, MODEL, copying, 4, decodes(5.0, tokens=0)).copy_leap_s == 0.0
    assert with_copies(machine, MODEL, Played(batches=prompts(0.0, -7.0), links=stores), 2, []) == machine
    assert with_copies(machine, MODEL, replace(copying, links=[LinkUse(name="cpu-disk")]), 4, alone) == machine, "no copies"


def test_tiers_have_room_for_what_runs_at_once_and_for_the_single_request_before() -> None:
    """Two requests of three pages and one of five that joins; single ones of three and of five."""
    first = Course(together=2, together_tokens=32, output_tokens=4, joining=(1,), single=0)
    course = replace(first, single=4, long_tokens=64, single_output_tokens=(2,))
    assert first.memory_pages(first.requests(16), 16) == 2 * 3 + 5
    assert course.memory_pages(course.requests(16), 16) == 2 * 3 + 5 + 2 * 5


@pytest.mark.parametrize("page_tokens", [1, 16, 512, 4096])
def test_prompts_are_as_long_whatever_a_page_is(page_tokens: int) -> None:
    requests = Course(joining=()).requests(page_tokens)
    assert sorted({request.prompt_tokens for request in requests}) == [32, 256, LONG_TOKENS]
    pages = page_ids_of(requests)
    assert len(pages) == len(set(pages)) == sum(request.prompt_tokens // page_tokens for request in requests)


def page_ids_of(requests: Sequence[Request]) -> list[int]:
    return [page for request in requests for start, count in request.runs for page in range(start, start + count)]


@pytest.mark.parametrize("page_tokens", [1, 16, 100, 512])
def test_requests_that_join_have_all_but_32_tokens_in_common_with_the_first(page_tokens: int) -> None:
    first, *_, early, late, last = Course(joining=(1, 2), single=0).requests(page_tokens)
    common = first.prompt_tokens // page_tokens
    for request in (early, late, last):
        pages = page_ids_of([request])
        assert pages[:common] == page_ids_of([first]) and request.prompt_tokens == common * page_tokens + 32
        assert len(pages) == request.prompt_pages == request.prompt_tokens // page_tokens
    alone = Course(joining=(2,), single=0).requests(page_tokens, shares_prefix=False)[-1]
    assert alone.prompt_tokens == 32 and not set(page_ids_of([alone])) & set(page_ids_of([first]))
    own = [set(page_ids_of([request])[common:]) for request in (early, late, last)]
    assert not own[0] & own[1] and not own[1] & own[2]
    assert (early.arrival_s, late.arrival_s, last.arrival_s) == (0.15, 0.3, 0.3)


def test_launches_alone_beside_decoding_requests_and_of_several_chunks() -> None:
    """Steps with a long chunk do not count; the overhead of a step is known."""
    machine = replace(MACHINE, step_overhead_s=4.0)
    idle = [Batch(0.0, 164.0 + more, 1, SHORT_TOKENS, 0, 0, 1) for more in (-60.0, 0.0, 2.0)]
    beside = [Batch(0.0, 200.0 + more, 1, SHORT_TOKENS, 1, 9, 1) for more in (0.0, 5.0, 90.0)]
    several = [Batch(0.0, 205.0 + 2 * 7.0, 3, 3 * SHORT_TOKENS, 1, 9, 1), Batch(0.0, 205.0 + 9.0, 2, 2 * SHORT_TOKENS, 1, 9, 1)]
    others = [Batch(0.0, 900.0, 2, 2 * SHORT_TOKENS + 1, 1, 9, 1), Batch(0.0, 800.0, 2, 2 * SHORT_TOKENS, 0, 0, 1)]
    found = with_launches(machine, [*idle, *beside, *several, *others, Batch(0.0, 1.0, 0, 0, 1, 9, 1)])
    assert found == replace(machine, prefill_launch_s=160.0, decode_launch_s=41.0, chunk_launch_s=8.0)
    assert with_launches(machine, idle) == replace(machine, prefill_launch_s=160.0), "nothing is known of the others"
    assert with_launches(machine, [Batch(0.0, 3.0, 1, SHORT_TOKENS, 0, 0, 1)]) == machine


def test_prompts_in_turn_wait_for_the_answer_before() -> None:
    requests = Course(together=0, joining=(), single=3, single_output_tokens=(2,), long_tokens=64).requests(16)
    assert [(request.after, request.delay_s, request.prompt_tokens) for request in requests] == [
        (-1, 0.25, 32), (0, 0.25, 64), (1, 0.25, 32),
    ]  # fmt: skip
    *others, first, second, third = Course(together=2, single=3).requests(16)
    assert {request.after for request in others} == {-1}
    assert first.after == 0, "when those that arrive together have been answered"
    assert (second.after, third.after) == (first.index, second.index)


def test_answers_are_long_and_short_after_prompts_of_both_lengths() -> None:
    requests = Course(together=0, joining=(), single=6).requests(16)
    assert [(request.prompt_tokens, request.output_tokens) for request in requests] == [
        (32, 40), (1024, 40), (32, 2), (1024, 2), (32, 40), (1024, 40),
    ]  # fmt: skip


def test_steps_of_one_kind_are_told_apart() -> None:
    """Short prompts are launches; the decode steps of long ones are alike, those of short ones are left out."""
    batches = [
        Batch(0.0, 1.0, 1, 32, 0, 0, 1), Batch(1.0, 3.0, 0, 0, 1, 32, 1), Batch(3.0, 7.0, 1, 64, 0, 0, 1),
        Batch(7.0, 15.0, 0, 0, 1, 64, 1), Batch(20.0, 36.0, 1, 64, 1, 70, 1), Batch(40.0, 44.0, 0, 0, 1, 70, 2),
        Batch(50.0, 99.0, 0, 0, 2, 128, 1),
    ]  # fmt: skip
    assert step_times(batches, 64) == {"launches": [1.0], "prefill_steps": [4.0], "decode_steps": [8.0, 2.0]}


CURVES = ComputeCurves(
    linear=[[1, 4e12], [200, 6e14]], prefill_attention=[[32, 32, 3e14]], decode_attention=[[1 << 16, 3e9], [1 << 28, 3e12]],
    rested_prefill_share=0.93, warming_s=0.5,
)  # fmt: skip


@pytest.mark.parametrize("curves", [None, CURVES], ids=["roofline", "curves"])
def test_overheads_of_a_simulated_machine_are_found(curves: ComputeCurves | None) -> None:
    """A row of decode steps hides a part of what it takes once, so nothing is found exactly."""
    known = replace(MACHINE, flops_per_s=7e14, memory_bytes_per_s=4e12, memory_bytes=1 << 40, compute_curves=curves)
    known = replace(known, host_to_device_bytes_per_s=5e10, device_to_host_bytes_per_s=5e10, both_directions_bytes_per_s=9e10)
    overheads: dict[str, Any] = {
        "leap_overhead_s": 0.001,
        "prefill_overhead_s": 0.003,
        "prefill_launch_s": 0.012,
        "chunk_launch_s": 0.0012,
        "decode_launch_s": 0.003,
        "copy_launch_s": 0.004,
        "copy_leap_s": 0.002,
        "copy_overhead_s": 0.0015,
    }
    machine, model = replace(known, **overheads), LLAMA

    def played(course: Workload) -> Played:
        requests = course.requests(16)
        pages = course.memory_pages(requests, 16)
        tiers = build_tiers(["gpu", "cpu"] if course.is_written_through else ["gpu"], pages, 16)
        substrate = SimulatedSubstrate(model, machine, 16, links="fifo")
        settings = EngineSettings(max_batch_tokens=course.batch_tokens)
        return serve(requests, substrate, tiers, build_cache(model, tiers, 16), settings)

    batches = played(Course()).batches
    joined = [batch.prefill_tokens for batch in batches if batch.prefill_requests and batch.decode_requests]
    assert joined == [SHORT_TOKENS * count for count in Course().joining]
    found = with_step_overheads(known, model, batches)
    copying = played(COPIES)
    copied = copy_overhead_s(known, model.page_bytes(16) / model.layers, copying.links, COPIES.together)
    found = replace(with_copies(found, model, copying, COPIES.together, batches), copy_overhead_s=copied)
    if curves is None:
        overheads |= {"prefill_overhead_s": 0.0, "prefill_launch_s": 0.015}
    else:
        found = replace(found, compute_curves=replace(curves, rested_prefill_share=1.0))
        found = warmed(found, timed_steps(played(Rests()).batches, model, found))
        assert found.compute_curves is not None
        assert found.compute_curves.rested_prefill_share == pytest.approx(curves.rested_prefill_share, abs=0.005)
        assert found.compute_curves.warming_s == pytest.approx(curves.warming_s, rel=0.1)
    for name, seconds in overheads.items():
        assert getattr(found, name) == pytest.approx(seconds, rel=0.06), name
    assert found.step_overhead_s < 5e-5
