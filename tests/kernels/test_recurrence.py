"""Convolution and scan give what the recurrence gives token by token, however a prompt is cut into chunks."""

from math import sqrt

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.kernels.recurrent_scan import scan  # noqa: E402
from kvsim.kernels.short_convolution import convolve  # noqa: E402

KEEP = {torch.float32: -0x40000001, torch.bfloat16: -0x4001}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def table(sequences, device):
    """(first row, tokens, slot, whether it has begun) of each sequence."""
    return torch.tensor(sequences, dtype=torch.int64, device=device).t().contiguous()


def error(out: "torch.Tensor", expected: "torch.Tensor") -> float:
    return float((out.double() - expected).norm() / expected.norm())


def slow_scan(inputs, states, sequences, shape):
    """Outputs and new states, one token and one head after another, in float64."""
    heads, key_heads, key_dim, value_dim = shape
    query, key, value, steps = (each.double() for each in inputs)
    out, states = torch.zeros_like(value), states.clone()
    for row, tokens, slot, is_begun in sequences:
        for head in range(heads):
            state = states[slot, head] * is_begun
            keys = slice(head // (heads // key_heads) * key_dim, (head // (heads // key_heads) + 1) * key_dim)
            values = slice(head * value_dim, (head + 1) * value_dim)
            for at in range(row, row + tokens):
                step = torch.nn.functional.softplus(steps[at, head])
                state = torch.exp(-step) * state + step / sqrt(key_dim) * torch.outer(key[at, keys], value[at, values])
                out[at, values] = query[at, keys] @ state
            states[slot, head] = state
    return out, states


def scanned(inputs, states, sequences, shape, *, is_decode=False):
    out = torch.zeros_like(inputs[2])
    scan(
        *inputs, out, states.view(BITS[states.dtype]), table(sequences, out.device), shape=shape, keep=KEEP[states.dtype],
        is_decode=is_decode,
    )  # fmt: skip
    return out


def drawn(rows: int, slots: int, shape: tuple[int, int, int, int], kind: "torch.dtype", state_kind, device):
    """Random inputs, and states below 2 in magnitude."""
    heads, key_heads, key_dim, value_dim = shape
    widths = (key_heads * key_dim, key_heads * key_dim, heads * value_dim, heads)
    inputs = [torch.randn(rows, width, device=device).to(kind) for width in widths]
    states = torch.empty(slots, heads * key_dim * value_dim, device=device).uniform_(-1.9, 1.9).to(state_kind)
    return inputs, states


def shaped(states, shape):
    heads, _, key_dim, value_dim = shape
    return states.double().view(len(states), heads, key_dim, value_dim)


@pytest.mark.parametrize(("kind", "state_kind"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 16, 16), (4, 2, 24, 8), (1, 1, 16, 130)])
def test_chunks_are_scanned_as_if_token_by_token(kind, state_kind, shape, device):
    """One that begins, one that goes on, and one that ends with a block; states that no sequence has stay as they are."""
    inputs, states = drawn(150, 5, shape, kind, state_kind, device)
    before = states.clone()
    sequences = [(0, 3, 4, 0), (3, 83, 1, 1), (86, 64, 2, 1)]
    expected, expected_states = slow_scan(inputs, shaped(states, shape), sequences, shape)
    out = scanned(inputs, states, sequences, shape)
    assert error(out, expected) < ERROR[kind] and error(shaped(states, shape), expected_states) < ERROR[kind]
    assert torch.equal(states[[0, 3]], before[[0, 3]])


@pytest.mark.parametrize("shape", [(2, 1, 16, 16), (3, 3, 24, 70)])
def test_a_decode_step_takes_the_state_by_one_token(shape, device):
    inputs, states = drawn(4, 6, shape, torch.float32, torch.float32, device)
    sequences = [(0, 1, 4, 1), (1, 1, 0, 1), (2, 1, 5, 0), (3, 1, 1, 1)]
    expected, expected_states = slow_scan(inputs, shaped(states, shape), sequences, shape)
    out = scanned(inputs, states, sequences, shape, is_decode=True)
    assert error(out, expected) < 1e-5 and error(shaped(states, shape), expected_states) < 1e-5


