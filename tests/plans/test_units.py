"""Rates, times and sizes with a unit."""

import pytest

from kvsim.emulation.settings import ServeSettings
from kvsim.errors import UsageError
from kvsim.plans.construct import construct
from kvsim.plans.units import quantity, with_numbers
from kvsim.results.slo import Slo
from kvsim.shadow.sources.settings import SourceSettings
from tests.composing import plan


@pytest.mark.parametrize(
    ("key", "text", "number"),
    [
        ("hardware.disk_read_bytes_per_s", "7GB/s", 7_000_000_000),
        ("hardware.disk_read_bytes_per_s", "1.5GiB/s", 3 * 2**29),
        ("tiers.remote.bytes_per_s", "12.5 GB/s", 12_500_000_000),
        ("slo.ttft_s", "200ms", 0.2),
        ("slo.ttft_s", "2s", 2),
        ("engine.step_overhead_s", "15us", 15e-6),
        ("server.timeout_s", "10min", 600),
        ("eviction.window_s", "1.5h", 5400),
        ("hardware.memory_bytes", "80GiB", 80 * 2**30),
        ("slo.ttft_s", ".5s", 0.5),
        ("slo.ttft_s", "1e-1s", 0.1),
        ("slo.ttft_s", "2.s", 2),
        ("slo.ttft_s", "-1ms", -0.001),
        ("slo.ttft_s", "1e-1", "1e-1"),
        ("slo.ttft_s", "0.2", "0.2"),
        ("trace.path", "7GB/s", "7GB/s"),
        ("tiers.gpu.capacity", "40GiB", "40GiB"),
        ("trace.sessions_per_s", "3", "3"),
    ],
)
def test_a_quantity_is_a_number_in_the_unit_of_its_setting(key: str, text: str, number: object) -> None:
    assert quantity(text, key) == number


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("hardware.disk_read_bytes_per_s", "7GB", r"hardware\.disk_read_bytes_per_s: 7GB is not a rate; did you mean GB/s"),
        ("slo.ttft_s", "2sec", r"slo\.ttft_s: 2sec is not a time; .*ns, us, ms, s, min, h, such as 200ms"),
        ("slo.ttft_s", "2GB", "2GB is not a time"),
        ("hardware.memory_bytes", "80gib", "80gib is not a size; did you mean GiB"),
    ],
)
def test_a_wrong_unit_is_answered_with_the_right_ones(key: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        quantity(text, key)


def test_lists_and_sections_are_read_too() -> None:
    node = {"cluster": {"failures": [{"engine": 2, "at_s": "10min", "back_after_s": 60}]}, "seed": 0}
    assert with_numbers(node) == {"cluster": {"failures": [{"engine": 2, "at_s": 600, "back_after_s": 60}]}, "seed": 0}


def test_a_run_with_units_is_the_run_with_the_numbers() -> None:
    with_units = plan("hardware.disk_read_bytes_per_s=7GB/s", "slo.ttft_s=200ms", command="simulate")
    plain = plan("hardware.disk_read_bytes_per_s=7000000000", "slo.ttft_s=0.2", command="simulate")
    assert with_units.config == plain.config and with_units.slo.ttft_s == 0.2
    assert with_units.hardware.disk_read_bytes_per_s == 7e9


def test_a_prefix_alone_is_offered_both_units() -> None:
    with pytest.raises(UsageError, match=r"'G' is not a unit of capacity; did you mean GiB or GB\?"):
        plan("tiers.gpu.capacity=40G")


def test_settings_of_a_command_may_have_units_too() -> None:
    assert construct(ServeSettings, {"drain_s": "2s"}, "serve").drain_s == 2
    assert construct(SourceSettings, {"log": "x.jsonl", "every_s": "500ms"}, "shadow").every_s == 0.5
    with pytest.raises(UsageError, match=r"serve\.drain_s: 2sec is not a time"):
        construct(ServeSettings, {"drain_s": "2sec"}, "serve")


def test_units_are_read_from_the_command_line() -> None:
    assert plan("slo.ttft_s=.5s", "slo.tpot_s=1e-1s", command="simulate").slo == Slo(ttft_s=0.5, tpot_s=0.1)
    with pytest.raises(UsageError, match=r"slo\.ttft_s must be above 0, not -0\.001; it is the longest time of a request"):
        plan("slo.ttft_s=-1ms", command="simulate")
