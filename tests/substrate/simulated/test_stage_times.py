"""Stages take what their layers take, and the way between them takes a latency and a rate."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.engine.substrate import Work
from kvsim.hardware.curves import ComputeCurves
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.compute import step_times
from kvsim.substrate.simulated.pipeline import StageTimes
from kvsim.substrate.simulated.substrate import SimulatedSubstrate

MODEL = ModelSpec(layers=4, hidden_size=2, vocabulary=1, heads=4, kv_heads=4, head_dim=1, mlp_width=300)
CURVES = ComputeCurves(linear=[[1.0, 60.0]], prefill_attention=[[1.0, 1.0, 8.0]], decode_attention=[[16.0, 4.0]])
PP2 = HardwareSpec(
    flops_per_s=10.0,
    memory_bytes=1,
    memory_bytes_per_s=10.0,
    gpus=4,
    pipeline_parallel=2,
    host_to_device_bytes_per_s=1,
    device_to_host_bytes_per_s=1,
    both_directions_bytes_per_s=1,
    disk_read_bytes_per_s=1,
    disk_write_bytes_per_s=1,
    step_overhead_s=2.0,
    interconnect_bytes_per_s=8.0,
    interconnect_latency_s=3.0,
    allreduce_bytes_per_s=3.0,
    allreduce_latency_s=10.0,
)
CHUNK, DECODE = Work(chunks=[(5, 10)], sampled_tokens=1), Work(decode_requests=2, decode_context_tokens=50)
EACH_KIND = pytest.mark.parametrize("curves", [None, CURVES], ids=["roofline", "measured parts"])


def stages_s(machine: HardwareSpec, work: Work, model: ModelSpec = MODEL) -> list[float]:
    return [stage.leap_s(work, 1, 0.0) for stage in StageTimes(model, machine).stages]


@EACH_KIND
@pytest.mark.parametrize("work", [CHUNK, DECODE], ids=["chunk", "decode"])
def test_stages_together_take_as_long_as_the_model_on_the_gpus_of_one(curves: ComputeCurves | None, work: Work) -> None:
    """All layers are alike, and the vocabulary is a word. The overhead is the host's."""
    machine = replace(PP2, compute_curves=curves)
    whole = step_times(MODEL, replace(machine, gpus=2, pipeline_parallel=1, step_overhead_s=0.0)).leap_s(work, 1)
    assert sum(stages_s(machine, work)) == pytest.approx(whole, rel=0.02)
    first, second = stages_s(machine, work)
    assert first == pytest.approx(second, rel=0.05) and StageTimes(MODEL, machine).host_s(work) == 2.0


def test_the_way_to_the_next_stage_takes_two_rows_for_each_token() -> None:
    """A row has 2 elements of 2 bytes: hidden state and residual of 5 tokens are 40 bytes. Each of 2 GPUs sends 20 at 8 bytes/s
    after 3 s; 20 bytes are gathered from the other one at 3 bytes/s, in one step of 10 s."""
    assert StageTimes(MODEL, PP2).send_s(CHUNK) == pytest.approx(3 + 20 / 8 + 10 + 20 / 3)


def test_the_lm_head_makes_the_last_stage_slower_so_it_has_no_layer_more() -> None:
    wide = replace(MODEL, layers=5, vocabulary=1000)
    times = StageTimes(wide, PP2)
    assert times.layers == [3, 2]
    without_head = replace(MODEL, layers=5)
    assert stages_s(PP2, DECODE, wide)[0] == stages_s(PP2, DECODE, without_head)[0]
    assert stages_s(PP2, DECODE, wide)[1] > stages_s(PP2, DECODE, without_head)[1]


def test_launches_are_shared_by_layers() -> None:
    machine = replace(PP2, prefill_launch_s=1e9)
    assert stages_s(machine, CHUNK) == pytest.approx([0.5e9, 0.5e9])


def test_each_stage_warms_and_rests_by_itself() -> None:
    machine = replace(PP2, compute_curves=replace(CURVES, rested_prefill_share=0.5, warming_s=1e6))
    times = StageTimes(MODEL, machine)
    rested = [stage.leap_s(CHUNK, 1, 0.0) for stage in times.stages]
    warm = stages_s(replace(machine, compute_curves=CURVES), CHUNK)
    assert rested == pytest.approx([seconds / 2 for seconds in warm], rel=0.01)


@given(tokens=st.integers(1, 5000), start=st.integers(0, 5000), stages=st.sampled_from([2, 4]))
def test_one_step_takes_no_less_time_with_more_stages_on_the_same_gpus(tokens: int, start: int, stages: int) -> None:
    """A stage has fewer GPUs, so a step alone is slower: throughput is what stages are for."""
    free = replace(PP2, allreduce_bytes_per_s=None, allreduce_latency_s=0.0, interconnect_latency_s=0.0)
    work = Work(chunks=[(tokens, start)], sampled_tokens=1)

    def alone_s(count: int) -> float:
        substrate = SimulatedSubstrate(MODEL, replace(free, pipeline_parallel=count), 16, links="fifo")
        substrate.env.run(substrate.compute(work, []))
        return float(substrate.env.now)

    assert alone_s(1) <= alone_s(stages) * (1 + 1e-12)


@given(tokens=st.integers(1, 5000), more=st.integers(0, 5000))
def test_more_tokens_take_no_less_time_in_any_stage_and_on_the_way(tokens: int, more: int) -> None:
    small, large = Work(chunks=[(tokens, 0)]), Work(chunks=[(tokens + more, 0)])
    assert all(few <= many for few, many in zip(stages_s(PP2, small), stages_s(PP2, large), strict=True))
    assert StageTimes(MODEL, PP2).send_s(small) <= StageTimes(MODEL, PP2).send_s(large)


def test_a_step_tells_what_stages_and_communication_took() -> None:
    substrate = SimulatedSubstrate(MODEL, PP2, 16, links="fifo")
    substrate.compute(DECODE, [])
    assert DECODE.stages_s == pytest.approx(sum(stages_s(PP2, DECODE)) / 2)
    of_stage_s = 4 * PP2.allreduce_s(2 * 2 * 2)
    assert DECODE.exchange_s == pytest.approx(of_stage_s), "two layers have four sums"
