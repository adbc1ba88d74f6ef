"""Pages as blocks of rows: what the driver is told, byte by byte; on a GPU, what it copies and how fast."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.hardware.copy_rule import CopyRule  # noqa: E402
from kvsim.substrate.hardware.memory import batch_memcpy, tier_copy  # noqa: E402
from kvsim.substrate.hardware.memory.batch_memcpy import BLOCKS_CALL, MAX_PITCH, Blocks, copy_blocks  # noqa: E402
from kvsim.substrate.hardware.memory.host_pool import HostPool  # noqa: E402
from kvsim.substrate.hardware.memory.tier_copy import TierCopy  # noqa: E402

MIB = 1 << 20


class Operand(ctypes.Structure):
    """``CUmemcpy3DOperand`` with a pointer, as cuda.h of CUDA 13.0 has it."""

    _fields_ = (
        ("type", ctypes.c_int), ("ptr", ctypes.c_uint64), ("rowLength", ctypes.c_size_t), ("layerHeight", ctypes.c_size_t),
        ("locHint_type", ctypes.c_int), ("locHint_id", ctypes.c_int),
    )  # fmt: skip


class Op(ctypes.Structure):
    """``CUDA_MEMCPY3D_BATCH_OP``."""

    _fields_ = (
        ("src", Operand), ("dst", Operand), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("depth", ctypes.c_size_t),
        ("srcAccessOrder", ctypes.c_int), ("flags", ctypes.c_uint),
    )  # fmt: skip


class Driver:
    """Takes blocks as CUDA's driver does, and copies them by processor, row by row."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.answer = 0

    def cuMemcpy3DBatchAsync_v2(self, count, ops, flags, stream):
        self.calls.append((count.value, stream.value))
        assert flags.value == 0
        for op in (Op * count.value).from_address(ops.value):
            assert (op.src.type, op.dst.type, op.depth, op.srcAccessOrder, op.flags) == (1, 1, 1, 1, 0)
            assert op.src.layerHeight >= op.height and op.dst.layerHeight >= op.height
            assert min(op.src.rowLength, op.dst.rowLength) >= op.width
            for row in range(op.height):
                ctypes.memmove(op.dst.ptr + row * op.dst.rowLength, op.src.ptr + row * op.src.rowLength, op.width)
        return self.answer


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(batch_memcpy, "driver", lambda: made)
    return made


STREAM = SimpleNamespace(cuda_stream=42)


def sides(source: np.ndarray, target: np.ndarray) -> tuple[Blocks, Blocks]:
    """Blocks 6, 0 and 2 of a layer-first pool ``[layer, page, byte]`` to pages 1, 4 and 0 of ``[page, layer, byte]``."""
    from_pages, to_pages = np.array([6, 0, 2]), np.array([1, 4, 0])
    blocks = Blocks(source.ctypes.data + from_pages * source.strides[1], source.strides[0])
    return Blocks(target.ctypes.data + to_pages * target.strides[0], target.strides[1]), blocks


