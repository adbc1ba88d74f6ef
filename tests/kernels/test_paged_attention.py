"""Paged attention gives what attention over the gathered pages gives, whatever the lengths, the heads and the slots."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.kernels import paged_attention  # noqa: E402
from kvsim.kernels.page_gather import gather_pages  # noqa: E402
from kvsim.kernels.paged_attention import (  # noqa: E402
    ContextRoom,
    attend_latents,
    attend_pages,
    cut_contexts,
    latent_groups,
)

ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def pool_of(
    pages: int, page_tokens: int, kv_heads: int, dim: int, dtype: "torch.dtype", device: "torch.device"
) -> "torch.Tensor":
    """Keys and values below 2 in magnitude, as a pool of bytes."""
    elements = torch.empty(pages, 2 * page_tokens * kv_heads * dim, device=device).uniform_(-1.9, 1.9).to(dtype)
    return elements.view(torch.uint8)


def slowly(query, pool, slots, contexts, page_tokens, kv_heads):
    """One request and one head after another, in float64."""
    requests, heads, dim = query.shape
    pages = pool.view(query.dtype).view(len(pool), 2, page_tokens, kv_heads, dim).double()
    out = torch.empty(requests, heads, dim, dtype=torch.float64, device=query.device)
    for request in range(requests):
        keys, values = pages[slots[request].long()].transpose(0, 1).flatten(1, 2)[:, : contexts[request]]
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = keys[:, kv_head] @ query[request, head].double() / dim**0.5
            out[request, head] = torch.softmax(scores, 0) @ values[:, kv_head]
    return out


def attend(query, pool, slots, contexts, page_tokens, kv_heads):
    _, heads, dim = query.shape
    cut = cut_contexts(
        np.array(contexts),
        slots,
        page_tokens=page_tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        device=query.device,
    )
    out = torch.full_like(query, float("nan"))
    attend_pages(query, pool, cut, out, page_tokens=page_tokens, kv_heads=kv_heads)
    return out, cut


def error(out: "torch.Tensor", expected: "torch.Tensor") -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim"), [(torch.float32, 4, 1, 16), (torch.float16, 2, 2, 64), (torch.bfloat16, 6, 2, 24)]
)
def test_ragged_contexts_attend_to_their_own_pages(dtype, heads, kv_heads, dim, device):
    page_tokens, contexts = 16, [1, 16, 17, 150, 64]
    pool = pool_of(40, page_tokens, kv_heads, dim, dtype, device)
    order = torch.randperm(40, device=device).int()
    slots, taken = [], 0
    for context in contexts:
        pages = -(-context // page_tokens)
        slots.append(order[taken : taken + pages])
        taken += pages
    query = torch.randn(len(contexts), heads, dim, device=device).to(dtype)
    out, _ = attend(query, pool, slots, contexts, page_tokens, kv_heads)
    assert error(out, slowly(query, pool, slots, contexts, page_tokens, kv_heads)) < ERROR[dtype]


@pytest.mark.parametrize(
    ("dtype", "heads", "latent", "rope"), [(torch.float32, 20, 48, 8), (torch.float16, 1, 16, 8), (torch.bfloat16, 4, 32, 16)]
)
def test_all_heads_attend_to_latents_which_are_keys_and_values(dtype, heads, latent, rope, device):
    """More heads than one program takes, too; a key is a latent and a rope key."""
    page_tokens, contexts, scale = 8, [1, 9, 150], 0.2
    pool = torch.empty(30, page_tokens * (latent + rope), device=device).uniform_(-1.9, 1.9).to(dtype)
    order = torch.randperm(30, device=device).int()
    slots = [order[:1], order[1:3], order[3:22]]
    rows = torch.randn(3, heads + 2, latent + rope, device=device).to(dtype)
    query, out = rows[:, 1:-1], torch.full((3, heads, latent), float("nan"), device=device, dtype=dtype)
    cut = cut_contexts(
        np.array(contexts), slots, page_tokens=page_tokens, heads=heads, kv_heads=latent_groups(heads), head_dim=latent,
        device=device,
    )  # fmt: skip
    attend_latents(query, pool.view(torch.uint8), cut, out, page_tokens=page_tokens, scale=scale)
    tokens = pool.view(30, page_tokens, latent + rope).double()
    expected = torch.stack([
        torch.softmax(query[at].double() @ (known := tokens[pages.long()].flatten(0, 1)[:count]).t() * scale, 1)
        @ known[:, :latent]
        for at, (pages, count) in enumerate(zip(slots, contexts, strict=True))
    ])  # fmt: skip
    assert error(out, expected) < ERROR[dtype]
    gathered = torch.zeros(1, 24, latent + rope, dtype=dtype, device=device)
    gather_pages(pool.view(torch.uint8), order[:3], gathered)
    assert torch.equal(gathered[0], tokens[order[:3].long()].flatten(0, 1).to(dtype))


def test_a_long_context_is_cut_into_parts_and_a_short_one_beside_it_is_not(device, monkeypatch):
    monkeypatch.setattr(paged_attention, "wanted_programs", lambda device: 12)
    page_tokens, contexts = 8, [1500, 5]
    pool = pool_of(200, page_tokens, 1, 16, torch.float32, device)
    slots = [torch.randperm(200, device=device)[:188].int(), torch.tensor([3], dtype=torch.int32, device=device)]
    query = torch.randn(2, 1, 16, device=device)
    out, cut = attend(query, pool, slots, contexts, page_tokens, 1)
    assert cut.spans.tolist() == [[0, 12], [12, 1]]  # 1505 tokens for 12 programs: 125.4, to a multiple of 64
    assert cut.parts[1:3, [0, 11, 12]].tolist() == [[0, 1408, 0], [128, 1500, 5]]
    assert error(out, slowly(query, pool, slots, contexts, page_tokens, 1)) < 1e-5


def test_a_batch_may_be_cut_into_room_for_a_larger_one_again_and_again(device):
    """Requests that are not in the batch also get a result: that of its first part."""
    pool = pool_of(40, 4, 2, 16, torch.float32, device)
    room = ContextRoom(4, heads=4, kv_heads=2, head_dim=16, device=device)
    for contexts in ([90, 7, 30], [5], [1, 2, 3, 156]):
        slots = [torch.randperm(40, device=device)[: -(-context // 4)].int() for context in contexts]
        query, out = torch.randn(4, 4, 16, device=device), torch.full((4, 4, 16), float("nan"), device=device)
        shape = {"page_tokens": 4, "heads": 4, "kv_heads": 2, "head_dim": 16, "device": device}
        cut = cut_contexts(np.array(contexts), slots, room=room, **shape)
        assert cut is room.parts
        attend_pages(query, pool, cut, out, page_tokens=4, kv_heads=2)
        count = len(contexts)
        assert error(out[:count], slowly(query[:count], pool, slots, contexts, 4, 2)) < 1e-5
        assert torch.isfinite(out).all()
    with pytest.raises(ValueError, match="room for 4 requests, not 5"):
        cut_contexts(np.ones(5, dtype=int), [slots[0]] * 5, room=room, **shape)


@pytest.mark.parametrize("contexts", [[1] * 8, [65] * 8, [10_000, *[1] * 7], [129, 64, 65, 1000, 3, 2, 77, 640]])
def test_there_is_room_for_contexts_of_any_length(contexts, device, monkeypatch):
    monkeypatch.setattr(paged_attention, "wanted_programs", lambda device: 24)
    room = ContextRoom(8, heads=2, kv_heads=2, head_dim=16, device=device)
    slots = [torch.zeros(-(-context // 4), dtype=torch.int32, device=device) for context in contexts]
    cut = cut_contexts(
        np.array(contexts), slots, page_tokens=4, heads=2, kv_heads=2, head_dim=16, device=device, room=room
    )  # fmt: skip
    request, start, end = cut.parts.tolist()
    tokens = [(r, t) for r, first, last in zip(request, start, end, strict=True) for t in range(first, last)]
    assert tokens == [(r, t) for r, context in enumerate(contexts) for t in range(context)]


def test_queries_and_results_may_be_parts_of_longer_rows(device):
    pool = pool_of(4, 4, 2, 16, torch.float32, device)
    slots = [torch.tensor([2, 0], dtype=torch.int32, device=device), torch.tensor([1, 3], dtype=torch.int32, device=device)]
    rows, results = torch.randn(2, 9, 16, device=device), torch.zeros(2, 7, 16, device=device)
    cut = cut_contexts(np.array([6, 8]), slots, page_tokens=4, heads=4, kv_heads=2, head_dim=16, device=device)
    attend_pages(rows[:, 1:5], pool, cut, results[:, 2:6], page_tokens=4, kv_heads=2)
    assert error(results[:, 2:6], slowly(rows[:, 1:5], pool, slots, [6, 8], 4, 2)) < 1e-5
    assert not results[:, :2].any() and not results[:, 6:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_whatever_bits_a_page_holds_are_numbers(dtype, device):
    pool = torch.randint(0, 256, (6, 2 * 4 * 16 * dtype.itemsize), dtype=torch.uint8, device=device)
    slots = [torch.arange(6, dtype=torch.int32, device=device)]
    out, _ = attend(torch.randn(1, 2, 16, device=device).to(dtype), pool, slots, [23], 4, 1)
    assert torch.isfinite(out).all() and out.any()
    gathered = torch.empty(2, 24, 1, 16, dtype=dtype, device=device)
    gather_pages(pool, slots[0], gathered)
    assert gathered.float().abs().max() < 2


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_pages_are_gathered_in_order_keys_then_values(dtype, device):
    pool = pool_of(9, 4, 2, 24, dtype, device)
    slots = torch.tensor([7, 0, 8], dtype=torch.int32, device=device)
    out = torch.zeros(2, 16, 2, 24, dtype=dtype, device=device)
    gather_pages(pool, slots, out)
    expected = pool.view(dtype).view(9, 2, 4, 2, 24)[[7, 0, 8]].transpose(0, 1).flatten(1, 2)
    assert torch.equal(out[:, :12], expected) and not out[:, 12:].any()


def test_what_does_not_fit_is_refused(device):
    pool = pool_of(2, 4, 2, 16, torch.float32, device)
    query, one = torch.randn(1, 4, 16, device=device), [torch.zeros(1, dtype=torch.int32, device=device)]
    with pytest.raises(ValueError, match="a context of 5 tokens needs 2 pages, not 1"):
        attend(query, pool, one, [5], 4, 2)
    with pytest.raises(ValueError, match="a context must have at least one token, not 0"):
        attend(query, pool, one, [0], 4, 2)
    with pytest.raises(ValueError, match="2 x 8 tokens x 2 heads x 16 x 4 = 2048 bytes"):
        attend(query, pool, one, [4], 8, 2)
    with pytest.raises(ValueError, match="kv_heads=2 must divide the number of query heads, 3"):
        attend(query[:, :3], pool, one, [4], 4, 2)
    with pytest.raises(ValueError, match="4 tokens x 20 x 4 = 320 bytes"):
        attend_latents(torch.randn(1, 4, 20), pool, None, torch.empty(1, 4, 16), page_tokens=4, scale=1.0)
    with pytest.raises(ValueError, match="2 pages of 2 x 512 bytes do not fit"):
        gather_pages(pool, one[0].repeat(2), torch.empty(2, 4, 2, 16, device=device))
