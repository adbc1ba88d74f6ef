"""Copies pages between pools of any layout, in GPU memory or pinned host memory, without staging."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

WORD_BYTES = 8
LEAST_FRAGMENT_BYTES = 512
ALIGNMENT_BYTES = 16
"""Bytes that a thread reads or writes at once."""
PIECE_BYTES = 4096
"""Largest piece of a fragment that forms one row of a tile."""
TILE_BYTES = 65536
WARPS = 32
"""A tile has 64 bytes per thread. Two tiles are in flight, so that few programs keep a high-latency link busy."""


@triton.jit(do_not_specialize=["pages", "tiles", "tile_ns"])
def page_copy_kernel(
    source,
    target,
    source_pages,
    target_pages,
    source_tokens,
    target_tokens,
    pages,
    tiles,
    source_page_stride,
    source_layer_stride,
    source_part_stride,
    target_page_stride,
    target_layer_stride,
    target_part_stride,
    fragment_words,
    token_words,
    tile_ns,
    LAYERS: tl.constexpr,
    PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_PACED: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
):
    """Copy tiles of ROWS pieces, one after another; the loads of the next tile are issued before a tile is stored.

    With HAS_TOKENS, the PARTS of a fragment (keys, values) begin at a token within those of the source and the target page.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    page_pieces: tl.constexpr = LAYERS * PARTS * PIECES
    held = tl.zeros((ROWS, COLUMNS), tl.int64)
    held_to = tl.zeros((ROWS, 1), tl.int64)
    held_words = tl.zeros((ROWS, 1), tl.int32)
    if IS_PACED:
        due = globaltimer()

    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile * ROWS
        piece = (first % page_pieces).to(tl.int32) + row
        index = first // page_pieces + piece // page_pieces
        layer = ((piece % page_pieces) // (PARTS * PIECES)).to(tl.int64)
        start = (piece % PIECES) * COLUMNS
        is_page = index < pages
        source_page = tl.load(source_pages + index, mask=is_page, other=0).to(tl.int64)
        target_page = tl.load(target_pages + index, mask=is_page, other=0).to(tl.int64)
        words = tl.where(is_page, fragment_words - start, 0)[:, None]
        read_from = (source_page * source_page_stride + layer * source_layer_stride + start)[:, None]
        write_to = (target_page * target_page_stride + layer * target_layer_stride + start)[:, None]
        if HAS_TOKENS:
            part = ((piece // PIECES) % PARTS).to(tl.int64)
            source_token = tl.load(source_tokens + index, mask=is_page, other=0).to(tl.int64)
            target_token = tl.load(target_tokens + index, mask=is_page, other=0).to(tl.int64)
            read_from += (part * source_part_stride + source_token * token_words)[:, None]
            write_to += (part * target_part_stride + target_token * token_words)[:, None]
        if IS_PACED:
            now = globaltimer()
            while now < due:
                now = globaltimer()
            due = tl.maximum(due, now - tile_ns) + tile_ns
        if IS_EVEN:
            loaded = tl.load(source + read_from + column, mask=words > 0)
            tl.store(target + held_to + column, held, mask=held_words > 0)
        else:
            loaded = tl.load(source + read_from + column, mask=column < words)
            tl.store(target + held_to + column, held, mask=column < held_words)
        held = loaded
        held_to = write_to
        held_words = words
    tl.store(target + held_to + column, held, mask=column < held_words)


def copy_pages(
    source: torch.Tensor,
    target: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    *,
    programs: int,
    bytes_per_s: float | None = None,
) -> None:
    """Copy ``source_pages`` of one pool to ``target_pages`` of another, in order, on the current stream.

    A pool is a tensor ``[page, layer, fragment]`` with any strides: pass a layer-first pool as ``pool.transpose(0, 1)``, and
    some of its layers as a slice. Either pool may be pinned host memory, which the kernel accesses over the bus. The page lists
    are int32 tensors in GPU memory. They are not checked here; a duplicate target page gets the content of either source. The
    call returns immediately.

    ``bytes_per_s`` throttles the programs to that rate. A kernel that writes to the host faster than the link can carry fills
    the queues in front of the link, and delays reads over the same link and the rest of the GPU. On a CPU there is no link, and
    the rate is ignored.

    Raises ValueError if shapes differ, or if fragments are shorter than 512 bytes or cannot be read 16 bytes at a time.
    """
    fragment_bytes = check_pools(source, target)
    read, written = (pool.view(torch.int64).unsqueeze(2) for pool in (source, target))
    is_bus = source.is_cuda or target.is_cuda
    _launch(read, written, (source_pages, target_pages), None, fragment_bytes, programs, bytes_per_s if is_bus else None)


def copy_tokens(
    source: torch.Tensor,
    target: torch.Tensor,
    source_pages: torch.Tensor,
    source_tokens: torch.Tensor,
    target_pages: torch.Tensor,
    target_tokens: torch.Tensor,
    *,
    programs: int,
) -> None:
    """Copy between pools whose pages have different numbers of tokens, on the current stream.

    A pool is a tensor ``[page, layer, part, token, byte]`` of uint8, with the keys and the values of a page as parts; tokens and
    bytes are contiguous. Each entry of the lists copies as many tokens as a page of the finer pool has: from page
    ``source_pages[i]``, beginning with its token ``source_tokens[i]``, to ``target_pages[i]``, from its token
    ``target_tokens[i]`` on. So a load may begin inside a page of host memory that is larger than one of the GPU, as in LightLLM's
    and LMCache's CPU caches. The lists are int32 tensors in GPU memory and are not checked here: the tokens must lie within the
    pages.

    Raises ValueError if layers, parts or bytes of a token differ, or if what is copied of a part is shorter than 512 bytes or
    cannot be read 16 bytes at a time.
    """
    for pool in (source, target):
        if pool.dim() != 5 or pool.dtype != torch.uint8 or pool.stride(4) != 1 or pool.stride(3) != pool.shape[4]:
            raise ValueError(f"a pool must be [page, layer, part, token, byte] of uint8, not {tuple(pool.shape)} of {pool.dtype}")
    if source.shape[1:3] != target.shape[1:3] or source.shape[4] != target.shape[4]:
        raise ValueError(f"layers, parts and bytes of a token must be equal, not {tuple(source.shape)} and {tuple(target.shape)}")
    tokens, token_bytes = min(source.shape[3], target.shape[3]), source.shape[4]
    if token_bytes % ALIGNMENT_BYTES:
        raise ValueError(f"a token's keys must be a multiple of {ALIGNMENT_BYTES} bytes, not {token_bytes}")
    parts = [pool[:, :, :, :tokens].flatten(3) for pool in (source, target)]
    fragment_bytes = check_pools(*(pool[:, :, part] for pool in parts for part in range(pool.shape[2])))
    read, written = (pool.view(torch.int64) for pool in parts)
    firsts = source_tokens, target_tokens, token_bytes // WORD_BYTES
    _launch(read, written, (source_pages, target_pages), firsts, fragment_bytes, programs, None)


def _launch(
    read: torch.Tensor,
    written: torch.Tensor,
    lists: tuple[torch.Tensor, torch.Tensor],
    firsts: tuple[torch.Tensor, torch.Tensor, int] | None,
    fragment_bytes: int,
    programs: int,
    bytes_per_s: float | None,
) -> None:
    """Launch the kernel on pools ``[page, layer, part, word]``; ``firsts`` has the lists of first tokens and a token's words."""
    source_pages, target_pages = lists
    if len(source_pages) != len(target_pages) or firsts and not len(firsts[0]) == len(firsts[1]) == len(source_pages):
        raise ValueError(f"{len(source_pages)} source pages cannot go to {len(target_pages)} target pages")
    if programs < 1:
        raise ValueError(f"programs must be at least 1, not {programs}")
    if not len(source_pages):
        return
    source_tokens, target_tokens, token_words = firsts or (source_pages, target_pages, 0)
    piece_bytes = min(fragment_bytes & -fragment_bytes, PIECE_BYTES)
    is_even = piece_bytes >= LEAST_FRAGMENT_BYTES
    if not is_even:
        piece_bytes = min(triton.next_power_of_2(fragment_bytes), PIECE_BYTES)
    pieces = triton.cdiv(fragment_bytes, piece_bytes)
    layers, parts = read.shape[1:3]
    share_bytes = triton.cdiv(len(source_pages) * layers * parts * fragment_bytes, programs)
    tile_bytes = max(piece_bytes, min(TILE_BYTES, triton.next_power_of_2(share_bytes)))
    page_copy_kernel[(programs,)](
        read,
        written,
        source_pages,
        target_pages,
        source_tokens,
        target_tokens,
        len(source_pages),
        triton.cdiv(len(source_pages) * layers * parts * pieces, tile_bytes // piece_bytes),
        read.stride(0),
        read.stride(1),
        read.stride(2),
        written.stride(0),
        written.stride(1),
        written.stride(2),
        fragment_bytes // WORD_BYTES,
        token_words,
        int(1e9 * tile_bytes * programs / bytes_per_s) if bytes_per_s else 0,
        LAYERS=layers,
        PARTS=parts,
        PIECES=pieces,
        ROWS=tile_bytes // piece_bytes,
        COLUMNS=piece_bytes // WORD_BYTES,
        IS_EVEN=is_even,
        IS_PACED=bytes_per_s is not None,
        HAS_TOKENS=firsts is not None,
        num_warps=WARPS,
    )


def check_pools(*pools: torch.Tensor) -> int:
    """Return the bytes of a fragment of these pools ``[page, layer, fragment]``.

    Raises ValueError if the pools do not match, or cannot be read and written 16 bytes at a time.
    """
    for pool in pools:
        if pool.dim() != 3 or pool.stride(2) != 1:
            raise ValueError(f"a pool must be [page, layer, fragment] with contiguous fragments, not {tuple(pool.shape)}")
        steps = [pool.stride(axis) * pool.element_size() for axis in (0, 1) if pool.shape[axis] > 1]
        if any(step % ALIGNMENT_BYTES for step in (*steps, pool.data_ptr())):
            raise ValueError(f"fragments must begin at multiples of {ALIGNMENT_BYTES} bytes: pad the pool")
    if len({(pool.shape[1], pool.shape[2] * pool.element_size()) for pool in pools}) > 1:
        shapes = " and ".join(f"{pool.shape[1]} x {pool.shape[2] * pool.element_size()} bytes" for pool in pools)
        raise ValueError(f"pages must have the same layers and bytes in both pools, not {shapes}")
    fragment_bytes = pools[0].shape[2] * pools[0].element_size()
    if fragment_bytes < LEAST_FRAGMENT_BYTES or fragment_bytes % ALIGNMENT_BYTES:
        raise ValueError(
            f"a fragment (a page's bytes in one layer) must be a multiple of {ALIGNMENT_BYTES} bytes "
            f"and at least {LEAST_FRAGMENT_BYTES}, not {fragment_bytes}"
        )
    return fragment_bytes
