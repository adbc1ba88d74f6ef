"""Kernels that copy pages between GPU and host in other ways than kvsim's own, for copy_variants.py."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvsim.kernels.page_copy import UNIT_BYTES, UNIT_WORDS, WORD_BYTES
from kvsim.substrate.hardware.memory.batch_memcpy import answered, driver

ROW_BYTES = 1024
"""Inner extent of a tile that tensor descriptors copy: 256 words of 4 bytes."""
CARVEOUT = 9
"""``CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT``, in percent."""
MOST_TILES = 1 << 31


@triton.jit
def sleep_until(due_ns):
    """Wait until the GPU's clock shows ``due_ns``, mostly asleep, and return what it shows."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred early; WAIT: mov.u64 $0, %globaltimer; setp.lt.u64 early, $0, $1;"
        " @early nanosleep.u32 200; @early bra WAIT; }",
        "=&l,l",
        [due_ns],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["tiles", "source_page", "source_layer", "target_page", "target_layer", "tile_ns"])
def tile_kernel(
    source,
    target,
    source_pages,
    target_pages,
    tiles,
    source_page,
    source_layer,
    target_page,
    target_layer,
    tile_ns,
    LAYERS: tl.constexpr,
    FRAGMENT_TILES: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
    EVICT: tl.constexpr,
    IS_PACED: tl.constexpr,
    HAS_CARVEOUT: tl.constexpr,
):
    """Copy tiles of WORDS contiguous words, one after another; strides are in units of 16 bytes.

    With HAS_CARVEOUT only the compiled function is another one.
    """
    column = tl.arange(0, WORDS)
    due_ns = tl.zeros([], tl.int64)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        fragment = tile // FRAGMENT_TILES
        start = (tile % FRAGMENT_TILES) * WORDS
        entry, layer = fragment // LAYERS, (fragment % LAYERS).to(tl.int64)
        from_page = tl.load(source_pages + entry).to(tl.int64)
        to_page = tl.load(target_pages + entry).to(tl.int64)
        read_from = (from_page * source_page + layer * source_layer) * UNIT_WORDS + start
        write_to = (to_page * target_page + layer * target_layer) * UNIT_WORDS + start
        held = tl.load(source + read_from + column, cache_modifier=LOAD, eviction_policy=EVICT)
        if IS_PACED:
            now_ns = sleep_until(due_ns)
            due_ns = tl.maximum(due_ns, now_ns - tile_ns) + tile_ns
        tl.store(target + write_to + column, held, cache_modifier=STORE, eviction_policy=EVICT)


