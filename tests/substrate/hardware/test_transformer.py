"""A step does the arithmetic of the model: layer by layer, with the FLOPs and bytes that ModelSpec counts."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from kvsim.model.spec import ModelSpec  # noqa: E402
from kvsim.substrate.hardware.model import attention  # noqa: E402
from kvsim.substrate.hardware.model.decode_graph import graph_sizes  # noqa: E402
from kvsim.substrate.hardware.model.layer import ChunkSlots, DecodeSlots  # noqa: E402
from kvsim.substrate.hardware.model.recurrence import RecurrentShape, state_layer_bytes  # noqa: E402
from kvsim.substrate.hardware.model.transformer import Transformer, check_model, enumerate_layers, padded  # noqa: E402

PAGE_TOKENS = 4
TINY = ModelSpec(
    layers=2, hidden_size=32, vocabulary=48, heads=4, kv_heads=2, head_dim=8, mlp_width=40, kv_dtype_bytes=4, weight_dtype_bytes=4
)
EXPERTS = replace(TINY, layers=3, dense_layers=1, routed_experts=6, experts_per_token=2, shared_experts=1, expert_width=16)
GATED = replace(TINY, attention_gate=True, tied_embeddings=True)
RELU = replace(TINY, mlp_matrices=2, mlp_layers=1)
LATENT = replace(TINY, kv_heads=0, head_dim=0, kv_latent_dim=24, query_latent_dim=20, nope_dim=8, rope_dim=8, value_dim=12)
HYBRID = replace(
    TINY,
    layers=5,
    recurrent_layers=3,
    state_heads=4,
    state_key_dim=8,
    state_value_dim=16,
    recurrent_in_width=64 + 32 + 64 + 4,
    conv_channels=64 + 32,
    conv_width=4,
    state_flops_per_element=5.0,
)
"""Two key heads, a convolution, a gate and a decay per head."""
INNER = replace(
    HYBRID, state_heads=32, state_key_dim=4, state_value_dim=1, recurrent_in_width=32, conv_channels=0, conv_width=0,
    recurrent_inner_parameters=32 * 12, state_dtype_bytes=2,
)  # fmt: skip
"""Narrow heads, two of them at a time; keys from the inner product; no convolution and no gate. States in bf16."""
MIXED = replace(LATENT, layers=3, **{name: getattr(HYBRID, name) for name in (
    "state_heads", "state_key_dim", "state_value_dim", "recurrent_in_width", "conv_channels", "conv_width",
    "state_flops_per_element")}, recurrent_layers=2)  # fmt: skip
MODELS = {
    "dense": TINY, "experts": EXPERTS, "gate": GATED, "relu": RELU, "latent": LATENT, "hybrid": HYBRID, "inner": INNER,
    "mixed": MIXED,
}  # fmt: skip
STATES = 6
QUICK = ("dense", "experts", "latent", "hybrid")
every_model = pytest.mark.parametrize(
    "model",
    [pytest.param(model, id=name, marks=() if name in QUICK else pytest.mark.long) for name, model in MODELS.items()],
)


def transformer(model: ModelSpec, device: "torch.device", pages: int = 24) -> Transformer:
    """Over a pool of keys and values below 2 in magnitude, and such states."""
    if model.routed_experts and device.type == "cuda":
        pytest.skip("experts on a GPU are bf16, too coarse to compare")
    kind = torch.bfloat16 if model.kv_dtype_bytes == 2 else torch.float32
    layers, page_bytes = model.attention_layers, model.page_bytes(PAGE_TOKENS)
    pool = torch.empty(layers, pages, page_bytes // layers // kind.itemsize, device=device).uniform_(-1.9, 1.9).to(kind)
    states = None
    if model.is_hybrid:
        state_kind = torch.bfloat16 if model.state_dtype_bytes == 2 else torch.float32
        elements = model.state_heads * model.state_key_dim * model.state_value_dim
        inputs = state_layer_bytes(model) // kind.itemsize - elements * state_kind.itemsize // kind.itemsize
        parts = [
            torch.empty(model.recurrent_layers, STATES, count, device=device).uniform_(-1.9, 1.9).to(each).view(torch.uint8)
            for count, each in ((elements, state_kind), (inputs, kind))
        ]
        states = torch.cat(parts, dim=2)
    return Transformer(model, pool.view(torch.uint8), PAGE_TOKENS, device=device, seed=1, states=states)


def slots(pages: list[int], device: "torch.device") -> "torch.Tensor":
    return torch.tensor(pages, dtype=torch.int32, device=device)


def normed(x: "torch.Tensor") -> "torch.Tensor":
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()


def slowly(ours: Transformer, rows: "list[tuple[int, torch.Tensor]]", sequences: "list[tuple[int, int, int, bool]]"):
    """Hidden states of tokens that attend to given numbers of keys in given pages, in float64, one token and head at a time.

    ``sequences`` are (first row, tokens, slot of the state, whether it goes on from it).
    """
    hidden = ours.embeddings[ours.inputs[: len(rows)]].double()
    for layer, (is_recurrent, index) in zip(ours.layers, ours.mixers, strict=True):
        if is_recurrent:
            hidden = hidden + recurrent(ours, layer, index, normed(hidden), sequences)
        elif ours.model.is_latent:
            hidden = hidden + latent(ours, layer, index, normed(hidden), rows)
        else:
            hidden = hidden + grouped(ours, layer, index, normed(hidden), rows)
        hidden = hidden + mlp(ours, layer, normed(hidden))
    return hidden


def grouped(ours, layer, index, x, rows):
    model = ours.model
    width, group = model.heads * model.head_dim, model.heads // model.kv_heads
    pages = ours.kv[index].view(ours.dtype).view(-1, 2, PAGE_TOKENS, model.kv_heads, model.head_dim).double()
    mixed = x @ layer.inward.double()
    attended = torch.zeros(len(rows), width, dtype=torch.float64, device=x.device)
    for row, (count, pages_of_row) in enumerate(rows):
        keys, values = pages[pages_of_row.long()].transpose(0, 1).flatten(1, 2)[:, :count]
        for head in range(model.heads):
            part = slice(head * model.head_dim, (head + 1) * model.head_dim)
            scores = keys[:, head // group] @ mixed[row, part] / model.head_dim**0.5
            attended[row, part] = torch.softmax(scores, 0) @ values[:, head // group]
    if model.attention_gate:
        attended *= torch.sigmoid(mixed[:, -width:])
    return attended @ layer.outward.double()


def latent(ours, layer, index, x, rows):
    """Every token in the naive form: the latents of its context are expanded."""
    model = ours.model
    whole, head_width = model.kv_latent_dim + model.rope_dim, model.nope_dim + model.rope_dim
    tokens = ours.kv[index].view(ours.dtype).view(-1, PAGE_TOKENS, whole).double()
    mixed = x @ layer.inward.double()
    query = mixed[:, : model.query_latent_dim] @ layer.query.double() if model.query_latent_dim else mixed
    attended = torch.zeros(len(rows), model.heads, model.value_dim, dtype=torch.float64, device=x.device)
    for row, (count, pages_of_row) in enumerate(rows):
        known = tokens[pages_of_row.long()].flatten(0, 1)[:count]
        compressed, rope = known[:, : model.kv_latent_dim], known[:, model.kv_latent_dim :]
        keys = (compressed @ layer.key_expansion.double()).view(count, model.heads, model.nope_dim)
        values = (compressed @ layer.value_expansion.double()).view(count, model.heads, model.value_dim)
        for head in range(model.heads):
            asked = query[row, head * head_width : (head + 1) * head_width]
            scores = torch.cat([keys[:, head], rope], dim=1) @ asked / head_width**0.5
            attended[row, head] = torch.softmax(scores, 0) @ values[:, head]
    return attended.flatten(1) @ layer.outward.double()


def recurrent(ours, layer, index, x, sequences):
    """Token by token, from the states before the step."""
    model, shape = ours.model, RecurrentShape.of(ours.model)
    width = shape.value_width
    mixed = x @ layer.inward.double()
    inputs, out = mixed[:, : shape.columns].clone(), torch.zeros(len(x), width, dtype=torch.float64, device=x.device)
    elements = model.state_heads * model.state_key_dim * model.state_value_dim * model.state_dtype_bytes
    before = ours.recurrence.states[index]
    for row, tokens, slot, is_begun in sequences:
        if model.conv_channels:
            last = before[slot, elements:].view(ours.dtype).double().view(model.conv_width - 1, -1)
            known = torch.cat([last * is_begun, mixed[row : row + tokens, : shape.columns]])
            for at in range(tokens):
                taps = known[at : at + model.conv_width] * layer.convolution.double()
                inputs[row + at] = torch.nn.functional.silu(taps.sum(0))
    source = inputs[:, width:] if layer.inner is None else inputs[:, :width] @ layer.inner.double()
    kind = torch.bfloat16 if model.state_dtype_bytes == 2 else torch.float32
    for row, tokens, slot, is_begun in sequences:
        states = before[slot, :elements].view(kind).double().view(shape.heads, shape.key_dim, shape.value_dim) * is_begun
        for at in range(row, row + tokens):
            for head in range(shape.heads):
                first = head // (shape.heads // shape.key_heads) * shape.key_dim
                key, query = (source[at, place : place + shape.key_dim] for place in (first, shape.key_width + first))
                step = torch.nn.functional.softplus(mixed[at, -shape.heads + head])
                part = slice(head * shape.value_dim, (head + 1) * shape.value_dim)
                new = torch.outer(key, inputs[at, part]) * step / shape.key_dim**0.5
                states[head] = torch.exp(-step) * states[head] + new
                out[at, part] = query @ states[head]
    if shape.has_gate:
        out *= torch.nn.functional.silu(mixed[:, shape.columns : shape.columns + width])
    return out @ layer.outward.double()


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
    decodes = [DecodeSlots(6, slots([3, 0], device), 4), DecodeSlots(1, slots([5, 6, 7], device), 0)]
    chunks = [ChunkSlots(5, 6, slots([9, 1, 2, 23], device), 3), ChunkSlots(3, 0, slots([4], device), 1)]
    rows = [(request.context_tokens, request.slots) for request in decodes]
    rows += [(chunk.start + token + 1, chunk.slots) for chunk in chunks for token in range(chunk.tokens)]
    return chunks, decodes, rows


SEQUENCES = [(0, 1, 4, True), (1, 1, 0, True), (2, 5, 3, True), (7, 3, 1, False)]
"""Of the batch: first row, tokens, slot of the state, and whether it has begun."""


def draw(ours: Transformer) -> None:
    """Draw what the batch's step draws, so that it can be computed before the step advances the states."""
    ours._inputs(10)
    if ours.model.routed_experts:
        ours._routes(10)


