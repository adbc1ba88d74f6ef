"""Copies pages between pools of any layout, in GPU memory or pinned host memory, without staging."""

import torch
import triton
import triton.language as tl

WORD_BYTES = 8
UNIT_BYTES = 16
"""Bytes that a thread reads or writes at once. Strides are given to the kernel in these units, so that the compiler knows it."""
UNIT_WORDS: tl.constexpr = tl.constexpr(UNIT_BYTES // WORD_BYTES)
LEAST_FRAGMENT_BYTES = 512
PIECES_BYTES = (512, 1024, 2048, 4096)
"""Sizes of pieces, into which fragments are cut. A piece forms one row of a tile."""
TILE_BYTES = 32768
STAGES = 4
"""Three tiles are being read while one is written, so that few programs keep a high-latency link busy."""
WARPS = 4


@triton.jit
def wait_until(due_ns):
    """Wait until the GPU's clock shows ``due_ns``, and return what it shows. A loop of Triton's would end the pipelining."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred early; WAIT: mov.u64 $0, %globaltimer; setp.lt.u64 early, $0, $1; @early bra WAIT; }",
        "=&l,l",
        [due_ns],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit(
    do_not_specialize=[
        "pieces",
        "entries",
        "source_page_stride",
        "source_layer_stride",
        "target_page_stride",
        "target_layer_stride",
        "fragment_units",
        "tile_ns",
    ]
)
def page_copy_kernel(
    source,
    target,
    source_pages,
    target_pages,
    pieces,
    entries,
    source_page_stride,
    source_layer_stride,
    target_page_stride,
    target_layer_stride,
    fragment_units,
    tile_ns,
    LAYERS: tl.constexpr,
    FRAGMENT_PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_PACED: tl.constexpr,
    IS_BY_LAYER: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Copy tiles of ROWS pieces, one after another, while the next tiles are already being read.

    A page has LAYERS fragments of FRAGMENT_PIECES pieces; the last piece may be shorter than COLUMNS. Pieces are in the order of
    the pages, ``entries`` in all; with IS_BY_LAYER in that of the layers, however many LAYERS there are.
    With IS_PACED, a program writes a tile every ``tile_ns`` at most; when it is late, it makes up for one tile.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    due_ns = tl.zeros([], tl.int64)
    for first in tl.range(tl.program_id(0) * ROWS, pieces, tl.num_programs(0) * ROWS, num_stages=STAGES):
        is_piece = first + row < pieces
        piece = (first + row).to(tl.uint32)  # without signs, division takes fewer instructions
        fragment = piece // FRAGMENT_PIECES
        if IS_BY_LAYER:
            pages = entries.to(tl.uint32)
            entry, layer = (fragment % pages).to(tl.int32), (fragment // pages).to(tl.int64)
        else:
            entry, layer = (fragment // LAYERS).to(tl.int32), (fragment % LAYERS).to(tl.int64)
        start = (piece % FRAGMENT_PIECES).to(tl.int32) * COLUMNS
        words = tl.where(is_piece, fragment_units * UNIT_WORDS - start, 0)[:, None]
        source_page = tl.load(source_pages + entry, mask=is_piece, other=0).to(tl.int64)
        target_page = tl.load(target_pages + entry, mask=is_piece, other=0).to(tl.int64)
        read_from = source_page * source_page_stride + layer * source_layer_stride
        write_to = target_page * target_page_stride + layer * target_layer_stride
        held = tl.load(source + (read_from * UNIT_WORDS + start)[:, None] + column, mask=column < words)
        if IS_PACED:
            now_ns = wait_until(due_ns)
            due_ns = tl.maximum(due_ns, now_ns - tile_ns) + tile_ns
        tl.store(target + (write_to * UNIT_WORDS + start)[:, None] + column, held, mask=column < words)


def copy_pages(
    source: torch.Tensor,
    target: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    *,
    programs: int,
    bytes_per_s: float | None = None,
    is_by_layer: bool = False,
) -> None:
    """Copy ``source_pages`` of one pool to ``target_pages`` of another, in order, on the current stream.

    A pool is a tensor ``[page, layer, fragment]`` with any strides: pass a layer-first pool as ``pool.transpose(0, 1)``, and
    some of its layers as a slice. Either pool may be pinned host memory, which the kernel accesses over the bus. The page lists
    are int32 tensors in GPU memory. They are not checked here; a duplicate target page gets the content of either source. The
    call returns immediately. It copies less than 1 TiB.

    ``is_by_layer`` copies all pages of a layer before the next layer: faster where the fragments of a layer are neighbours, as
    those of single tokens in a larger page.

    ``bytes_per_s`` throttles the programs to that rate. A kernel that writes to the host faster than the link can carry fills
    the queues in front of the link, and delays reads over the same link and the rest of the GPU. A tile of each program may be
    ahead of the rate. On a CPU there is no link, and the rate is ignored.

    Raises ValueError if shapes differ, or if fragments are shorter than 512 bytes or cannot be read 16 bytes at a time.
    """
    fragment_bytes = check_pools(source, target)
    if len(source_pages) != len(target_pages):
        raise ValueError(f"{len(source_pages)} source pages cannot go to {len(target_pages)} target pages")
    if programs < 1:
        raise ValueError(f"programs must be at least 1, not {programs}")
    if not len(source_pages):
        return
    layers, piece_bytes = source.shape[1], best_piece(fragment_bytes)
    fragment_pieces, rows = triton.cdiv(fragment_bytes, piece_bytes), TILE_BYTES // piece_bytes
    strides = [pool.stride(axis) * pool.element_size() // UNIT_BYTES for pool in (source, target) for axis in range(2)]
    tile_bytes = rows * fragment_bytes / fragment_pieces
    is_paced = bytes_per_s is not None and (source.is_cuda or target.is_cuda)
    page_copy_kernel[(programs,)](
        source.view(torch.int64),
        target.view(torch.int64),
        source_pages,
        target_pages,
        len(source_pages) * layers * fragment_pieces,
        len(source_pages),
        *strides,
        fragment_bytes // UNIT_BYTES,
        int(1e9 * tile_bytes * programs / bytes_per_s) if bytes_per_s else 0,
        LAYERS=1 if is_by_layer else layers,  # one kernel for any number of layers
        FRAGMENT_PIECES=fragment_pieces,
        ROWS=rows,
        COLUMNS=piece_bytes // WORD_BYTES,
        IS_PACED=is_paced,
        IS_BY_LAYER=is_by_layer,
        STAGES=STAGES,
        num_warps=WARPS,
    )


def best_piece(fragment_bytes: int) -> int:
    """Return the largest size of pieces of which the last one is filled best."""
    return min(reversed(PIECES_BYTES), key=lambda piece_bytes: -fragment_bytes % piece_bytes)


def check_pools(*pools: torch.Tensor) -> int:
    """Return the bytes of a fragment of these pools ``[page, layer, fragment]``.

    Raises ValueError if the pools do not match, or cannot be read and written 16 bytes at a time.
    """
    for pool in pools:
        if pool.dim() != 3 or pool.stride(2) != 1:
            raise ValueError(f"a pool must be [page, layer, fragment] with contiguous fragments, not {tuple(pool.shape)}")
        steps = [pool.stride(axis) * pool.element_size() for axis in (0, 1) if pool.shape[axis] > 1]
        if any(step % UNIT_BYTES for step in (*steps, pool.data_ptr())):
            raise ValueError(f"fragments must begin at multiples of {UNIT_BYTES} bytes: pad the pool")
    if len({(pool.shape[1], pool.shape[2] * pool.element_size()) for pool in pools}) > 1:
        shapes = " and ".join(f"{pool.shape[1]} x {pool.shape[2] * pool.element_size()} bytes" for pool in pools)
        raise ValueError(f"pages must have the same layers and bytes in both pools, not {shapes}")
    fragment_bytes = pools[0].shape[2] * pools[0].element_size()
    if fragment_bytes < LEAST_FRAGMENT_BYTES or fragment_bytes % UNIT_BYTES:
        raise ValueError(
            f"a fragment (a page's bytes in one layer) must be a multiple of {UNIT_BYTES} bytes "
            f"and at least {LEAST_FRAGMENT_BYTES}, not {fragment_bytes}"
        )
    return fragment_bytes
