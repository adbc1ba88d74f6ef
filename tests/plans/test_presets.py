"""Presets: bundles of choices that stand for an engine or a known setup."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.eviction.lfu import LFU
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.run.play import check_capacity, replay, simulate
from tests.composing import composed

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
PRESETS = sorted(path.stem for path in (CONF / "preset").glob("*.yaml"))
TINY_TRACE = [
    {"timestamp": 0, "input_length": 1_500, "output_length": 10, "hash_ids": [0, 1, 2]},
    {"timestamp": 1_000, "input_length": 2_000, "output_length": 10, "hash_ids": [0, 1, 2, 3]},
    {"timestamp": 2_000, "input_length": 1_500, "output_length": 10, "hash_ids": [0, 1, 2]},
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(*overrides: str, command: str = "replay") -> Plan:
    """The plan of a preset; a trace that needs a file gets a tiny one."""
    cfg = composed(*overrides)
    if OmegaConf.is_missing(cfg.trace, "path"):
        Path("trace.jsonl").write_text("\n".join(map(json.dumps, TINY_TRACE)))
        cfg.trace.path = "trace.jsonl"
    return build_run(cfg, command=command, overrides=overrides)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("command", ["replay", pytest.param("simulate", marks=pytest.mark.long)])
def test_every_preset_is_complete_and_runs(name: str, command: str) -> None:
    rules = ("rules=default",) if command == "simulate" else ()
    built = plan(f"preset={name}", "trace.limit=40", *rules, command=command)
    requests = built.trace.load(built.page_tokens).requests
    check_capacity(built, requests)
    outcome = {"replay": replay, "simulate": simulate}[command](built, requests)
    assert len(outcome.hit_pages) == len(requests) > 0
    assert outcome.hit_pages.sum() > 0


def test_every_preset_says_what_it_stands_for() -> None:
    for name in PRESETS:
        first, second = (CONF / "preset" / f"{name}.yaml").read_text().splitlines()[:2]
        assert first == "# @package _global_" and second.startswith("# "), name


def test_the_command_line_wins_over_a_preset() -> None:
    assert isinstance(plan("preset=fastdeploy").tiers[1].placement, Exclusive)
    changed = plan("preset=fastdeploy", "placement=write_back", "eviction=lfu", "tiers.cpu.capacity=7pages", "page_tokens=32")
    assert isinstance(changed.tiers[1].placement, WriteBack)
    assert all(isinstance(tier.eviction, LFU) for tier in changed.tiers)
    assert changed.tiers[1].capacity_pages == 7
    assert changed.page_tokens == 32


def test_the_order_of_words_does_not_matter() -> None:
    assert plan("placement=write_back", "preset=fastdeploy").config == plan("preset=fastdeploy", "placement=write_back").config
