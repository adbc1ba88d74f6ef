"""The file of prices: what it may have, and one line for each mistake."""

from pathlib import Path

import pytest

from kvsim.errors import UsageError
from kvsim.sweeps.prices import Prices, overrides, read_prices

LEAST = "gpus: {h100: 2.5}\nper: hour\n"


def read(tmp_path: Path, text: str) -> Prices:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    return read_prices(path)


def test_a_price_is_that_of_gpus_memory_and_drives(tmp_path: Path) -> None:
    """8 GPUs at 2.5, 2 x 256 GiB at 0.01 and 2 drives at 0.3: 20 + 5.12 + 0.6."""
    drive = "drives: {x: {price: 0.3, capacity: 2TiB}}\n"
    prices = read(tmp_path, f"{LEAST}currency: USD\ncpu_gib: 0.01\n{drive}choices: {{cpu: [0, 256GiB], drives: [none, x]}}")
    assert prices.price("h100", 8, 512 * 2**30, "x", 2) == 25.72
    assert prices.price("h100", 8, 0, "none", 0) == 20
    assert prices.listed.unit == "USD per hour"
    assert prices.drives["x"].lines == ("tiers.disk.capacity=2TiB",) and prices.drives["x"].n_bytes == 2 * 2**40


@pytest.mark.parametrize(
    ("engines", "gpus", "expected"),
    [(1, 8, None), (2, 4, None), (4, 4, 2), (6, 2, 3), (10, 2, 2), (5, 2, 1), (3, 8, 1)],
)
def test_engines_are_spread_evenly_over_as_few_hosts_as_there_must_be(
    engines: int, gpus: int, expected: int | None, tmp_path: Path
) -> None:
    """With 8 GPUs a host; 5 engines with 2 GPUs cannot be spread evenly over 2 hosts, nor 10 over 3."""
    assert read(tmp_path, f"{LEAST}gpus_per_host: 8").engines_per_host(engines, gpus) == expected


def test_a_policy_is_overrides_or_the_name_of_an_eviction_policy() -> None:
    assert overrides("slru") == ["eviction=slru"]
    assert overrides("slru eviction.protected_hits=3 placement=write_back") == [
        "eviction=slru", "eviction.protected_hits=3", "placement=write_back",
    ]  # fmt: skip
    assert overrides("") == []


