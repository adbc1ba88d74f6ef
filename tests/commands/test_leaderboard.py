"""``kvsim leaderboard``: who plays, on what, and that its numbers are those of the runs."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import kvsim
from kvsim.cli import main
from kvsim.errors import UsageError
from tests.workloads import make_request, write_trace

SMALL = ["trace=synthetic", "trace.sessions=30"]
FOUR = "leaderboard.policies=[fifo,mru]"


def board(folder: Path, *words: str) -> dict[str, Any]:
    assert main(["leaderboard", *SMALL, *words, f"output={folder}"]) == 0
    found: dict[str, Any] = json.loads((folder / "leaderboard.json").read_text())
    return found


def value(record: dict[str, Any], policy: str, capacity: str) -> float:
    return next(float(cell["value"]) for cell in record["cells"] if (cell["policy"], cell["capacity"]) == (policy, capacity))


def test_its_numbers_are_those_of_replays(tmp_path: Path) -> None:
    record = board(tmp_path, FOUR, "leaderboard.capacities=[5000,9000]")
    trace = kvsim.load_trace("synthetic", sessions=30)
    for policy in ("lru", "fifo", "mru", "belady"):
        alone = kvsim.replay(trace, "tiers.gpu.capacity=5000pages", eviction=policy)
        assert value(record, policy, "5000pages") == pytest.approx(alone.hit_rate, abs=1e-12)
    (fifo,) = [one for one in record["standings"] if one["policy"] == "fifo"]
    gains = [value(record, "fifo", size) - value(record, "lru", size) for size in ("5000pages", "9000pages")]
    assert fifo["gain"] == pytest.approx(sum(gains) / 2)
    assert fifo["worst"] == pytest.approx(min(gains))
    room = [value(record, "belady", size) - value(record, "lru", size) for size in ("5000pages", "9000pages")]
    assert fifo["headroom"] == pytest.approx(sum(gains) / sum(room))


def test_files_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = board(tmp_path, FOUR, "leaderboard.capacities=5000")
    assert [one["policy"] for one in record["standings"]].count("lru") == 1
    assert "belady" not in [one["policy"] for one in record["standings"]], "a bound takes no place"
    rows = list(csv.DictReader((tmp_path / "leaderboard.csv").read_text().splitlines()))
    assert {row["policy"] for row in rows} == {"lru", "fifo", "mru", "belady"}
    assert all((tmp_path / row["folder"] / "result.json").exists() for row in rows)
    page = (tmp_path / "leaderboard.html").read_text()
    assert 'src="1/plotly.min.js"' in page
    assert (tmp_path / "1" / "plotly.min.js").exists()
    assert record["verdict"] in capsys.readouterr().out


def test_the_users_policy_joins_with_its_settings(tmp_path: Path) -> None:
    record = board(tmp_path, FOUR, "eviction=slru", "eviction.protected_hits=3", "leaderboard.capacities=[5000]")
    assert {one["policy"] for one in record["standings"]} == {"lru", "slru protected_hits=3", "fifo", "mru"}


def test_all_policies_play_by_default_and_those_that_cannot_are_last(tmp_path: Path) -> None:
    record = board(tmp_path, "leaderboard.capacities=[5000]")
    names = [one["policy"] for one in record["standings"]]
    assert {"lru", "mq", "arc", "s3_fifo", "priority"} <= set(names)
    missing = [one for one in record["standings"] if one["missing"]]
    assert "priority" in [one["policy"] for one in missing], "the trace has no priorities"
    assert all(one["reason"] for one in missing)
    assert names[-len(missing) :] == [one["policy"] for one in missing]


def test_several_traces(tmp_path: Path) -> None:
    words = ["leaderboard.traces=[synthetic sessions=20,synthetic sessions=25 page_tokens=64]", "leaderboard.policies=[fifo]"]
    assert main(["leaderboard", *words, f"output={tmp_path}"]) == 2, "unquoted words"
    words[0] = 'leaderboard.traces=["synthetic sessions=20","synthetic sessions=25 page_tokens=64"]'
    assert main(["leaderboard", *words, f"output={tmp_path}"]) == 0
    record = json.loads((tmp_path / "leaderboard.json").read_text())
    assert [trace["page_tokens"] for trace in record["traces"]] == [16, 64]
    assert all(1 <= len(trace["capacities"]) <= 4 for trace in record["traces"])
    assert len(record["cells"]) == 3 * sum(len(trace["capacities"]) for trace in record["traces"])


def test_a_second_time_nothing_is_played_again(tmp_path: Path) -> None:
    board(tmp_path, FOUR, "leaderboard.capacities=[5000]")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("1/*/result.json")}
    board(tmp_path, FOUR, "leaderboard.capacities=[5000]")
    assert len(before) == 4
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("1/*/result.json")}


def test_routing_is_ranked_by_times(tmp_path: Path) -> None:
    words = ["leaderboard.family=routing", "leaderboard.policies=[random]", "cluster.engines=2", "leaderboard.capacities=[20000]"]
    record = board(tmp_path, *words)
    assert (record["measure"], record["runs"], record["baseline"], record["bound"]) == ("ttft_s", "simulate", "round_robin", None)
    trace = kvsim.load_trace("synthetic", sessions=30)
    alone = {
        name: kvsim.simulate(trace, "cluster.engines=2", "tiers.gpu.capacity=20000pages", routing=name).record["ttft_s"]["mean"]
        for name in ("random", "round_robin")
    }
    (random,) = [one for one in record["standings"] if one["policy"] == "random"]
    assert random["gain"] == pytest.approx(alone["round_robin"] - alone["random"]), "sooner is better"


def test_any_family_may_be_ranked_by_times(tmp_path: Path) -> None:
    record = board(tmp_path, "leaderboard.measure=ttft_s", "leaderboard.policies=[fifo]", "leaderboard.capacities=[20000]")
    assert (record["runs"], record["bound"]) == ("simulate", None)
    assert value(record, "fifo", "20000pages") > 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["leaderboard.policies=[lfuu]"], "there is no eviction policy 'lfuu'"),
        (["leaderboard.policies=[]"], "policies is empty"),
        (["leaderboard.family=evict"], "there is no 'evict'"),
        (["leaderboard.family=admission"], "these policies serve different ones: compare goodput and attainment with"),
        (["leaderboard.family=autoscaling"], "two numbers, goodput and the hours of engines, and a leaderboard has one"),
        (["leaderboard.measure=speed"], "there is no 'speed'"),
        (["leaderboard.workers=0"], "workers"),
        (["eviction.protected_hits=3"], "eviction.protected_hits"),
        (["leaderboard.traces=[synthetic]"], "leaderboard.traces says which traces play"),
        (["tiers.gpu.capacity=5000pages", "leaderboard.capacities=[5000]"], "says which capacities play"),
        (["timeline=true"], "timeline has no effect on kvsim leaderboard"),
        (["admission=queue_limit"], "admission has no effect on kvsim leaderboard, which compares runs of the same requests"),
        (["-m", "seed=1,2"], "leave out -m"),
        (["curve.fraction=0.5"], "has no effect"),
        (["leaderboard.capacities=[0]"], "tiers.gpu.capacity is 0"),
        (["leaderboard.capacities=[0.5]"], "sizes such as 40GiB, or shares of a trace's unique pages such as 5%, not 0.5"),
        (["leaderboard.capacities=[0%]"], "'0%' is no share: give one above 0% and up to 100%"),
        (["leaderboard.capacities=[101%]"], "'101%' is no share"),
        (["leaderboard.capacities=[few%]"], "'few%' is no share"),
        (["leaderboard.capacities=[true]"], "not True"),
        (["leaderboard.family=checkpoint"], "has no effect on a model without recurrent layers"),
    ],
)
def test_mistakes_get_one_line_before_anything_is_played(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["leaderboard", *SMALL, *words, f"output={tmp_path / 'board'}"]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert not (tmp_path / "board").exists()


def several_answers(folder: Path) -> Path:
    """Prompts of 1 to 6 pages, of which some have three answers."""
    sizes = [512, 3000, 700, 1500, 3000]
    lines = [
        {
            "timestamp": 1000 * at,
            "input_length": size,
            "output_length": 300,
            "hash_ids": [10 * (at % 4) + page for page in range(9)],
        }
        for at, size in enumerate(sizes * 6)
    ]
    rows = [{**line, "hash_ids": line["hash_ids"][: -(-line["input_length"] // 512)], "n": 1 + 2 * (at % 3 == 0)}
            for at, line in enumerate(lines)]  # fmt: skip
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "answers.jsonl"


@pytest.mark.parametrize("more", [{}, {"warmup": 0.5}])
def test_rejected_requests_and_the_warm_up_count_as_in_the_runs(more: dict[str, Any], tmp_path: Path) -> None:
    trace = kvsim.load_trace(several_answers(tmp_path), page_tokens=512)
    found = kvsim.leaderboard(trace, policies=["fifo"], capacities=[7], **more)
    for cell in found.cells:
        result = json.loads((found.folder / cell["folder"] / "result.json").read_text())
        assert result["rejected"] > 0
        assert cell["value"] == pytest.approx(result["hit_rate"], abs=1e-12)
        assert cell["us_per_request"] == pytest.approx(1e6 * result["wall_s"] / 30), "the warm-up takes time, too"


def test_capacities_by_default_hold_the_largest_request_with_all_its_answers(tmp_path: Path) -> None:
    trace = kvsim.load_trace(several_answers(tmp_path), page_tokens=512)
    found = kvsim.leaderboard(trace, policies=["fifo"])
    results = [json.loads((found.folder / cell["folder"] / "result.json").read_text()) for cell in found.cells]
    assert [result["rejected"] for result in results] == [0] * len(results)


def test_shares_are_of_the_unique_pages_of_each_trace(tmp_path: Path) -> None:
    """Fifty prompts of ten blocks share the first one: 451. Each takes eleven pages with its answer, and one stays free."""
    prompts = [[0, *range(100 * chat + 1, 100 * chat + 10)] for chat in range(50)]
    requests = [
        make_request(blocks, prompt_tokens=5120, output_tokens=8, arrival_s=float(at)) for at, blocks in enumerate(prompts)
    ]
    trace = kvsim.load_trace(write_trace(tmp_path / "trace.jsonl", requests), page_tokens=512)
    found = kvsim.leaderboard(trace, policies=["fifo"], capacities=["1%", "10%", "100.0%", 70])
    capacities = [cell["capacity"] for cell in found.cells if cell["policy"] == "lru"]
    assert capacities == ["12pages", "45pages", "451pages", "70pages"]


def test_what_is_named_twice_plays_once(tmp_path: Path) -> None:
    words = ['leaderboard.policies=["slru protected_hits=3","slru  protected_hits=3",fifo,lru]']
    record = board(tmp_path, *words, "leaderboard.capacities=[5000]")
    assert sorted(one["policy"] for one in record["standings"]) == ["fifo", "lru", "slru protected_hits=3"]
    assert len(record["cells"]) == 4


def test_a_folder_with_runs_of_another_leaderboard_changes_nothing(tmp_path: Path) -> None:
    """Their folders have numbers that jobs of the second one have, too, and some of their runs stand for jobs of it."""
    board(tmp_path / "used", "leaderboard.policies=[fifo,slru]", "leaderboard.capacities=[5000,9000]")
    words = ["leaderboard.policies=[arc,fifo]", "leaderboard.capacities=[9000]"]
    used, fresh = board(tmp_path / "used", *words), board(tmp_path / "fresh", *words)
    names = ("policy", "capacity", "value", "gain", "noise", "most", "headroom")
    assert [[cell[name] for name in names] for cell in used["cells"]] == [
        [cell[name] for name in names] for cell in fresh["cells"]
    ]
    for cell in used["cells"]:
        result = json.loads((tmp_path / "used" / cell["folder"] / "result.json").read_text())
        assert result["choices"]["eviction"] == cell["policy"]


@pytest.mark.parametrize(
    ("capacities", "twice"),
    [("[5%,5.0%]", "'5.0%'"), ("[5000,5000pages]", "'5000pages'"), ("[1GiB,2GiB,1GiB]", "'1GiB'"), ("[70,70]", "70")],
)
def test_the_same_capacity_twice_is_refused(capacities: str, twice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leaderboard", f"leaderboard.capacities={capacities}"]) == 2
    assert capsys.readouterr().err == f"kvsim: leaderboard.capacities has {twice} more than once\n"


def test_a_path_in_the_settings_of_the_users_policy_may_have_spaces(tmp_path: Path) -> None:
    from kvsim.policies.eviction.leaf_model import DEFAULT

    model = tmp_path / "my model.json"
    model.write_bytes(DEFAULT.read_bytes())
    words = ["eviction=learned", f"eviction.path='{model}'", "leaderboard.policies=[fifo]", "leaderboard.capacities=[5000]"]
    record = board(tmp_path / "board", *words)
    (own,) = [one for one in record["standings"] if one["policy"].startswith("learned")]
    assert own["gain"] is not None


def test_what_knows_the_future_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = board(tmp_path, "leaderboard.policies=[belady_compute]", "leaderboard.capacities=[5000]")
    assert (record["look_ahead"], record["best"]) == (["belady_compute"], "lru")
    assert "belady_compute knows what the trace will ask for" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("more", [["tiers.cpu.capacity=5000pages"], ["model=qwen3_next_80b"], ["preset=vllm"]])
def test_a_bound_that_cannot_play_is_left_out(more: list[str], tmp_path: Path) -> None:
    record = board(tmp_path, "leaderboard.policies=[mru]", "leaderboard.capacities=[9000]", *more)
    assert record["bound"] is None
    assert {cell["policy"] for cell in record["cells"]} == {"lru", "mru"}
    assert not record["standings"][-1]["missing"]


def test_checkpoints_are_compared_with_those_of_a_run_that_chooses_none(tmp_path: Path) -> None:
    words = ["leaderboard.family=checkpoint", "leaderboard.policies=[last]", "leaderboard.capacities=[20000]"]
    record = board(tmp_path, *words, "model=qwen3_next_80b")
    assert record["baseline"] == "retention"
    trace = kvsim.load_trace("synthetic", sessions=30)
    alone = kvsim.replay(trace, "model=qwen3_next_80b", "tiers.gpu.capacity=20000pages")
    assert value(record, "retention", "20000pages") == pytest.approx(alone.hit_rate, abs=1e-12)


def test_from_python() -> None:
    traces = {"few": kvsim.load_trace("synthetic", sessions=20), "more": kvsim.load_trace("synthetic", sessions=30)}
    done: list[int] = []
    found = kvsim.leaderboard(traces, policies=["fifo"], capacities=[5000], advance=done.append)
    assert [trace["name"] for trace in found.traces] == ["few", "more"]
    assert found.best in ("lru", "fifo")
    assert len(found.table) == 6
    assert done[-1] == 6
    assert "lru" in repr(found)
    assert found.plot().data[0].type == "heatmap"


def test_python_refuses_policies_as_objects() -> None:
    from kvsim.policies.eviction.fifo import FIFO

    trace = kvsim.load_trace("synthetic", sessions=5)
    with pytest.raises(UsageError, match="takes policies by name"):
        kvsim.leaderboard(trace, eviction=FIFO())
    with pytest.raises(UsageError, match="say which policy, eviction=NAME"):
        kvsim.leaderboard(trace, "eviction.protected_hits=3")
    for line, more in (
        ("sample has no effect on kvsim leaderboard", {"sample": "1%"}),
        ("logger has no effect on kvsim leaderboard", {"logger": "wandb"}),
        ("policies are names, not None", {"policies": [None]}),
        ("the trace is already loaded", {"page_tokens": 32}),
    ):
        with pytest.raises(UsageError, match=line):
            kvsim.leaderboard(trace, **more)
    with pytest.raises(UsageError, match="takes it by its argument"):
        kvsim.leaderboard(trace, "output=elsewhere")
    with pytest.raises(UsageError, match="traces is empty"):
        kvsim.leaderboard({})
    with pytest.raises(UsageError, match=r"kvsim\.leaderboard: family: there is no 'cache'"):
        kvsim.leaderboard(trace, family="cache")
