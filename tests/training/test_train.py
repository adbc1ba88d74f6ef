"""``kvsim train``: what is recorded, what is learned from it, and that nothing of the test reaches the model."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.cli import main
from kvsim.core.request import Request, Reset
from kvsim.plans.arguments import Arguments
from kvsim.plans.from_python import plan_for
from kvsim.plans.plan import Plan
from kvsim.policies.eviction.leaf_features import FEATURES
from kvsim.run import play
from kvsim.trace.base import Trace
from kvsim.training.decisions import FAR, HORIZON, Decision, Recording, Reservoir
from kvsim.training.fit import agreement, fit
from kvsim.training.settings import TrainSettings
from kvsim.training.train import train, with_eviction

QUICK = TrainSettings(rounds=2, decisions=2_000, epochs=3, hidden=8)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return kvsim.load_trace("synthetic", sessions=60)


def test_without_torch_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["train", "trace.sessions=5", f"output={tmp_path / 'out'}"]) == 2
    assert capsys.readouterr().err == "kvsim: kvsim train needs the package torch: pip install kvsim[hardware]\n"
    assert not (tmp_path / "out").exists()


def plan_of(trace: Trace, folder: Path, capacity: str = "6000pages") -> Plan:
    return plan_for("replay", trace, Arguments([f"tiers.gpu.capacity={capacity}", f"output={folder}"], {}))


def decision(values: list[float], next_uses: list[int], feature: str = "hits", request: int = 0) -> Decision:
    features = np.zeros((len(values), len(FEATURES)))
    features[:, FEATURES.index(feature)] = values
    return Decision(request, features, np.array(next_uses, dtype=np.int64), np.arange(len(values), dtype=float))


def test_belady_lets_go_what_is_used_last() -> None:
    assert decision([0, 0, 0], [5, 9, 7]).best.tolist() == [False, True, False]
    assert decision([0, 0, 0], [FAR, 9, FAR]).best.tolist() == [True, False, True]


def test_a_model_learns_which_feature_tells() -> None:
    draws = np.random.default_rng(0)
    made = []
    for number in range(600):
        hits = draws.permutation(8).astype(float)
        made.append(decision(hits.tolist(), (1000 - 100 * hits).astype(int).tolist(), request=number))
    fitted = fit(made, replace(QUICK, epochs=30), seed=0)
    assert fitted.agreement == 1.0, "few hits: used last"
    assert fitted.lru_agreement < 0.3
    assert fitted.losses[-1] < fitted.losses[0]


def test_reuse_learns_the_odds() -> None:
    draws = np.random.default_rng(0)
    made = []
    for number in range(500):
        hits = draws.integers(0, 2, 8)
        is_used = draws.random(8) < np.where(hits, 0.9, 0.2)
        made.append(decision(hits.tolist(), np.where(is_used, 5, FAR).tolist(), request=number))
    model = fit(made, replace(QUICK, target="reuse", epochs=500), seed=0).model
    rows = np.zeros((2, len(FEATURES)))
    rows[1, FEATURES.index("hits")] = 1.0
    odds = 1 / (1 + np.exp(-model.scores(rows)))
    assert odds == pytest.approx([0.2, 0.9], abs=0.04)


def test_agreement_by_hand() -> None:
    made = [decision([1.0, 2.0], [9, 5]), decision([1.0, 2.0], [5, 9])]
    assert agreement(made, lambda features: features[:, FEATURES.index("hits")]) == 0.5
    assert agreement(made, None) == 0.5, "the first one is the least recently used"


def slow_next_use(requests: list[Request], after: int, page: int) -> int:
    """Return the first request after one whose prompt or answer has a page."""
    for request in requests[after + 1 :]:
        runs = [*request.runs, *(request.output_runs or ())]
        if any(start <= page < start + count for start, count in runs):
            return request.index
    return FAR


class Watched(Recording):
    """Compares every next use with a search through all requests that follow."""

    compared = 0

    def _next_use(self, node: Any) -> int:
        found = super()._next_use(node)
        start, count = node.runs[-1]
        expected = slow_next_use(self.known, self._latest, start + count - 1)
        if expected != FAR and expected > self._latest + self._horizon:
            expected = FAR
        assert found == expected
        self.compared += 1
        return found


def test_next_uses_against_a_search(trace: Trace, tmp_path: Path) -> None:
    requests = trace.requests[:60]
    recording = Watched(None, Reservoir(500, np.random.default_rng(0)), 8)
    recording.known = requests  # type: ignore[attr-defined]
    play.replay(with_eviction(plan_of(trace, tmp_path, "4500pages"), recording), list(requests))
    last = len(requests) - round(HORIZON * len(requests))
    assert recording.compared > 100
    assert all(one.request < last for one in recording._reservoir.kept), "what comes after them is known as far for all"


def test_a_reservoir_keeps_each_decision_with_equal_odds() -> None:
    counts = np.zeros(50)
    for seed in range(2_000):
        reservoir = Reservoir(5, np.random.default_rng(seed))
        for number in range(50):
            place = reservoir.place()
            if place is not None:
                reservoir.put(place, decision([0.0], [0], request=number))
        for one in reservoir.in_order():
            counts[one.request] += 1
    assert counts.sum() == 10_000
    assert np.abs(counts / 2_000 - 0.1).max() < 0.03


def test_the_test_part_does_not_reach_the_model(trace: Trace, tmp_path: Path) -> None:
    """The requests after the training are replaced by others: the model's file stays the same to the last byte."""
    half = len(trace.requests) // 2
    changed = [
        request if number < half else replace(request, runs=((10**9 + 10**5 * number, request.prompt_pages),), output_runs=None)
        for number, request in enumerate(trace.requests)
    ]
    models = []
    for name, requests in (("first", trace.requests), ("second", changed), ("third", trace.requests[: half + 3])):
        own = replace(trace, requests=list(requests))
        settings = replace(QUICK, part=half / len(requests))
        train(plan_of(trace, tmp_path / name), own, settings, None)
        models.append((tmp_path / name / "model.json").read_bytes().replace(repr(settings.part).encode(), b"part"))
    assert models[0] == models[1] == models[2]
    assert b"part" in models[0]