def test_a_prompt_in_chunks_is_a_prompt_at_once(device):
    shape = (2, 2, 16, 16)
    inputs, states = drawn(100, 2, shape, torch.float32, torch.float32, device)
    inputs[2] *= 0.1  # values, and thus states: what goes on from a chunk must stay below 2
    states *= 0.1
    states[1] = states[0]
    whole = scanned(inputs, states, [(0, 100, 0, 1)], shape)
    first = scanned(inputs, states, [(0, 70, 1, 1)], shape)
    rest = scanned(inputs, states, [(70, 30, 1, 1)], shape)
    assert error(first[:70] + 0.0, whole[:70].double()) < 1e-5 and error(rest[70:], whole[70:].double()) < 1e-5
    assert error(states[1], states[0].double()) < 1e-5


@pytest.mark.parametrize("is_decode", [False, True])
def test_whatever_bits_a_state_has_are_numbers(is_decode, device):
    shape = (2, 1, 16, 16)
    inputs, states = drawn(1, 1, shape, torch.float32, torch.float32, device)
    states.view(torch.uint8).random_(0, 256)
    out = scanned(inputs, states, [(0, 1, 0, 1)], shape, is_decode=is_decode)
    assert torch.isfinite(out).all() and torch.isfinite(states).all()


def slow_convolution(inputs, weights, states, sequences):
    width = len(weights)
    out, states = torch.zeros_like(inputs, dtype=torch.float64), states.double().clone()
    for row, tokens, slot, is_begun in sequences:
        known = torch.cat([states[slot] * is_begun, inputs[row : row + tokens].double()])
        for token in range(tokens):
            total = (known[token : token + width] * weights.double()).sum(0)
            out[row + token] = torch.nn.functional.silu(total)
        states[slot] = known[tokens:]
    return out, states


@pytest.mark.parametrize(("kind", "width", "channels"), [(torch.float32, 4, 80), (torch.bfloat16, 2, 16), (torch.float32, 5, 8)])
def test_a_convolution_goes_on_from_the_last_inputs(kind, width, channels, device):
    sequences = [(0, 2, 1, 1), (2, 90, 3, 1), (92, 1, 0, 0), (93, 2, 4, 0)]
    wide = torch.randn(95, channels + 7, device=device).to(kind)
    inputs, weights = wide[:, 3 : 3 + channels], torch.randn(width, channels, device=device).to(kind)
    states = torch.empty(5, width - 1, channels, device=device).uniform_(-1.9, 1.9).to(kind)
    before, out = states.clone(), torch.zeros(95, channels, dtype=kind, device=device)
    expected, expected_states = slow_convolution(inputs, weights, states, sequences)
    convolve(inputs, weights, states.view(BITS[kind]), table(sequences, device), out, keep=KEEP[kind], is_decode=False)
    assert error(out, expected) < ERROR[kind] and torch.equal(states.double(), expected_states)
    assert torch.equal(states[2], before[2])


def test_a_convolution_of_single_tokens_moves_the_inputs_on(device):
    inputs, weights = torch.randn(3, 20, device=device), torch.randn(4, 20, device=device)
    states = torch.empty(4, 3, 20, device=device).uniform_(-1.9, 1.9)
    sequences = [(0, 1, 3, 1), (1, 1, 0, 0), (2, 1, 1, 1)]
    expected, expected_states = slow_convolution(inputs, weights, states, sequences)
    out = torch.zeros(3, 20, device=device)
    bits = states.view(torch.int32)
    convolve(inputs, weights, bits, table(sequences, device), out, keep=KEEP[torch.float32], is_decode=True)
    assert error(out, expected) < 1e-5 and torch.equal(states.double(), expected_states)
