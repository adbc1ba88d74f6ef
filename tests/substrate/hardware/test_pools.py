"""Memory behind the tiers: its layout, and what is refused before anything is allocated."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.errors import UsageError  # noqa: E402
from kvsim.substrate.hardware.memory.available import GIB, available_bytes  # noqa: E402
from kvsim.substrate.hardware.memory.gpu_pool import GpuPool, PeerPools, random_bytes  # noqa: E402
from kvsim.substrate.hardware.memory.host_pool import HostPool, check_host_room, shared_file  # noqa: E402
from kvsim.substrate.hardware.memory.raw_tensor import raw_tensor  # noqa: E402

PAGE_BYTES = 3 * 4096


def gpu_pool(device, **sizes):
    usual = {"layers": 3, "fragment_bytes": 4096, "pages": 5, "weight_bytes": 0, "device": device}
    return GpuPool(**usual | sizes)


def test_random_bytes_have_all_bits_and_any_length(device):
    some = random_bytes(8003, device)
    assert some.shape == (8003,) and some.dtype == torch.uint8 and some.is_contiguous()
    assert some.data_ptr() % 8 == 0
    counts = torch.stack([(some >> bit & 1).float().mean() for bit in range(8)] + [(some[7::8] >> 7).float().mean()])
    assert all(0.4 < share < 0.6 for share in counts.tolist()), "and the highest one of each word"
    assert torch.equal(some, random_bytes(8003, device)), "always the same"


def test_a_page_is_contiguous_on_the_host_and_begins_at_a_block(device):
    made = HostPool(7, PAGE_BYTES)
    if device.type == "cuda":
        made.pin()
    pages = made.share(3)
    assert pages.shape == (7, 3, 4096) and made.rows.shape == (7, PAGE_BYTES)
    pages[6, 2, 4095] = 9
    assert made.rows[6, -1] == 9
    assert made.rows.ctypes.data % 4096 == 0
    assert pages.is_pinned() == (device.type == "cuda")
    del pages
    made.close()


def test_each_rank_has_its_share_of_every_page():
    made = HostPool(2, PAGE_BYTES)
    shares = [made.share(3, rank, 2) for rank in range(2)]
    assert [share.shape for share in shares] == [(2, 3, 2048)] * 2
    shares[1][0, 0, 0] = 7
    assert made.rows[0].tolist().index(7) == PAGE_BYTES // 2


def test_a_shared_pool_is_the_same_memory_wherever_it_is_mapped():
    file = shared_file("test", 7 * PAGE_BYTES)
    first, second = HostPool(7, PAGE_BYTES, file), HostPool(7, PAGE_BYTES, os.dup(file))
    first.rows[3, 5] = 8
    assert second.rows[3, 5] == 8
    for made in (first, second):
        made.close_file()
    second.rows[4, 0] = 1
    assert first.rows[4, 0] == 1, "mappings outlive the descriptors"


def test_pages_are_sent_to_another_pool_by_its_address(device):
    """As two processes without GPUs do it; here both pools are one process's."""
    if device.type == "cuda":
        pytest.skip("on a machine with a GPU, kernels are compiled, and cannot reach pools in files")
    pools = [gpu_pool(device, file=shared_file("test", 5 * PAGE_BYTES)) for _ in range(2)]
    pools[0].pages.random_(0, 256)
    peers = PeerPools(pools[0].pages, {1: pools[1].address})
    peers.send(1, torch.tensor([4, 0]).numpy(), torch.tensor([1, 2]).numpy())
    assert torch.equal(pools[1].pages[:, [1, 2]], pools[0].pages[:, [4, 0]])
    assert not pools[1].pages[:, [0, 3, 4]].any()
    with pytest.raises(ValueError, match="targets contains page 5, but the pool has pages 0 to 4"):
        peers.send(1, torch.tensor([4]).numpy(), torch.tensor([5]).numpy())
    peers.close()
    for pool in pools:
        os.close(pool.file)


def test_foreign_memory_becomes_a_tensor_without_a_copy(device):
    owner = torch.arange(24, dtype=torch.uint8, device=device)
    raw = raw_tensor(owner.data_ptr() + 4, 16, owner.device)
    assert raw.device == owner.device and raw.dtype == torch.uint8 and raw.tolist() == list(range(4, 20))
    raw.view(2, 8)[1, 7] = 99
    assert owner[19] == 99


@pytest.mark.parametrize("fragment_bytes", [256, 520])
def test_a_page_that_kernels_cannot_copy_is_refused(fragment_bytes, device):
    with pytest.raises(UsageError, match=r"page_tokens: (a fragment .* must be a multiple of 16|fragments must begin)"):
        gpu_pool(device, fragment_bytes=fragment_bytes)


def test_a_host_pool_larger_than_memory_is_refused(device):
    with pytest.raises(UsageError, match=r"tiers.*GiB.* available: decrease"):
        check_host_room(0, 2 * available_bytes(), 0, device)


@pytest.mark.gpu
def test_a_gpu_pool_larger_than_memory_is_refused(device):
    with pytest.raises(UsageError, match=r"tiers.gpu.* GiB .*decrease"):
        gpu_pool(device, pages=(1 << 50) // PAGE_BYTES)


@pytest.mark.gpu
def test_weights_count_on_a_gpu(device):
    with pytest.raises(UsageError, match=r"1,048,576\.0 GiB of weights"):
        gpu_pool(device, weight_bytes=GIB << 20)


@pytest.mark.parametrize("sizes", [(1 << 50, 0, 0), (0, 0, 1 << 50)])
def test_without_a_gpu_everything_must_fit_into_host_memory(sizes):
    with pytest.raises(UsageError, match=r"1,048,576\.0 GiB.* are available: decrease"):
        check_host_room(*sizes, torch.device("cpu"))
