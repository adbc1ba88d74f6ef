"""Where one case is called best, the noise of a single run is told: on recorded traces and on synthetic ones."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvsim
from kvsim.report.comparison.compare import NEAR, Comparison
from kvsim.report.comparison.findings import answers
from kvsim.report.comparison.html import render_comparison
from kvsim.report.comparison.pivot import pivots_note
from kvsim.results.fields import BY_KEY
from kvsim.results.runs import read_runs

HIT_RATE = BY_KEY["hit_rate"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded trace without sessions, whose prompts come from a pool; LRU and FIFO do about as well, MRU does not."""
    folder = tmp_path_factory.mktemp("noise")
    rng = np.random.default_rng(1)
    lines = [
        json.dumps({"timestamp": 1000 * number, "input_length": 1025, "output_length": 1, "hash_ids": [2 * at, 2 * at + 1, 9999]})
        for number, at in enumerate((rng.zipf(1.4, 3000) % 400).tolist())
    ]
    (folder / "log.jsonl").write_text("\n".join(lines))
    trace = kvsim.load_trace(path=folder / "log.jsonl", page_tokens=512)
    settings = {"eviction": ["lru", "slru", "mru"], "tiers.gpu.capacity": ["100pages", "120pages"]}
    kvsim.sweep(trace, settings, output=folder / "sweep")
    return folder / "sweep"


def test_what_cannot_be_told_from_the_best_is_marked_and_the_rest_is_not(swept: Path) -> None:
    comparison = Comparison(read_runs([swept]))
    stands = comparison.standing(HIT_RATE)
    rates = [HIT_RATE.of(case.first) or 0.0 for case in comparison.cases]
    best = int(np.argmax(rates))
    by_place = {found.place: found for found in comparison.against(HIT_RATE, best, [at for at in range(6) if at != best])}
    assert set(by_place) == set(range(6)) - {best}
    for place, found in by_place.items():
        assert found.drawn == "stretches" and found.difference.of == pytest.approx(rates[best] - rates[place])
        assert found.difference.low <= found.difference.of <= found.difference.high
        assert (stands.get(place) == NEAR) is found.difference.holds_zero or rates[place] == rates[best]
    mru = [place for place, case in enumerate(comparison.cases) if case.settings["eviction"] == "mru"]
    assert all(place not in stands for place in mru), "far below the best"


def test_the_sentence_has_the_difference_with_its_interval(swept: Path) -> None:
    (line, *_) = answers(Comparison(read_runs([swept])))
    assert line.startswith("Highest hit rate: ")
    assert "points [" in line and "(95 %, resampling stretches of the trace)" in line


def test_pivots_and_pages_explain_the_mark(swept: Path) -> None:
    runs = read_runs([swept])
    assert "by resampling the trace's sessions or stretches of it" in pivots_note(Comparison(runs))
    comparison = Comparison(runs)
    assert not any("≈" in line for line in comparison.notes()), "nothing has the mark yet"
    marks = NEAR in comparison.standing(HIT_RATE).values()
    assert any("by resampling stretches of the trace, holds zero" in line for line in comparison.notes()) is marks
    assert render_comparison(runs, "kvsim") == render_comparison(runs, "kvsim"), "the draws are the same each time"


def test_runs_without_rows_or_of_other_requests_have_no_noise(swept: Path, tmp_path: Path) -> None:
    trace = kvsim.load_trace("synthetic", sessions=30)
    kvsim.sweep(trace, {"eviction": ["lru"]}, "tiers.gpu.capacity=3000pages", output=tmp_path / "other")
    comparison = Comparison(read_runs([swept, tmp_path / "other"]))
    assert all(found.place != 6 for found in comparison.against(HIT_RATE, 0, range(1, 7)))
    for path in (tmp_path / "other").glob("*/requests.csv.gz"):
        path.unlink()
    comparison = Comparison(read_runs([tmp_path / "other", swept]))
    assert comparison.against(HIT_RATE, 0, range(1, 7)) == []


def test_sessions_are_drawn_where_the_trace_has_them(tmp_path: Path) -> None:
    trace = kvsim.load_trace("synthetic", sessions=40)
    kvsim.sweep(trace, {"eviction": ["lru", "mru"]}, "tiers.gpu.capacity=6000pages", output=tmp_path / "sweep")
    comparison = Comparison(read_runs([tmp_path / "sweep"]))
    (found,) = comparison.against(HIT_RATE, 0, [1])
    assert found.drawn == "sessions"