def test_a_single_choice_needs_no_list(tmp_path: Path) -> None:
    assert read(tmp_path, f"{LEAST}choices: {{engines: 2, policies: lru}}").choices.engines == [2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("per: hour", "gpus is missing"),
        ("gpus: {h100: 2.5}", "per is missing: per: hour, or per: month"),
        ("gpus: {h100: 2.5}\nper: week", "per must be one of hour, month, not week"),
        ("gpus: {}\nper: hour", "gpus is empty"),
        ("gpus: [h100]\nper: hour", "gpus must be a mapping, not ['h100']"),
        ("gpus: {h10: 2.5}\nper: hour", "gpus: there is no file of hardware h10; did you mean"),
        ("gpus: {h100: -1}\nper: hour", "gpus.h100 must be 0 or more, not -1"),
        ("gpus: {h100: .nan}\nper: hour", "gpus.h100 must be a finite number of at least 0, not nan"),
        ("gpus: {h100: cheap}\nper: hour", "gpus.h100: 'cheap' is not a number"),
        (f"{LEAST}cpu_gb: 1", "cpu_gb: there is no such setting; did you mean cpu_gib?"),
        (f"{LEAST}choices: {{engine: [1]}}", "choices.engine: there is no such setting; did you mean engines?"),
        (f"{LEAST}choices: {{engines: [0]}}", "choices.engines must be at least 1, not 0"),
        (f"{LEAST}choices: {{engines: []}}", "choices.engines is empty: give at least one value"),
        (f"{LEAST}choices: {{engines: [1, 1]}}", "choices.engines has a value twice"),
        (f"{LEAST}choices: [1]", "choices must be a mapping, not [1]"),
        (f"{LEAST}choices: {{cpu: [10pages]}}", "choices.cpu must be a size such as 2GiB, or 0, not '10pages'"),
        (f"{LEAST}choices: {{cpu: [10GiB]}}", "cpu_gib is missing"),
        (f"{LEAST}choices: {{drives: [x]}}", "choices.drives: there is no drive x; choose from none"),
        (f"{LEAST}choices: {{policies: ['lru \"']}}", "choices.policies[0]: cannot read"),
        (
            f"{LEAST}choices: {{policies: ['lru cluster.engines=2']}}",
            "choices.policies[0]: cluster.engines is no policy: it costs",
        ),
        (f"{LEAST}choices: {{policies: [lru, slo.ttft_s=2]}}", "choices.policies[1]: slo.ttft_s is no policy: set it on the"),
        (f"{LEAST}drives: {{none: {{price: 1, capacity: 1TiB}}}}", "drives.none: this name stands for no drive"),
        (f"{LEAST}drives: {{x: {{price: 1}}}}", "drives.x must have a price and a capacity"),
        (f"{LEAST}drives: {{x: 1}}", "drives.x must have a price and a capacity"),
        (f"{LEAST}drives: {{x: {{price: a, capacity: 1TiB}}}}", "drives.x.price must be a number of at least 0, not 'a'"),
        (f"{LEAST}drives: {{x: {{price: 1, capacity: 0}}}}", "drives.x.capacity must be above 0"),
        (f"{LEAST}drives: {{x: {{price: 1, capacity: much}}}}", "drives.x.capacity must be a size"),
        (f"{LEAST}drives: {{x: {{price: 1, capacity: 1TiB, hardware.gpus: 2}}}}", "drives.x.hardware.gpus: a drive has price"),
        (f"{LEAST}drives: {{x: {{price: 1, capacity: 1TiB, hardware.disk_latency_s: {{a: 1}}}}}}", "latency_s must be a single"),
        (f"{LEAST}drives: {{x: {{price: 1, capacity: 1TiB, tiers.disk.scope: [1, 2]}}}}", "drives.x.tiers.disk.scope must be a"),
        (f"{LEAST}drives: {{x: {{price: 1, capacity: [1, 2]}}}}", "drives.x.capacity must be a single value, not [1, 2]"),
        (f"{LEAST}choices: {{policies: [lru drive=pm9a3]}}", "choices.policies[0]: drive is no policy: it changes"),
        (f"{LEAST}choices: {{policies: [network=connectx7]}}", "network is no policy: it changes the hardware"),
        (f"{LEAST}choices: {{policies: [hardware.memory_bytes=1]}}", "hardware.memory_bytes is no policy: it changes"),
        (f"{LEAST}choices: {{policies: [hardware.pipeline_parallel=2]}}", "is no policy: set choices.pipeline_parallel"),
        (f"{LEAST}choices: {{pipeline_parallel: [0]}}", "choices.pipeline_parallel must be at least 1, not 0"),
        (f"{LEAST}choices: {{expert_parallel: [2, 2]}}", "choices.expert_parallel has a value twice"),
        (f"{LEAST}gpus_per_host: 4\nchoices: {{gpus_per_engine: [8]}}", "choices.gpus_per_engine: the GPUs of an engine are on"),
        ("gpus: {h100: 2.5", ":2: not valid YAML"),
        ("- 1", "it must be a mapping of settings"),
    ],
)
def test_a_mistake_is_told_in_one_line_that_names_file_and_key(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        read(tmp_path, text)
    line = str(raised.value)
    assert line.startswith(f"{tmp_path / 'prices.yaml'}:") and expected in line and "\n" not in line


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.yaml: there is no such file"):
        read_prices(tmp_path / "missing.yaml")


def test_a_drive_of_the_catalogue_has_its_rates_unless_others_are_given(tmp_path: Path) -> None:
    own = "hardware.disk_read_bytes_per_s: 7GB/s, tiers.disk.scope: cluster"
    drives = f"{{pm9a3: {{price: 1, capacity: 1TiB}}, micron_9550: {{price: 1, capacity: 1TiB, {own}}}}}"
    found = read(tmp_path, f"{LEAST}drives: {drives}").drives
    assert found["pm9a3"].lines == ("drive=pm9a3", "tiers.disk.capacity=1TiB")
    assert found["micron_9550"].lines == (
        "tiers.disk.capacity=1TiB", "hardware.disk_read_bytes_per_s=7000000000", "tiers.disk.scope=cluster",
    )  # fmt: skip
