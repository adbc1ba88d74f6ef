"""With curves a step is the sum of its parts, and copies and reads are as fast as pages of the run's size are."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.pool import Pool
from kvsim.core.tier import Edge, Tier
from kvsim.core.transfer import Transfer
from kvsim.core.tree import Node, RadixTree
from kvsim.engine.substrate import Work
from kvsim.hardware.curves import ComputeCurves, DiskCurves, LinkCurves
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.substrate.simulated.compute import MeasuredParts, Ramps, step_times
from kvsim.substrate.simulated.substrate import SimulatedSubstrate

MODEL = ModelSpec(layers=2, hidden_size=2, vocabulary=5, heads=2, kv_heads=1, head_dim=1, mlp_width=3)
"""120 FLOPs a token and 20 for one that is sampled, 16 a pair, 8 bytes of KV a token (4 a layer), 140 bytes of weights."""
MACHINE: dict[str, Any] = {
    "flops_per_s": 1e9,
    "memory_bytes": 1,
    "memory_bytes_per_s": 1e9,
    "host_to_device_bytes_per_s": 100.0,
    "device_to_host_bytes_per_s": 80.0,
    "both_directions_bytes_per_s": 150.0,
    "disk_read_bytes_per_s": 20.0,
    "disk_write_bytes_per_s": 10.0,
    "step_overhead_s": 0.5,
    "attention_data_parallel": True,  # MODEL has one KV head, of which tensor-parallel GPUs would have copies
}
CURVES: dict[str, Any] = {
    "linear": [[1, 10.0], [100, 1000.0]],
    "prefill_attention": [[2, 10, 4.0], [2, 1000, 8.0], [200, 10, 16.0]],
    "decode_attention": [[40, 20.0], [80, 20.0], [400, 50.0]],
}


def machine(**changes: Any) -> HardwareSpec:
    return HardwareSpec(**(MACHINE | changes))


def measured(gpus: int = 1, **curves: Any) -> MeasuredParts:
    steps = step_times(MODEL, machine(gpus=gpus, compute_curves=ComputeCurves(**(CURVES | curves))))
    assert isinstance(steps, MeasuredParts)
    return steps


def test_products_run_at_the_rate_for_their_flops_a_byte() -> None:
    """12 tokens, all sampled: 12 * 140 = 1680 FLOPs for 140 bytes, 12 a byte: 120 FLOPs a second; and attention's least."""
    work = Work(decode_requests=12, decode_context_tokens=0)
    assert measured().leap_s(work, 1) == pytest.approx(1680 / 120 + 2 * 2.0 + 0.5)


def test_a_chunk_attends_at_the_rate_for_its_rows_and_its_context() -> None:
    """One token of two heads, at position 99: 16 * 100 FLOPs at 100 tokens' rate, halfway between those of 10 and of 1000."""
    work = Work(chunks=[(1, 99)])
    assert measured(linear=[[1, 120.0]]).leap_s(work, 1) == pytest.approx(1 + 1600 / 32**0.5 + 0.5)
    work = Work(chunks=[(10, 0), (1, 9)])
    attention_s = 16 * 55 / (4 * 16) ** 0.5 + 16 * 10 / 4
    assert measured(linear=[[1, 120.0]]).leap_s(work, 1) == pytest.approx(11 + attention_s + 0.5)


def test_prefill_is_done_in_whole_tiles_and_decoding_is_not() -> None:
    """Tiles of 4: products of 10 + 1 tokens take as long as of 12, attention as of 12 and of 4 tokens, from 0 and 9 on. These
    have 24 and 8 rows of queries: their own rates. With two requests that decode there are 13 tokens: as many as 16."""
    rates = [[8, 1, 16.0], [8, 13, 32.0], [24, 1, 64.0]]
    tiled = {"linear": [[1, 120.0]], "prefill_attention": rates, "prefill_tile_tokens": 4}
    chunks = [(10, 0), (1, 9)]
    attention_s = 16 * 78 / 64 + 16 * (4 * 9 + 10) / 32
    assert measured(**tiled).leap_s(Work(chunks=chunks), 1) == pytest.approx(12 + attention_s + 0.5)
    mixed = Work(chunks=chunks, decode_requests=2, decode_context_tokens=20)
    sampling_s, decode_s = 2 * 20 / 120, 2 * 4.0
    assert measured(**tiled).leap_s(mixed, 1) == pytest.approx(16 + sampling_s + attention_s + decode_s + 0.5)
    decode = Work(decode_requests=1, decode_context_tokens=10)
    assert measured(**tiled).leap_s(decode, 1) == measured(**(tiled | {"prefill_tile_tokens": 1})).leap_s(decode, 1)


