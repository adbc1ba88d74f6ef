"""Attention of decoding requests over pages anywhere in a pool, split over the context (flash-decoding).

One program attends with the query heads of a KV head to one part of a request's context, so that a few long contexts fill the
GPU as well as many short ones; a second kernel joins the parts (Dao et al.: Flash-Decoding for long-context inference, 2023).
Pages are those of PagedAttention (Kwon et al., SOSP 2023, arXiv:2309.06180). With latents, one is key and value of all heads
(multi-head latent attention, absorbed: DeepSeek-V2, arXiv:2405.04434, section 2.1).
"""

from dataclasses import dataclass
from functools import cache
from math import log2

import numpy as np
import torch
import triton
import triton.language as tl

BLOCK_TOKENS = 64
"""Tokens that a program processes at a time."""
BLOCK_LATENTS = 32
"""The same for latents, which are several times as long as keys."""
LATENT_GROUP = 16
"""Query heads with which one program attends to latents."""
LEAST_ROWS = 16
"""Fewest rows of a matrix product on tensor cores."""
PROGRAMS_PER_MULTIPROCESSOR = 8
INTERPRETED_PROGRAMS = 4
JOINED_PARTS = 16
BOUNDED = {2: -0x4001, 4: -0x40000001}
"""Mask by bytes per element: all bits except the exponent's highest, which is set only in numbers of magnitude 2 or more,
infinities and NaN."""


