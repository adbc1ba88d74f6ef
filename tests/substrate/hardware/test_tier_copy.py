"""Every method brings the same bytes; bad lists are refused before anything moves; sizes decide which method is taken."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.hardware.copy_rule import CopyRule  # noqa: E402
from kvsim.substrate.hardware.memory.batch_memcpy import merged  # noqa: E402
from kvsim.substrate.hardware.memory.page_list import check_unique, upload_page_lists  # noqa: E402
from kvsim.substrate.hardware.memory.tier_copy import TierCopy  # noqa: E402

METHODS = ["kernel", "staged", "memcpy", None]


def tiers(device: "torch.device", fragment_bytes: int = 528, layers: int = 3) -> TierCopy:
    gpu = torch.randint(0, 256, (layers, 20, fragment_bytes), dtype=torch.uint8, device=device)
    host = torch.randint(0, 256, (25, layers, fragment_bytes), dtype=torch.uint8)
    host = host.pin_memory() if device.type == "cuda" else host
    return TierCopy(gpu, host, CopyRule(), lanes=2, lane_bytes=3 * layers * fragment_bytes)


def wait(device: "torch.device") -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pages", [1, 17])
def test_store_writes_the_named_pages_and_no_others(method, pages, device):
    copies, rng = tiers(device), np.random.default_rng(pages)
    gpu_pages, host_pages = rng.permutation(20)[:pages], rng.permutation(25)[:pages]
    expected = copies.host.clone()
    expected[host_pages] = copies.gpu[gpu_pages.tolist()].cpu()
    copies.store(gpu_pages, host_pages, method)
    wait(device)
    assert torch.equal(copies.host, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("host_pages", [[24, 3, 4, 5, 0, 9, 8], list(range(7))])
def test_load_writes_the_named_pages_and_no_others(method, host_pages, device):
    copies, gpu_pages = tiers(device), np.array([19, 0, 1, 2, 7, 6, 5])
    expected = copies.gpu.clone()
    expected[gpu_pages.tolist()] = copies.host[host_pages].to(device)
    copies.load(np.array(host_pages), gpu_pages, method, is_shared=True)
    wait(device)
    assert torch.equal(copies.gpu, expected)


@pytest.mark.parametrize("method", METHODS)
def test_layers_can_be_loaded_one_part_after_another(method, device):
    copies = tiers(device, layers=5)
    host_pages, gpu_pages, parts = np.array([24, 3, 4, 0, 9, 8, 7]), np.array([19, 0, 1, 7, 6, 5, 2]), []
    before, loaded = copies.gpu.clone(), copies.gpu.clone()
    loaded[gpu_pages.tolist()] = copies.host[host_pages].to(device)

    def submitted():
        wait(device)
        parts.append(copies.gpu.clone())

    copies.load(host_pages, gpu_pages, method, layers_at_once=2, submitted=submitted)
    for part, layers in zip(parts, (2, 4, 5), strict=True):
        assert torch.equal(part[:, :layers], loaded[:, :layers]) and torch.equal(part[:, layers:], before[:, layers:])


@pytest.mark.parametrize(
    ("gpu_pages", "host_pages", "problem"),
    [
        ([0, 20], [0, 1], "gpu_pages contains page 20, but the pool has pages 0 to 19"),
        ([0, 1], [0, -1], "host_pages contains page -1, but the pool has pages 0 to 24"),
        ([0, 1], [0], "2 pages of the GPU do not match 1 pages of the host"),
    ],
)
def test_bad_lists_are_refused_and_nothing_moves(gpu_pages, host_pages, problem, device):
    copies = tiers(device)
    before = copies.gpu.clone(), copies.host.clone()
    for call in (
        lambda: copies.store(np.array(gpu_pages), np.array(host_pages)),
        lambda: copies.load(np.array(host_pages), np.array(gpu_pages)),
    ):
        with pytest.raises(ValueError, match=problem):
            call()
    assert torch.equal(copies.gpu, before[0]) and torch.equal(copies.host, before[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("gpu_pages", "host_pages", "problem"),
    [([1, 2, 1], [0, 1, 2], "gpu_pages contains page 1 twice"), ([0, 1, 2], [4, 4, 5], "host_pages contains page 4 twice")],
)
def test_a_duplicate_page_is_reported_and_other_pages_stay_unchanged(method, gpu_pages, host_pages, problem, device):
    copies = tiers(device)
    before = copies.gpu.clone(), copies.host.clone()
    for call in (copies.store, lambda gpu, host, method: copies.load(host, gpu, method)):
        with pytest.raises(ValueError, match=problem):
            call(np.array(gpu_pages), np.array(host_pages), method)
        wait(device)
    others = np.setdiff1d(np.arange(20), gpu_pages), np.setdiff1d(np.arange(25), host_pages)
    assert torch.equal(copies.gpu[others[0]], before[0][others[0]])
    assert torch.equal(copies.host[others[1]], before[1][others[1]])


@pytest.mark.parametrize(("unit", "fragment_bytes"), [(3, 528), (4, 512)])
@pytest.mark.parametrize("rank", [0, 1])
def test_pages_go_to_and_from_their_places_in_larger_ones(unit, fragment_bytes, rank, device):
    """The host has two ranks' shares of larger pages ``[layer, page, fragment]``; lists begin, end and jump inside them."""
    layers, rng = 3, np.random.default_rng(unit)
    gpu = torch.randint(0, 256, (layers, 20, fragment_bytes), dtype=torch.uint8, device=device)
    host = torch.randint(0, 256, (6, 2, layers, unit * fragment_bytes), dtype=torch.uint8)
    host = host.pin_memory() if device.type == "cuda" else host
    copies = TierCopy(gpu, host[:, rank], CopyRule(), unit_pages=unit)
    host_pages = np.array([unit + 1, *range(2 * unit, 4 * unit + 1), 6 * unit - 1, 0])
    gpu_pages, back = rng.permutation(20)[: len(host_pages)], rng.permutation(20)[: len(host_pages)]
    expected = host.clone()
    places = expected[:, rank].unflatten(2, (unit, fragment_bytes))
    for page, slot in zip(host_pages, gpu_pages, strict=True):
        places[page // unit, :, page % unit] = gpu[:, slot].cpu()
    copies.store(gpu_pages, host_pages)
    wait(device)
    assert torch.equal(host, expected)
    loaded = gpu.clone()
    loaded[:, back.tolist()] = gpu[:, gpu_pages.tolist()]
    copies.load(host_pages, back, layers_at_once=2)
    wait(device)
    assert torch.equal(gpu, loaded)


@pytest.mark.parametrize("page", [-1, 18])
def test_a_place_in_no_larger_page_is_refused(page, device):
    gpu, host = torch.zeros(2, 20, 512, dtype=torch.uint8, device=device), torch.zeros(6, 2, 3 * 512, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"host_pages contains page {page}, but the pool has pages 0 to 17"):
        TierCopy(gpu, host, CopyRule(), unit_pages=3).load(np.array([0, page]), np.array([0, 1]))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["load", "store"])