def test_chunks_may_attend_as_long_as_the_longest_of_the_step() -> None:
    """10 and 1 tokens: the queries of the second chunk, whose context is 9 tokens and itself, are 10, of 20 rows. 9 of them
    attend over all ten. A chunk alone takes no longer."""
    rates = [[2, 1, 4.0], [20, 1, 16.0]]
    padding = {"linear": [[1, 120.0]], "prefill_attention": rates, "pads_chunks": True}
    attention_s = 16 * 55 / 16 + 16 * (9 * 10 + 10) / 16
    assert measured(**padding).leap_s(Work(chunks=[(10, 0), (1, 9)]), 1) == pytest.approx(11 + attention_s + 0.5)
    alone = Work(chunks=[(1, 9)])
    assert measured(**padding).leap_s(alone, 1) == measured(**(padding | {"pads_chunks": False})).leap_s(alone, 1)


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_few_rows_take_as_long_as_the_fewest_measured(gpus: int) -> None:
    """20 tokens of two heads: 40, 20 and 10 rows on each GPU, 40 at least were measured."""
    work = Work(chunks=[(20, 0)])
    curves = {"linear": [[1, 120.0 / gpus]], "prefill_attention": [[40, 1, 16.0], [80, 1, 32.0]]}
    assert measured(gpus=gpus, **curves).leap_s(work, 1) == pytest.approx(20 + 210 + 0.5)


@pytest.mark.parametrize(
    ("context", "layer_s"),
    [(0, 2.0), (5, 2.0), (10, 2.0), (15, 3.0), (20, 4.0), (60, 6.0), (100, 8.0), (200, 16.0)],
)
def test_decode_attention_takes_seconds_by_the_bytes_of_a_layer(context: int, layer_s: float) -> None:
    """Points at 10, 20 and 100 tokens of 4 bytes: 2, 4 and 8 seconds in each of two layers."""
    work = Work(decode_requests=1, decode_context_tokens=context)
    assert measured(linear=[[1, 140.0]]).leap_s(work, 1) == pytest.approx(1 + 2 * layer_s + 0.5)


def test_a_step_with_prefill_takes_its_launch_at_least_and_a_decode_step_does_not() -> None:
    curves = ComputeCurves(**CURVES)
    chunk, decode = Work(chunks=[(10, 0)]), Work(decode_requests=1, decode_context_tokens=1)
    chunk_s, decode_s = measured().leap_s(chunk, 1), measured().leap_s(decode, 1)
    for work, launch_s, expected_s in ((chunk, 1e6, 1e6 + 2 + 0.5), (chunk, 1e-6, chunk_s + 2), (decode, 1e6, decode_s)):
        steps = step_times(MODEL, machine(compute_curves=curves, prefill_launch_s=launch_s, prefill_overhead_s=2.0))
        assert steps.leap_s(work, 1) == pytest.approx(expected_s)


def test_copies_that_begin_with_a_measured_step_delay_its_launch() -> None:
    chunk: dict[str, Any] = {"chunks": [(10, 0)]}
    decode = {"decode_requests": 1, "decode_context_tokens": 1}
    hardware = machine(compute_curves=ComputeCurves(**CURVES), prefill_launch_s=1e6, copy_launch_s=7.0, copy_leap_s=3.0)
    steps = step_times(MODEL, hardware)
    for work, count, more_s in ((chunk, 1, 7.0), (decode, 1, 3.0), (decode, 5, 3.0)):
        copying, alone = Work(**work, has_copies=True), Work(**work)
        assert steps.leap_s(copying, count) - steps.leap_s(alone, count) == pytest.approx(more_s)


def test_repeated_context_takes_its_share_of_the_time() -> None:
    """Of 100 tokens 80 are repeated: as 20 + 80 / 4 = 40 tokens, and two more for each further step."""
    shared = measured(repeated_context_share=0.25)
    work, less = (Work(decode_requests=2, decode_context_tokens=tokens) for tokens in (100, 40))
    assert shared.leap_s(work, 3) > shared.leap_s(less, 3)
    work.repeated_context_tokens = 80
    assert shared.leap_s(work, 3) == pytest.approx(shared.leap_s(less, 3))
    assert measured().leap_s(work, 3) == pytest.approx(measured().leap_s(Work(decode_requests=2, decode_context_tokens=100), 3))


