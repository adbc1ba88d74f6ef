"""A step does the arithmetic of the model: layer by layer, with the FLOPs and bytes that ModelSpec counts."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from kvsim.model import ModelSpec  # noqa: E402
from kvsim.substrate.hardware.decode_graph import graph_sizes  # noqa: E402
from kvsim.substrate.hardware.transformer import ChunkSlots, DecodeSlots, Transformer, check_model, padded  # noqa: E402

PAGE_TOKENS = 4
TINY = ModelSpec(
    layers=2, hidden_size=32, vocabulary=48, heads=4, kv_heads=2, head_dim=8, mlp_width=40, kv_dtype_bytes=4, weight_dtype_bytes=4
)
EXPERTS = replace(TINY, layers=3, dense_layers=1, routed_experts=6, experts_per_token=2, shared_experts=1, expert_width=16)
GATED = replace(TINY, attention_gate=True, tied_embeddings=True)
RELU = replace(TINY, mlp_matrices=2, mlp_layers=1)


def transformer(model: ModelSpec, device: "torch.device", pages: int = 24) -> Transformer:
    """Over a pool of keys and values below 2 in magnitude."""
    if model.routed_experts and device.type == "cuda":
        pytest.skip("experts on a GPU are bf16, too coarse to compare")
    fragment = 2 * PAGE_TOKENS * model.kv_heads * model.head_dim
    pool = torch.empty(model.layers, pages, fragment, device=device).uniform_(-1.9, 1.9)
    pool = pool.to(torch.bfloat16 if model.kv_dtype_bytes == 2 else torch.float32)
    return Transformer(model, pool.view(torch.uint8), PAGE_TOKENS, device=device, seed=1)


def slots(pages: list[int], device: "torch.device") -> "torch.Tensor":
    return torch.tensor(pages, dtype=torch.int32, device=device)


def normed(x: "torch.Tensor") -> "torch.Tensor":
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()


def slowly(ours: Transformer, rows: "list[tuple[int, torch.Tensor]]") -> "torch.Tensor":
    """Hidden states of tokens that attend to given numbers of keys in given pages, in float64, one token and head at a time."""
    model = ours.model
    width, group = model.heads * model.head_dim, model.heads // model.kv_heads
    hidden = ours.embeddings[ours.inputs[: len(rows)]].double()
    for index, layer in enumerate(ours.layers):
        pages = ours.kv[index].view(ours.dtype).view(-1, 2, PAGE_TOKENS, model.kv_heads, model.head_dim).double()
        mixed = normed(hidden) @ layer.inward.double()
        attended = torch.zeros(len(rows), width, dtype=torch.float64, device=hidden.device)
        for row, (count, pages_of_row) in enumerate(rows):
            keys, values = pages[pages_of_row.long()].transpose(0, 1).flatten(1, 2)[:, :count]
            for head in range(model.heads):
                part = slice(head * model.head_dim, (head + 1) * model.head_dim)
                scores = keys[:, head // group] @ mixed[row, part] / model.head_dim**0.5
                attended[row, part] = torch.softmax(scores, 0) @ values[:, head // group]
        if model.attention_gate:
            attended *= torch.sigmoid(mixed[:, -width:])
        hidden = hidden + attended @ layer.outward.double()
        hidden = hidden + mlp(ours, layer, normed(hidden))
    return hidden


def gated(x: "torch.Tensor", up: "torch.Tensor", down: "torch.Tensor") -> "torch.Tensor":
    both = x @ up.double()
    width = down.shape[0]
    if both.shape[-1] == width:
        return both.relu() ** 2 @ down.double()
    return (torch.nn.functional.silu(both[..., :width]) * both[..., width:]) @ down.double()


def mlp(ours, layer, x):
    result = torch.zeros_like(x)
    if layer.up is not None:
        result += gated(x, layer.up, layer.down)
    if layer.router is not None:
        for token in range(len(x)):
            for expert in ours.choices[token].tolist():
                share = gated(x[token], layer.experts_up[expert], layer.experts_down[expert])
                result[token] += share / ours.model.experts_per_token
    return result


def batch(device):
    """Two decodes and two chunks of prompts with cached prefixes; the tokens of each as (keys, pages)."""
    decodes = [DecodeSlots(6, slots([3, 0], device)), DecodeSlots(1, slots([5, 6, 7], device))]
    chunks = [ChunkSlots(5, 6, slots([9, 1, 2, 23], device)), ChunkSlots(3, 0, slots([4], device))]
    rows = [(request.context_tokens, request.slots) for request in decodes]
    rows += [(chunk.start + token + 1, chunk.slots) for chunk in chunks for token in range(chunk.tokens)]
    return chunks, decodes, rows


@pytest.mark.parametrize("model", [TINY, EXPERTS, GATED, RELU], ids=["dense", "experts", "gate", "relu"])
def test_a_step_is_the_models_arithmetic(model, device):
    ours = transformer(model, device)
    chunks, decodes, rows = batch(device)
    logits = ours.step(chunks, decodes, sampled_tokens=1)
    expected = normed(slowly(ours, rows)[[0, 1, 6]]) @ ours.head.double()
    assert logits.shape == (3, model.vocabulary)
    assert float((logits.double() - expected).norm() / expected.norm()) < 1e-5


def test_bf16_is_near(device):
    ours = transformer(replace(TINY, kv_dtype_bytes=2, weight_dtype_bytes=2), device)
    chunks, decodes, rows = batch(device)
    logits = ours.step(chunks, decodes, sampled_tokens=2)
    expected = normed(slowly(ours, rows)[[0, 1, 6, 9]]) @ ours.head.double()
    assert float((logits.double() - expected).norm() / expected.norm()) < 2e-2


def test_a_step_gives_the_same_in_buffers_that_a_larger_one_used(device):
    ours = transformer(TINY, device)
    chunks, decodes, _ = batch(device)
    before = ours.step([], decodes).clone()
    ours.step(chunks, decodes * 3)
    assert torch.equal(ours.step([], decodes), before)


@pytest.mark.gpu
@pytest.mark.parametrize("model", [TINY, GATED, RELU], ids=["dense", "gate", "relu"])
def test_a_replayed_step_gives_what_a_launched_one_gives(model, device):
    ours = transformer(model, device)
    chunks, decodes, _ = batch(device)
    launched = [ours.step([], decodes * count).clone() for count in (1, 2, 3)]
    ours.record_decodes(5)
    ours.step(chunks, decodes * 40)  # larger buffers than those that were recorded
    for count, expected in zip((1, 2, 3), launched, strict=True):
        assert torch.allclose(ours.step([], decodes * count), expected, rtol=1e-4, atol=1e-5)
    assert [graph.room.requests for graph in ours.graphs] == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (13, [1, 2, 4, 8, 12, 13]), (40, [1, 2, 4, 8, 12, 16, 24, 32, 40])]
)
def test_steps_are_recorded_for_some_sizes(most, sizes):
    assert list(graph_sizes(most)) == sizes


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 128), (128, 128), (129, 256), (3900, 3968), (16383, 16384), (16384, 16384), (16385, 16640)]
)
def test_rows_are_filled_up_to_few_sizes(tokens, rows):
    assert padded(tokens) == rows


def test_nothing_is_sampled_of_a_chunk_within_its_prompt(device):
    chunks, _, _ = batch(device)
    assert transformer(TINY, device).step(chunks, []).shape == (0, TINY.vocabulary)


def test_layers_are_waited_for_in_order_and_bits_of_any_kind_are_numbers(device):
    ours = transformer(TINY, device)
    ours.kv.random_(0, 256)
    waited = []
    chunks, decodes, _ = batch(device)
    logits = ours.step(chunks, decodes, waited.append, sampled_tokens=2)
    assert waited == [0, 1] and torch.isfinite(logits).all()


def added_flops(to, left, right, **_):
    return 2 * left[0] * left[1] * right[1]


def grouped_flops(left, right, *_, **__):
    """Each row is multiplied with the matrix of one group."""
    return 2 * left[0] * left[1] * right[2]


@pytest.mark.parametrize("model", [TINY, EXPERTS, GATED, RELU], ids=["dense", "experts", "gate", "relu"])
def test_flops_are_those_that_the_model_counts(model, device):
    if device.type == "cuda":
        pytest.skip("torch's counter of FLOPs cannot see a causal mask that is but a name for one")
    ours = transformer(model, device)
    chunks = [ChunkSlots(20, 12, slots(list(range(8)), device)), ChunkSlots(8, 0, slots([20, 21], device))]
    products = {torch.ops.aten.addmm_: added_flops, torch.ops.aten._grouped_mm: grouped_flops}
    with FlopCounterMode(display=False, custom_mapping=products) as counter, sdpa_kernel(SDPBackend.MATH):
        ours.step(chunks, [DecodeSlots(9, slots([9, 10, 11], device))], sampled_tokens=1)
    counted = {str(name).removeprefix("aten."): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    attention = counted.pop("bmm")
    pairs = 20 * 32 + 8 * 8  # Those above the diagonal are counted too.
    assert attention == model.attention_flops_per_pair * pairs
    assert sum(counted.values()) == 29 * model.linear_flops_per_token + 2 * model.sampling_flops_per_token


@pytest.mark.parametrize("model", [TINY, EXPERTS, GATED, RELU], ids=["dense", "experts", "gate", "relu"])
def test_weights_are_those_that_the_model_counts(model, device):
    ours = transformer(model, device)
    matrices = [ours.embeddings] if model.tied_embeddings else [ours.embeddings, ours.head]
    for layer in ours.layers:
        matrices += [weights for name in layer.__slots__ if (weights := getattr(layer, name)) is not None]
    assert sum(weights.numel() for weights in matrices) == model.parameters
    assert len({weights.data_ptr() for weights in matrices}) == len(matrices)


def test_the_experts_of_a_token_differ(device):
    ours = transformer(EXPERTS, device)
    routes = ours._routes(100)
    assert all(len(set(experts)) == 2 for experts in ours.choices[:100].tolist())
    assert routes.ends[-1] == 200 and sorted(routes.tokens.tolist()) == sorted([*range(100), *range(100)])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kv_dtype_bytes": 1}, r"kv_dtype_bytes must be 2 \(bf16\) or 4 \(float32\) on hardware, not 1"),
        ({"weight_dtype_bytes": 0.5}, "weight_dtype_bytes must be 2"),
        ({"kv_dtype_bytes": 2}, "weight_dtype_bytes must equal kv_dtype_bytes=2, not 4"),
        (
            {"kv_heads": 0, "head_dim": 0, "kv_latent_dim": 8, "nope_dim": 8, "rope_dim": 4, "value_dim": 8},
            "kv_latent_dim: .* latent",
        ),
        (
            {
                "recurrent_layers": 1,
                "state_heads": 1,
                "state_key_dim": 2,
                "state_value_dim": 2,
                "recurrent_in_width": 2,
                "state_flops_per_element": 1.0,
            },
            "recurrent_layers: there is no kernel",
        ),
    ],
)
def test_a_model_whose_work_cannot_be_done_is_refused(change, problem):
    with pytest.raises(ValueError, match=problem):
        check_model(replace(TINY, **change), torch.device("cpu"))


def test_a_pool_that_does_not_fit_is_refused(device):
    with pytest.raises(ValueError, match="with 2 layers"):
        Transformer(TINY, torch.zeros(3, 2, 512, dtype=torch.uint8, device=device), PAGE_TOKENS, device=device, seed=0)
    with pytest.raises(ValueError, match="2 x 4 tokens x 2 heads x 8 x 4 = 512 bytes"):
        Transformer(TINY, torch.zeros(2, 2, 500, dtype=torch.uint8, device=device), PAGE_TOKENS, device=device, seed=0)
    with pytest.raises(ValueError, match="a chunk that ends at 9 needs 3 pages, not 2"):
        transformer(TINY, device).step([ChunkSlots(3, 6, slots([0, 1], device))], [])
