"""``kvsim curve``."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kvsim.api import load_trace, replay
from kvsim.cli import main
from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.run.curves import default_capacities, policy_maker, sample

SMALL = ("trace.sessions=30", "output=run")
ALONE = ("replay.hold_output=false",)


def record(*overrides: str) -> dict[str, Any]:
    assert main(["curve", *SMALL[any("sessions" in each for each in overrides) :], *overrides]) == 0
    read: dict[str, Any] = json.loads(Path("run/curve.json").read_text())
    return read


@pytest.mark.parametrize("rules", [("rules.recompute_last_token=false", "warmup=0.3"), pytest.param((), marks=pytest.mark.long)])
def test_every_point_is_a_replay(rules: tuple[str, ...]) -> None:
    """Also where the tier is smaller than some prompts."""
    policies = 'curve.policies=["slru protected_hits=3"]'
    drawn = record(policies, "trace.sessions=12", "curve.capacities=[600,32000tokens]", *rules)
    trace = load_trace("synthetic", sessions=12)
    overrides = {"lru": (), "belady": ("eviction=belady",)}
    overrides |= {"slru protected_hits=3": ("eviction=slru", "eviction.protected_hits=3")}
    assert [(p["policy"], p["capacity_pages"]) for p in drawn["points"]] == [
        (policy, pages) for policy in ("lru", "slru protected_hits=3", "belady") for pages in (600, 2_000)
    ]
    assert drawn["points"][0]["rejected"] > 0
    for point in drawn["points"]:
        capacity = f"tiers.gpu.capacity={point['capacity_pages']}pages"
        played = replay(trace, *overrides[point["policy"]], capacity, *rules, *ALONE).record
        assert point["hit_rate"] == played["hit_rate"]
        assert point["page_hit_rate"] == played["page_hit_rate"]
        assert point["rejected"] == played["rejected"]
    unlimited = replay(trace, "tiers.gpu.capacity=unlimited", *rules, *ALONE)
    assert drawn["unlimited"]["hit_rate"] == unlimited.hit_rate


def test_the_table_names_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = record("curve.capacities=[2000,20000]")
    rows = {line.split("  ")[0]: line.split()[-2:] for line in capsys.readouterr().out.splitlines()}
    assert rows["no cache"] == ["0.00%", "0.00%"]
    for policy, place in (("lru", 0), ("belady", 2)):
        assert rows[policy] == [f"{point['hit_rate']:.2%}" for point in drawn["points"][place : place + 2]]
    assert rows["unlimited"] == [f"{drawn['unlimited']['hit_rate']:.2%}"] * 2


def test_a_curve_writes_its_folder_and_nothing_else(folder: Path) -> None:
    drawn = record()
    assert [path.name for path in folder.iterdir()] == ["run"]
    assert sorted(path.name for path in (folder / "run").iterdir()) == ["curve.csv", "curve.html", "curve.json"]
    assert drawn["command"] == "curve"
    rows = list(csv.DictReader((folder / "run" / "curve.csv").read_text().splitlines()))
    assert (rows[0]["policy"], rows[0]["hit_tokens"]) == ("no cache", "0")
    assert (rows[-1]["policy"], int(rows[-1]["hit_tokens"])) == ("unlimited", drawn["unlimited"]["hit_tokens"])
    lru = [row for row in rows if row["policy"] == "lru"]
    pages = [int(row["capacity_pages"]) for row in lru]
    assert pages == sorted(set(pages)) and {*drawn["line"]["capacity_pages"], *drawn["capacities"]} == set(pages)
    rates = [float(row["hit_rate"]) for row in lru]
    assert rates == sorted(rates), "every LRU holds what a smaller one holds"
    page = (folder / "run" / "curve.html").read_text()
    assert "Plotly.newPlot" in page and "Hit rate by capacity in pages" in page
    assert "default-src 'none'" in page, "the browser fetches nothing"


def test_a_sample_shows_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = record("trace.sessions=200", "curve.fraction=0.5", "curve.capacities=[500,40000]", "curve.policies=fifo")
    assert 0 < drawn["sampling"]["requests"] < drawn["requests"]
    lru = {p["sampled"]: p["hit_rate"] for p in drawn["points"] if p["policy"] == "lru" and p["capacity_pages"] == 40_000}
    assert drawn["sampling"]["error"] == {"40000": lru[True] - lru[False]}, "500 pages, scaled down, are less than a prompt"
    assert {p["policy"] for p in drawn["points"] if p["sampled"]} == {"lru", "fifo", "belady"}
    assert f"{100 * (lru[True] - lru[False]):+.2f}" in capsys.readouterr().out


def request(index: int, *runs: tuple[int, int]) -> Request:
    pages = sum(length for _, length in runs)
    return Request(index=index, arrival_s=0.0, prompt_tokens=pages, output_tokens=0, runs=runs, prompt_pages=pages)


def test_a_sample_takes_all_or_none_of_those_that_share_a_page() -> None:
    """All share page 0; behind it there are 1,000 families of 3."""
    requests = [request(i, (0, 1), (1 + 10 * (i % 1_000), 1 + i // 1_000)) for i in range(3_000)]
    chosen = sample(requests, 0.2, seed=0)
    families = {one.index % 1_000 for one in chosen}
    assert 120 < len(families) < 280
    assert [one.index for one in chosen] == [one.index for one in requests if one.index % 1_000 in families]
    assert chosen != sample(requests, 0.2, seed=1)


def test_default_capacities_lie_between_the_largest_prompt_and_all_pages() -> None:
    assert default_capacities(247, 6_000) == [500, 1_000, 2_000, 5_000]
    assert default_capacities(21, 30) == [21, 30]


def test_a_policy_is_made_anew_for_every_replay() -> None:
    make = policy_maker("slru protected_hits=4")
    assert make() is not make()
    assert make().protected_hits == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("slru protected_hits=0", "slru.protected_hits must be at least 1"),
        ("slrru", "there is no eviction policy 'slrru'; did you mean slru?"),
        ("slru 3", "cannot parse '3' in 'slru 3'"),
        ("slru hits=3", "slru.hits: there is no such setting"),
    ],
)
def test_a_policy_that_cannot_be_made_is_named(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as error:
        policy_maker(text)
    assert str(error.value).startswith(f"curve.policies: {problem}")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("curve.capacities=[]", "curve.capacities is empty"),
        ("curve.capacities=[-1]", "curve.capacities: '-1pages' is not a capacity"),
        ("curve.capacities=[0]", "curve.capacities: 0 is always shown"),
        ("curve.capacities=unlimited", "curve.capacities: unlimited is always shown"),
        ("curve.capacities=1", "curve.capacities: no request fits into 1 pages of 16 tokens: the smallest prompt has "),
        ("curve.fraction=0", "curve.fraction must be above 0 and at most 1, not 0.0"),
        ("curve.fraction=0.000001", "curve.fraction=1e-06 leaves none of "),
        ("tiers.gpu.capacity=1GiB", "tiers.gpu.capacity has no effect on kvsim curve"),
        ("eviction@tiers.gpu.eviction=lru", "eviction@tiers.gpu.eviction has no effect on kvsim curve"),
        ("replay.in_flight=2", "replay.in_flight has no effect on kvsim curve"),
    ],
)
def test_a_mistake_ends_with_one_line(override: str, expected: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", *SMALL, override]) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith(f"kvsim: {expected}")
    assert shown.err.count("\n") == 1
    assert list(folder.iterdir()) == []