def test_only_what_a_cache_holds_of_common_context_is_read_faster() -> None:
    """20 different tokens and 80 repeated ones. A cache of 5 tokens holds a quarter: 80 * 3 / 4 / 4 = 15 are saved, not 60."""
    work = Work(decode_requests=2, decode_context_tokens=100, repeated_context_tokens=80)
    token_bytes = MODEL.kv_bytes_per_token / MODEL.attention_layers
    for held_tokens, counted in ((5, 85), (20, 40), (1000, 40)):
        steps = measured(repeated_context_share=0.25, repeated_context_bytes=held_tokens * token_bytes)
        alone = measured().leap_s(Work(decode_requests=2, decode_context_tokens=counted), 3)
        assert steps.leap_s(work, 3) == pytest.approx(alone)


def test_decode_attention_takes_its_flops_at_least() -> None:
    """At 100 tokens 16 * 100 FLOPs; a rate of 40 FLOPs a second makes more of them than the 16 seconds of their bytes."""
    steps = step_times(MODEL, machine(flops_per_s=40.0, compute_curves=ComputeCurves(**(CURVES | {"linear": [[1, 140.0]]}))))
    assert steps.leap_s(Work(decode_requests=1, decode_context_tokens=100), 1) == pytest.approx(1 + 40 + 0.5)


def test_gpus_share_rows_bytes_and_flops() -> None:
    """A row of the chunk is each GPU's, and a token takes 2 bytes of a layer on each."""
    chunk = Work(chunks=[(1, 99)])
    rows = [[1, 1, 10.0], [2, 1, 1000.0]]
    assert measured(gpus=2, linear=[[1, 60.0]], prefill_attention=rows).leap_s(chunk, 1) == pytest.approx(1 + 1600 / 20 + 0.5)
    decode = Work(decode_requests=1, decode_context_tokens=40)
    assert measured(gpus=2, linear=[[1, 70.0]]).leap_s(decode, 1) == pytest.approx(1 + 2 * 4.0 + 0.5)


HYBRID = replace(
    MODEL,
    recurrent_layers=1,
    state_heads=1,
    state_key_dim=3,
    state_value_dim=5,
    recurrent_in_width=1,
    state_flops_per_element=1.0,
)
"""15 elements, 60 bytes of states."""


def test_states_are_read_and_written_at_the_memorys_rate() -> None:
    curves = ComputeCurves(**CURVES)
    fast, slow = (
        step_times(HYBRID, machine(compute_curves=curves, memory_bytes_per_s=rate)).leap_s(Work(chunks=[(3, 0), (1, 0)]), 1)
        for rate in (1e9, 1.0)
    )
    assert slow - fast == pytest.approx(2 * 2 * 60)


@pytest.mark.parametrize("gpus", [1, 2])
def test_recurrences_take_the_time_of_their_own_curves(gpus: int) -> None:
    """Chunks of 4 tokens and 1 token, the latter as long as 2: 60 elements at 20 a second, 15 at 5. Two decoding requests
    read and write 240 bytes at 30 a second. GPUs share both, and the FLOPs of a recurrence are no products any more."""
    rows: dict[str, Any] = {"scan": [[2, 10.0], [4, 20.0]], "state_update": [[240 / gpus, 30.0]]}
    linear = {"linear": [[1, 1.0]], "prefill_attention": [[1, 1, 1e9]]}
    own, without = (
        step_times(model, machine(gpus=gpus, compute_curves=ComputeCurves(**(CURVES | linear | more))))
        for model, more in ((HYBRID, rows), (replace(HYBRID, state_flops_per_element=1e-12), {}))
    )
    chunks, decode = Work(chunks=[(4, 0), (1, 0)]), Work(decode_requests=2, decode_context_tokens=2)
    memory_s = 2 * 2 * 60 / machine(gpus=gpus).effective_memory_bytes_per_s
    assert own.leap_s(chunks, 1) - without.leap_s(chunks, 1) == pytest.approx((60 / 20 + 15 / 5) / gpus - memory_s)
    assert own.leap_s(decode, 3) - without.leap_s(decode, 3) == pytest.approx(3 * (240 / gpus / 30 - memory_s))


WORK = st.builds(Work, decode_requests=st.integers(1, 60), decode_context_tokens=st.integers(0, 300))


