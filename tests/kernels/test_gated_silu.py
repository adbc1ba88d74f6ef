"""The gate's SiLU multiplies what is beside it."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.kernels.gated_silu import gate_silu  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [8, 1024, 1500])
def test_a_row_is_its_gate_times_the_rest(width, dtype, device):
    both = torch.randn(3, 2 * width, device=device).to(dtype)
    out = torch.full((3, width), float("nan"), device=device, dtype=dtype)
    gate_silu(both, out)
    expected = torch.nn.functional.silu(both[:, :width].double()) * both[:, width:].double()
    assert float((out.double() - expected).norm() / expected.norm()) < (1e-6 if dtype == torch.float32 else 1e-2)
