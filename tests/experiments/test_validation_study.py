"""The validation study: what it draws, what it serves and skips, and what its tables claim."""

import importlib.util
import json
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.report.validation.recording import Recording
from kvsim.report.validation.repeated import compare_repeated
from kvsim.results.result import RunRecord, to_json
from kvsim.results.statistics import student_t
from kvsim.results.tolerances import Tolerances
from tests.report.validation.test_repeated import SIMULATED, measured, times
from tests.workloads import conversations, write_trace

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "hardware"
PARTS = ("validation_draw", "validation_tables")


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("study_validation", FOLDER / "validation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys.modules["validation_tables"], "take_screenshot", lambda *_, **__: False)
    yield module
    for name in PARTS:
        sys.modules.pop(name, None)


@pytest.fixture
def traces(tmp_path: Path) -> dict[str, Path]:
    """Conversations in blocks of 512 tokens, and sessions of ever longer prompts in blocks of 64."""
    requests = conversations(requests=60, page_tokens=512, gap_s=1.0)
    sessions = [
        {"id": f"s{number}", "requests": [
            {"t": 2.0 * turn, "in": 640 * (turn + 1), "out": 80, "api_time": 1.0, "hash_ids_rle": [1, 10 * (turn + 1)]}
            for turn in range(12)
        ]}
        for number in range(3)
    ]  # fmt: skip
    sessions.append({"id": "long", "requests": [{"t": 0.0, "in": 64_000, "out": 8, "hash_ids_rle": [1, 1000]}]})
    agents = tmp_path / "agents.jsonl"
    agents.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    return {"conversation": write_trace(tmp_path / "conversation.jsonl", requests), "agents": agents}


@pytest.fixture
def small(study: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    draws = sys.modules["validation_draw"]
    monkeypatch.setattr(draws, "COUNTS", (8, 16, 24))
    return draws


def test_as_many_requests_as_end_in_time_are_taken(
    small: ModuleType, traces: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request takes half a second: 16 of the counts 8, 16 and 24 end in ten seconds, and 12 are three quarters of that."""

    def simulated_s(overrides: list[str]) -> float:
        return 0.5 * int(dict(word.split("=", 1) for word in overrides)["trace.limit"])

    monkeypatch.setattr(small, "simulated_s", simulated_s)
    choices = {"shares": {"gpu": 0.5, "cpu": 0.25, "disk": 1.0}, "eviction": "arc", "placement": "write_back", "prefetch": "none"}
    settings = ["trace=mooncake", f"trace.path={traces['conversation']}"]
    sizes = [small.sized("one", "conversation", settings, choices, load, 10.0, 3) for load in (1.0, 0.75)]
    assert [one.requests for one in sizes] == [16, 12] and sizes[0].refused == 3
    assert small.sized("one", "conversation", settings, choices, 1.0, 3.9, 0) is None, "eight take longer"
    words = dict(word.split("=", 1) for word in sizes[0].overrides)
    whole = kvsim.load_trace("mooncake", path=str(traces["conversation"]), limit=16).requests
    assert float(words["trace.rate"]) == pytest.approx(whole[-1].arrival_s / 8.0, rel=1e-3), "arrivals over 8 of 10 seconds"
    used = max(start + pages for request in whole for start, pages in request.runs)
    assert [words[f"tiers.{tier}.capacity"] for tier in ("cpu", "disk")] == [f"{used // 4}pages", f"{used}pages"]
    assert int(words["tiers.gpu.capacity"].removesuffix("pages")) >= max(used // 2, 1.25 * max(one.prompt_pages for one in whole))


@pytest.mark.long
def test_what_is_drawn_depends_on_the_seed_alone_and_runs_in_time(
    small: ModuleType, traces: dict[str, Path], tmp_path: Path
) -> None:
    drawn = list(small.draw(3, 4, traces, 5.0, tmp_path / "one"))
    again = list(small.draw(3, 4, traces, 5.0, tmp_path / "two"))
    assert [one.name for one in drawn] == ["drawn-01", "drawn-02", "drawn-03", "drawn-04"]
    without_path = [[[word for word in one.overrides if "trace.path" not in word] for one in some] for some in (drawn, again)]
    assert without_path[0] == without_path[1]
    assert len({one.trace for one in drawn}) > 1, "traces of several kinds"
    for one in drawn:
        assert small.simulated_s(one.overrides) <= 5.0 and 8 <= one.requests <= 24
        assert any(word == "model=llama3_8b" for word in one.overrides)


def test_all_traces_keep_their_reuse_in_shorter_requests(small: ModuleType, traces: dict[str, Path], tmp_path: Path) -> None:
    for name, full in (("conversation", ("mooncake", 512)), ("agents", ("weka", 64))):
        (tmp_path / name).mkdir()
        rng = np.random.default_rng(0)
        words = dict(word.split("=", 1) for word in small.makers_of(traces, tmp_path / name)[name](rng, "drawn"))
        path = Path(words["trace.path"])
        shorter = kvsim.load_trace(full[0], path=str(path), block_tokens=full[1] // 4, page_tokens=full[1] // 4).requests
        assert len(shorter) > 20 and min(request.arrival_s for request in shorter) == 0
        assert max(request.prompt_pages for request in shorter) > 2
        if name == "agents":
            assert len(path.read_text().splitlines()) == 3, "without the session whose first prompt is too long"
            assert {(one.prompt_tokens, one.output_tokens) for one in shorter} == {(160 * turn, 10) for turn in range(1, 13)}
        else:
            whole = kvsim.load_trace(full[0], path=str(traces[name]), page_tokens=512).requests
            pages = [one.prompt_pages for one in whole]
            assert [one.prompt_pages for one in shorter] in [pages[at : at + len(shorter)] for at in range(len(pages))]


def record(simulated: list[Recording], real: list[Recording], **tolerances: float) -> RunRecord:
    return compare_repeated(simulated, real, Tolerances(**tolerances), "kvsim validate")


GOOD = record(SIMULATED, [measured(times(10.0)), measured(times(10.5))])
OFF = record(SIMULATED, [measured(times(110.0)), measured(times(111.0))])


def part(study: ModuleType, name: str, records: dict[str, RunRecord], *missing: str) -> Any:
    wanted = {key: ["trace=synthetic"] for key in (*records, *missing)}
    return sys.modules["validation_tables"].Part(name=name, text="A text.", wanted=wanted, records=records)


def failing(study: ModuleType, *parts: Any) -> list[str]:
    return [claim.text.split(" is ")[0] for claim in study.claims(parts) if not claim.holds]


def test_every_configuration_must_hold_and_be_measured(study: ModuleType) -> None:
    assert failing(study, part(study, "drawn", {"a": GOOD, "b": GOOD})) == []
    assert failing(study, part(study, "drawn", {"a": GOOD, "b": OFF})) == ["drawn: ttft_p50", "drawn: ttft_p99"]
    assert len(failing(study, part(study, "drawn", {"a": GOOD}, "b"))) == 5
    wrong = GOOD | {"hardware": [GOOD["hardware"][0] | {"wrong_words": 1}]}
    assert failing(study, part(study, "drawn", {"a": wrong})) == ["bytes: no word of a reused page or state"]


def ranked(*medians: tuple[float, float]) -> dict[str, RunRecord]:
    """Records of policies whose median is ``simulated`` in all simulations, and up to a tenth from ``measured``."""
    from tests.report.validation.test_repeated import run

    return {
        f"policy {number}": record(
            [run(times(simulated - 1))] * 2, [measured(times(real - 1 + more)) for more in (-0.1, 0.0, 0.1)]
        )
        for number, (simulated, real) in enumerate(medians)
    }


def test_policies_that_real_runs_tell_apart_keep_their_order(study: ModuleType) -> None:
    assert failing(study, part(study, "ranking", ranked((5, 6), (7, 7.5), (8, 9)))) == []
    assert len(failing(study, part(study, "ranking", ranked((5, 6), (9, 7.5), (8, 9))))) == 1, "the last two the other way round"
    assert failing(study, part(study, "ranking", ranked((5, 6), (4.9, 6.05), (8, 9)))) == [], "the first two are not told apart"
    assert len(failing(study, part(study, "ranking", ranked((5, 6), (5.1, 6), (5.2, 6))))) == 1, "none are"
    assert len(failing(study, part(study, "ranking", ranked((5, 6)), "policy 2"))) == 1
    pairs = sys.modules["validation_tables"].ranked_pairs(ranked((5, 6), (7, 7.5)))
    assert pairs[0]["simulated"] == pytest.approx(np.log(5 / 7)) and pairs[0]["real"] == pytest.approx(np.log(6 / 7.5), abs=1e-3)
    spread = np.sqrt(np.mean([np.var(np.log(real + np.array([-0.1, 0, 0.1])), ddof=1) for real in (6, 7.5)]))
    assert pairs[0]["half_width"] == pytest.approx(student_t(4) * spread * np.sqrt(2 / 3))


Serve = Callable[[list[str]], int]


DESCRIBED: dict[str, dict[str, float]] = {
    name: {"flops_per_s": float(number)}
    for number, name in enumerate(["h200_measured", "h200_measured_hybrid", "mine", "mine_hybrid"])
}
"""Descriptions of machines."""


@pytest.fixture(autouse=True)
def descriptions(study: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "described", DESCRIBED.__getitem__)


def served(folder: Path, called: list[list[str]], code: int = 0) -> Serve:
    """A ``kvsim validate`` that writes a record."""

    def command(words: list[str]) -> int:
        called.append(words)
        output = Path(next(word for word in words if word.startswith("output=")).removeprefix("output="))
        if code != 2:
            (output / "hardware").mkdir(parents=True, exist_ok=True)
            name = next(word for word in words if word.startswith("hardware=")).removeprefix("hardware=")
            (output / "validate.json").write_text(to_json(GOOD | {"config": {"hardware": DESCRIBED[name]}}))
        return code

    return command


def drawn_before(study: ModuleType, folder: Path) -> list[str]:
    """A folder with a draw of two configurations, and the options that use it."""
    folder.mkdir()
    one = {
        "name": "drawn-01",
        "trace": "synthetic",
        "requests": 8,
        "overrides": ["trace=synthetic", "eviction=arc"],
        "refused": 0,
    }
    other = one | {"name": "drawn-02", "overrides": ["trace=synthetic", "tiers.disk.capacity=9pages", "placement=exclusive"]}
    rule = {"seed": 1, "count": 2, "seconds": 8.0}
    (folder / "drawn.json").write_text(json.dumps({"rule": rule, "drawn": [one, other]}))
    (folder / "picked.json").write_text(json.dumps({"ranking": "drawn-02", "hybrid": "drawn-02"}))
    return ["--count", "2", "--folder", str(folder), "--output", str(folder / "tables")]


def test_what_has_been_served_is_not_served_again(study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, called = drawn_before(study, tmp_path / "runs"), list[list[str]]()
    monkeypatch.setattr(study, "kvsim", served(tmp_path, called))
    assert study.main([*options, "--parts", "drawn", "--most-seconds", "1000"]) == 0 and len(called) == 2
    assert (
        "validate.runs=3" in called[0]
        and "hardware=h200_measured" in called[0]
        and called[0][1:3] == ["trace=synthetic", "eviction=arc"]
    )
    assert study.main([*options, "--parts", "drawn"]) == 0 and len(called) == 2
    assert study.main([*options, "--parts", "drawn", "ranking"]) == 1 and len(called) == 6, "four policies on the second draw"
    assert [words[3:5] for words in called[2:]] == [
        [f"placement={placement}", f"scheduling={order}"]
        for placement in ("write_back", "write_through")
        for order in ("fcfs", "shortest_prefill")
    ]
    page = (tmp_path / "runs" / "tables" / "validation_drawn.md").read_text()
    assert "| drawn-01 | 4 | 100 ± 0, +0.00 |" in page and "not told apart" in page and "`eviction=arc`" in page
    rows = (tmp_path / "runs" / "tables" / "validation_drawn.csv").read_text().splitlines()
    assert len(rows) == 1 + 6 * len(GOOD["figures"])


def test_recorded_runs_are_simulated_again(study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, called = drawn_before(study, tmp_path / "runs"), list[list[str]]()
    (tmp_path / "runs" / "drawn" / "drawn-02" / "hardware").mkdir(parents=True)
    monkeypatch.setattr(study, "kvsim", served(tmp_path, called))
    assert study.main([*options, "--parts", "drawn", "--again", "--hardware", "mine"]) == 1, "the first has not been measured"
    assert len(called) == 1 and "hardware=mine" in called[0]
    assert f"validate.measured={tmp_path / 'runs' / 'drawn' / 'drawn-02' / 'hardware'}" in called[0]


def test_simulations_of_another_description_are_not_mixed(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = drawn_before(study, tmp_path / "runs")
    monkeypatch.setattr(study, "kvsim", served(tmp_path, []))
    assert study.main([*options, "--parts", "chosen", "--hardware", "mine"]) == 0
    with pytest.raises(SystemExit, match="not simulated with hardware=h200_measured as it is now: simulate it with --again"):
        study.main([*options, "--parts", "chosen", "--read"])
    assert study.main([*options, "--parts", "chosen", "--read", "--hardware", "mine"]) == 0
    monkeypatch.setitem(DESCRIBED, "mine", {"flops_per_s": 9.0})
    with pytest.raises(SystemExit, match="not simulated with hardware=mine as it is now"):
        study.main([*options, "--parts", "chosen", "--read", "--hardware", "mine"])
    assert study.main([*options, "--parts", "chosen", "--again", "--hardware", "mine"]) == 0
    monkeypatch.setitem(DESCRIBED, "mine", {"flops_per_s": 10.0})
    assert study.main([*options, "--parts", "chosen", "--read", "--hardware", "mine", "--more", "hardware.flops_per_s=9"]) == 0


def test_another_draw_needs_another_folder_and_a_draw_needs_its_traces(study: ModuleType, tmp_path: Path) -> None:
    options = drawn_before(study, tmp_path / "runs")
    with pytest.raises(SystemExit, match="choose another --folder"):
        study.main([*options, "--seed", "2"])
    with pytest.raises(SystemExit, match="--conversation: set it to the file"):
        study.main(["--folder", str(tmp_path / "other")])


def test_the_ranking_and_the_hybrid_model_get_draws_by_simulation_alone(
    small: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the third differs much between policies, and only the fourth and the fifth load states from the CPU tier."""
    cpu, disk = "tiers.cpu.capacity=10pages", "tiers.disk.capacity=10pages"
    tiers = [["model=llama3_8b"], [cpu, disk], [cpu, disk, "eviction=arc"], [cpu, "trace.seed=4"], [cpu, "trace.seed=5"], [cpu]]
    draws = [
        small.Drawn(name=f"draw {number}", trace="synthetic", requests=8, overrides=words, refused=0)
        for number, words in enumerate(tiers, start=1)
    ]

    def simulated(words: list[str]) -> dict[str, Any]:
        median = 3.0 if "eviction=arc" in words and "scheduling=fcfs" in words else 1.0
        loads = any(word.startswith("trace.seed") for word in words) and "tiers.cpu.capacity=80pages" in words
        return {"ttft_s": {"p50": median}, "links": {"gpu-cpu": {}} | ({"cpu-gpu": {}} if loads else {})}

    monkeypatch.setattr(small, "simulated", simulated)
    assert small.pick_to_rank(draws) == "draw 3" and small.pick_to_rank(draws[3:]) is None
    assert small.pick_for_hybrid(draws[::-1]) == "draw 5" and small.pick_for_hybrid(draws) == "draw 4"
    assert small.pick_for_hybrid(draws[:3]) is None


def test_the_archive_has_the_real_runs_and_depends_on_their_content_alone(
    study: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = []
    for place in ("one", "two"):
        folder = tmp_path / place
        for number in (2, 1) if place == "one" else (1, 2):
            run = folder / "drawn" / "drawn-01" / "hardware" / str(number)
            run.mkdir(parents=True)
            (run / "result.json").write_text(f"result {number}")
            (run / "requests.csv.gz").write_text(f"requests {number}")
            (run / "report.html").write_text("not packed")
        (folder / "drawn" / "drawn-01" / "simulated" / "1").mkdir(parents=True)
        (folder / "drawn" / "drawn-01" / "simulated" / "1" / "result.json").write_text("not packed")
        assert study.main(["--pack", "--folder", str(folder), "--output", str(folder)]) == 0
        packed.append((folder / "validation_recorded.tar.xz").read_bytes())
    assert packed[0] == packed[1] and "2 runs" in capsys.readouterr().out
    with tarfile.open(tmp_path / "one" / "validation_recorded.tar.xz") as archive:
        names = [f"drawn/drawn-01/hardware/{number}/{name}" for number in (1, 2) for name in ("requests.csv.gz", "result.json")]
        assert sorted(archive.getnames()) == names
        assert {(member.mtime, member.uid, member.uname) for member in archive} == {(0, 0, "")}
    with pytest.raises(SystemExit, match="--pack: no real runs"):
        study.main(["--pack", "--folder", str(tmp_path / "three"), "--output", str(tmp_path)])
