"""What a plan must be for its engines to be started and stopped, and what has no effect without it."""

import pytest

from kvsim.errors import NoEffect, UsageError
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.settings.configuration import compose_with_choices

SCALED = ("cluster.engines=4", "autoscaling=target_utilization")


def plan(*overrides: str, command: str = "simulate") -> Plan:
    config, choices = compose_with_choices(list(overrides))
    return build_run(config, command=command, overrides=overrides, choices=choices)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["autoscaling=schedule"], "autoscaling has no effect with one engine"),
        (["cluster.engines=2", "cluster.min_engines=2"], "cluster.min_engines has no effect without autoscaling"),
        (["cluster.engines=2", "cluster.start_s=1"], "cluster.start_s has no effect without autoscaling"),
        (["cluster.engines=2", "autoscaling=dynamo_planner", "autoscaling.values=3"], "autoscaling.values has no effect with"),
    ],
)
def test_a_setting_without_effect_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(NoEffect, match=message):
        plan(*overrides)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["cluster.failures=[{engine: 1, at_s: 5}]"], "autoscaling: engines that fail are not replaced"),
        (["cluster.workers=2", "routing=session_affinity"], "cluster.workers: autoscaling starts and stops engines"),
        (["cluster.min_engines=5"], "cluster.min_engines=5 is above engines=4"),
        (["cluster.min_engines=3", "cluster.initial_engines=2"], "cluster.initial_engines=2 is below min_engines=3"),
        (["cluster.start_s=1e9"], "cluster.start_s must be from 0 to 86400"),
        (["hardware.disk_read_bytes_per_s=1000"], "this machine loads the weights in 1.6.*e\\+07 s, more than a day"),
        (
            ["tiers.cpu.capacity=1000pages", "tiers.cpu.scope=engine", "tiers.disk.capacity=9000pages"],
            "the CPU tier of an engine that stops ends with it",
        ),
        (["substrate=hardware", "model=tiny"], "autoscaling: a GPU of this machine cannot be started and stopped"),
    ],
)
def test_what_cannot_be_scaled_is_refused(more: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*SCALED, *more)


def test_prefill_and_decode_apart_are_not_scaled() -> None:
    with pytest.raises(UsageError, match="engines that only prefill or only decode are not scaled"):
        plan("cluster.prefill=1", "cluster.decode=1", "autoscaling=target_utilization")


def test_states_below_the_gpu_end_with_an_engine_or_are_refused() -> None:
    hybrid = (*SCALED, "model=nemotron_h_8b", "tiers.cpu.capacity=10GiB", "cluster.engines_per_host=1")
    with pytest.raises(UsageError, match="recurrent states below the GPU of an engine that stops cannot be kept"):
        plan(*hybrid)
    assert plan(*hybrid, "tiers.cpu.scope=engine").is_scaled


@pytest.mark.parametrize("command", ["replay", "curve", "serve", "plan", "validate"])
def test_other_commands_do_not_scale(command: str) -> None:
    with pytest.raises(NoEffect, match=f"autoscaling has no effect on kvsim {command}"):
        plan("autoscaling=target_utilization", command=command)


def test_an_engine_starts_as_fast_as_its_weights_are_read() -> None:
    """16 GB from the disk of an H200 host, at 3.2 GB/s, or over the links to its GPU if these are slower."""
    one = plan(*SCALED)
    n_bytes = one.model.parameters * one.model.weight_dtype_bytes
    assert one.start_s == n_bytes / one.hardware.disk_read_bytes_per_s
    link = plan(*SCALED, "hardware.host_to_device_bytes_per_s=1e9")
    assert link.start_s == n_bytes / 1e9
    assert plan(*SCALED, "cluster.start_s=90").start_s == 90.0


def test_engines_at_the_start() -> None:
    assert plan(*SCALED).cluster.first == 1 and plan(*SCALED, "cluster.min_engines=0").cluster.first == 1
    assert plan(*SCALED, "cluster.min_engines=3").cluster.first == 3
    assert plan(*SCALED, "cluster.min_engines=0", "cluster.initial_engines=0").cluster.first == 0