@every_model
def test_a_step_is_the_models_arithmetic(model, device):
    ours = transformer(model, device)
    chunks, decodes, rows = batch(device)
    draw(ours)
    expected = normed(slowly(ours, rows, SEQUENCES)[[0, 1, 6]]) @ ours.head.double()
    logits = ours.step(chunks, decodes, sampled_tokens=1)
    assert logits.shape == (3, model.vocabulary)
    assert float((logits.double() - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    ("model", "allowed"),
    [
        pytest.param(TINY, 2e-2, id="dense"),
        pytest.param(LATENT, 2e-2, id="latent", marks=pytest.mark.long),
        pytest.param(HYBRID, 6e-2, id="hybrid", marks=pytest.mark.long),
    ],
)
def test_bf16_is_near(model, allowed, device):
    """Five layers, three of them recurrent, add up more errors than two."""
    ours = transformer(replace(model, kv_dtype_bytes=2, weight_dtype_bytes=2), device)
    chunks, decodes, rows = batch(device)
    draw(ours)
    expected = normed(slowly(ours, rows, SEQUENCES)[[0, 1, 6, 9]]) @ ours.head.double()
    logits = ours.step(chunks, decodes, sampled_tokens=2)
    assert float((logits.double() - expected).norm() / expected.norm()) < allowed


def test_a_step_gives_the_same_in_buffers_that_a_larger_one_used(device):
    ours = transformer(TINY, device)
    chunks, decodes, _ = batch(device)
    before = ours.step([], decodes).clone()
    ours.step(chunks, decodes * 3)
    assert torch.equal(ours.step([], decodes), before)


@pytest.mark.gpu
@pytest.mark.parametrize("model", [TINY, GATED, RELU, LATENT], ids=["dense", "gate", "relu", "latent"])
def test_a_replayed_step_gives_what_a_launched_one_gives(model, device):
    ours = transformer(model, device)
    chunks, decodes, _ = batch(device)
    launched = [ours.step([], decodes * count).clone() for count in (1, 2, 3)]
    ours.record_decodes(5)
    ours.step(chunks, decodes * 40)  # larger buffers than those that were recorded
    for count, expected in zip((1, 2, 3), launched, strict=True):
        assert torch.allclose(ours.step([], decodes * count), expected, rtol=1e-4, atol=1e-5)
    assert [graph.room.requests for graph in ours.graphs] == [1, 2, 4, 5]


@pytest.mark.gpu
def test_a_replayed_step_advances_the_states_of_its_requests_alone(device):
    ours = transformer(HYBRID, device)
    _, decodes, _ = batch(device)
    ours.record_decodes(4)
    before = ours.recurrence.states.clone()
    logits = ours.step([], decodes).clone()
    states = ours.recurrence.states.clone()
    ours.recurrence.states.copy_(before)
    ours.graphs.clear()
    assert torch.allclose(ours.step([], decodes), logits, rtol=1e-4, atol=1e-5)
    kept = [1, 2, 3]
    assert torch.equal(states[:, kept], before[:, kept]) and torch.equal(ours.recurrence.states[:, [0, 4]], states[:, [0, 4]])


def test_attention_layers_are_spread_among_recurrent_ones():
    kinds = list(enumerate_layers(replace(HYBRID, layers=7, recurrent_layers=5)))
    assert [number for is_recurrent, number in kinds if is_recurrent] == [0, 1, 2, 3, 4]
    assert [at for at, (is_recurrent, _) in enumerate(kinds) if not is_recurrent] == [3, 6]
    assert list(enumerate_layers(TINY)) == [(False, 0), (False, 1)]


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


@every_model
def test_flops_are_those_that_the_model_counts(model, device):
    if device.type == "cuda":
        pytest.skip("torch's counter of FLOPs cannot see a causal mask that is but a name for one")
    ours = transformer(model, device)
    chunks = [ChunkSlots(20, 12, slots(list(range(8)), device)), ChunkSlots(8, 0, slots([20, 21], device))]
    products = {torch.ops.aten.addmm_: added_flops, torch.ops.aten._grouped_mm: grouped_flops}
    with FlopCounterMode(display=False, custom_mapping=products) as counter, sdpa_kernel(SDPBackend.MATH):
        ours.step(chunks, [DecodeSlots(9, slots([9, 10, 11], device))], sampled_tokens=1)
    counted = sum(counter.get_flop_counts()["Global"].values())
    pairs = 20 * 32 + 8 * 8  # Those above the diagonal are counted too.
    kernels = 2 * model.recurrent_layers * model.conv_channels * model.conv_width + recurrence_flops(model)
    linear = 29 * (model.linear_flops_per_token - kernels) + 12 * model.prefix_flops_per_token
    assert counted == model.attention_flops_per_pair * pairs + linear + 2 * model.sampling_flops_per_token


def recurrence_flops(model: ModelSpec) -> float:
    """Of one token: what the scan does, which torch cannot count."""
    elements = model.state_heads * model.state_key_dim * model.state_value_dim
    return model.recurrent_layers * elements * model.state_flops_per_element


@every_model
def test_weights_are_those_that_the_model_counts(model, device):
    ours = transformer(model, device)
    matrices = [ours.embeddings] if model.tied_embeddings else [ours.embeddings, ours.head]
    for layer in ours.layers:
        matrices += [weights for name in layer.__slots__ if (weights := getattr(layer, name)) is not None]
    assert sum(weights.numel() for weights in matrices) == model.parameters
    assert len({weights.data_ptr() for weights in matrices}) == len(matrices)


def test_flash_attention_is_asked_for_what_a_mask_would_give(monkeypatch, device):
    """It has one width for keys and values, and lets the last query attend to all keys."""

    def flash(query, keys, values, dropout, is_causal):
        assert (dropout, is_causal) == (0.0, True) and keys.shape == values.shape
        heads, tokens, width = query.shape[1:]
        keys, values = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (keys, values))
        scores = query @ keys.transpose(2, 3) * width**-0.5
        later = torch.ones(tokens, keys.shape[2], dtype=torch.bool, device=device).triu(keys.shape[2] - tokens + 1)
        return scores.masked_fill(later, float("-inf")).softmax(dim=3) @ values, None, None

    monkeypatch.setattr(attention, "flash_attention", flash)
    query, keys, values = torch.randn(9, 4, 8, device=device), *(torch.randn(11, 2, 8, device=device) for _ in range(2))
    outs = []
    for mask in (None, attention.causal_mask(3, 11, device)):
        out = torch.zeros(9, 4, 6, device=device)
        attention.ChunkPart(slice(2, 5), slice(0, 11), mask).attend(query, keys, values, out)
        assert not out[:2].any() and not out[5:].any()
        outs.append(out)
    torch.testing.assert_close(*outs)


