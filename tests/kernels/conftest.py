"""Where kernels run in tests."""

from typing import Any

import pytest


@pytest.fixture
def device() -> Any:
    """The GPU if there is one, else the CPU, on which Triton interprets. Random tensors are the same every time."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
