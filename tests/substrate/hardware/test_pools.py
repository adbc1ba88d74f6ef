"""Memory behind the tiers: its layout, and what is refused before anything is allocated."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.errors import UsageError  # noqa: E402
from kvsim.substrate.hardware.memory import GIB, available_bytes  # noqa: E402
from kvsim.substrate.hardware.pools import Pools  # noqa: E402


def pools(device, **sizes):
    usual = {"layers": 3, "fragment_bytes": 4096, "gpu_pages": 5, "cpu_pages": 7, "weight_bytes": 0, "device": device}
    return Pools(**usual | sizes)


def test_a_page_is_contiguous_on_the_host_and_begins_at_a_block(device):
    made = pools(device)
    assert made.gpu.shape == (3, 5, 4096) and made.host.shape == (7, 3, 4096)
    assert made.rows.shape == (7, 3 * 4096)
    made.host[6, 2, 4095] = 9
    assert made.rows[6, -1] == 9
    assert made.rows.ctypes.data % 4096 == 0
    assert made.host.is_pinned() == (device.type == "cuda")
    made.close()


def test_without_a_cpu_tier_there_is_no_host_pool(device):
    made = pools(device, cpu_pages=0)
    assert made.host is None
    made.close()


@pytest.mark.parametrize("fragment_bytes", [256, 520])
def test_a_page_that_kernels_cannot_copy_is_refused(fragment_bytes, device):
    with pytest.raises(UsageError, match=r"page_tokens: (a fragment .* must be a multiple of 16|fragments must begin)"):
        pools(device, fragment_bytes=fragment_bytes)


def test_a_host_pool_larger_than_memory_is_refused(device):
    pages = 2 * available_bytes() // (3 * 4096)
    with pytest.raises(UsageError, match=r"tiers.*GiB.* are available: decrease"):
        pools(device, cpu_pages=pages)


def test_a_gpu_pool_larger_than_memory_is_refused(device):
    with pytest.raises(UsageError, match=r"tiers.* GiB .*decrease"):
        pools(device, gpu_pages=(1 << 50) // (3 * 4096))


def test_weights_count(device):
    with pytest.raises(UsageError, match=r"1,048,576\.0 GiB"):
        pools(device, weight_bytes=GIB << 20)