def test_the_experts_of_a_token_differ(device):
    ours = transformer(EXPERTS, device)
    routes = ours._routes(100)
    assert all(len(set(experts)) == 2 for experts in ours.choices[:100].tolist())
    assert routes.ends[-1] == 200 and sorted(routes.tokens.tolist()) == sorted([*range(100), *range(100)])


RECURRENT = {
    "recurrent_layers": 1,
    "state_heads": 4,
    "state_key_dim": 2,
    "state_value_dim": 2,
    "recurrent_in_width": 12,
    "state_flops_per_element": 1.0,
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kv_dtype_bytes": 1}, r"kv_dtype_bytes must be 2 \(bf16\) or 4 \(float32\) on hardware, not 1"),
        ({"weight_dtype_bytes": 0.5}, "weight_dtype_bytes must be 2"),
        ({"kv_dtype_bytes": 2}, "weight_dtype_bytes must equal kv_dtype_bytes=2, not 4"),
        (RECURRENT | {"recurrent_in_width": 7}, "recurrent_in_width=7 and conv_channels=0 must have columns for .* = 8 values"),
        (RECURRENT | {"recurrent_in_width": 11}, "no columns for keys and queries of state_key_dim=2 elements"),
        (RECURRENT | {"recurrent_inner_parameters": 9}, "recurrent_inner_parameters=9 must be a multiple of 8"),
        (RECURRENT | {"state_dtype_bytes": 1}, r"state_dtype_bytes must be 2 \(bf16\) or 4 \(float32\) on hardware, not 1"),
        (
            RECURRENT | {"state_key_dim": 1, "state_dtype_bytes": 1 + 1, "state_heads": 1},
            "multiple of 16 bytes, not 4: see state_heads",
        ),
    ],
)
def test_a_model_whose_work_cannot_be_done_is_refused(change, problem):
    with pytest.raises(ValueError, match=problem):
        check_model(replace(TINY, **change), torch.device("cpu"))


