"""The activation of a gated MLP in one pass: ``silu(gate) * up`` (Shazeer: GLU variants, 2020, arXiv:2002.05202)."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def gated_silu_kernel(both, out, width, both_stride, out_stride, BLOCK: tl.constexpr):
    """One program computes one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_element = column < width
    gate = tl.load(both + row * both_stride + column, mask=is_element, other=0.0).to(tl.float32)
    up = tl.load(both + row * both_stride + width + column, mask=is_element, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=is_element)


def gate_silu(both: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``silu(gate) * up`` to ``out`` ``[row, width]``; ``both`` is ``[row, 2 * width]``, gate then up. Does not wait."""
    rows, width = out.shape
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        gated_silu_kernel[grid](both, out, width, both.stride(0), out.stride(0), BLOCK=BLOCK, num_warps=4)
