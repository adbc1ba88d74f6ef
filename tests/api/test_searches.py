"""Searches, validations and reports from Python do what the commands do.

A request comes every second and takes 0.25 s of an engine, one at a time: up to a rate of 4 none waits.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.cli import main
from kvsim.core.request import Request
from kvsim.errors import UsageError, WrongResult
from kvsim.policies.eviction.fifo import FIFO
from kvsim.results.observed import ServerFacts
from kvsim.results.observed_file import write_observed
from kvsim.trace.base import Trace
from tests.report.servers.observed_runs import observed
from tests.reused_compositions import compositions_are_reused

SERVER: dict[str, Any] = {
    "hardware": "linear", "hardware.fixed_s": 0.25, "hardware.prefill_token_s": 0, "hardware.decode_request_s": 0,
    "hardware.chunk_context_s": 0, "hardware.decode_context_s": 0, "engine.max_running_requests": 1, "slo.ttft_s": "300ms",
}  # fmt: skip
PRICES = {"per": "hour", "currency": "USD", "gpus": {"h100": 3, "h200": 2}, "choices": {"engines": [1, 2]}}
TIMES = ("load_s", "wall_s", "requests_per_s", "command_line", "versions")
PAGES = {"verified_pages": 9, "wrong_words": 0, "wrong_pages": 0, "verified_states": 0, "wrong_states": 0}
FOUND = {"device": "NVIDIA H200", "disk_faults": {}, **PAGES}


@pytest.fixture(autouse=True, scope="module")
def compositions() -> Iterator[None]:
    with compositions_are_reused():
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [{"timestamp": 1000 * at, "input_length": 512, "output_length": 1, "hash_ids": [at]} for at in range(100)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


@pytest.fixture
def temporary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary folders."""
    place = folder / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


def words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def test_saturate_finds_what_the_command_finds(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[int] = []
    found = kvsim.saturate("trace.jsonl", SERVER, saturate={"tolerance": 0.02}, advance=done.append)
    assert capsys.readouterr().out == ""
    assert 4 / 1.02 <= found.rate <= 4 < found.fails_at
    assert done == list(range(1, len(found.runs) + 1))
    assert found.best.ttft_p99 == pytest.approx(0.25) and found.best.attainment == 1.0
    assert found.best.settings == {"trace.rate": f"{found.rate:g}"} and len(found.best.requests) == 100
    assert (
        found.table["rate"].tolist() == sorted(found.table["rate"]) == [float(run.settings["trace.rate"]) for run in found.runs]
    )
    assert found.plot("time to first token by rate").layout.xaxis.title.text == "rate"
    assert repr(found).startswith("Saturation(highest rate ") and "<table>" in found._repr_html_()
    arguments = ["trace=mooncake", "trace.path=trace.jsonl", *words(SERVER), "saturate.tolerance=0.02", "output=out"]
    assert main(["saturate", *arguments]) == 0
    written = json.loads(Path("out/saturate.json").read_text())
    assert {key: value for key, value in written.items() if key not in TIMES} == {
        key: value for key, value in found.record.items() if key not in TIMES
    }
    found.save("kept")
    assert json.loads(Path("kept/saturate.json").read_text()) == found.record
    assert len(list(temporary.iterdir())) == 1
    del found
    assert not list(temporary.iterdir()), "a temporary folder goes with its result"


def test_what_a_search_has_finished_is_not_run_again() -> None:
    first = kvsim.saturate("trace.jsonl", SERVER, output="out")
    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("*/result.json")}
    again = kvsim.saturate("trace.jsonl", SERVER, output="out")
    assert again.rate == first.rate and before
    assert {path: path.stat().st_mtime_ns for path in Path("out").glob("*/result.json")} == before


def test_a_search_takes_policies_that_are_objects() -> None:
    named = kvsim.saturate("trace.jsonl", SERVER, eviction="fifo")
    passed = kvsim.saturate("trace.jsonl", SERVER, eviction=FIFO())
    assert passed.rate == named.rate and passed.best.choices["eviction"] == "FIFO"


def test_requests_of_a_program_arrive_at_other_rates_too(temporary: Path) -> None:
    requests = [
        Request(index=at, arrival_s=float(at), prompt_tokens=512, output_tokens=1, runs=((32 * at, 32),), prompt_pages=32)
        for at in range(100)
    ]
    made = Trace(name="made", requests=requests, page_tokens=16, block_tokens=None)
    found = kvsim.saturate(made, SERVER)
    assert found.rate == kvsim.saturate("trace.jsonl", SERVER).rate
    assert found.best.config["trace"]["name"] == "made" and requests[1].arrival_s == 1.0


