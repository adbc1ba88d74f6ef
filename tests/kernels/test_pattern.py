"""A page's pattern is its own, the same in every layout, and every wrong word is counted."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.kernels.page_copy import copy_pages  # noqa: E402
from kvsim.kernels.page_fill import fill_pages  # noqa: E402
from kvsim.kernels.page_verify import verify_pages  # noqa: E402

MASK = 2**64 - 1


def int32(slots: list[int], device: "torch.device") -> "torch.Tensor":
    return torch.tensor(slots, dtype=torch.int32, device=device)


def int64(ids: list[int], device: "torch.device") -> "torch.Tensor":
    return torch.tensor(ids, dtype=torch.int64, device=device)


def mixed(x: int) -> int:
    """MurmurHash3's finalizer, in Python's integers."""
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & MASK
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ x >> 33


def test_words_are_the_mixed_numbers_of_page_and_position(device):
    pool = torch.zeros(4, 2, 24, dtype=torch.uint8, device=device)
    fill_pages(pool, int32([3], device), int64([2**40], device))
    words = [word & MASK for word in pool.view(torch.int64)[3].flatten().tolist()]
    assert words == [mixed(2**40 * 6 + position + 1) for position in range(6)]
    assert not pool[:3].any()


def test_no_two_words_of_any_pages_are_equal(device):
    pool = torch.zeros(7, 3, 1040, dtype=torch.uint8, device=device)
    fill_pages(pool, int32([5, 0, 3, 1], device), int64([0, 1, 2, 2**50], device))
    words = pool.view(torch.int64)[[5, 0, 3, 1]].flatten().tolist()
    assert len(set(words)) == len(words) == 4 * 3 * 130 and 0 not in words


def test_wrong_words_are_counted_by_page(device):
    pool = torch.zeros(3, 7, 1040, dtype=torch.uint8, device=device)
    pages, slots, ids = pool.transpose(0, 1), int32([5, 0, 3], device), int64([8, 9, 2**40], device)
    fill_pages(pages, slots, ids)
    assert verify_pages(pages, slots, ids).tolist() == [0, 0, 0]
    pool[1, 0, 8] ^= 1
    pool[2, 0, 1039] ^= 128
    pool[2, 0, 1038] ^= 1
    assert verify_pages(pages, slots, ids).tolist() == [0, 2, 0]


def test_a_page_in_the_place_of_another_is_all_wrong(device):
    pool = torch.zeros(2, 2, 512, dtype=torch.uint8, device=device)
    fill_pages(pool, int32([0, 1], device), int64([10, 11], device))
    assert verify_pages(pool, int32([0, 1], device), int64([11, 10], device)).tolist() == [128, 128]


def test_a_copied_page_is_verified_in_the_other_layout(device):
    gpu = torch.zeros(3, 4, 528, dtype=torch.uint8, device=device)
    host = torch.zeros(5, 3, 528, dtype=torch.uint8, device=device)
    fill_pages(gpu.transpose(0, 1), int32([2, 0], device), int64([70, 71], device))
    copy_pages(gpu.transpose(0, 1), host, int32([2, 0], device), int32([4, 1], device), programs=2)
    assert verify_pages(host, int32([4, 1], device), int64([70, 71], device)).tolist() == [0, 0]
