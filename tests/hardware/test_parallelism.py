"""What GPUs that share a model exchange takes a latency and a rate, and their numbers must fit together."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.hardware.spec import HardwareSpec, LinearHardware

MACHINE = HardwareSpec(
    flops_per_s=1.0,
    memory_bytes=1,
    memory_bytes_per_s=1.0,
    gpus=8,
    host_to_device_bytes_per_s=1.0,
    device_to_host_bytes_per_s=1.0,
    both_directions_bytes_per_s=1.0,
    disk_read_bytes_per_s=1.0,
    disk_write_bytes_per_s=1.0,
    interconnect_bytes_per_s=2.0,
    interconnect_latency_s=5.0,
    allreduce_bytes_per_s=4.0,
    allreduce_latency_s=3.0,
    allreduce_steps=2,
)
STAGES = replace(MACHINE, pipeline_parallel=2)
EXPERTS = replace(MACHINE, expert_parallel=8, expert_exchange="all2all")


def test_the_gpus_of_a_stage_are_those_that_tensor_parallelism_has() -> None:
    assert (MACHINE.stage_gpus, STAGES.stage_gpus) == (8, 4)
    assert replace(MACHINE, tensor_parallel=4, pipeline_parallel=2).stage_gpus == 4
    assert STAGES.allreduce_s(16.0) == 2 * 3.0 + 16.0 * 2 * 3 / 4 / 4.0, "only the stage's own GPUs add up"
    assert not replace(MACHINE, pipeline_parallel=8).communicates and STAGES.communicates


def test_activations_reach_the_next_stage_in_parts_that_are_gathered_there() -> None:
    """Each of 4 GPUs sends a quarter of 16 bytes at 2 bytes/s after 5 s; gathering them is one step of 3 s, and 12 bytes at 4."""
    assert STAGES.stage_send_s(16.0) == 5.0 + 4 / 2.0 + (3.0 + 16.0 * 3 / 4 / 4.0)
    assert replace(MACHINE, gpus=2, pipeline_parallel=2).stage_send_s(16.0) == 5.0 + 16 / 2.0


def test_an_all_to_all_sends_everything_but_the_own_part_in_one_step() -> None:
    assert EXPERTS.all2all_s(16.0) == 3.0 + 14.0 / 4.0
    assert replace(EXPERTS, all2all_bytes_per_s=7.0, all2all_latency_s=0.5).all2all_s(16.0) == 0.5 + 14.0 / 7.0
    assert replace(EXPERTS, allreduce_bytes_per_s=None, all2all_bytes_per_s=7.0).all2all_s(16.0) == 3.0 + 14.0 / 7.0
    assert replace(EXPERTS, allreduce_bytes_per_s=None).all2all_s(16.0) == 0.0
    assert replace(EXPERTS, allreduce_peer_bytes_per_s=0.25).all2all_s(16.0) == 3.0 + 14.0 / 1.75, "a link to each other GPU"


def test_deepep_takes_as_long_as_its_figures_say() -> None:
    """DeepEP's low-latency kernels, 8 GPUs, 128 tokens each, hidden size 7168, 8 experts a token: 77 us there in FP8 at 98 GB/s,
    114 us back in bf16 at 127 GB/s, counting the rows that stay, too."""
    rows = 128 * 8 * 7168
    there = replace(EXPERTS, all2all_bytes_per_s=98e9 * 7 / 8, all2all_latency_s=0.0).all2all_s(rows * 1)
    back = replace(EXPERTS, all2all_bytes_per_s=127e9 * 7 / 8, all2all_latency_s=0.0).all2all_s(rows * 2)
    assert there == pytest.approx(77e-6, rel=0.04) and back == pytest.approx(114e-6, rel=0.02)


def test_a_stage_is_a_machine_whose_host_only_launches_it() -> None:
    whole = replace(
        STAGES, rank_jitter=0.5, step_overhead_s=1.0, prefill_overhead_s=2.0, leap_overhead_s=4.0, copy_leap_s=8.0,
        prefill_launch_s=16.0, chunk_launch_s=32.0,
    )  # fmt: skip
    stage = whole.stage(0.25)
    assert (stage.gpus, stage.pipeline_parallel, stage.rank_jitter) == (4, 1, 0.0)
    assert (stage.step_overhead_s, stage.prefill_overhead_s, stage.leap_extra_s(has_copies=True)) == (0.0, 0.0, 0.0)
    assert stage.launch_s(2, 0) == 0.25 * (16 + 32)
    assert whole.host_s(has_prefill=True, has_copies=True) == 3.0
    assert whole.host_s(has_prefill=False, has_copies=True) == 1.0 + 4.0 + 8.0


@given(gpus=st.sampled_from([2, 4, 8, 16]), n_bytes=st.floats(1, 1e12), more=st.floats(1, 10))
def test_more_bytes_take_no_less_time(gpus: int, n_bytes: float, more: float) -> None:
    spread = replace(MACHINE, gpus=gpus, expert_parallel=gpus, expert_exchange="all2all")
    staged = replace(MACHINE, gpus=2 * gpus, pipeline_parallel=2)
    for seconds in (spread.all2all_s, staged.stage_send_s, spread.allreduce_s):
        assert seconds(n_bytes) <= seconds(n_bytes * more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pipeline_parallel": 3}, "pipeline_parallel=3 does not divide gpus=8"),
        ({"pipeline_parallel": 0}, "pipeline_parallel must be at least 1, not 0"),
        ({"tensor_parallel": 4}, "gpus is 8, but tensor_parallel=4 x pipeline_parallel=1 is 4: set gpus=4"),
        ({"tensor_parallel": 8, "pipeline_parallel": 2}, "gpus is 8, but tensor_parallel=8 x pipeline_parallel=2 is 16"),
        ({"expert_parallel": 3}, "expert_parallel=3 does not divide the 8 tensor-parallel GPUs"),
        ({"pipeline_parallel": 2, "expert_parallel": 8}, "expert_parallel=8 does not divide the 4 tensor-parallel GPUs"),
        ({"expert_parallel": 4, "expert_exchange": "all2all"}, "expert_exchange=all2all needs expert_parallel=8, all GPUs"),
        ({"expert_exchange": "p2p"}, "expert_exchange must be one of allreduce, all2all, not p2p"),
        ({"expert_imbalance": 0.5}, "expert_imbalance must be at least 1, not 0.5"),
        ({"all2all_bytes_per_s": 0.0}, "all2all_bytes_per_s must be above 0, not 0.0"),
        ({"all2all_latency_s": -1.0}, "all2all_latency_s must be 0 or more, not -1.0"),
        ({"all2all_dispatch_bytes": 4}, "all2all_dispatch_bytes must be from 1 to 2, not 4"),
    ],
)
def test_numbers_that_do_not_fit_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MACHINE, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["pipeline_parallel", "expert_parallel"])
def test_a_formula_for_whole_steps_has_neither_stages_nor_experts(name: str) -> None:
    rates = ("flops_per_s", "memory_bytes", "memory_bytes_per_s", "host_to_device_bytes_per_s", "device_to_host_bytes_per_s",
             "both_directions_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")  # fmt: skip
    terms = {"fixed_s": 1.0, "prefill_token_s": 1.0, "decode_request_s": 1.0, "chunk_context_s": 0.0, "decode_context_s": 0.0}
    with pytest.raises(ValueError, match=f"{name} has no effect where step times are a formula"):
        LinearHardware(**{rate: getattr(MACHINE, rate) for rate in rates}, **terms, gpus=2, **{name: 2})