@settings(max_examples=100)
@given(work=WORK, steps=st.integers(1, 60), fraction=st.floats(0.0, 1.2))
def test_a_leap_is_the_sum_of_its_steps_and_may_be_stopped_at_each(work: Work, steps: int, fraction: float) -> None:
    parts = measured()
    each = [
        parts.leap_s(Work(decode_requests=work.decode_requests, decode_context_tokens=context), 1)
        for context in range(
            work.decode_context_tokens, work.decode_context_tokens + steps * work.decode_requests, work.decode_requests
        )
    ]
    assert parts.leap_s(work, steps) == pytest.approx(sum(each), rel=1e-9)
    elapsed_s = parts.leap_s(work, steps) * fraction
    expected = next((done for done in range(1, steps) if parts.leap_s(work, done) >= elapsed_s), steps)
    assert parts.steps_by(work, elapsed_s, steps) == (expected, parts.leap_s(work, expected))


def test_a_long_sum_costs_no_more_than_its_points() -> None:
    ramps = Ramps([(10.0, 5.0), (20.0, 10.0)])
    assert ramps.total(0, 1, 10) == 50
    assert ramps.total(10, 10, 2) == 5 + 10
    assert ramps.total(5, 10, 3) == 5 + 7.5 + 12.5
    assert ramps.total(20, 2, 10**12) == pytest.approx(10 * 10**12 + 10.0**24 / 2, rel=1e-9)


def test_channels_have_the_rates_of_the_runs_pages() -> None:
    links = LinkCurves(host_to_device=[[8, 0.25, 50.0]], device_to_host=[[8, 0.5, 30.0]], both_directions=[[8, 60.0]])
    disk = DiskCurves(read=[[1, 16, 4.0], [4, 16, 8.0]], write=[[1, 16, 2.0]], depth=2)
    spec = machine(link_curves=links, disk_curves=disk, disk_latency_s=0.125)
    channels = SimulatedSubstrate(MODEL, spec, 2, links="fifo").channels
    assert {name: (channel.bytes_per_s, channel.latency_s) for name, channel in channels.items()} == {
        "cpu-gpu": (50, 0.25),
        "gpu-cpu": (30, 0.5),
        "disk-cpu": (pytest.approx(32**0.5), 0.125),
        "cpu-disk": (2, 0.125),
        "disk-gpu": (pytest.approx(32**0.5), 0.375),
        "gpu-disk": (2, 0.625),
    }
    both = [channels["cpu-gpu"].send(375.0), channels["gpu-cpu"].send(225.0)]
    channels["cpu-gpu"].agenda.play()
    assert [flow.ended_s for flow in both] == pytest.approx([10.25, 10.5])  # 37.5 and 22.5 bytes a second


def test_a_disk_that_reads_and_writes_at_once_carries_no_more_than_was_measured() -> None:
    disk = DiskCurves(read=[[4, 16, 8.0]], write=[[4, 16, 4.0]], both=[[4, 16, 6.0]])
    channels = SimulatedSubstrate(MODEL, machine(disk_curves=disk, disk_latency_s=0.0), 2, links="fifo").channels
    flows = [channels["disk-cpu"].send(40.0), channels["cpu-disk"].send(24.0)]
    channels["disk-cpu"].agenda.play()
    assert [flow.ended_s for flow in flows] == pytest.approx([10.0, 11.0])  # 4 and 2 bytes a second; then 4 for the last 4


@pytest.mark.parametrize(
    "curves", [None, LinkCurves(host_to_device=[[4, 0.5, 30.0]], device_to_host=[[4, 0.25, 30.0]], both_directions=[[4, 60.0]])]
)
def test_copies_begin_later_in_a_serving_engine(curves: LinkCurves | None) -> None:
    plain, serving = (machine(link_curves=curves, host_latency_s=1.0, copy_overhead_s=more_s) for more_s in (0.0, 3.0))
    found = [SimulatedSubstrate(MODEL, spec, 2, links="fifo").channels for spec in (plain, serving)]
    for name, more_s in (("cpu-gpu", 3.0), ("gpu-cpu", 3.0), ("disk-gpu", 3.0), ("disk-cpu", 0.0)):
        assert found[1][name].latency_s - found[0][name].latency_s == pytest.approx(more_s)


@pytest.mark.parametrize(("host", "slower"), [(100.0, 20.0), (15.0, 15.0)], ids=["slow disk", "slow host link"])
def test_between_disk_and_gpu_the_slower_of_disk_and_host_link_counts(host: float, slower: float) -> None:
    spec = machine(
        host_to_device_bytes_per_s=host,
        device_to_host_bytes_per_s=host,
        disk_read_bytes_per_s=20.0,
        disk_write_bytes_per_s=20.0,
        host_latency_s=0.25,
        disk_latency_s=1.0,
    )
    channels = SimulatedSubstrate(MODEL, spec, 2, links="fifo").channels
    assert [(channels[name].bytes_per_s, channels[name].latency_s) for name in ("disk-gpu", "gpu-disk")] == [
        (slower, 1.25),
        (slower, 1.25),
    ]


