"""The names of policies in results: what was chosen, not where its class is."""

import json
from pathlib import Path

import pytest

import kvsim
from kvsim.cli import main
from kvsim.policies.eviction.lfu import LFU
from kvsim.results.chosen_names import chosen

SMALL = ("trace.sessions=4", "model=tiny", "tiers.gpu.capacity=400pages")


def record(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_hydras_own_groups_and_empty_choices_are_left_out():
    choices = {"eviction": "lru", "eviction@tiers.cpu.eviction": None, "preset": "null", "hydra/launcher": "basic"}
    assert chosen(choices, {}) == {"eviction": "lru"}


def test_a_class_set_by_hand_replaces_the_name_of_the_file():
    config = {"eviction": {"_target_": "mine.Own"}}
    assert chosen({"eviction": "lru"}, config, {"eviction._target_"}) == {"eviction": "Own"}


def test_a_run_records_what_was_chosen(tmp_path: Path):
    cpu = ["tiers.cpu.capacity=900pages", "eviction@tiers.cpu.eviction=arc"]
    assert main(["simulate", *SMALL, *cpu, "preset=sglang_hicache", "page_tokens=16", f"output={tmp_path}"]) == 0
    found = record(tmp_path)["choices"]
    assert found["eviction@tiers.cpu.eviction"] == "arc"
    assert (found["trace"], found["model"], found["preset"], found["rules"]) == ("synthetic", "tiny", "sglang_hicache", "sglang")
    assert not [group for group in found if group.startswith("hydra")]


def test_python_records_the_same_names_and_the_class_of_an_object():
    trace = kvsim.load_trace("synthetic", sessions=4)
    by_name = kvsim.replay(trace, *SMALL[1:], "eviction=slru").record["choices"]
    assert (by_name["eviction"], by_name["trace"]) == ("slru", "synthetic")
    assert kvsim.replay(trace, *SMALL[1:], eviction=LFU()).record["choices"]["eviction"] == "LFU"


def test_two_files_of_one_class_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "conf" / "eviction"
    folder.mkdir(parents=True)
    for name, hits in (("early", 2), ("late", 5)):
        target = "_target_: kvsim.policies.eviction.slru.SegmentedLRU"
        (folder / f"{name}.yaml").write_text(f"{target}\nprotected_hits: {hits}\n")
    sweep = ["-m", "--config-dir", str(tmp_path / "conf"), f"output={tmp_path / 'out'}"]
    assert main(["replay", *sweep, *SMALL, "eviction=early,late"]) == 0
    assert [record(tmp_path / "out" / job)["choices"]["eviction"] for job in "01"] == ["early", "late"]
    assert (tmp_path / "out" / "sweep.csv").read_text().splitlines()[0].startswith("job,status,eviction,capacity_bytes")
    assert main(["report", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("early") >= 2
