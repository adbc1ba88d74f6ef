"""Pages arrive whole and in order, whatever the layout, the size and the list; nothing else changes."""

import os
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.kernels.page_copy import best_piece, copy_pages  # noqa: E402


def pool(*shape: int, device: "torch.device") -> "torch.Tensor":
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def int32(pages: list[int], device: "torch.device") -> "torch.Tensor":
    return torch.tensor(pages, dtype=torch.int32, device=device)


@pytest.mark.parametrize("fragment_bytes", [512, 528, 1152, 6144, 4096 + 512])
@pytest.mark.parametrize(("layers", "programs"), [(1, 1), (3, 4)])
def test_pages_go_from_a_layer_first_to_a_page_first_pool(fragment_bytes, layers, programs, device):
    gpu, host = pool(layers, 9, fragment_bytes, device=device), pool(12, layers, fragment_bytes, device=device)
    expected = host.clone()
    expected[[0, 11, 5, 6]] = gpu.transpose(0, 1)[[8, 2, 3, 0]]
    lists = int32([8, 2, 3, 0], device), int32([0, 11, 5, 6], device)
    copy_pages(gpu.transpose(0, 1), host, *lists, programs=programs)
    assert torch.equal(host, expected)


@pytest.mark.parametrize("fragment_bytes", [512, 1040, 8192])
def test_pages_come_back(fragment_bytes, device):
    gpu, host = pool(3, 9, fragment_bytes, device=device), pool(12, 3, fragment_bytes, device=device)
    expected = gpu.clone()
    expected[:, [4, 1]] = host[[7, 9]].transpose(0, 1)
    copy_pages(host, gpu.transpose(0, 1), int32([7, 9], device), int32([4, 1], device), programs=2)
    assert torch.equal(gpu, expected)


def test_many_pages_take_many_tiles(device):
    source, target = pool(300, 2, 1536, device=device), pool(300, 2, 1536, device=device)
    order = torch.randperm(300).tolist()
    expected = target.clone()
    expected[order] = source
    copy_pages(source, target, int32(list(range(300)), device), int32(order, device), programs=3)
    assert torch.equal(target, expected)


def test_layer_by_layer_the_same_bytes_arrive(device):
    source, target = pool(70, 3, 528, device=device), pool(70, 3, 528, device=device)
    order = torch.randperm(70).tolist()
    expected = target.clone()
    expected[order] = source
    copy_pages(source, target, int32(list(range(70)), device), int32(order, device), programs=3, is_by_layer=True)
    assert torch.equal(target, expected)


def test_some_layers_are_copied_as_a_slice(device):
    gpu, host = pool(4, 5, 1024, device=device), pool(5, 4, 1024, device=device)
    expected = host.clone()
    expected[[3, 0], 1:3] = gpu.transpose(0, 1)[[1, 2], 1:3]
    copy_pages(gpu.transpose(0, 1)[:, 1:3], host[:, 1:3], int32([1, 2], device), int32([3, 0], device), programs=2)
    assert torch.equal(host, expected)


def test_other_element_types_are_bytes(device):
    source = torch.randn(4, 2, 256, device=device, dtype=torch.bfloat16)
    target = torch.zeros_like(source)
    copy_pages(source, target, int32([3], device), int32([0], device), programs=1)
    assert torch.equal(target[0], source[3]) and not target[1:].any()


def test_a_rate_changes_no_byte(device):
    source, target = pool(40, 2, 2048, device=device), pool(40, 2, 2048, device=device)
    every = int32(list(range(40)), device)
    copy_pages(source, target, every, every, programs=2, bytes_per_s=1e9)
    assert torch.equal(source, target)


@pytest.mark.gpu
@pytest.mark.parametrize("fragment_bytes", [1152, 2048])
def test_a_rate_is_one_of_bytes_however_they_fill_pieces(fragment_bytes, device):
    count = (32 << 20) // fragment_bytes
    source = pool(count, 1, fragment_bytes, device=device)
    target, every = torch.empty_like(source), torch.arange(count, dtype=torch.int32, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        start.record()
        copy_pages(source, target, every, every, programs=4, bytes_per_s=1e9)
        end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) / 1e3 == pytest.approx(count * fragment_bytes / 1e9, rel=0.05)


def test_pieces_leave_little_room_in_the_last_one():
    sizes = {512: 512, 528: 1024, 1040: 512, 1152: 512, 2048: 2048, 4096 + 512: 512, 6144: 2048, 18432: 2048, 65536: 4096}
    assert {fragment_bytes: best_piece(fragment_bytes) for fragment_bytes in sizes} == sizes


COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvsim.kernels.page_copy import STAGES, TILE_BYTES, WARPS, page_copy_kernel

sizes = {"LAYERS": 32, "FRAGMENT_PIECES": 1, "ROWS": TILE_BYTES // 2048, "COLUMNS": 256, "STAGES": STAGES}
sizes["IS_PACED"], sizes["IS_BY_LAYER"] = sys.argv[1] == "paced", sys.argv[1] == "by layer"
names = page_copy_kernel.arg_names
types = {"source": "*i64", "target": "*i64", "source_pages": "*i32", "target_pages": "*i32"}
signature = {name: "constexpr" if name in sizes else types.get(name, "i32") for name in names}
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in types}
kernel = ASTSource(page_copy_kernel, signature, {(names.index(name),): size for name, size in sizes.items()}, aligned)
print(triton.compile(kernel, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS}).asm["ptx"])
"""


@pytest.mark.parametrize("pace", ["paced", "by layer", pytest.param("unpaced", marks=pytest.mark.long)])
def test_the_compiled_kernel_reads_three_tiles_ahead_and_moves_16_bytes_at_a_time(pace):
    """Each of 128 threads reads 16 vectors of a tile of 32 KiB: three times before the loop and once in it; one store in it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED, pace]
    ptx = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert len(re.findall(r"cp\.async\.cg\.shared\.global .*, 0x10,", ptx)) == 4 * 16
    assert re.findall(r"st\.global[.\w]*", ptx) == ["st.global.v2.b64"] * 16
    assert ptx.count("globaltimer") == (pace == "paced")


def test_an_empty_list_is_no_launch(device):
    source, target = pool(2, 1, 512, device=device), pool(2, 1, 512, device=device)
    expected = target.clone()
    copy_pages(source, target, int32([], device), int32([], device), programs=4)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("fragment_bytes", [256, 520, 1000])
def test_fragments_that_cannot_be_copied_are_refused(fragment_bytes, device):
    source = pool(2, 1, fragment_bytes, device=device)
    with pytest.raises(ValueError, match=r"multiple"):
        copy_pages(source, source.clone(), int32([0], device), int32([1], device), programs=1)


def test_pools_and_lists_must_fit_each_other(device):
    source, one = pool(2, 2, 512, device=device), int32([0], device)
    with pytest.raises(ValueError, match="2 x 512 bytes and 2 x 1024 bytes"):
        copy_pages(source, pool(2, 2, 1024, device=device), one, one, programs=1)
    with pytest.raises(ValueError, match="1 source pages cannot go to 2 target pages"):
        copy_pages(source, source.clone(), one, int32([0, 1], device), programs=1)
    with pytest.raises(ValueError, match="programs must be at least 1, not 0"):
        copy_pages(source, source.clone(), one, one, programs=0)
