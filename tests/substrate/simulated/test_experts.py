"""GPUs with experts of their own: what the busiest one reads and computes, and what tokens cost on their way."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.engine.substrate import Work
from kvsim.hardware.curves import ComputeCurves
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.communication import Communication, ExpertLoad
from kvsim.substrate.simulated.compute import step_times

MODEL = ModelSpec(
    layers=3, hidden_size=2, vocabulary=5, heads=4, kv_heads=4, head_dim=1, dense_layers=1, mlp_width=3, routed_experts=8,
    experts_per_token=2, shared_experts=1, expert_width=5,
)  # fmt: skip
"""Two layers have experts of 3 * 2 * 5 = 30 weights each, 60 bytes."""
TP4 = HardwareSpec(
    flops_per_s=1.0,
    memory_bytes=1,
    memory_bytes_per_s=1.0,
    gpus=4,
    host_to_device_bytes_per_s=1,
    device_to_host_bytes_per_s=1,
    both_directions_bytes_per_s=1,
    disk_read_bytes_per_s=1,
    disk_write_bytes_per_s=1,
    step_overhead_s=0.0,
    allreduce_bytes_per_s=3.0,
    allreduce_latency_s=10.0,
    allreduce_steps=2,
)
EP4 = replace(TP4, expert_parallel=4)
EXCHANGED = replace(EP4, expert_exchange="all2all")
CHUNK, DECODE = Work(chunks=[(5, 10)]), Work(decode_requests=2, decode_context_tokens=50)
CURVES = ComputeCurves(linear=[[1.0, 60.0], [100.0, 90.0]], prefill_attention=[[1.0, 1.0, 8.0]], decode_attention=[[16.0, 4.0]])
EACH_KIND = pytest.mark.parametrize("curves", [None, CURVES], ids=["roofline", "measured parts"])


def step_s(machine: HardwareSpec, work: Work, model: ModelSpec = MODEL) -> float:
    return step_times(model, machine).leap_s(work, 1)


@EACH_KIND
@pytest.mark.parametrize("work", [CHUNK, DECODE], ids=["chunk", "decode"])
def test_whole_experts_take_as_long_as_parts_of_all_if_every_group_gets_as_many_tokens(
    curves: ComputeCurves | None, work: Work
) -> None:
    """Each GPU reads as many bytes and computes as much, and results are added up as before."""
    assert step_s(replace(EP4, compute_curves=curves), work) == step_s(replace(TP4, compute_curves=curves), work)
    two = replace(TP4, compute_curves=curves, expert_parallel=2)
    assert step_s(two, work) == step_s(replace(TP4, compute_curves=curves), work)


def test_the_busiest_group_computes_its_share_of_tokens() -> None:
    """A token uses 2 experts in 2 layers, 4 * 30 weights: 240 FLOPs. With half as many more, 5 tokens need 600 more on 4 GPUs."""
    bound_by_compute = replace(EP4, memory_bytes_per_s=1e9)
    busiest = replace(bound_by_compute, expert_imbalance=1.5)
    assert MODEL.routed_flops_per_token == 240.0
    assert step_s(busiest, CHUNK) - step_s(bound_by_compute, CHUNK) == pytest.approx(0.5 * 240 * 5 / 4)


def test_the_busiest_group_touches_more_experts() -> None:
    """Two tokens that pick 2 of 8 touch 8 * (1 - 0.75 ** 2) = 3.5; where an expert is picked half of the time, 6.

    There are 60 bytes in each of 2 layers, and 4 GPUs read a byte a second each.
    """
    bound_by_memory = replace(EP4, flops_per_s=1e9)
    busiest = replace(bound_by_memory, expert_imbalance=2.0)
    assert step_s(busiest, DECODE) - step_s(bound_by_memory, DECODE) == pytest.approx((6 - 3.5) * 60 * 2 / 4)


def test_an_imbalance_without_groups_of_experts_is_of_no_matter() -> None:
    assert step_s(replace(TP4, expert_imbalance=2.0), DECODE) == step_s(TP4, DECODE)


def test_tokens_go_to_their_experts_and_back_in_place_of_the_second_sum() -> None:
    """Of 6 sums, 2 give way. Each of 4 GPUs has 2 of 5 tokens, a row of 4 bytes for each of 2 experts: 16 bytes each way.

    A quarter of them stays. A sum of 20 bytes takes 20 s and 30 bytes at 3 bytes/s; a way takes 10 s and 12 bytes.
    """
    sums_s = 4 * (2 * 10 + 20 * 2 * 3 / 4 / 3)
    ways_s = 2 * 2 * (10 + 16 * 3 / 4 / 3)
    assert Communication(MODEL, EXCHANGED).step_s(CHUNK) == pytest.approx(sums_s + ways_s)


def test_tokens_may_go_in_fp8_and_the_busiest_gpu_gets_more_of_them() -> None:
    plain = Communication(MODEL, EXCHANGED).step_s(CHUNK)
    fp8 = Communication(MODEL, replace(EXCHANGED, all2all_dispatch_bytes=1)).step_s(CHUNK)
    assert plain - fp8 == pytest.approx(2 * 8 * 3 / 4 / 3), "half of the bytes there, in two layers"
    busiest = Communication(MODEL, replace(EXCHANGED, expert_imbalance=1.5)).step_s(CHUNK)
    assert busiest - plain == pytest.approx(2 * 2 * 0.5 * 16 * 3 / 4 / 3)


def test_a_single_token_is_on_one_gpu_while_the_others_wait() -> None:
    one, four = Work(decode_requests=1, decode_context_tokens=5), Work(decode_requests=4, decode_context_tokens=5)
    no_sums = replace(EXCHANGED, allreduce_bytes_per_s=None, all2all_bytes_per_s=3.0)
    assert Communication(MODEL, no_sums).step_s(one) == Communication(MODEL, no_sums).step_s(four) > 0


def test_every_gpu_has_the_shared_experts_where_tokens_are_exchanged() -> None:
    """One of 60 bytes in each of 2 layers: 3 GPUs read them, too."""
    assert MODEL.shared_expert_bytes == 120.0
    more = ExpertLoad(MODEL, EXCHANGED).weight_bytes(5) - ExpertLoad(MODEL, EP4).weight_bytes(5)
    assert more == pytest.approx(3 * 120)


def test_a_dense_model_has_nothing_to_exchange() -> None:
    dense = ModelSpec(layers=3, hidden_size=2, vocabulary=5, heads=4, kv_heads=4, head_dim=1, mlp_width=3)
    assert step_s(EXCHANGED, CHUNK, dense) == step_s(TP4, CHUNK, dense)


@EACH_KIND
@given(tokens=st.integers(1, 4000), imbalance=st.floats(1, 3), more=st.floats(0, 1))
def test_more_imbalance_never_makes_a_roofline_step_faster(
    curves: ComputeCurves | None, tokens: int, imbalance: float, more: float
) -> None:
    """With measured parts, more FLOPs for each byte may be computed at a higher rate, but never in less time than fewer."""
    machine = replace(EXCHANGED, expert_imbalance=imbalance, compute_curves=curves)
    work = Work(chunks=[(tokens, 0)])
    slower = replace(machine, expert_imbalance=imbalance + more)
    assert step_s(slower, work) >= step_s(machine, work) * (1 - 1e-12)


@given(tokens=st.integers(1, 4000), more=st.integers(0, 4000))
def test_more_tokens_never_take_less_time_on_their_way(tokens: int, more: int) -> None:
    communication = Communication(MODEL, EXCHANGED)
    fewer_s, more_s = (communication.step_s(Work(decode_requests=count)) for count in (tokens, tokens + more))
    assert fewer_s <= more_s