def test_requests_of_a_program_are_told_apart() -> None:
    trace = kvsim.load_trace("trace.jsonl")
    for number in (10, 20):
        made = Trace(name="made", requests=trace.requests[:number], page_tokens=16, block_tokens=None)
        (run,) = kvsim.sweep(made, {"eviction": ["lru"]}, output="swept")
        assert run.record["requests"] == number and run.choices["trace"] == "made"


def test_a_failed_search_leaves_no_folder(temporary: Path) -> None:
    with pytest.raises(UsageError, match=r"slo: set slo\.ttft_s or slo\.tpot_s, or both"):
        kvsim.saturate("trace.jsonl")
    with pytest.raises(UsageError, match="all requests arrive at once"):
        kvsim.saturate(kvsim.trace_from_tokens([[1, 2], [3, 4]]), SERVER)
    with pytest.raises(UsageError, match=r"prices\.gpus|prices: gpus"):
        kvsim.plan("trace.jsonl", prices={"per": "hour"}, slo={"ttft_s": 1})
    assert not list(temporary.iterdir())


def test_plan_finds_what_the_command_finds(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"slo.ttft_s": 2, "saturate.attainment": 0.9}
    Path("prices.yaml").write_text(json.dumps(PRICES))
    done: list[int] = []
    found = kvsim.plan("trace.jsonl", settings, prices=PRICES, advance=done.append)
    assert capsys.readouterr().out == "" and len(done) == len([one for one in found.candidates if one["folder"]])
    assert (found.cheapest["gpu"], found.cheapest["engines"], found.cheapest["price"]) == ("h200", 1, 2.0)
    assert found.best.attainment >= 0.9 and "vllm" in json.dumps(found.start)
    assert found.table["price"].tolist() == [2.0, 3.0, 4.0, 6.0]
    assert "Number 0 is the cheapest that holds" in repr(found) and found.plot().data
    arguments = ["trace=mooncake", "trace.path=trace.jsonl", *words(settings), "output=out"]
    assert main(["plan", "prices=prices.yaml", *arguments]) == 0
    written = json.loads(Path("out/plan.json").read_text())
    assert written["candidates"] == found.record["candidates"] and written["cheapest"] == found.record["cheapest"]
    with pytest.raises(UsageError, match=r"eviction: kvsim\.plan takes policies by name"):
        kvsim.plan("trace.jsonl", settings, prices=PRICES, eviction=FIFO())
    with pytest.raises(UsageError, match=r"saturate\.rate: the rate that must be held is that of the trace"):
        kvsim.plan("trace.jsonl", settings, prices=PRICES, saturate={"rate": 2})
    with pytest.raises(UsageError, match=r"hardware: leave it out: prices chooses"):
        kvsim.plan("trace.jsonl", settings, prices=PRICES, hardware="h100")


def recording(wrong_pages: int = 0) -> str:
    """Write a run as one on hardware, and return its folder."""
    result = kvsim.simulate("trace.jsonl", SERVER_WITHOUT_SLO, output="hardware")
    result.record["config"]["substrate"] = "hardware"
    result.record["hardware"] = FOUND | {"wrong_pages": wrong_pages, "wrong_words": wrong_pages}
    result.write("hardware")
    return "hardware"


SERVER_WITHOUT_SLO = {key: value for key, value in SERVER.items() if key != "slo.ttft_s"}


def test_validate_compares_with_recordings(capsys: pytest.CaptureFixture[str]) -> None:
    measured = recording()
    found = kvsim.validate("trace.jsonl", SERVER_WITHOUT_SLO, validate={"measured": measured}, output="out")
    assert capsys.readouterr().out == "" and Path("out/validate.html").exists()
    assert found.holds and found.failures == "" and found.identical == 1.0
    assert {check["name"] for check in found.checks} >= {"identical", "ttft_p50"}
    assert repr(found) == "Validation(within its tolerances)" and found.plot().data
    off = kvsim.validate("trace.jsonl", SERVER_WITHOUT_SLO | {"hardware.fixed_s": 0.5}, validate={"measured": measured})
    assert not off.holds and "ttft_p50 is" in off.failures
    with pytest.raises(WrongResult, match="wrong"):
        kvsim.validate("trace.jsonl", SERVER_WITHOUT_SLO, validate={"measured": recording(1)})


OF_CLIENT = {"hardware": "h100", "model": "llama3_8b", "validate.ttft_p50": 100, "validate.ttft_p99": 100}


