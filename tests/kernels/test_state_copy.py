"""States arrive in their slots in every layer, whatever pool they are saved in; other slots stay as they were."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.kernels.state_copy import load_states, save_states  # noqa: E402


def int32(slots, device):
    return torch.tensor(slots, dtype=torch.int32, device=device)


def pool(layers: int, slots: int, n_bytes: int, device: "torch.device") -> "torch.Tensor":
    return torch.randint(0, 256, (layers, slots, n_bytes), dtype=torch.uint8, device=device)


@pytest.mark.parametrize("state_bytes", [16, 8192, 8192 + 16, 20_000])
def test_states_are_saved_in_all_layers_and_loaded_again(state_bytes, device):
    states, saved = pool(3, 6, state_bytes, device), pool(3, 4, state_bytes, device)
    expected = saved.clone()
    expected[:, [1, 0]] = states[:, [2, 5]]
    save_states(states, int32([2, 5], device), saved, int32([[1], [0]], device))
    assert torch.equal(saved, expected)
    after = states.clone()
    after[:, [3, 0]] = expected[:, [0, 1]]
    load_states(states, int32([3, 0], device), saved, int32([[0], [1]], device))
    assert torch.equal(states, after)


def test_a_state_fills_several_slots_of_another_shape(device):
    """3 layers of 1,040 bytes in slots of 2 layers of 512: three whole slots and 48 bytes of the fourth."""
    states, saved = pool(3, 4, 1040, device), pool(2, 9, 512, device)
    before, units = saved.clone(), [[7, 0, 3, 5], [1, 2, 8, 4]]
    save_states(states, int32([2, 0], device), saved, int32(units, device))
    for state, slots in zip((2, 0), units, strict=True):
        whole = saved[:, slots].transpose(0, 1).flatten()
        assert torch.equal(whole[:3120], states[:, state].flatten())
        assert torch.equal(whole[3120:], before[:, slots].transpose(0, 1).flatten()[3120:])
    assert torch.equal(saved[:, 6], before[:, 6])
    expected = states.clone()
    expected[:, [1, 3]] = states[:, [0, 2]]
    load_states(states, int32([3, 1], device), saved, int32(units, device))
    assert torch.equal(states, expected)


def test_no_slots_are_no_copy(device):
    states = torch.ones(1, 2, 64, dtype=torch.uint8, device=device)
    save_states(states, int32([], device), states, torch.empty(0, 1, dtype=torch.int32, device=device))
    assert states.all()


def test_what_cannot_be_copied_is_refused(device):
    one, two = int32([0], device), int32([[0], [1]], device)
    odd, even = (torch.zeros(1, 2, n_bytes, dtype=torch.uint8, device=device) for n_bytes in (24, 32))
    with pytest.raises(ValueError, match="multiple of 16 bytes, not 24 bytes"):
        save_states(odd, one, odd, two[:1])
    with pytest.raises(ValueError, match="1 states do not match 2 saved ones"):
        load_states(even, one, even, two)
    with pytest.raises(ValueError, match="a state of 64 bytes does not fit into 1 slots of 32"):
        save_states(torch.zeros(2, 1, 32, dtype=torch.uint8, device=device), one, even, two[:1])