@triton.jit(do_not_specialize=["part_count"])
def paged_attention_kernel(
    query,
    pool,
    parts,
    tables,
    partial,
    weights,
    part_count,
    query_stride,
    page_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    MORE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    IS_LATENT: tl.constexpr,
    PAGE: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    MORES: tl.constexpr,
    BLOCK: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """One program attends to one part of one request with GROUP query heads. A part may be empty.

    The heads are those of one KV head or, with latents, any GROUP of all heads. A latent is a value of DIM elements and a key of
    MORE elements more.
    """
    part = tl.program_id(0)
    group = tl.program_id(1)
    request = tl.load(parts + part)
    start = tl.load(parts + part_count + part).to(tl.int32)
    end = tl.load(parts + 2 * part_count + part).to(tl.int32)
    if start >= end:
        return
    slots = tl.load(tables + request).to(tl.pointer_type(tl.int32))
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)[None, :]
    head = group * GROUP + row
    is_head = (row < GROUP) & (head < HEADS)
    is_element = is_head[:, None] & (dim < DIM)
    kind = query.dtype.element_ty
    ask = query + request * query_stride + head[:, None] * (DIM + MORE)
    asked = tl.load(ask + dim, mask=is_element, other=0.0).to(PRODUCT)
    if IS_LATENT:
        more = tl.arange(0, MORES)[None, :]
        asked_more = tl.load(ask + DIM + more, mask=is_head[:, None] & (more < MORE), other=0.0).to(PRODUCT)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    attended = tl.zeros((ROWS, DIMS), tl.float32)

    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        is_token = token < end
        slot = tl.load(slots + token // PAGE, mask=is_token, other=0).to(tl.int64)
        is_read = is_token[:, None] & (dim < DIM)
        if IS_LATENT:
            latent = pool + (slot * page_stride + (token % PAGE) * (DIM + MORE))[:, None]
            key = tl.load(latent + dim, mask=is_read, other=0)
            key = (key & KEEP).to(kind, bitcast=True).to(PRODUCT)
            rest = tl.load(latent + DIM + more, mask=is_token[:, None] & (more < MORE), other=0)
            rest = (rest & KEEP).to(kind, bitcast=True).to(PRODUCT)
            value = key
            score = tl.dot(asked, tl.trans(key), input_precision="ieee")
            score = tl.dot(asked_more, tl.trans(rest), score, input_precision="ieee") * scale
        else:
            place = slot * page_stride + (token % PAGE) * (KV_HEADS * DIM) + group * DIM
            address = pool + place[:, None] + dim
            key = tl.load(address, mask=is_read, other=0)
            value = tl.load(address + PAGE * KV_HEADS * DIM, mask=is_read, other=0)
            key = (key & KEEP).to(kind, bitcast=True).to(PRODUCT)
            value = (value & KEEP).to(kind, bitcast=True).to(PRODUCT)
            score = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(is_token[None, :], score, float("-inf"))
        highest = tl.maximum(most, tl.max(score, 1))
        share = tl.exp2(score - highest[:, None])
        kept = tl.exp2(most - highest)
        total = total * kept + tl.sum(share, 1)
        attended = attended * kept[:, None] + tl.dot(share.to(PRODUCT), value, input_precision="ieee")
        most = highest

    to = part.to(tl.int64) * HEADS + head
    tl.store(partial + to[:, None] * DIM + dim, attended / total[:, None], mask=is_element)
    tl.store(weights + to, most + tl.log2(total), mask=is_head)


@triton.jit(do_not_specialize=["requests"])
def join_kernel(
    partial,
    weights,
    spans,
    out,
    requests,
    out_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program joins the parts of one request and one query head, weighted by their sums of exponentials."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(spans + request)
    end = first + tl.load(spans + requests + request)
    dim = tl.arange(0, DIMS)
    most = float("-inf")
    total = 0.0
    joined = tl.zeros((DIMS,), tl.float32)
    for begin in range(first, end, PARTS):
        part = begin + tl.arange(0, PARTS)
        at = part.to(tl.int64) * HEADS + head
        weight = tl.load(weights + at, mask=part < end, other=float("-inf"))
        is_element = (part < end)[:, None] & (dim < DIM)[None, :]
        values = tl.load(partial + at[:, None] * DIM + dim[None, :], mask=is_element, other=0.0)
        more = tl.maximum(most, tl.max(weight, 0))
        share = tl.exp2(weight - more)
        kept = tl.exp2(most - more)
        total = total * kept + tl.sum(share, 0)
        joined = joined * kept + tl.sum(share[:, None] * values, 0)
        most = more
    place = out + request.to(tl.int64) * out_stride + head * DIM + dim
    tl.store(place, (joined / total).to(out.dtype.element_ty), mask=dim < DIM)


@dataclass(frozen=True, slots=True)
class ContextParts:
    """The parts into which the contexts of a batch are cut, in GPU memory: computed once per step, used in every layer."""

    parts: torch.Tensor
    """Request, first token and end of each part, int64 ``[3, parts]``. Empty parts may follow."""
    spans: torch.Tensor
    """First part and number of parts of each request, int64 ``[2, requests]``."""
    tables: torch.Tensor
    """Address of each request's page slots, int64 ``[requests]``. The slots must not move."""
    partial: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, table: torch.Tensor, parts: int, requests: int, heads: int, head_dim: int) -> "ContextParts":
        """Create parts, spans and tables as consecutive views of ``table``."""
        end = 3 * parts + 2 * requests
        return cls(
            parts=table[: 3 * parts].view(3, parts),
            spans=table[3 * parts : end].view(2, requests),
            tables=table[end:],
            partial=torch.empty((parts, heads, head_dim), dtype=torch.float32, device=table.device),
            weights=torch.empty((parts, heads), dtype=torch.float32, device=table.device),
        )


class ContextRoom:
    """Memory for the parts of up to ``requests`` contexts of any length, at a fixed address, as a CUDA graph requires.

    ``parts`` describes the batch that was cut last. If it has fewer requests, the remaining ones attend to its first part.
    """

    def __init__(self, requests: int, *, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
        most = wanted_programs(device) // kv_heads + requests
        self.requests = requests
        self.table = torch.zeros(table_length(most, requests), dtype=torch.int64, device=device)
        self.parts = ContextParts.of(self.table, most, requests, heads, head_dim)


def table_length(parts: int, requests: int) -> int:
    """Return the number of table entries for ``requests`` requests cut into ``parts`` parts."""
    return 3 * parts + 3 * requests


def cut_contexts(
    contexts: np.ndarray,
    slots: list[torch.Tensor],
    *,
    page_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    room: ContextRoom | None = None,
) -> ContextParts:
    """Cut contexts, given by their tokens, into parts of equal length, about as many as fill the GPU.

    The parts are written to ``room``, if given. ``slots`` has the page slots of each request (int32, contiguous, on ``device``),
    at least those of its context. The host does not wait for the GPU. Raises ValueError for an empty context, a context with too
    few slots, and more requests than ``room`` holds.
    """
    requests = len(contexts)
    counts = np.array([len(each) for each in slots])
    needed = -(-contexts // page_tokens)
    if contexts.min() < 1:
        raise ValueError(f"a context must have at least one token, not {contexts.min()}")
    if (counts < needed).any():
        short = int(np.flatnonzero(counts < needed)[0])
        raise ValueError(f"a context of {contexts[short]} tokens needs {needed[short]} pages, not {counts[short]}")
    wanted = -(-int(contexts.sum()) * kv_heads // wanted_programs(device))
    length = max(-(-wanted // BLOCK_TOKENS), 1) * BLOCK_TOKENS
    shares = -(-contexts // length)
    request = np.repeat(np.arange(requests), shares)
    first_part = np.cumsum(shares) - shares
    start = (np.arange(len(request)) - first_part[request]) * length
    parts, columns = len(request), requests
    if room is not None:
        parts, columns = room.parts.parts.shape[1], room.requests
        if requests > columns:
            raise ValueError(f"there is room for {columns} requests, not {requests}")
    host = torch.zeros(table_length(parts, columns), dtype=torch.int64, pin_memory=device.type == "cuda")
    table = host.numpy()
    by_part, by_request = table[: 3 * parts].reshape(3, parts), table[3 * parts :].reshape(3, columns)
    by_part[:, : len(request)] = request, start, np.minimum(start + length, contexts[request])
    by_request[1, requests:] = 1
    by_request[:, :requests] = first_part, shares, [each.data_ptr() for each in slots]
    if room is None:
        return ContextParts.of(host.to(device, non_blocking=True), parts, columns, heads, head_dim)
    room.table.copy_(host, non_blocking=True)
    return room.parts


@cache
def wanted_programs(device: torch.device) -> int:
    """Return a number of programs that more than fills the GPU, as they end at different times; few for the interpreter."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    multiprocessors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return PROGRAMS_PER_MULTIPROCESSOR * multiprocessors


def attend_pages(
    query: torch.Tensor, pool: torch.Tensor, cut: ContextParts, out: torch.Tensor, *, page_tokens: int, kv_heads: int
) -> None:
    """Attend with one query token of each request to its context, and write the result to ``out``, on the current stream.

    ``query`` and ``out`` are ``[request, head, dim]``, bf16, float16 or float32, with contiguous heads per request. ``pool`` is
    one layer's pages ``[page, fragment]`` in bytes; a fragment has a page's keys, then its values, each ``[token, kv head, dim]``
    in the query's type. The highest exponent bit of keys and values is cleared: this does not change numbers of magnitude below
    2, and makes finite numbers of any bits that a page contains. Products use the query's type (float32 in the interpreter) and
    are summed in float32. The call returns immediately. Raises ValueError if shapes do not match.
    """
    heads, dim = query.shape[1:]
    check_fragment(pool, page_tokens=page_tokens, kv_heads=kv_heads, head_dim=dim, element_bytes=query.element_size())
    if heads % kv_heads:
        raise ValueError(f"kv_heads={kv_heads} must divide the number of query heads, {heads}")
    shape = {"GROUP": heads // kv_heads, "MORE": 0, "KV_HEADS": kv_heads, "BLOCK": BLOCK_TOKENS, "num_stages": 3}
    _attend(query, pool, cut, out, groups=kv_heads, page_tokens=page_tokens, scale=dim**-0.5, shape=shape)


def attend_latents(
    query: torch.Tensor, pool: torch.Tensor, cut: ContextParts, out: torch.Tensor, *, page_tokens: int, scale: float
) -> None:
    """Attend with one absorbed query token of each request to the latents of its context, and write the result to ``out``.

    ``out`` is ``[request, head, latent]`` and ``query`` ``[request, head, latent + rope]``, types and strides as for
    ``attend_pages``. A token of the pool is a latent, the value of all heads, then a rope key; together they are the key. Scores
    are multiplied by ``scale``. Cut contexts as for ``latent_groups(heads)`` KV heads. Raises ValueError if shapes do not match.
    """
    heads, whole, dim = query.shape[1], query.shape[2], out.shape[2]
    check_latents(pool, page_tokens=page_tokens, latent_dim=whole, element_bytes=query.element_size())
    group = min(heads, LATENT_GROUP)
    shape = {"GROUP": group, "MORE": whole - dim, "KV_HEADS": 1, "BLOCK": BLOCK_LATENTS, "num_stages": 2}
    _attend(query, pool, cut, out, groups=latent_groups(heads), page_tokens=page_tokens, scale=scale, shape=shape)


def latent_groups(heads: int) -> int:
    """Return how many programs attend to one part of a context of latents, each with some of the query heads."""
    return -(-heads // min(heads, LATENT_GROUP))


def _attend(
    query: torch.Tensor,
    pool: torch.Tensor,
    cut: ContextParts,
    out: torch.Tensor,
    *,
    groups: int,
    page_tokens: int,
    scale: float,
    shape: dict[str, int],
) -> None:
    """Launch both kernels; ``shape`` has what differs between keys and values and latents."""
    requests, heads, dim = out.shape
    words = pool.view(torch.int16 if query.element_size() == 2 else torch.int32)
    dims, parts = max(LEAST_ROWS, triton.next_power_of_2(dim)), cut.parts.shape[1]
    paged_attention_kernel[(parts, groups)](
        query,
        words,
        cut.parts,
        cut.tables,
        cut.partial,
        cut.weights,
        parts,
        query.stride(0),
        words.stride(0),
        scale * log2(np.e),
        HEADS=heads,
        DIM=dim,
        IS_LATENT=shape["MORE"] > 0,
        PAGE=page_tokens,
        KEEP=BOUNDED[query.element_size()],
        ROWS=max(LEAST_ROWS, triton.next_power_of_2(shape["GROUP"])),
        DIMS=dims,
        MORES=max(LEAST_ROWS, triton.next_power_of_2(shape["MORE"])),
        PRODUCT=PRODUCTS[query.dtype] if query.is_cuda else tl.float32,
        num_warps=4,
        **shape,
    )
    join_kernel[(requests, heads)](
        cut.partial,
        cut.weights,
        cut.spans,
        out,
        requests,
        out.stride(0),
        HEADS=heads,
        DIM=dim,
        DIMS=dims,
        PARTS=JOINED_PARTS,
        num_warps=4,
    )


PRODUCTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def check_fragment(pool: torch.Tensor, *, page_tokens: int, kv_heads: int, head_dim: int, element_bytes: int) -> None:
    """Raise ValueError unless a layer's pages ``[page, fragment]`` exactly fit keys and values of these shapes."""
    expected = 2 * page_tokens * kv_heads * head_dim * element_bytes
    if pool.dim() != 2 or pool.stride(1) != 1 or pool.shape[1] * pool.element_size() != expected:
        raise ValueError(
            f"a layer of the pool must be [page, fragment], a fragment 2 x {page_tokens} tokens x {kv_heads} heads x {head_dim} "
            f"x {element_bytes} = {expected} bytes, not {tuple(pool.shape)} of {pool.element_size()}"
        )


def check_latents(pool: torch.Tensor, *, page_tokens: int, latent_dim: int, element_bytes: int) -> None:
    """Raise ValueError unless a layer's pages ``[page, fragment]`` exactly fit latents of ``latent_dim`` elements in all."""
    expected = page_tokens * latent_dim * element_bytes
    if pool.dim() != 2 or pool.stride(1) != 1 or pool.shape[1] * pool.element_size() != expected:
        raise ValueError(
            f"a layer of the pool must be [page, fragment], a fragment {page_tokens} tokens x {latent_dim} x {element_bytes} "
            f"= {expected} bytes, not {tuple(pool.shape)} of {pool.element_size()}"
        )