@triton.jit(do_not_specialize=["tiles", "source_page", "source_layer", "target_page", "target_layer"])
def descriptor_kernel(
    source,
    target,
    source_pages,
    target_pages,
    source_rows,
    target_rows,
    tiles,
    source_page,
    source_layer,
    target_page,
    target_layer,
    LAYERS: tl.constexpr,
    FRAGMENT_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_CARVEOUT: tl.constexpr,
):
    """Copy tiles of ROWS rows of COLUMNS words of 4 bytes by tensor descriptors (TMA); strides are in rows."""
    reading = tl.make_tensor_descriptor(source, shape=[source_rows, COLUMNS], strides=[COLUMNS, 1], block_shape=[ROWS, COLUMNS])
    writing = tl.make_tensor_descriptor(target, shape=[target_rows, COLUMNS], strides=[COLUMNS, 1], block_shape=[ROWS, COLUMNS])
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        fragment = tile // FRAGMENT_TILES
        start = (tile % FRAGMENT_TILES) * ROWS
        entry, layer = fragment // LAYERS, fragment % LAYERS
        from_page = tl.load(source_pages + entry)
        to_page = tl.load(target_pages + entry)
        held = reading.load([from_page * source_page + layer * source_layer + start, 0])
        writing.store([to_page * target_page + layer * target_layer + start, 0], held)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a kernel copies."""

    programs: int
    tile_bytes: int
    warps: int = 4
    stages: int = 4
    load: str = ""
    store: str = ""
    evict: str = ""
    registers: int | None = None
    """Most registers of a thread; None: as the compiler likes."""
    has_carveout: bool = False
    """Whether multiprocessors stay set up for kernels with much shared memory, beside which a program may then run."""
    pace: float | None = None
    """Rate to which the kernel throttles itself, as a share of memcpy's."""
    is_descriptor: bool = False

    @property
    def name(self) -> str:
        """Everything that is not as usual."""
        words = [f"{'TMA' if self.is_descriptor else 'kernel'}, {self.programs} x {self.tile_bytes >> 10} KiB"]
        words += [f"{self.warps} warps", f"{self.stages} stages"]
        words += [f"load {self.load}"] if self.load else []
        words += [f"store {self.store}"] if self.store else []
        words += [self.evict] if self.evict else []
        words += [f"{self.registers} registers"] if self.registers else []
        words += ["carveout"] if self.has_carveout else []
        words += [f"held back to {self.pace:g}"] if self.pace else []
        return ", ".join(words)


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel."""

    registers: int
    shared_bytes: int


Pages = tuple[torch.Tensor, torch.Tensor]
"""A pool as ``[page, layer, fragment]``, and a list of its pages in GPU memory (int32)."""


def copy_tiles(source: Pages, target: Pages, shape: Shape, bytes_per_s: float) -> Any:
    """Copy pages of one pool to pages of another, in order, on the current stream; return the compiled kernel, if there is one.

    Fragments must be multiples of tiles. ``bytes_per_s`` is the rate of which ``shape.pace`` is a share.
    """
    (read, read_pages), (write, write_pages) = source, target
    layers, fragment_bytes = read.shape[1], read.shape[2]
    tile_bytes = min(shape.tile_bytes, fragment_bytes)
    fragment_tiles = fragment_bytes // tile_bytes
    tiles = len(read_pages) * layers * fragment_tiles
    if fragment_bytes % tile_bytes or tiles >= MOST_TILES:
        raise ValueError(f"fragments of {fragment_bytes} bytes are no multiples of tiles of {tile_bytes}, or there are too many")
    options = {"num_warps": shape.warps} | ({"maxnreg": shape.registers} if shape.registers and read_pages.is_cuda else {})
    lists = (read_pages, write_pages)
    if shape.is_descriptor:
        strides = [pool.stride(axis) // ROW_BYTES for pool in (read, write) for axis in (0, 1)]
        rows = [pool.untyped_storage().nbytes() // ROW_BYTES for pool in (read, write)]
        return descriptor_kernel[(shape.programs,)](
            read.view(torch.int32), write.view(torch.int32), *lists, *rows, tiles, *strides,
            LAYERS=layers, FRAGMENT_TILES=fragment_tiles, ROWS=tile_bytes // ROW_BYTES, COLUMNS=ROW_BYTES // 4,
            STAGES=shape.stages, HAS_CARVEOUT=shape.has_carveout, **options,
        )  # fmt: skip
    strides = [pool.stride(axis) // UNIT_BYTES for pool in (read, write) for axis in (0, 1)]
    is_paced = shape.pace is not None and read_pages.is_cuda
    tile_ns = int(1e9 * tile_bytes * shape.programs / (shape.pace * bytes_per_s)) if shape.pace else 0
    return tile_kernel[(shape.programs,)](
        read.view(torch.int64), write.view(torch.int64), *lists, tiles, *strides, tile_ns,
        LAYERS=layers, FRAGMENT_TILES=fragment_tiles, WORDS=tile_bytes // WORD_BYTES, STAGES=shape.stages, LOAD=shape.load,
        STORE=shape.store, EVICT=shape.evict, IS_PACED=is_paced, HAS_CARVEOUT=shape.has_carveout, **options,
    )  # fmt: skip


def prepare(compiled: Any, shape: Shape) -> Compiled | None:
    """Set a compiled kernel's carveout if its shape asks for that; None without a GPU."""
    if compiled is None or not hasattr(compiled, "function"):
        return None
    if shape.has_carveout:
        answered(driver().cuFuncSetAttribute(ctypes.c_void_p(compiled.function), CARVEOUT, 100), "cuFuncSetAttribute")
    return Compiled(compiled.n_regs, compiled.metadata.shared)


def let_descriptors_allocate(device: torch.device) -> None:
    """Give tensor descriptors, which a kernel makes in GPU memory, their memory."""
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
