"""Curves go through their points, straight on logarithms, and stay as they are outside."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsim.errors import UsageError
from kvsim.hardware.curves import ComputeCurves, DiskCurves, LinkCurves
from kvsim.hardware.spec import HardwareSpec
from kvsim.plans.construct import construct

H200 = Path(__file__).parent.parent.parent / "conf" / "hardware" / "h200.yaml"
COMPUTE: dict[str, Any] = {
    "linear": [[1, 4.0], [100, 400]],
    "prefill_attention": [[1, 1, 1.0]],
    "decode_attention": [[10, 1.0], [20, 1.5]],
}
LINKS: dict[str, Any] = {
    "host_to_device": [[1000, 1e-5, 10.0], [4000, 4e-5, 40.0]],
    "device_to_host": [[1000, 1e-5, 8.0]],
    "both_directions": [[1000, 15.0]],
}
DISK: dict[str, Any] = {"read": [[1, 100, 10.0], [1, 400, 20.0], [4, 100, 40.0]], "write": [[1, 100, 5.0]]}


def test_a_curve_is_straight_on_logarithms_and_constant_outside() -> None:
    curves = ComputeCurves(**COMPUTE)
    assert [curves.linear_flops_per_s(x) for x in (0.1, 1, 100, 1e9)] == [4, 4, 400, 400]
    assert curves.linear_flops_per_s(10) == pytest.approx(40)


def test_a_link_has_a_rate_and_a_latency_for_each_size_of_fragment() -> None:
    curves = LinkCurves(**LINKS)
    assert curves.to_device(2000) == pytest.approx((20, 2e-5))
    assert curves.to_host(2000) == (8, 1e-5) and curves.total_bytes_per_s(2000) == 15


def test_a_disk_has_a_rate_for_each_depth_and_size_of_page() -> None:
    assert DiskCurves(**DISK, depth=1).read_bytes_per_s(200) == pytest.approx(200**0.5)
    assert DiskCurves(**DISK, depth=2).read_bytes_per_s(100) == pytest.approx(20)
    assert DiskCurves(**DISK, depth=2).read_bytes_per_s(400) == pytest.approx((20 * 40) ** 0.5)
    assert DiskCurves(**DISK).read_bytes_per_s(1e9) == DiskCurves(**DISK, depth=64).read_bytes_per_s(1e9) == 40
    assert DiskCurves(**DISK).write_bytes_per_s(1) == 5
    assert DiskCurves(**DISK).total_bytes_per_s(1) is None
    assert DiskCurves(**DISK, both=[[1, 100, 12.0], [4, 100, 44.0]]).total_bytes_per_s(100) == 44
    with pytest.raises(ValueError, match=r"disk_curves.both must be rows of \[depth, page_bytes, bytes_per_s\], at least one"):
        DiskCurves(**DISK, both=[])


def test_a_scan_of_few_tokens_takes_as_long_as_the_fewest_measured() -> None:
    curves = ComputeCurves(**COMPUTE, scan=[[16, 8.0], [64, 32.0]], state_update=[[100, 5.0], [1000, 50.0]])
    assert [curves.scan_elements_per_s(tokens) for tokens in (4, 16, 32, 64, 1000)] == pytest.approx([2, 8, 16, 32, 32])
    assert curves.state_bytes_per_s(100) == 5 and curves.state_bytes_per_s(1e6) == 50


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scan": [[1, 1.0]]}, "compute_curves.scan and compute_curves.state_update: set both or neither"),
        (
            {"scan": [[1, 1.0]], "state_update": [[1, 0.0]]},
            r"compute_curves.state_update must be rows of \[bytes, bytes_per_s\] with all values above 0",
        ),
        ({"prefill_tile_tokens": 0}, "compute_curves.prefill_tile_tokens must be at least 1, not 0"),
        ({"rested_prefill_share": 0.0}, "compute_curves.rested_prefill_share must be above 0 and at most 1, not 0.0"),
        ({"rested_prefill_share": 1.1}, "compute_curves.rested_prefill_share must be above 0 and at most 1, not 1.1"),
        ({"warming_s": 0.0}, "compute_curves.warming_s must be above 0, not 0.0"),
        ({"linear": []}, r"compute_curves.linear must be rows of \[flops_per_byte, flops_per_s\], at least one"),
        ({"linear": [[1, 2], [1, 3]]}, "in ascending order of flops_per_byte"),
        ({"linear": [[2, 2], [1, 3]]}, "in ascending order of flops_per_byte"),
        ({"linear": [[1, 2, 3]]}, r"all values above 0, not \[1, 2, 3\]"),
        ({"linear": [[1, 0]]}, r"all values above 0, not \[1, 0\]"),
        ({"linear": [[1, "fast"]]}, "all values above 0, not .*fast"),
        ({"linear": [7]}, "all values above 0, not 7"),
        ({"prefill_attention": [[1, 2, 1], [1, 1, 1]]}, "in ascending order of query_rows and context_tokens"),
        ({"decode_attention": [[10, 1.0], [20, 2.5]]}, "compute_curves.decode_attention: more bytes must not take less time"),
    ],
)
def test_bad_rows_are_refused_by_name(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ComputeCurves(**(COMPUTE | change))


def test_a_depth_is_at_least_one() -> None:
    with pytest.raises(ValueError, match=r"disk_curves\.depth must be at least 1, not 0"):
        DiskCurves(**DISK, depth=0)


def from_yaml(**curves: Any) -> HardwareSpec:
    left_out = (
        "_target_",
        "rank_faults",
        "allreduce_steps",
        "pipeline_parallel",
        "expert_parallel",
        "expert_exchange",
        "attention_data_parallel",
        "all2all_dispatch_bytes",
    )
    given = yaml.safe_load(H200.read_text())
    settings = {name: float(value) for name, value in given.items() if name not in left_out and value is not None}
    text = yaml.safe_dump(settings | {"memory_bytes": 10**11, "gpus": 1} | curves)
    return construct(HardwareSpec, yaml.safe_load(text), "hardware")


def test_curves_are_part_of_a_hardware_file() -> None:
    spec = from_yaml(link_curves=LINKS, disk_curves=DISK | {"depth": 2}, compute_curves=COMPUTE)
    assert spec.link_curves == LinkCurves(**LINKS)
    assert spec.disk_curves == DiskCurves(**DISK, depth=2)
    assert spec.compute_curves == ComputeCurves(**COMPUTE)
    assert from_yaml().compute_curves is None


@pytest.mark.parametrize(
    ("curves", "problem"),
    [
        ({"compute_curves": COMPUTE | {"linear": [[0, 1]]}}, "hardware.compute_curves.linear must be rows of"),
        ({"compute_curves": {"linear": [[1, 1]]}}, "hardware.compute_curves.decode_attention is missing"),
        ({"link_curves": LINKS | {"sideways": []}}, "hardware.link_curves.sideways: Key 'sideways' not in 'LinkCurves'"),
    ],
)
def test_a_bad_curve_in_a_file_is_one_line(curves: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        from_yaml(**curves)