def pools() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both pools, and the target after the copy."""
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, (3, 7, 24), dtype=np.uint8)
    target = rng.integers(0, 256, (5, 3, 24), dtype=np.uint8)
    after = target.copy()
    after[[1, 4, 0]] = source[:, [6, 0, 2]].transpose(1, 0, 2)
    return source, target, after


def test_the_driver_gets_all_pages_in_one_call_and_copies_each_layer_to_its_place(driver):
    source, target, after = pools()
    assert batch_memcpy.BLOCK.itemsize == ctypes.sizeof(Op) == 112
    copy_blocks(*sides(source, target), 3, 24, STREAM)
    assert np.array_equal(target, after) and driver.calls == [(3, 42)]


def test_no_pages_are_no_call(driver):
    nothing = Blocks(np.zeros(0, dtype=np.int64), 24)
    copy_blocks(nothing, nothing, 3, 24, STREAM)
    assert not driver.calls


def test_an_error_of_the_driver_is_reported(driver):
    driver.answer = 1
    with pytest.raises(RuntimeError, match="CUDA driver call cuMemcpy3DBatchAsync failed with error 1"):
        copy_blocks(*sides(*pools()[:2]), 3, 24, STREAM)


@pytest.mark.parametrize("why", ["old driver", "pitch", "one row"])
def test_rows_are_copied_one_by_one_where_the_driver_takes_no_blocks(why, driver, monkeypatch):
    if why == "old driver":
        monkeypatch.setattr(batch_memcpy, "driver", SimpleNamespace)
    taken: list[tuple[list[int], list[int], int]] = []
    monkeypatch.setattr(batch_memcpy, "copy_batch", lambda to, of, size, _: taken.append((to.tolist(), of.tolist(), size)))
    pitch = MAX_PITCH + 1 if why == "pitch" else 100
    copy_blocks(Blocks(np.array([1, 7]), pitch), Blocks(np.array([3, 5]), 10), 1 if why == "one row" else 2, 8, STREAM)
    rows = ([1, 7], [3, 5]) if why == "one row" else ([1, 1 + pitch, 7, 7 + pitch], [3, 13, 5, 15])
    assert taken == [(*rows, 8)] and not driver.calls


def test_rows_may_be_as_far_apart_as_the_largest_pitch(driver):
    assert batch_memcpy.takes_blocks(MAX_PITCH) and not batch_memcpy.takes_blocks(MAX_PITCH + 1)


@pytest.mark.parametrize(("takes_blocks", "calls"), [(True, [(0, 7)]), (False, [(0, 2), (1, 2), (0, 2), (1, 1)])])
@pytest.mark.parametrize("way", ["load", "store"])
def test_blocks_take_one_call_and_fragments_one_for_each_turn_of_a_stream(way, takes_blocks, calls, monkeypatch):
    """Calls by stream and pages."""
    gpu, host = (torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((3, 9, 512), (9, 3, 512)))
    copies, made = TierCopy(gpu, host, CopyRule(), lanes=2), list[tuple[int, int]]()
    copies.takes_blocks = takes_blocks
    lanes = copies.loading if way == "load" else copies.storing
    move = type(lanes[0]).move

    def counted(lane, way, gpu_pages, *rest):
        made.append((lanes.index(lane), len(gpu_pages)))
        move(lane, way, gpu_pages, *rest)

    monkeypatch.setattr(type(lanes[0]), "move", counted)
    first, second = np.array([8, 0, 3, 4, 5, 1, 7]), np.arange(7)
    getattr(copies, way)(first, second, "memcpy")
    host_pages, gpu_pages = (first, second) if way == "load" else (second, first)
    assert made == calls and torch.equal(copies.gpu[gpu_pages], copies.host[host_pages])


@pytest.mark.parametrize("way", ["load", "store"])
@pytest.mark.parametrize(
    ("takes_blocks", "least_bytes", "is_staged"), [(True, 1024, False), (False, 1024, True), (False, 512, False)]
)
def test_short_fragments_are_staged_where_a_page_is_no_block(way, takes_blocks, least_bytes, is_staged, device, monkeypatch):
    """Fragments of 512 bytes, from which on the rule takes memcpy."""
    gpu, host = (torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((3, 9, 512), (9, 3, 512)))
    host = host.pin_memory() if device.type == "cuda" else host
    copies = TierCopy(gpu.to(device), host, CopyRule(memcpy_fragment_bytes=512))
    copies.takes_blocks = takes_blocks
    monkeypatch.setattr(tier_copy, "FRAGMENT_BYTES", least_bytes)
    first, second = np.array([8, 0, 3]), np.array([1, 2, 5])
    getattr(copies, way)(first, second)
    if device.type == "cuda":
        torch.cuda.synchronize()
    host_pages, gpu_pages = (first, second) if way == "load" else (second, first)
    assert torch.equal(copies.gpu[gpu_pages].cpu(), copies.host[host_pages])
    assert is_staged == any(lane.staging is not None for lane in copies.loading + copies.storing)


# On a GPU


def tiers(fragment_bytes: int, layers: int, gpu_pages: int, host_pages: int, ranks: int = 1) -> tuple[TierCopy, HostPool]:
    """Pools as serving has them; the content of the GPU's is undefined."""
    gpu = torch.empty((layers, gpu_pages, fragment_bytes), dtype=torch.uint8, device="cuda")
    pool = HostPool(host_pages, ranks * layers * fragment_bytes)
    pool.pin()
    return TierCopy(gpu, pool.share(layers, ranks - 1, ranks), CopyRule()), pool


