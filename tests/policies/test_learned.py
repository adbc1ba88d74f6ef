"""The learned order: what a model sees of leaves, its file, and that a run decides by it."""

import json
from functools import partial
from itertools import pairwise
from math import log1p
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.cli import main
from kvsim.core.tree import Node
from kvsim.policies.eviction.leaf_features import FEATURES
from kvsim.policies.eviction.leaf_model import DEFAULT, LeafModel, read_model
from kvsim.policies.eviction.learned import Learned
from tests.core.small import offered, small_cache
from tests.policies.small import filled
from tests.workloads import random_word


def model_of(feature: str, sign: float = 1.0) -> LeafModel:
    """A model whose score is one feature."""
    weights = np.zeros((len(FEATURES), 1))
    weights[FEATURES.index(feature), 0] = sign
    return LeafModel(np.zeros(len(FEATURES)), np.ones(len(FEATURES)), [(weights, np.zeros(1))])


def learned(feature: str, sign: float = 1.0) -> Learned:
    policy = Learned()
    policy.use_model(model_of(feature, sign))
    return policy


def test_features_by_hand() -> None:
    """``abc`` is used twice and ``x`` once; the clock ticks at each step of a request."""
    cache = filled(learned("hits"), "abc", "abc", "x", gpu=8)
    policy, now = cache.gpu.eviction, 50.0
    abc, x = cache.node("abc"), cache.node("x")
    rows = policy.features([abc, x], now)
    seen = dict(zip(FEATURES, rows[0], strict=True))
    assert seen["age_s"] == pytest.approx(log1p(now - abc.last_used))
    assert seen["lifetime_s"] == pytest.approx(log1p(now - abc.created))
    assert seen["mean_gap_s"] == pytest.approx(log1p(abc.last_used - abc.created))
    assert seen["hits"] == pytest.approx(log1p(2))
    assert seen["end_tokens"] == seen["node_tokens"] == pytest.approx(log1p(3))
    once = dict(zip(FEATURES, rows[1], strict=True))
    assert (once["hits"], once["mean_gap_s"], once["last_gap_s"]) == pytest.approx((log1p(1), 0.0, 0.0))
    assert once["end_tokens"] == pytest.approx(log1p(1))


def slow_features(node: Node, tier: int, now: float) -> list[float]:
    """The numbers of ``FEATURES``, from the node as it is."""
    use = node.notes[tier]
    used, created, hits, end = node.last_used_in(tier), node.created_in(tier), node.hits_in(tier), node.depth + node.pages
    gap = (used - created) / (hits - 1) if hits > 1 else 0.0
    counts = (hits, end, node.pages, use.prompt_tokens, use.output_tokens, use.turn)
    return [*map(log1p, (now - used, now - created, gap, use.gap_s, *counts)), float(end > use.prompt_tokens)]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_noted_of_leaves_is_true_whatever_happens_between(seed: int) -> None:
    """On two tiers, with prompts that part and come back, requests that overlap, and victims of which a part stays."""
    random, compared = Random(seed), 0
    cache = small_cache(gpu=40, cpu=60, eviction=partial(learned, "age_s"))
    running = []
    for _ in range(250):
        running.append(cache.run(random_word(random, "aaab")))
        if len(running) > random.randint(0, 2):
            cache.finish(running.pop(0))
        at = float(next(cache.clock))
        for tier in cache.tiers:
            leaves = [node for node in cache.tree.root.descendants() if node.is_evictable(tier.index)]
            if leaves:
                rows = tier.eviction.features(leaves, at)
                assert rows == pytest.approx(np.array([slow_features(node, tier.index, at) for node in leaves]), abs=1e-12)
                compared += len(leaves)
        table = [leaf.column for leaf in cache.gpu.eviction._leaves.all]
        assert len(set(table)) == len(table)
    assert compared > 1000


def test_the_lowest_score_leaves_first() -> None:
    cache = filled(learned("hits"), "abc", "abc", "x", gpu=8)
    assert offered(cache.gpu.eviction, 50.0)[0] is cache.node("x"), "used once"
    cache = filled(learned("hits", -1.0), "abc", "abc", "x", gpu=8)
    assert offered(cache.gpu.eviction, 50.0)[0] is cache.node("abc"), "the sign turned round"


