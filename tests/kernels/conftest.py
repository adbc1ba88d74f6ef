"""Where kernels run in tests."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.fixture
def device() -> "torch.device":
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