def test_what_goes_straight_to_the_disk_takes_its_part_of_the_host_link() -> None:
    """100 bytes a second to the GPU, 150 both ways: loads from CPU and disk get 5/6 of 100 and of 20, and go on alone."""
    channels = SimulatedSubstrate(MODEL, machine(host_latency_s=0.0, disk_latency_s=0.0), 2, links="fifo").channels
    flows = [channels["cpu-gpu"].send(1000.0), channels["disk-gpu"].send(100.0)]
    channels["cpu-gpu"].agenda.play()
    assert [flow.ended_s for flow in flows] == pytest.approx([6 + 500 / 100, 6.0])


def test_gpus_with_copies_of_the_same_kv_each_read_all_of_it() -> None:
    """On two GPUs, decode attention takes as long as on one; with a head for each, it reads half as many bytes a GPU."""
    work = Work(decode_requests=1, decode_context_tokens=20)  # 80 bytes a layer
    fast = {"linear": [[1, 1e9]]}
    one = step_times(MODEL, machine(compute_curves=ComputeCurves(**(CURVES | fast)))).leap_s(work, 1)
    copies, parts = (
        step_times(MODEL, machine(gpus=2, attention_data_parallel=own, compute_curves=ComputeCurves(**(CURVES | fast))))
        for own in (False, True)
    )
    assert copies.leap_s(work, 1) == pytest.approx(one, rel=1e-6)
    assert one - parts.leap_s(work, 1) == pytest.approx(2 * (80 / 20 - 40 / 20), rel=1e-6)


def test_gpus_with_copies_of_the_same_kv_each_move_their_own() -> None:
    """MODEL has one KV head, which both GPUs have: whole fragments of 8 bytes, at the rate of one link."""
    links = LinkCurves(
        host_to_device=[[4, 0.25, 50.0], [8, 0.5, 70.0]], device_to_host=[[8, 0.5, 30.0]], both_directions=[[8, 60.0]]
    )
    for curves, down, up in ((links, (70.0, 0.5), (30.0, 0.5)), (None, (100.0, 1.0), (80.0, 1.0))):
        spec = machine(link_curves=curves, gpus=2, attention_data_parallel=False, host_latency_s=1.0)
        channels = SimulatedSubstrate(MODEL, spec, 2, links="fifo").channels
        assert [(channels[name].bytes_per_s, channels[name].latency_s) for name in ("cpu-gpu", "gpu-cpu")] == [down, up]


def states_up(lower: str, upper: str) -> Transfer:
    """Two states of 60 bytes on their way from one tier to the one above."""
    above, below = (Tier(name, place, Pool(9), LRU()) for place, name in enumerate((upper, lower)))
    above.slot_bytes = 60
    states = Node(((0, 2),), 2, 0, None, RadixTree(2), 0.0)
    return Transfer(Edge(above, below, WriteThrough()), [states], goes_down=False)


@pytest.mark.parametrize("jitter", [0.0, 1e-12])
def test_gpus_with_copies_of_the_same_kv_have_parts_of_a_state(jitter: float) -> None:
    """Both links carry 200 bytes a second of states, and half as much KV, which each of the two GPUs has; a disk is slower."""
    for lower, seconds in (("cpu", 120 / 200), ("disk", 120 / 20)):
        spec = machine(gpus=2, attention_data_parallel=False, rank_jitter=jitter, host_latency_s=0.0, disk_latency_s=0.0)
        substrate = SimulatedSubstrate(HYBRID, spec, 2, links="fifo")
        substrate.copy(states_up(lower, "gpu"))
        substrate.agenda.play()
        assert substrate.env.now == pytest.approx(seconds)
        assert [link.bytes for link in substrate.wiring.used()] == [120]


def test_gpus_have_links_of_their_own_for_parts_of_each_fragment() -> None:
    """Pages of 2 tokens: fragments of 8 bytes, 4 on each of two GPUs."""
    links = LinkCurves(
        host_to_device=[[4, 0.25, 50.0], [8, 0.5, 70.0]], device_to_host=[[4, 0.5, 30.0]], both_directions=[[4, 60.0]]
    )
    channels = SimulatedSubstrate(MODEL, machine(link_curves=links, gpus=2), 2, links="fifo").channels
    assert [(channels[name].bytes_per_s, channels[name].latency_s) for name in ("cpu-gpu", "gpu-cpu")] == [(100, 0.25), (60, 0.5)]
