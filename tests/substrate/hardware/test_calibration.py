"""Lines through measured times, and disks measured in files that are gone afterwards."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.substrate.hardware.disk_rates import DiskRates  # noqa: E402
from kvsim.substrate.hardware.link_rates import LEAST_LATENCY_S, fitted  # noqa: E402
from kvsim.substrate.hardware.stopwatch import Stopwatch  # noqa: E402


def test_a_line_has_the_latency_and_the_rate_of_its_points():
    n_bytes = np.array([1e3, 1e6, 1e9])
    assert fitted(n_bytes, 2e-5 + n_bytes / 5e10) == pytest.approx((2e-5, 5e10))


def test_short_copies_count_as_much_as_long_ones():
    """A hundredth more for the longest copy moves the rate by that, and the latency by no more."""
    n_bytes = np.array([1e3, 1e6, 1e9])
    seconds = (2e-5 + n_bytes / 5e10) * [1, 1, 1.01]
    latency_s, rate = fitted(n_bytes, seconds)
    assert latency_s == pytest.approx(2e-5, rel=0.01) and rate == pytest.approx(5e10 / 1.01, rel=0.005)


def test_noise_makes_no_latency_or_rate_of_zero_or_less():
    assert fitted(np.array([1e3, 1e6]), np.array([1e-3, 1e-4])) == (LEAST_LATENCY_S, 1e10)
    assert fitted(np.array([1e3, 1e6]), np.array([1e-7, 2e-4]))[0] == LEAST_LATENCY_S
    assert fitted(np.array([1e6]), np.array([1e-3])) == (LEAST_LATENCY_S, 1e9)


def test_a_disk_is_measured_in_files_that_are_gone_afterwards(tmp_path):
    rates = DiskRates(tmp_path, most_bytes=1 << 18, most_pages=8, seed=0)
    for page_bytes, threads in ((1 << 14, 1), (1 << 16, 3)):
        assert all(0 < rate < 1e12 for rate in rates.bytes_per_s(page_bytes, threads))
    assert 0 < rates.latency_s(1 << 14) < 1
    assert not list(tmp_path.iterdir())


def test_a_disk_that_loses_pages_is_not_measured(tmp_path):
    rates = DiskRates(tmp_path, most_bytes=1 << 18, most_pages=8, seed=0)
    with rates._open(4, 1 << 14, 1) as disk, pytest.raises(OSError, match=r"4 of 4 pages were lost .*'missing': 1"):
        rates._seconds(disk, disk.read, np.arange(4))
    assert not list(tmp_path.iterdir())


def test_a_stopwatch_leaves_the_first_call_out():
    calls = []
    watch = Stopwatch(torch.device("cpu"), 3)
    assert 0 <= watch.seconds(lambda: calls.append(len(calls))) < 1
    assert calls == [0, 1, 2, 3]