def test_single_tokens_of_larger_pages_take_no_longer_than_pages_of_16(way, device):
    """As LightLLM copies them: 4 KiB of each of 32 layers, scattered on the GPU, 256 tokens of a layer together on the host."""
    layers, fragment_bytes, unit, tokens = 32, 4096, 256, 8192
    gpu = torch.zeros((layers, tokens, fragment_bytes), dtype=torch.uint8, device=device)
    host = torch.zeros((tokens // unit, layers, unit * fragment_bytes), dtype=torch.uint8).pin_memory()
    single = TierCopy(gpu, host, CopyRule(), unit_pages=unit)
    paged = TierCopy(
        gpu.view(layers, tokens // 16, 16 * fragment_bytes), host.view(tokens // 16, layers, 16 * fragment_bytes), CopyRule()
    )
    took_s = {}
    for copies, pages, method in ((single, tokens, None), (paged, tokens // 16, "kernel")) * 2:
        lists = np.arange(pages), np.random.default_rng(0).permutation(pages)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        getattr(copies, way)(*(lists if way == "load" else lists[::-1]), method)
        end.record()
        torch.cuda.synchronize()
        took_s[copies] = start.elapsed_time(end) / 1e3
    rates = {name: layers * tokens * fragment_bytes / took_s[copies] for name, copies in (("single", single), ("paged", paged))}
    print(f"{way}: {rates['single'] / 1e9:.1f} GB/s token by token, {rates['paged'] / 1e9:.1f} GB/s in pages of 16")
    assert rates["single"] > 0.8 * rates["paged"]


def test_a_host_page_with_gaps_is_refused(device):
    gpu, host = torch.zeros(2, 4, 512, dtype=torch.uint8, device=device), torch.zeros(4, 2, 1024, dtype=torch.uint8)
    with pytest.raises(ValueError, match="a page of the host's pool must be contiguous"):
        TierCopy(gpu, host[:, :, :512], CopyRule())


def test_scratch_space_need_not_be_cleared():
    seen = np.full(5, 2, dtype=np.int32)
    check_unique(np.array([4, 0, 1]), seen, name="pages")
    check_unique(np.array([2, 4]), seen, name="pages")
    with pytest.raises(ValueError, match="pages contains page 4 twice"):
        check_unique(np.array([4, 2, 4]), seen, name="pages")


def test_lists_are_uploaded_as_rows(device):
    rows = upload_page_lists(np.array([3, 1]), np.array([0, 2]), device=device)
    assert rows.dtype == torch.int32 and rows.tolist() == [[3, 1], [0, 2]]


def test_neighbours_on_both_sides_become_one_copy():
    targets, sources = np.array([0, 10, 20, 30, 50]), np.array([100, 110, 130, 140, 150])
    assert [list(part) for part in merged(targets, sources, 10)] == [[0, 20, 50], [100, 130, 150], [20, 20, 10]]


def test_sizes_and_traffic_decide_the_method():
    known = CopyRule(
        memcpy_fragment_bytes=1000,
        staged_load_page_bytes=500,
        staged_store_page_bytes=700,
        staged_load_beside_store_page_bytes=300,
    )
    assert [known.load_method(10, page, is_shared=False) for page in (499, 500)] == ["kernel", "staged"]
    assert [known.load_method(10, page, is_shared=True) for page in (299, 300)] == ["kernel", "staged"]
    assert [known.store_method(10, page) for page in (699, 700)] == ["kernel", "staged"]
    assert known.store_method(1000, 1000) == known.load_method(1000, 1000, is_shared=True) == "memcpy"
