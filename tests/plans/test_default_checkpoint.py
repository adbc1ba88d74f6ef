"""Without a choice, a hybrid model has the states that vLLM keeps, and a run that reuses nothing for want of one says so."""

from typing import Any

import pytest

import kvsim
from kvsim.errors import UsageError
from kvsim.policies.checkpoint.none import NoCheckpoint
from kvsim.policies.checkpoint.retention import Retention
from tests.composing import plan

HYBRID = ("model=qwen3_next_80b", "tiers.gpu.capacity=40GiB")


@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_a_hybrid_model_has_vllms_and_another_one_none(command: str) -> None:
    fits = "model.weight_dtype_bytes=1"
    hybrid, other = plan(*HYBRID, fits, command=command), plan(command=command)
    assert isinstance(hybrid.checkpoint, Retention) and hybrid.checkpoint.interval_tokens == 0
    assert isinstance(other.checkpoint, NoCheckpoint)
    assert hybrid.config["checkpoint"]["_target_"].endswith(".Retention"), "the record says what ran"
    assert other.config["checkpoint"]["_target_"].endswith(".NoCheckpoint")


def test_a_choice_stays_and_so_does_that_of_a_preset() -> None:
    assert isinstance(plan(*HYBRID, "checkpoint=none").checkpoint, NoCheckpoint)
    assert type(plan("preset=marconi").checkpoint).__name__ == "Branch"


def test_engines_rules_that_decide_it_themselves_get_none() -> None:
    assert isinstance(plan(*HYBRID, "rules=sglang_mamba", "tiers.gpu.states=64states").checkpoint, NoCheckpoint)


def replayed(*more: str, **settings: Any) -> dict[str, Any]:
    trace = kvsim.load_trace("synthetic", sessions=10)
    return kvsim.replay(trace, *HYBRID, *more, **settings).record


def test_the_default_is_retention_by_name_too() -> None:
    default, named = replayed(), replayed(checkpoint="retention")
    assert default["hit_rate"] == named["hit_rate"] > 0.5
    assert default["choices"]["checkpoint"] == "retention" and default["config_hash"] == named["config_hash"]
    assert not default["warnings"]


def test_nothing_reused_for_want_of_a_state_is_a_warning() -> None:
    none = replayed(checkpoint="none")
    assert none["hit_rate"] == 0
    (text,) = none["warnings"]
    lost = none["checkpoints"]["tokens_lost_to_missing_state"]
    assert f"nothing was reused: keys and values of {lost:,} prompt tokens were cached" in text
    assert "no state is saved with checkpoint=none" in text


def test_a_setting_without_a_choice_asks_for_one() -> None:
    with pytest.raises(UsageError, match="interval_tokens: no checkpoint is chosen that has settings: add checkpoint=NAME"):
        replayed("checkpoint.interval_tokens=512")