def recording_of_a_client() -> str:
    """Write a trace, and a run of it against vLLM, and return the name of the run's file."""
    facts = ServerFacts(engine="vllm", page_tokens=16, capacity_tokens=4096)
    run = observed([0] * 10, output=4, token_s=0.01, ttft_s=[0.1] * 10)
    write_observed(Path("run.jsonl.gz"), replace(run, facts=facts, prompt_tokens=np.full(10, 85)))
    lines = [{"timestamp": 150 * at, "token_ids": [1000 * at + n for n in range(85)], "output_length": 4} for at in range(10)]
    Path("tokens.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return "run.jsonl.gz"


def test_validate_compares_with_results_of_a_client(capsys: pytest.CaptureFixture[str]) -> None:
    settings, _ = OF_CLIENT, recording_of_a_client()
    found = kvsim.validate("tokens.jsonl", settings, results="run.jsonl.gz")
    assert capsys.readouterr().out == ""
    assert found.choices["preset"] == "vllm" and found.config["tiers"]["gpu"]["capacity"] == "4096tokens"
    assert found.given_order["differing"] == [0] and found.holds
    loaded = kvsim.validate(kvsim.load_trace("tokens.jsonl", page_tokens=32), settings, results="run.jsonl.gz")
    assert any("age_tokens=32 is simulated, but the server has 16" in note for note in loaded.notes)


def test_report_puts_folders_and_results_side_by_side(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = kvsim.load_trace("synthetic", sessions=20)
    sizes = ({"tiers.gpu.capacity": "8000pages"}, {"tiers.gpu.capacity": "9000pages"})
    lru, fifo = (kvsim.replay(trace, sizes[0], eviction=name) for name in ("lru", "fifo"))
    kvsim.replay(trace, sizes[1], output="larger")
    swept = kvsim.sweep(trace, {"eviction": ["lru", "mru"]}, sizes[1], output="swept")
    found = kvsim.report(lru, fifo, Path("larger"), swept, output="page.html")
    assert capsys.readouterr().out == ""
    assert [run.hit_rate for run in found] == [
        lru.hit_rate,
        fifo.hit_rate,
        swept[0].hit_rate,
        swept[0].hit_rate,
        swept[1].hit_rate,
    ]
    assert all(rate > 0 for rate in found.table["belady_hit_rate"])
    assert repr(found).startswith("Report(5 runs over ") and str(temporary) not in Path("page.html").read_text()
    assert found.write("pages").exists() and found.write("pages") == Path("pages/report.html")
    del found
    assert not list(temporary.iterdir())
    with pytest.raises(UsageError, match="nowhere: there is no such folder"):
        kvsim.report("nowhere")
    with pytest.raises(UsageError, match=r"kvsim\.report: give the folders"):
        kvsim.report()
    with pytest.raises(UsageError, match=r"kvsim\.report: 3 is no folder"):
        kvsim.report(3)  # type: ignore[arg-type]


def test_the_room_of_reports_and_the_function_are_both_there() -> None:
    import kvsim.report.figure as figure

    assert callable(figure.laid_out) and callable(kvsim.report)
    trace = kvsim.load_trace("synthetic", sessions=5)
    assert len(kvsim.report(kvsim.replay(trace))) == 1


def test_a_run_keeps_the_files_that_it_came_with(temporary: Path) -> None:
    trace = kvsim.load_trace("trace.jsonl")
    room = {"tiers.gpu.capacity": "8000pages"}
    runs = [
        kvsim.saturate(trace, SERVER).best,
        kvsim.sweep(trace, {"eviction": ["lru"]}, room)[0],
        kvsim.report(kvsim.replay(trace, room))[0],
        kvsim.report(kvsim.sweep(trace, {"eviction": ["lru"]}, room))[0],
        kvsim.plan(trace, {"slo.ttft_s": 2, "saturate.attainment": 0.9}, prices=PRICES).best,
    ]
    assert [len(run.requests) for run in runs] == [100] * 5 and all(run.plot().data for run in runs)
    del runs
    assert not list(temporary.iterdir())


def test_a_server_and_results_are_named_as_a_program_has_them(folder: Path) -> None:
    Path("with space").mkdir()
    moved = Path(recording_of_a_client()).rename("with space/x.gz")
    measured = recording_of_a_client()
    names: list[Any] = [str(folder / measured), folder / measured, [measured], moved]
    for name in names:
        assert kvsim.validate("tokens.jsonl", OF_CLIENT, results=name).holds, name
    with pytest.raises(UsageError, match=r"http://localhost:1\b.*(refused|connect)"):
        kvsim.validate("tokens.jsonl", OF_CLIENT, server="http://localhost:1")
