"""The stages of a model in a pipeline: consecutive layers, each stage on GPUs of its own."""

from dataclasses import dataclass, fields

from kvsim.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class ModelStage(ModelSpec):
    """A part of a model's layers, with the same costs as in the model. The first stage has the input embeddings, the last one the
    lm_head; if these share their weights, both stages have them."""

    has_embeddings: bool
    has_head: bool

    @property
    def _head_parameters(self) -> int:
        return self.vocabulary * self.hidden_size if self.has_head else 0

    @property
    def _table_parameters(self) -> int:
        return self.vocabulary * self.hidden_size if self.has_embeddings else 0


def check_stages(model: ModelSpec, stages: int) -> None:
    """Raise ValueError unless the model can be divided into so many stages."""
    if stages > model.layers:
        raise ValueError(f"pipeline_parallel must be at most {model.layers}, the model's layers, not {stages}")
    if stages <= 1:
        return
    why = ""
    if model.is_hybrid:
        why = "some layers are recurrent"
    elif model.sliding_window_layers:
        why = "some layers have a sliding window"
    elif model.mlp_layers not in (0, model.layers):
        why = "some layers have no MLP"
    if why:
        raise ValueError(f"pipeline_parallel={stages}: stages of a model in which {why} are not simulated: set 1")


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Return how many layers each stage has.

    As vLLM's ``get_pp_indices`` (``distributed/utils.py``): those that are left over go one each to the stages before the last,
    from the back, since the last one has the lm_head.
    """
    each, left = divmod(layers, stages)
    return [each + (stages - 1 - left <= stage < stages - 1) for stage in range(stages)]


def stages_of(model: ModelSpec, stages: int) -> list[ModelStage]:
    """Divide a model into stages. Dense layers of a mixture of experts are its first ones. Raises ValueError if it cannot be."""
    check_stages(model, stages)
    own = {field.name: getattr(model, field.name) for field in fields(ModelSpec)}
    found, before = [], 0
    for number, layers in enumerate(layers_of_stages(model.layers, stages)):
        dense = min(max(model.dense_layers - before, 0), layers)
        has_dense = dense > 0 or not model.routed_experts
        parts = {"layers": layers, "mlp_layers": 0, "dense_layers": dense, "mlp_width": model.mlp_width if has_dense else 0}
        found.append(ModelStage(**(own | parts), has_embeddings=number == 0, has_head=number == stages - 1))
        before += layers
    return found
