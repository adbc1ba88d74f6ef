"""States arrive in their slots in every layer; other slots stay as they were."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.kernels.state_copy import copy_states  # noqa: E402


def int32(slots: list[int], device: "torch.device") -> "torch.Tensor":
    return torch.tensor(slots, dtype=torch.int32, device=device)


@pytest.mark.parametrize("state_bytes", [16, 8192, 8192 + 16, 20_000])
def test_states_are_copied_in_all_layers(state_bytes, device):
    states = torch.randint(0, 256, (3, 6, state_bytes), dtype=torch.uint8, device=device)
    expected = states.clone()
    expected[:, [5, 0]] = states[:, [2, 3]]
    copy_states(states, int32([2, 3], device), int32([5, 0], device))
    assert torch.equal(states, expected)


def test_no_slots_are_no_copy(device):
    states = torch.ones(1, 2, 64, dtype=torch.uint8, device=device)
    copy_states(states, int32([], device), int32([], device))
    assert states.all()


def test_what_cannot_be_copied_is_refused(device):
    one, two = int32([0], device), int32([0, 1], device)
    with pytest.raises(ValueError, match="multiple of 16 bytes, not 24 bytes"):
        copy_states(torch.zeros(1, 2, 24, dtype=torch.uint8, device=device), one, one)
    with pytest.raises(ValueError, match="1 source slots cannot go to 2 target slots"):
        copy_states(torch.zeros(1, 2, 32, dtype=torch.uint8, device=device), one, two)
