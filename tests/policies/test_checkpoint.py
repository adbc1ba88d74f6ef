"""Checkpoint policies by hand: after which pages of a prompt and of its answer they save a state."""

from pathlib import Path

import hydra
import pytest

from kvsim.commands.policies import policies
from kvsim.errors import UsageError
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill
from kvsim.policies.checkpoint.branch import Branch
from kvsim.policies.checkpoint.every_page import EveryPage
from kvsim.policies.checkpoint.interval import Interval
from kvsim.policies.checkpoint.last import Last
from kvsim.policies.checkpoint.none import NoCheckpoint
from kvsim.policies.checkpoint.retention import Retention
from kvsim.policies.context import PolicyContext

CONF = Path(__file__).resolve().parent.parent.parent / "conf" / "checkpoint"
CHOICES = sorted(path.stem for path in CONF.glob("*.yaml"))
HYBRID = ("model=qwen3_next_80b", "page_tokens=64")


def bound(policy: CheckpointPolicy, page_tokens: int = 4) -> CheckpointPolicy:
    policy.bind(PolicyContext(page_tokens=page_tokens))
    return policy


def prefill(start: int = 0, known: int = 0, full: int = 10, replay: int | None = None) -> Prefill:
    return Prefill(start=start, known=known, full=full, replay=full if replay is None else replay)


def plan(*overrides: str) -> Plan:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=[*HYBRID, *overrides])
    return build_run(cfg, command="replay", overrides=[*HYBRID, *overrides])


# --- where states are saved ------------------------------------------------------------------------------------------


def test_none_saves_nothing() -> None:
    policy = bound(NoCheckpoint())
    assert list(policy.after_prefill(prefill(known=3))) == []
    assert list(policy.after_answer(10, 14)) == []


def test_every_page_saves_after_every_page_that_is_computed() -> None:
    policy = bound(EveryPage())
    assert list(policy.after_prefill(prefill(start=6))) == [7, 8, 9, 10]
    assert list(policy.after_answer(10, 13)) == [11, 12, 13]


def test_an_interval_is_counted_in_tokens_from_the_start_of_the_prompt() -> None:
    """Pages of 4 tokens: tokens 12, 24 and 36 end pages 3, 6 and 9."""
    policy = bound(Interval(tokens=12))
    assert list(policy.after_prefill(prefill())) == [3, 6, 9, 10]
    assert list(policy.after_prefill(prefill(start=4))) == [6, 9, 10]
    assert list(policy.after_answer(10, 19)) == [12, 15, 18]


def test_an_interval_that_pages_do_not_divide_is_rounded_down_to_pages() -> None:
    """Tokens 10, 20, 30 and 40 lie in, or end, pages 2.5, 5, 7.5 and 10."""
    assert list(bound(Interval(tokens=10)).after_prefill(prefill())) == [2, 5, 7, 10, 10]


def test_an_interval_below_a_page_is_a_page() -> None:
    assert sorted(set(bound(Interval(tokens=1)).after_prefill(prefill(start=7)))) == [8, 9, 10]


def test_last_saves_after_the_last_full_page_of_prompt_and_answer() -> None:
    policy = bound(Last())
    assert list(policy.after_prefill(prefill(start=2, known=5))) == [10]
    assert list(policy.after_answer(10, 14)) == [14]


def test_branch_saves_where_a_known_path_is_left_without_a_state() -> None:
    policy = bound(Branch())
    assert list(policy.after_prefill(prefill(start=2, known=5))) == [5]
    assert list(policy.after_prefill(prefill(start=5, known=5))) == [], "a state is there"
    assert list(policy.after_prefill(prefill())) == [], "no path is known"
    assert list(policy.after_answer(10, 14)) == [14]


def test_branch_saves_at_the_end_of_prompts_on_demand() -> None:
    policy = bound(Branch(prompt_end=True))
    assert list(policy.after_prefill(prefill(start=2, known=5))) == [5, 10]
    assert list(policy.after_prefill(prefill())) == [10]


def test_retention_0_saves_the_junction_and_the_replay_boundary() -> None:
    """A prompt of 10 full pages, whose last token is computed again when it is sent again: 9 pages can be reused."""
    policy = bound(Retention())
    assert list(policy.after_prefill(prefill(start=2, known=5, replay=9))) == [5, 9]
    assert list(policy.after_answer(10, 14)) == []


def test_retention_n_saves_every_n_tokens_and_not_at_the_end() -> None:
    policy = bound(Retention(interval_tokens=12))
    assert list(policy.after_prefill(prefill())) == [3, 6, 9]
    assert list(policy.after_answer(10, 19)) == [12, 15, 18]


def test_retention_of_all_is_an_interval_of_at_most_a_page() -> None:
    assert list(bound(Retention(interval_tokens=4)).after_prefill(prefill(start=7))) == [8, 9, 10]
    assert list(bound(Retention(interval_tokens=1)).after_answer(10, 12)) == [11, 12]


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (["checkpoint=interval", "checkpoint.tokens=0"], "checkpoint.tokens must be at least 1, not 0"),
        (
            ["checkpoint=retention", "checkpoint.interval_tokens=-1"],
            "checkpoint.interval_tokens must be 0 or more, not -1; 0 keeps states at junctions",
        ),
        (["checkpoint=last", "checkpoint.max_states_per_path=0"], "checkpoint.max_states_per_path must be at least 1, not 0"),
        (["checkpoint=last", "checkpoint.detached_states=5"], "checkpoint.detached_states has no effect without detached=true"),
        (
            ["checkpoint=last", "checkpoint.detached=true", "checkpoint.detached_states=0"],
            "checkpoint.detached_states must be at least 1, not 0",
        ),
        (["checkpoint=none", "+checkpoint.detached=true"], "checkpoint: none saves no states, so it takes no settings"),
        (["checkpoint=none", "+checkpoint.max_states_per_path=3"], "checkpoint: none saves no states, so it takes no settings"),
        (["checkpoint=interval", "checkpoint.tokens=few"], "checkpoint.tokens: 'few' is not a whole number"),
        (["checkpoint=last", "+checkpoint.tokens=3"], "checkpoint.tokens: there is no such setting"),
        (["checkpoint=last", "tiers.gpu.states=0"], "tiers.gpu.states is 0, so no state could be saved"),
        (["checkpoint=last", "tiers.gpu.states=lots"], "tiers.gpu.states: "),
        (["tiers.cpu.states=4states"], "tiers.cpu.states has no effect without that tier"),
    ],
)
def test_bad_settings_end_with_their_key(override: list[str], expected: str) -> None:
    with pytest.raises(UsageError) as error:
        plan(*override)
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_yaml_composes_to_its_class_with_its_defaults(choice: str) -> None:
    built = plan(f"checkpoint={choice}").checkpoint
    assert type(built)().__dict__ == built.__dict__


def test_policies_are_listed_with_purpose_and_defaults() -> None:
    listed = {name: (purpose, settings) for name, purpose, settings in policies("checkpoint")}
    common = "max_states_per_path=None\ndetached=false\ndetached_states=None"
    assert sorted(listed) == CHOICES == ["branch", "every_page", "interval", "last", "none", "retention", "sparse"]
    assert listed["interval"][1] == f"tokens=256\n{common}"
    assert listed["retention"][1] == f"interval_tokens=0\n{common}"
    assert listed["sparse"][1] == f"spacing=learned\nstates=None\n{common}"
    assert listed["none"][1] == ""
    assert listed["branch"][1] == f"prompt_end=false\n{common}"
    assert all(listed[name][1] == common for name in ("every_page", "last"))
    assert all(purpose.endswith(".") for purpose, _ in listed.values())
