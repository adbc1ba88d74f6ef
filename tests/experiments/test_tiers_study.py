"""The study of lower tiers: what it draws, what it serves in which part, and what it claims."""

import importlib
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvsim.report.validation.repeated import compare_repeated
from kvsim.results.result import RunRecord
from kvsim.results.tolerances import Tolerances
from tests.report.validation.test_repeated import SIMULATED, measured, times

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "hardware"
PARTS = ("tiers", "tiers_draw", "tiers_launch", "tiers_launched", "tiers_measure", "validation_tables")
Loaded = dict[str, ModuleType]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    """The study's modules by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield {name: importlib.import_module(name) for name in PARTS}
    for name in PARTS:
        sys.modules.pop(name, None)


def words_of(overrides: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in overrides)


def test_the_configurations_are_those_that_the_rule_draws(study: Loaded) -> None:
    """The stratum whose first candidate is accepted, drawn again."""
    draw = study["tiers_draw"]
    committed = json.loads(draw.FILE.read_text())
    place = next(place for place, stratum in enumerate(draw.STRATA) if stratum.name == "coarse")
    overrides, facts = draw.tried_one(np.random.default_rng([committed["seed"], place]), draw.STRATA[place])
    one = next(one for one in committed["drawn"] if one["name"] == "coarse")
    assert overrides == one["overrides"] and "preset=lightllm" in overrides
    assert facts.hit_points == pytest.approx(one["simulated_hit_points"], abs=0.01)


def test_there_are_as_many_configurations_as_the_strata_say_and_all_show_what_these_ask(study: Loaded) -> None:
    draw = study["tiers_draw"]
    drawn = json.loads(draw.FILE.read_text())["drawn"]
    counts = {stratum.name: [one["stratum"] for one in drawn].count(stratum.name) for stratum in draw.STRATA}
    assert counts == {"disk": 4, "cpu": 4, "beside": 1, "hybrid": 1, "coarse": 1, "overloaded": 1}
    points = {name: [one["simulated_hit_points"].get(name, 0.0) for one in drawn] for name in ("cpu", "disk")}
    assert sum(point > 5 for point in points["disk"]) >= 4 and sum(point > 10 for point in points["cpu"]) >= 4
    assert all(draw.SECONDS[0] <= one["simulated_s"] <= draw.SECONDS[1] for one in drawn)
    assert words_of(drawn[9]["overrides"])["model"] == "nemotron_h_8b"


def test_a_candidate_that_hits_too_little_or_does_not_end_in_time_is_not_accepted(
    study: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = study["tiers_draw"]
    disk = next(stratum for stratum in draw.STRATA if stratum.name == "disk")
    cases = [
        ({"disk": 7.0}, 7.0, 0, True),
        ({"disk": 5.9}, 7.0, 0, False),
        ({"disk": 7.0}, 8.1, 0, False),
        ({"disk": 7.0}, 7.0, 1, False),
    ]
    for hit_points, seconds, rejected, is_accepted in cases:
        facts = draw.Facts(hit_points=hit_points, queue_p50_s=0.0, seconds=seconds, rejected=rejected)
        monkeypatch.setattr(draw, "simulated", lambda overrides, facts=facts: facts)
        assert (draw.tried_one(np.random.default_rng(0), disk) is not None) == is_accepted


def test_each_part_needs_one_calibration_and_together_they_have_everything(study: Loaded) -> None:
    measure = study["tiers_measure"]
    all_of_them = measure.read_configurations(measure.CONFIGURATIONS)
    parts = [measure.part_of(all_of_them, part, 3) for part in (1, 2, 3)]
    assert [len(part) for part in parts] == [6, 5, 1]
    assert [{one.model for one in part} for part in parts] == [{"llama3_8b"}, {"llama3_8b"}, {"nemotron_h_8b"}]
    assert sorted(one.name for part in parts for one in part) == sorted(one.name for one in all_of_them)
    assert measure.part_of(all_of_them, 1, 1) == all_of_them
    alike = [one for one in all_of_them if one.model == "llama3_8b"]
    assert [len(measure.part_of(alike, part, 2)) for part in (1, 2)] == [6, 5]


class Machine:
    """What kvsim does on a machine: calibrations take 300 s, runs 20 s, and ``slow`` ones break after 5."""

    def __init__(self, measure: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.done = 0.0, list[str]()
        monkeypatch.setattr(measure, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(measure, "machine_name", lambda: "h100_12345678")
        monkeypatch.setattr(measure, "kvsim", self.serve)
        monkeypatch.setattr(measure.subprocess, "run", self.calibrate)

    def calibrate(self, command: list[str], **_: Any) -> Any:
        self.now_s += 300.0
        words = words_of([word for word in command if "=" in word])
        (Path(words["output"]) / f"{words['name']}.yaml").write_text("flops_per_s: 1\n")
        self.done.append(words["name"])
        return type("Ended", (), {"returncode": 0})()

    def serve(self, words: list[str]) -> int:
        given = words_of([word for word in words if "=" in word])
        name, number = Path(given["output"]).parts[-2:]
        assert given["hardware"] == f"measured_{given['model']}" and "substrate=hardware" in words
        if name == "broken":
            self.now_s += 5.0
            raise RuntimeError("out of memory")
        self.now_s += 20.0
        Path(given["output"]).mkdir(parents=True)
        for file in ("result.json", "requests.csv.gz", "report.html"):
            (Path(given["output"]) / file).write_text(f"{name} {number}")
        self.done.append(f"{name} {number}")
        return 0


def written(path: Path, *names: str) -> Path:
    drawn = [{"name": name, "overrides": ["model=llama3_8b", "trace=synthetic"], "simulated_s": 7.0} for name in names]
    path.write_text(json.dumps({"seed": 1, "drawn": drawn}))
    return path


def test_runs_are_made_in_rounds_until_the_time_is_up_and_not_twice(
    study: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a calibration of 300 s there is time for four runs of 20 s; the fifth would end at 400 + 1.15 * 20 s."""
    measure = study["tiers_measure"]
    machine = Machine(measure, monkeypatch)
    options = ["--configurations", str(written(tmp_path / "drawn.json", "a", "b")), "--folder", str(tmp_path / "runs")]
    options += ["--output", str(tmp_path / "out")]
    assert measure.main([*options, "--seconds", "402"]) == 1
    assert machine.done == ["measured_llama3_8b", "a 1", "b 1", "a 2", "b 2"]
    archive = tmp_path / "out" / "h100_12345678-1-of-1.tar.xz"
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    runs = [
        f"h100_12345678/runs/{name}/{number}/{file}"
        for name in "ab"
        for number in "12"
        for file in ("requests.csv.gz", "result.json")
    ]
    assert names == ["h100_12345678/hardware/measured_llama3_8b.yaml", *runs]
    assert measure.main([*options, "--seconds", "402"]) == 0 and machine.done[5:] == ["a 3", "b 3"]
    assert "6 of 6 runs" in capsys.readouterr().out