def test_the_command_trains_tests_and_says_how_to_use_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace.sessions=60", "tiers.gpu.capacity=6000pages", "train.rounds=2", "train.decisions=2000", "train.epochs=3"]
    assert main(["train", *words, f"output={tmp_path / 'model'}"]) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "model" / "train.json").read_text())
    assert [one["policy"] for one in record["tested"]] == ["lru", "learned", "belady"]
    assert record["trained_requests"] + record["tested_requests"] > 0
    assert "eviction=learned eviction.path=" in printed
    use = ["trace.sessions=60", "tiers.gpu.capacity=6000pages", "warmup=0.5", "eviction=learned"]
    assert main(["replay", *use, f"eviction.path={tmp_path / 'model' / 'model.json'}", f"output={tmp_path / 'run'}"]) == 0
    learned = next(one for one in record["tested"] if one["policy"] == "learned")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["hit_rate"] == pytest.approx(learned["hit_rate"])


@pytest.mark.parametrize("rules", [["preset=vllm"], ["model=qwen3_next_80b"], ["replay.in_flight=2"]])
def test_where_belady_is_no_bound_it_is_left_out_of_the_test(trace: Trace, rules: list[str], tmp_path: Path) -> None:
    plan = plan_for("replay", trace, Arguments([*rules, "tiers.gpu.capacity=6000pages", f"output={tmp_path / 'model'}"], {}))
    tested = train(plan, trace, replace(QUICK, rounds=1, epochs=1, decisions=200), None)["tested"]
    assert [one["policy"] for one in tested] == ["lru", "learned"]


def test_a_trace_with_resets_is_tested_without_belady(trace: Trace, tmp_path: Path) -> None:
    at = len(trace.requests) // 3
    requests = [replace(one, resets=(Reset("drain", one.arrival_s),) if one.index == at else ()) for one in trace.requests]
    own = replace(trace, requests=requests)
    tested = train(plan_of(own, tmp_path / "model"), own, replace(QUICK, rounds=1, epochs=1, decisions=200), None)["tested"]
    assert [one["policy"] for one in tested] == ["lru", "learned"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train.target=future"], "there is no 'future'"),
        (["train.part=0"], "train.part"),
        (["train.decisions=5"], "train.decisions"),
        (["train.decisions=100", "train.rounds=101"], "train.rounds=101 share decisions=100: set rounds to at most as many"),
        (["eviction=mq"], "eviction has no effect on kvsim train"),
        (["tiers.gpu.capacity=1TiB"], "too few to learn from"),
        (["-m", "seed=1,2"], "leave out -m"),
    ],
)
def test_mistakes_get_one_line(words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "trace.sessions=10", *words, f"output={tmp_path / 'model'}"]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert not (tmp_path / "model" / "model.json").exists()