def test_a_perceptron_by_hand() -> None:
    mean, scale = np.full(len(FEATURES), 2.0), np.full(len(FEATURES), 4.0)
    first = np.zeros((len(FEATURES), 2))
    first[0] = [1.0, -1.0]
    model = LeafModel(mean, scale, [(first, np.array([0.5, 0.0])), (np.array([[2.0], [3.0]]), np.array([1.0]))])
    features = np.full((2, len(FEATURES)), 2.0)
    features[0, 0], features[1, 0] = 6.0, -2.0  # 1 and -1 after shift and scale
    assert model.scores(features) == pytest.approx([2 * 1.5 + 1, 3 * 1 + 1])


def test_a_perceptron_computes_layer_by_layer() -> None:
    """Biases of all layers, negative sums that are cut off, and other numbers of leaves after each other."""
    rng = np.random.default_rng(1)
    sizes = (len(FEATURES), 6, 5, 1)
    layers = [(rng.normal(size=(inputs, outputs)), rng.normal(size=outputs)) for inputs, outputs in pairwise(sizes)]
    mean, scale = rng.normal(size=len(FEATURES)), rng.uniform(0.5, 2.0, len(FEATURES))
    model = LeafModel(mean, scale, layers)
    for leaves in (1, 7, 7, 32):
        features = rng.normal(size=(leaves, len(FEATURES)))
        values = (features - mean) / scale
        for weights, biases in layers[:-1]:
            values = np.maximum(values @ weights + biases, 0.0)
        assert model.scores(features) == pytest.approx((values @ layers[-1][0] + layers[-1][1])[:, 0], rel=1e-12, abs=1e-12)


def test_a_file_gives_the_model_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    layers = [(rng.normal(size=(len(FEATURES), 3)), rng.normal(size=3)), (rng.normal(size=(3, 1)), rng.normal(size=1))]
    model = LeafModel(rng.normal(size=len(FEATURES)), np.ones(len(FEATURES)), layers, {"trace": "mine"})
    (tmp_path / "model.json").write_text(model.text())
    again = read_model(tmp_path / "model.json")
    features = rng.normal(size=(5, len(FEATURES)))
    assert again.scores(features).tolist() == model.scores(features).tolist()
    assert again.training == {"trace": "mine"}


def damaged(change: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(DEFAULT.read_text())
    if change == "version":
        record["kvsim_leaf_model"] = 0
    elif change == "features":
        record["features"] = record["features"][:-1]
    elif change == "nan":
        record["layers"][0]["weights"][0][0] = float("nan")
    elif change == "shape":
        record["layers"][1]["weights"] = record["layers"][1]["weights"][:-1]
    elif change == "no layers":
        record["layers"] = []
    else:
        del record["mean"]
    return record


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("version", "another version"), ("features", "other features"), ("nan", "damaged"), ("shape", "damaged"),
        ("no layers", "damaged"), ("mean", "damaged"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_line(change: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(damaged(change)))
    assert main(["replay", "trace.sessions=2", "eviction=learned", f"eviction.path={path}", f"output={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("content", [None, "{", "[1, 2]"])
def test_no_model_is_one_line(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    if content is not None:
        path.write_text(content)
    assert main(["replay", "trace.sessions=2", "eviction=learned", f"eviction.path={path}", f"output={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert "eviction.path" in error
    assert "train" in error


def test_the_model_that_comes_with_kvsim_hits_more_than_lru_on_traffic_of_its_kind() -> None:
    trace = kvsim.load_trace("synthetic", sessions=300, seed=3)
    hits = {name: kvsim.replay(trace, "tiers.gpu.capacity=8000pages", eviction=name).hit_rate for name in ("lru", "learned")}
    assert hits["learned"] > hits["lru"] + 0.04


def test_a_changed_file_is_another_run(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    hashes = []
    for feature in ("age_s", "hits"):
        path.write_text(model_of(feature).text())
        words = ["trace.sessions=3", "tiers.gpu.capacity=4000pages", "eviction=learned", f"eviction.path={path}"]
        assert main(["replay", *words, f"output={tmp_path / feature}"]) == 0
        hashes.append(json.loads((tmp_path / feature / "result.json").read_text())["config_hash"])
    assert hashes[0] != hashes[1]