def test_a_configuration_that_breaks_does_not_stop_the_others(
    study: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = study["tiers_measure"]
    machine = Machine(measure, monkeypatch)
    options = ["--configurations", str(written(tmp_path / "drawn.json", "broken", "b")), "--folder", str(tmp_path / "runs")]
    assert measure.main([*options, "--output", str(tmp_path / "out"), "--runs", "2", "--seconds", "900"]) == 1
    assert machine.done == ["measured_llama3_8b", "b 1", "b 2"]
    assert "out of memory" in capsys.readouterr().err


def test_without_time_for_a_calibration_nothing_begins(study: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = study["tiers_measure"]
    machine = Machine(measure, monkeypatch)
    options = ["--configurations", str(written(tmp_path / "drawn.json", "a")), "--folder", str(tmp_path / "runs")]
    assert measure.main([*options, "--output", str(tmp_path / "out"), "--seconds", "200"]) == 1 and machine.done == []


# Claims


def record(*real_s: float) -> RunRecord:
    return compare_repeated(SIMULATED, [measured(times(one)) for one in real_s], Tolerances(), "kvsim validate")


def test_claims_hold_where_every_configuration_does(study: Loaded) -> None:
    """The records have no lower tiers, so the first two claims fail; a configuration that is not measured fails all others."""
    tiers = study["tiers"]
    good, off = record(10.0, 10.5), record(110.0, 111.0)
    held = {claim.text.split(" ")[0]: claim.holds for claim in tiers.claims({"a": good}, ["a"])[2:]}
    assert held["the"] and held["ttft_p50"] and held["no"]
    failed = {claim.text.split(" ")[0] for claim in tiers.claims({"a": off}, ["a"])[2:] if not claim.holds}
    assert failed == {"ttft_p50", "ttft_p99"}
    assert not any(claim.holds for claim in tiers.claims({"a": good}, ["a", "b"])[:-1])
    wrong = good | {"hardware": [good["hardware"][0] | {"wrong_words": 1}]}
    assert not tiers.claims({"a": wrong}, ["a"])[-1].holds


def test_enough_configurations_must_hit_the_lower_tiers(study: Loaded) -> None:
    tiers = study["tiers"]
    known = {str(number): {"hit_rate disk": {"hardware": {"mean": 0.06}}} for number in range(4)}
    assert tiers.claim_of_share("disk", 4, 5.0, known).holds
    known["0"]["hit_rate disk"]["hardware"]["mean"] = 0.05
    assert not tiers.claim_of_share("disk", 4, 5.0, known).holds


def test_the_machine_that_has_served_a_configuration_most_often_counts(study: Loaded, tmp_path: Path) -> None:
    tiers = study["tiers"]
    configurations = [study["tiers_measure"].Configuration(name, ["model=tiny"], 1.0) for name in ("a", "b", "c")]
    for machine, name, runs in (("one", "a", 2), ("two", "a", 3), ("one", "b", 2), ("two", "c", 1)):
        for number in range(runs):
            (tmp_path / machine / "runs" / name / str(number)).mkdir(parents=True)
            (tmp_path / machine / "runs" / name / str(number) / "result.json").write_text("{}")
    served = tiers.served_by([tmp_path / "one", tmp_path / "two"], configurations)
    assert {name: one.machine.name for name, one in served.items()} == {"a": "two", "b": "one"}, "a single run has no spread"


def test_simulations_that_stand_in_for_the_machine_mostly_agree(study: Loaded) -> None:
    """Of 20 simulations three differ: of the 1,140 choices of three, only these three together are off."""
    tiers = study["tiers"]
    rare = {"unit": "share", "simulated": {"values": [0.0] * 17 + [1.0] * 3}, "hardware": {"values": [0.0] * 3}}
    equal = rare | {"simulated": {"values": [0.5] * 20}}
    assert tiers.share_that_agrees([equal], 0.0) == 1.0
    assert tiers.share_that_agrees([rare], 0.0) == tiers.share_that_agrees([equal, rare], 0.0) == pytest.approx(1139 / 1140)
    assert tiers.share_that_agrees([rare], 1.0) == 1.0
    assert "hit rates in 1.0, ttft_p50 in 1.0 and" in tiers.yardstick({"a": record(10.0, 10.5)}).text(1)


# Launches


def steps(kind: str, least: int, count: int, measured_s: float, expected_s: float) -> dict[str, Any]:
    return {"kind": kind, "least": least, "leaps": count, "steps": count, "measured_s": measured_s, "expected_s": expected_s}


def test_launches_of_the_real_runs_are_added_to_what_was_calibrated(study: Loaded) -> None:
    """By hand: 4 short steps of two runs take 10 ms longer each, a decode step 1 ms; long steps and rows do not count."""
    runs = [
        {"steps": [steps("both", 1, 3, 0.06, 0.045), steps("both", 1025, 1, 9.0, 1.0), steps("decode", 1, 2, 0.022, 0.02)]},
        {"steps": [steps("both", 257, 1, 0.05, 0.025), steps("decode", 2, 1, 9.0, 1.0) | {"steps": 2}]},
    ]
    known = {"hardware": {"prefill_launch_s": 0.013, "leap_overhead_s": 0.0011}}
    words = study["tiers_launched"].words_of({"hardware": runs, "config": known})
    assert words == ["hardware.prefill_launch_s=0.023", "hardware.leap_overhead_s=0.0021"]
    good = record(10.0, 10.5)
    lines = list(study["tiers_launched"].section({"a": {"hardware": runs}}, {"a": good}))
    assert lines[-1].startswith("| a | +10.0 | +1.0 |")


def test_launches_are_compared_in_three_ways_and_in_rounds(
    study: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is served in each way, and what the table says of it: a configuration that fails is left out, and told."""
    launch = study["tiers_launch"]
    from kvsim.substrate.hardware.machine import Demand

    given = list[tuple[list[str], Any]]()

    def serve(words: list[str]) -> int:
        given.append((words, Demand.has_processes))
        if len(given) == 3:
            return 1
        folder = Path(words[-1].removeprefix("output="))
        folder.mkdir(parents=True)
        rows = [
            steps("both", 1, 2, 0.06 if len(given) < 4 else 0.08, 0.03),
            steps("both", 513, 2, 9.0, 9.0),
            steps("decode", 1, 1, 9.0, 9.0),
        ]
        (folder / "result.json").write_text(json.dumps({"hardware": {"steps": rows}}))
        return 0

    monkeypatch.setattr(launch, "kvsim", serve)
    words = ["model=tiny", "tiers.gpu.capacity=9pages", "tiers.cpu.capacity=9pages", "placement=write_through", "prefetch=none"]
    drawn = {"seed": 1, "drawn": [{"name": "a", "overrides": words, "simulated_s": 1.0}]}
    (tmp_path / "drawn.json").write_text(json.dumps(drawn))
    for machine, name in (("l", "other"), ("m", "a")):
        (tmp_path / machine / "hardware").mkdir(parents=True)
        (tmp_path / machine / "runs" / name).mkdir(parents=True)
        with tarfile.open(tmp_path / f"{machine}.tar.xz", "w:xz") as archive:
            archive.add(tmp_path / machine, machine)
    options = ["--configurations", str(tmp_path / "drawn.json"), "--recorded", str(tmp_path), "--output", str(tmp_path)]
    assert launch.main([*options, "--only", "a", "--runs", "2"]) == 1
    assert [is_own is True for _, is_own in given] == [False, True, False] * 2 and Demand.has_processes is not True
    served = [[word for word in some if word in words] for some, _ in given]
    assert served == [words, words, words[:2]] * 2
    assert {Path(some[some.index("--config-dir") + 1]).name for some, _ in given} == {"m"}, "the machine that has served it"
    table = (tmp_path / "tiers_launch.md").read_text().splitlines()
    assert table[-3:] == [
        "| a | as served | 2, 2 | 15.00, 15.00 | 30.00, 40.00 | - | - |",
        "| a | own process | 2, 2 | 15.00, 15.00 | 30.00, 40.00 | - | - |",
        "| a | without tiers | 2 | 15.00 | 40.00 | - | - |",
    ]
