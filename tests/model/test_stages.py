"""A pipeline's stages have all of the model between them, each layer once."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvsim.model.spec import ModelSpec
from kvsim.model.stages import layers_of_stages, stages_of

CONF = Path(__file__).parent.parent.parent / "conf" / "model"
SMALL = ModelSpec(layers=5, hidden_size=2, vocabulary=7, heads=2, kv_heads=1, head_dim=3, mlp_width=11)
SPARSE = replace(SMALL, mlp_width=11, dense_layers=3, routed_experts=8, experts_per_token=2, shared_experts=1, expert_width=5)


def from_file(name: str) -> ModelSpec:
    settings = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return ModelSpec(**{key: value for key, value in settings.items() if key != "_target_"})


def handed_out(layers: int, stages: int) -> list[int]:
    """What vLLM does, slowly: all get as many; what is left goes to the last but one, then to the one before it, and so on."""
    found = [0] * stages
    while sum(found) + stages <= layers:
        found = [count + 1 for count in found]
    place = stages - 2
    while sum(found) < layers:
        found[place] += 1
        place -= 1
    return found


@given(layers=st.integers(1, 130), stages=st.integers(1, 16))
def test_layers_that_are_left_over_go_to_the_stages_before_the_last(layers: int, stages: int) -> None:
    if stages <= layers:
        assert layers_of_stages(layers, stages) == handed_out(layers, stages)
    assert sum(layers_of_stages(layers, stages)) == layers


def test_uneven_stages_of_known_models() -> None:
    assert layers_of_stages(80, 4) == [20, 20, 20, 20]
    assert layers_of_stages(61, 4) == [15, 15, 16, 15], "DeepSeek-V3"
    assert layers_of_stages(61, 2) == [31, 30]


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "qwen3_32b", "deepseek_v3"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_stages_add_up_to_the_model(name: str, count: int) -> None:
    model = from_file(name)
    parts = stages_of(model, count)
    for number in ("parameters", "kv_bytes_per_token", "allreduces", "moe_layers", "layers", "attention_flops_per_pair"):
        assert sum(getattr(part, number) for part in parts) == getattr(model, number), number
    assert sum(part.linear_flops_per_token for part in parts) == pytest.approx(model.linear_flops_per_token)
    assert sum(part.weight_bytes(7) for part in parts) == pytest.approx(model.weight_bytes(7))
    assert [part.sampling_flops_per_token for part in parts[:-1]] == [0.0] * (count - 1)
    assert parts[-1].sampling_flops_per_token == model.sampling_flops_per_token


def test_a_stage_has_its_layers_and_what_stands_at_its_end_of_the_model() -> None:
    """A layer has 2 * 2 * 3 * (2 + 1) = 36 weights of attention and 3 * 2 * 11 = 66 of its MLP. A table has 14."""
    first, last = stages_of(SMALL, 2)
    assert (first.layers, last.layers) == (3, 2)
    assert (first.parameters, last.parameters) == (3 * 102 + 14, 2 * 102 + 14)
    assert first.weight_bytes(1) == 3 * 102 * 2 and last.weight_bytes(1) == (2 * 102 + 14) * 2, "a table is not read as a whole"


def test_shared_embeddings_are_on_both_ends() -> None:
    tied = replace(SMALL, tied_embeddings=True)
    assert sum(part.parameters for part in stages_of(tied, 2)) == tied.parameters + 14


def test_dense_layers_are_the_first_ones() -> None:
    parts = stages_of(SPARSE, 3)
    assert [(part.layers, part.dense_layers, part.moe_layers) for part in parts] == [(2, 2, 0), (2, 1, 1), (1, 0, 1)]
    assert [part.moe_layers for part in stages_of(from_file("deepseek_v3"), 4)] == [12, 15, 16, 15]


@pytest.mark.parametrize(
    ("model", "count", "message"),
    [
        (SMALL, 6, "pipeline_parallel must be at most 5, the model's layers, not 6"),
        (
            replace(SMALL, mlp_layers=2),
            2,
            "pipeline_parallel=2: stages of a model in which some layers have no MLP",
        ),
        (from_file("nemotron_h_8b"), 2, "pipeline_parallel=2: stages of a model in which some layers are recurrent"),
    ],
)
def test_what_cannot_be_divided_is_refused(model: ModelSpec, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stages_of(model, count)


def test_a_busier_group_touches_more_experts() -> None:
    """Of 8 experts, a token picks 2. One token touches 2 on average; twice as likely, they are 4."""
    one = SPARSE.weight_bytes(1, 2.0) - SPARSE.weight_bytes(1)
    assert one == pytest.approx(2 * SPARSE.moe_layers * 3 * 2 * 5 * 2)
    assert SPARSE.weight_bytes(10**6, 2.0) == pytest.approx(SPARSE.weight_bytes(10**6))
    assert SPARSE.weight_bytes(3, 4.0) == pytest.approx(SPARSE.weight_bytes(10**6)), "none is left over"
