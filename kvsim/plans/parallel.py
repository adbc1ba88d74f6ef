"""Checks of how an engine's GPUs share the model: tensor, pipeline and expert parallelism."""

from collections.abc import Collection
from typing import Any

from kvsim.core.rules import IN_TIME
from kvsim.errors import NoEffect, UsageError
from kvsim.hardware.parallelism import ALL2ALL
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.model.stages import check_stages
from kvsim.numbers import Whole
from kvsim.plans.plan import Plan
from kvsim.settings.unused_settings import ALLREDUCE, OF_EXPERTS, given

EXPERTS, EXCHANGE = "hardware.expert_parallel", "hardware.expert_exchange"
STAGES, ATTENTION = "hardware.pipeline_parallel", "hardware.attention_data_parallel"
SHARES_MEMORY = ("hardware.tensor_parallel", STAGES, EXPERTS, EXCHANGE, ATTENTION)
"""What the memory of an engine's GPUs depends on, besides their number."""


def with_gpus(node: Any, keys: Collection[str]) -> Any:
    """Return the settings of a machine with the number of GPUs that the degrees of parallelism give, unless the user gave it."""
    if not isinstance(node, dict) or "hardware.gpus" in keys or node.get("gpus", 1) != 1:
        return node
    degrees = [node.get("tensor_parallel") or 1, node.get("pipeline_parallel", 1)]
    if not all(Whole(1).holds(degree) for degree in degrees):
        return node  # refused later, by name
    return node | {"gpus": degrees[0] * degrees[1]} if degrees != [1, 1] else node


def check_shares(model: ModelSpec, hardware: HardwareSpec) -> None:
    """Raise UsageError unless the machine's GPUs can share the model."""
    try:
        check_stages(model, hardware.pipeline_parallel)
    except ValueError as error:
        raise UsageError(f"hardware.{error}") from error
    _check_heads(model, hardware.attention_gpus)
    groups, experts = hardware.expert_parallel, model.routed_experts
    if groups == 1:
        return
    if not experts:
        raise NoEffect(EXPERTS, "on a model without routed experts")
    if experts % groups:
        raise UsageError(f"{EXPERTS}={groups} does not divide the model's {experts} routed experts: each group has as many")
    most = min(float(groups), experts / model.experts_per_token)
    if hardware.expert_imbalance > most:
        raise UsageError(
            f"hardware.expert_imbalance must be at most {most:g}, not {hardware.expert_imbalance:g}: a token picks "
            f"{model.experts_per_token} of {experts} experts, each once, in {groups} groups"
        )


def _check_heads(model: ModelSpec, gpus: int) -> None:
    """Raise UsageError for a number of GPUs to share each layer that engines refuse."""
    if not model.attention_layers or _share_heads(model, gpus):
        return
    able = ", ".join(str(count) for count in range(1, model.heads + 1) if _share_heads(model, count))
    kv_heads = "" if model.is_latent else f" and {model.kv_heads} KV heads"
    raise UsageError(
        f"hardware.gpus: {gpus} GPUs cannot share the model's {model.heads} query heads{kv_heads} evenly, which engines refuse: "
        f"set a tensor parallelism of {able}"
    )


def _share_heads(model: ModelSpec, gpus: int) -> bool:
    """Return whether each GPU has as many query heads, and whole KV heads or a copy of one.

    In vLLM, ``verify_with_parallel_config`` (``config/model.py``) and ``QKVParallelLinear`` ask for it; in SGLang, each model,
    such as ``models/llama.py``.
    """
    parts = 1 if model.is_latent else model.kv_heads
    return model.heads % gpus == 0 and (parts % gpus == 0 or gpus % parts == 0)


def check_parallel(plan: Plan, command: str, keys: set[str]) -> None:
    """Raise UsageError for a way to share the model that cannot be simulated, and for settings without effect on it."""
    hardware = plan.hardware
    if hardware.pipeline_parallel > 1 and command in IN_TIME:
        rules = plan.rules
        if not rules.has_stages([tier.name for tier in plan.tiers]):
            ways = ", or ".join(filter(None, (rules.with_stages, "rules=default, whose batches follow vLLM's batch queue")))
            raise UsageError(
                f"{STAGES}: {rules.engine}'s own schedule is simulated with one step at a time here, so without stages: set "
                f"{ways}"
            )
        if hardware.noise is not None:
            raise UsageError(
                f"{STAGES}: hardware.noise was measured of whole steps, not of stages: set hardware.noise=null, or {STAGES}=1"
            )
    for key in filter(None, [given(keys, EXCHANGE), given(keys, "hardware.expert_imbalance")]):
        if hardware.expert_parallel == 1:
            raise NoEffect(key, "with one group of experts", f"set {EXPERTS}, or leave it out")
    for key in filter(None, [given(keys, name) for name in OF_EXPERTS if "all2all" in name]):
        if not hardware.exchanges_tokens:
            raise NoEffect(key, "unless tokens are sent to their experts", f"set {EXPERTS} and {EXCHANGE}={ALL2ALL}")
        if key != OF_EXPERTS[0] and hardware.all2all_bytes_per_s is None and hardware.allreduce_bytes_per_s is None:
            raise NoEffect(key, "without a rate", f"set {OF_EXPERTS[0]}, or leave it out")
    if given(keys, ATTENTION) and plan.model.kv_copies(hardware.stage_gpus) == 1:
        raise NoEffect(ATTENTION, "where no KV is on several GPUs", "leave it out")
    if command not in IN_TIME and given(keys, EXPERTS) and not hardware.exchanges_tokens:
        raise NoEffect(EXPERTS, f"on kvsim {command}")
    for key in filter(None, [given(keys, name) for name in ALLREDUCE]):
        if hardware.stage_gpus == 1:
            raise NoEffect(key, "with one GPU", "set hardware.gpus, or leave it out")
        has_use = hardware.communicates or key == ALLREDUCE[0]
        if not has_use and not (hardware.exchanges_tokens and hardware.all2all_bytes_per_s is not None):
            raise NoEffect(key, "without a rate", f"set {ALLREDUCE[0]}, or leave it out")
