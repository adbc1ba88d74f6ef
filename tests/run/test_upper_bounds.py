"""The bounds on the page of a run: those that a sweep shows, none where none hold, and with answers where answers are cached."""

import json
import re
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.run import execute
from tests.report.test_html import Page

SMALL = ["trace.sessions=20", "tiers.gpu.capacity=8GiB"]


def drawn(page: Path) -> dict[str, str]:
    """The hit rates of the bounds that a page shows, by kind."""
    return dict(re.findall(r'<div class="ghost"><i class="(\w+)" style="width:([\d.]+%)">', page.read_text()))


def stored(folder: Path) -> dict[str, str]:
    """The hit rates of the bounds that a sweep has kept, by kind."""
    found = {path.name.split("-")[0]: json.loads(path.read_text()) for path in (folder / "bounds").glob("*.json")}
    return {kind: f"{bound['hit_rate']:.2%}" for kind, bound in found.items()}


@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_a_run_alone_and_the_jobs_of_a_sweep_show_the_same_bounds(command: str, tmp_path: Path) -> None:
    assert main([command, *SMALL, f"output={tmp_path}/alone"]) == 0
    assert main([command, "-m", *SMALL, "eviction=lru,mq", f"output={tmp_path}/sweep"]) == 0
    alone = drawn(tmp_path / "alone" / "report.html")
    assert alone.keys() == {"belady", "unlimited"} and alone == stored(tmp_path / "sweep")
    assert [drawn(tmp_path / "sweep" / job / "report.html") for job in "01"] == [alone] * 2
    assert not (tmp_path / "bounds").exists(), "a run alone keeps nothing beside its folder"


def test_nothing_hits_more_than_the_bound_where_answers_are_cached(tmp_path: Path) -> None:
    """The rules of vLLM leave it to the trace whether answers are cached, and this one has them."""
    assert (
        main(["replay", "-m", "preset=vllm", "trace.sessions=60", "tiers.gpu.capacity=80GiB,200GiB", f"output={tmp_path}/one"])
        == 0
    )
    for job in "01":
        result = json.loads((tmp_path / "one" / job / "result.json").read_text())
        assert result["config"]["rules"]["cache_output"] is True
        bounds = drawn(tmp_path / "one" / job / "report.html")
        assert result["hit_rate"] <= float(bounds["unlimited"].rstrip("%")) / 100 + 5e-5
        assert bounds["belady"] <= bounds["unlimited"]
    assert result["hit_rate"] > 0.5
    plain = tmp_path / "plain"
    assert main(["replay", "trace.sessions=60", "tiers.gpu.capacity=200GiB", f"output={plain}"]) == 0
    assert drawn(plain / "report.html")["unlimited"] < bounds["unlimited"], "answers are hit as well"


def test_a_model_with_states_has_no_bounds(tmp_path: Path) -> None:
    assert (
        main(["replay", "trace.sessions=10", "model=qwen3_next_80b", "tiers.gpu.capacity=40GiB", f"output={tmp_path}/run"]) == 0
    )
    assert drawn(tmp_path / "run" / "report.html") == {}
    assert "elady" not in Page((tmp_path / "run" / "report.html").read_text()).text


def test_a_run_of_very_many_requests_leaves_them_to_kvsim_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "MOST_REQUESTS", 10)
    assert main(["replay", *SMALL, f"output={tmp_path}/alone"]) == 0
    assert drawn(tmp_path / "alone" / "report.html") == {}
    assert "on the page that kvsim report makes of it" in (tmp_path / "alone" / "report.html").read_text()
    assert main(["replay", "-m", *SMALL, "eviction=lru,mq", f"output={tmp_path}/sweep"]) == 0
    assert drawn(tmp_path / "sweep" / "0" / "report.html").keys() == {"belady", "unlimited"}