@pytest.mark.parametrize(("width", "is_possible"), [(8, True), (256, True), (20, False), (264, False)])
def test_a_gpu_takes_heads_that_flash_attention_can_read(width, is_possible):
    model = replace(TINY, head_dim=width, kv_dtype_bytes=2, weight_dtype_bytes=2)
    check_model(model, torch.device("cpu"))
    check_model(replace(TINY, head_dim=width), torch.device("cuda"))
    if is_possible:
        check_model(model, torch.device("cuda"))
        return
    with pytest.raises(ValueError, match=f"head_dim must be a multiple of 8, at most 256, on a GPU, not {width}"):
        check_model(model, torch.device("cuda"))


def test_a_pool_that_does_not_fit_is_refused(device):
    with pytest.raises(ValueError, match="with 2 layers"):
        Transformer(TINY, torch.zeros(3, 2, 512, dtype=torch.uint8, device=device), PAGE_TOKENS, device=device, seed=0)
    with pytest.raises(ValueError, match="2 x 4 tokens x 2 heads x 8 x 4 = 512 bytes"):
        Transformer(TINY, torch.zeros(2, 2, 500, dtype=torch.uint8, device=device), PAGE_TOKENS, device=device, seed=0)
    with pytest.raises(ValueError, match="states are for models with recurrent layers, which need them"):
        Transformer(HYBRID, torch.zeros(2, 2, 512, dtype=torch.uint8, device=device), PAGE_TOKENS, device=device, seed=0)
    with pytest.raises(ValueError, match="4 tokens x 32 x 4 = 512 bytes"):
        Transformer(LATENT, torch.zeros(2, 2, 448, dtype=torch.uint8, device=device), PAGE_TOKENS, device=device, seed=0)
    with pytest.raises(ValueError, match="a chunk that ends at 9 needs 3 pages, not 2"):
        transformer(TINY, device).step([ChunkSlots(3, 6, slots([0, 1], device))], [])