@pytest.mark.gpu
@pytest.mark.parametrize("apart", ["as far as blocks may be", "farther"])
def test_layers_of_a_large_pool_are_copied_rightly(apart):
    """2 GiB from a layer to the next: up to there a page is a block, beyond it is fragments."""
    pages = (1 << 15) - (apart != "farther")
    copies, pool = tiers(1 << 16, 2, pages, 8, ranks=2)
    assert copies.takes_blocks == (apart != "farther" and hasattr(batch_memcpy.driver(), BLOCKS_CALL))
    gpu_pages, host_pages = np.array([pages - 1, 0, 5, 17000, 3]), np.array([7, 2, 0, 1, 5])
    at = gpu_pages.tolist()
    copies.gpu[at] = torch.randint(0, 256, (5, 2, 1 << 16), dtype=torch.uint8, device="cuda")
    sent = copies.gpu[at].cpu()
    copies.store(gpu_pages, host_pages, "memcpy")
    torch.cuda.synchronize()
    assert torch.equal(copies.host[host_pages], sent)
    assert not copies.host[[3, 4, 6]].any() and not pool.rows[:, : copies.page_bytes].any()
    copies.gpu[at] = 0
    copies.load(host_pages[::-1], gpu_pages[::-1], "memcpy", layers_at_once=1)
    torch.cuda.synchronize()
    assert torch.equal(copies.gpu[at].cpu(), sent)
    copies.gpu[at] = 0
    copies.load(host_pages, gpu_pages, "memcpy")
    torch.cuda.synchronize()
    assert torch.equal(copies.gpu[at].cpu(), sent)
    copies.close()
    pool.close()


def seconds(copies: TierCopy, way: str, pages: int, method: str) -> float:
    """The median time of a copy of random pages, from the call to the last byte."""
    rng, took_s = np.random.default_rng(0), []
    for _ in range(12):
        lists = rng.permutation(256)[:pages], rng.permutation(256)[:pages]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        getattr(copies, way)(*lists, method)
        end.record()
        torch.cuda.synchronize()
        took_s.append(start.elapsed_time(end) / 1e3)
    return float(np.median(took_s[2:]))


@pytest.mark.gpu
def test_a_block_for_each_page_is_faster_than_a_copy_for_each_fragment(monkeypatch):
    """Llama 3 8B's pages of 16 tokens, 2 MiB: 8 of them, as serving copies them, and 256."""
    copies, pool = tiers(1 << 16, 32, 256, 256)
    if not copies.takes_blocks:
        pytest.skip(f"the driver has no {BLOCKS_CALL}")
    caller = torch.cuda.Stream()
    with torch.cuda.stream(caller):
        for way in ("load", "store"):
            for pages in (8, 256):
                rates = {}
                for method in ("kernel", "staged", "fragments", "memcpy"):
                    copies.takes_blocks = method == "memcpy"
                    monkeypatch.setattr(batch_memcpy, "MAX_PITCH", MAX_PITCH if copies.takes_blocks else 0)
                    took_s = seconds(copies, way, pages, "memcpy" if method == "fragments" else method)
                    rates[method] = pages * copies.page_bytes / took_s
                print(f"{way}, {2 * pages} MiB:", ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items()))
                assert rates["memcpy"] > rates["fragments"] * (1.2 if pages == 8 else 0.97)
    copies.close()
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["load", "store"])
def test_products_take_no_longer_beside_blocks(way):
    copies, pool = tiers(1 << 16, 32, 256, 256)
    left, right = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in ((2048, 8192), (8192, 8192)))
    product = torch.mm(left, right)
    products, beside = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()

    def took_ms(method: str | None) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(products):
            start.record()
            for _ in range(80):
                torch.mm(left, right, out=product)
            end.record()
        with torch.cuda.stream(beside):
            for _ in range(6 if method else 0):
                getattr(copies, way)(np.random.default_rng(0).permutation(256), np.arange(256), method)
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    ratios = {}
    for method in ("kernel", "memcpy"):
        took_ms(method)
        ratios[method] = float(np.median([took_ms(method) / took_ms(None) for _ in range(5)]))
    print(f"products beside a {way}: {ratios['memcpy']:.3f} times as long by memcpy, {ratios['kernel']:.3f} by kernel")
    assert ratios["memcpy"] < 1.1
    copies.close()
    pool.close()
