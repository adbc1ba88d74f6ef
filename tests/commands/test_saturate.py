"""``kvsim saturate`` on a server whose capacity is known.

A request comes every second and takes 0.25 s, one at a time: up to a rate of 4 none waits, and beyond it the queue grows by one
request after another. A second server takes 0.5 s, so its capacity is a rate of 2.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kvsim.cli import main
from kvsim.report.saturation_page import write_saturation
from kvsim.results.records import read_saturation

REQUESTS = 300
SERVER = (
    "hardware=linear", "hardware.fixed_s=0.25", "hardware.prefill_token_s=0", "hardware.decode_request_s=0",
    "hardware.chunk_context_s=0", "hardware.decode_context_s=0", "engine.max_running_requests=1", "slo.ttft_s=0.3",
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "trace.jsonl", [1000 * number for number in range(REQUESTS)])
    return tmp_path


def write_trace(path: Path, arrivals_ms: list[int], **more: Any) -> None:
    """Prompts of one block each, unlike all others, with answers of one token."""
    lines = [
        json.dumps({"timestamp": at, "input_length": 512, "output_length": 1, "hash_ids": [number], **more})
        for number, at in enumerate(arrivals_ms)
    ]
    path.write_text("\n".join(lines))


def saturate(*arguments: str) -> int:
    return main(["saturate", "trace=mooncake", "trace.path=trace.jsonl", "output=out", *arguments])


def record(folder: str = "out") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "saturate.json").read_text())
    return found


def test_the_rate_is_that_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert saturate(*SERVER, "saturate.tolerance=0.02") == 0
    found = record()
    assert 4 / 1.02 <= found["rate"] <= 4 < found["fails_at"] <= found["rate"] * 1.02
    assert found["highest"]["requests_per_s"] == pytest.approx(found["rate"], rel=1e-9)
    assert found["highest"]["attainment"] == 1.0 and found["highest"]["ttft_s_p99"] == pytest.approx(0.25)
    assert found["slo"] == {"ttft_s": 0.3, "tpot_s": None, "attainment": 0.99}
    assert (found["gpus"], found["price_per_hour"], found["notes"]) == (1, 1.0, [])
    shown = capsys.readouterr().out
    assert "rate 1: 1 requests/s, 100.00% meet the objectives" in shown
    assert "out: saturate.json saturate.csv saturate.html" in shown


def test_a_job_leaves_a_page_rows_and_the_results_of_its_runs(folder: Path) -> None:
    assert saturate(*SERVER) == 0
    with (folder / "out" / "saturate.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["is_highest"] for row in rows].count("true") == 1
    assert [float(row["rate"]) for row in rows] == sorted(run["rate"] for run in record()["runs"])
    page = (folder / "out" / "saturate.html").read_text()
    assert "the highest rate at which 99.00% have TTFT &lt;= 0.3 s</h1>" in page
    assert "<dt>hardware</dt><dd>linear</dd>" in page and page.index("highest rate<b>") < page.index("Attainment by rate")
    for row in rows:
        result = json.loads((folder / "out" / row["folder"] / "result.json").read_text())
        assert result["config"]["trace"]["rate"] == float(row["rate"])
        assert result["slo"]["attainment"] == float(row["attainment"])
    page = (folder / "out" / "saturate.html").read_text()
    assert "Attainment by rate" in page and "Time to first token by rate" in page


def test_runs_that_have_finished_are_not_run_again(folder: Path) -> None:
    assert saturate(*SERVER) == 0
    before, first = record(), {path: path.stat().st_mtime_ns for path in folder.glob("out/*/result.json")}
    assert saturate(*SERVER) == 0
    assert record() == before
    assert {path: path.stat().st_mtime_ns for path in folder.glob("out/*/result.json")} == first
    assert saturate(*SERVER, "hardware.fixed_s=0.5", "slo.ttft_s=0.6") == 0, "another configuration in the same folder"
    assert 2 / 1.05 <= record()["rate"] <= 2


def test_files_of_earlier_versions_do_not_say_what_was_shed() -> None:
    assert saturate(*SERVER) == 0
    earlier = record()
    for run in [earlier["highest"], *earlier["runs"]]:
        del run["shed"]
    Path("out", "saturate.json").write_text(json.dumps(earlier))
    assert read_saturation(Path("out")) == earlier
    write_saturation(Path("out"), [("out", earlier)])
    with open("out/saturate.csv") as file:
        assert [row["shed"] for row in csv.DictReader(file)] == [""] * len(earlier["runs"])


def test_requests_that_were_refused_are_in_the_table_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """One request in service and one that waits: beyond a rate of 4, every other one is refused."""
    limited = "admission=queue_limit", "admission.waiting_requests=1", "saturate.attainment=0.7"
    assert saturate(*SERVER, *limited) == 0
    runs = record()["runs"]
    for run in runs:
        result = json.loads(Path("out", run["folder"], "result.json").read_text())
        assert (run["shed"], run["rejected"]) == (result["admission"]["shed"], 0)
    assert runs[0]["shed"] == 0 < runs[-1]["shed"]
    with open("out/saturate.csv") as file:
        assert [int(row["shed"]) for row in csv.DictReader(file)] == [run["shed"] for run in runs]
    columns = capsys.readouterr().out.rpartition("attainment")[2]
    assert "shed" in columns and "rejected" not in columns


def test_a_sweep_orders_configurations_by_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert saturate("-m", *SERVER, "slo.ttft_s=0.6", "hardware.fixed_s=0.5,0.25") == 0
    assert 2 / 1.05 <= record("out/0")["rate"] <= 2 and 4 / 1.05 <= record("out/1")["rate"] <= 4.2
    with open("out/saturate.csv") as file:
        assert {(row["job"], row["hardware.fixed_s"]) for row in csv.DictReader(file)} == {("0", "0.5"), ("1", "0.25")}
    table = capsys.readouterr().out.rpartition("kvsim saturate")[2]
    rows = [line.split()[:2] for line in table.splitlines()]
    assert rows.index(["1", "0.25"]) < rows.index(["0", "0.5"])


def test_objectives_that_differ_are_not_called_those_of_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page names the objective where all have one, and draws it as a line; otherwise it says that they differ."""
    assert saturate(*SERVER, "-m", "engine.max_running_requests=1,2") == 0
    assert "99.00% of the requests have TTFT <= 0.3 s" in capsys.readouterr().out
    page = (folder / "out" / "saturate.html").read_text()
    assert "99.00% have TTFT &lt;= 0.3 s" in page and '"objective"' in page
    assert saturate(*SERVER[:-1], "-m", "slo.ttft_s=0.3,0.6", "output=both") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "The highest rate at which requests meet the objectives of their configuration." in shown
    assert "slo ttft s" in shown, "a column"
    page = (folder / "both" / "saturate.html").read_text()
    assert "have TTFT" not in page and "the highest rate at which objectives hold, which differ" in page


def test_the_cheapest_configuration_that_holds_a_rate_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Two engines hold a rate of 6 and one does not; three hold it, too, at a higher price."""
    swept = "cluster.engines=1,2,3", "saturate.rate=6", "saturate.price_per_hour.gpu=2.5"
    assert saturate("-m", *SERVER, *swept) == 0
    assert [record(f"out/{job}")["holds_wanted_rate"] for job in range(3)] == [False, True, True]
    assert [record(f"out/{job}")["price_per_hour"] for job in range(3)] == [2.5, 5.0, 7.5]
    shown = " ".join(capsys.readouterr().out.split())
    assert "The cheapest configuration that holds a rate of 6 is job 1, at 5.00 per hour" in shown


def test_the_share_of_requests_that_must_meet_objectives_is_a_column_where_it_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert saturate("-m", *SERVER, "saturate.attainment=0.5,0.99999") == 0
    printed = capsys.readouterr().out.rpartition("kvsim saturate")[2]
    assert "saturate attainment" in printed
    assert {tuple(line.split()[:2]) for line in printed.splitlines() if line[:1].isdigit()} == {("0", "0.5"), ("1", "0.99999")}
    with open("out/saturate.csv") as file:
        assert {float(row["saturate.attainment"]) for row in csv.DictReader(file)} == {0.5, 0.99999}, "numbers, as they were set"


def test_each_of_several_wanted_rates_has_its_own_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One engine holds a rate of 3, two one of 6, and none of 20."""
    assert saturate("-m", *SERVER, "cluster.engines=1,2", "saturate.rate=20,6,3") == 0
    found = {(one["config"]["cluster"]["engines"], one["wanted_rate"]): one for one in (record(f"out/{job}") for job in range(6))}
    assert {key: one["holds_wanted_rate"] for key, one in found.items()} == {
        (1, 3): True, (1, 6): False, (1, 20): False, (2, 3): True, (2, 6): True, (2, 20): False,
    }  # fmt: skip
    printed = capsys.readouterr().out.rpartition("kvsim saturate")[2]
    rows = [line.split() for line in printed.splitlines() if line[:1].isdigit()]
    assert [(row[1], row[2], row[-1]) for row in rows] == [
        ("1", "3", "yes"), ("2", "3", "yes"), ("2", "6", "yes"), ("1", "6", "no"), ("1", "20", "no"), ("2", "20", "no"),
    ]  # fmt: skip
    answer = (
        "The cheapest configuration that holds a rate of 3 is job 2, at 1.00 per hour. "
        "The cheapest configuration that holds a rate of 6 is job 4, at 2.00 per hour. "
        "No configuration holds a rate of 20. Of those with the same price, the one with the least memory is named."
    )
    assert answer in " ".join(printed.split()) and answer in (folder / "out" / "saturate.html").read_text()
    with open("out/saturate.csv") as file:
        assert {(row["job"], row["saturate.rate"]) for row in csv.DictReader(file)} >= {("0", "20"), ("1", "6"), ("2", "3")}


def test_a_rate_has_an_answer_for_each_of_several_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    """One engine holds a rate of 6 if a request may wait 100 s, and two engines if it may not: neither answers for the other."""
    assert saturate("-m", *SERVER[:-1], "slo.ttft_s=0.3,100", "cluster.engines=1,2", "saturate.rate=6") == 0
    found = [record(f"out/{job}") for job in range(4)]
    held = {(one["slo"]["ttft_s"], one["config"]["cluster"]["engines"]): one["holds_wanted_rate"] for one in found}
    assert held == {(0.3, 1): False, (0.3, 2): True, (100, 1): True, (100, 2): True}
    printed = " ".join(capsys.readouterr().out.split())
    for limit, job, price in (("0.3", 1, "2.00"), ("100", 2, "1.00")):
        assert f"a rate of 6 with TTFT <= {limit} s for 99.00% of the requests is job {job}, at {price} per hour" in printed


def test_a_rate_that_no_configuration_holds_is_told_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert saturate("-m", *SERVER, "cluster.engines=1,2", "saturate.rate=20") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "No configuration holds a rate of 20. out:" in printed and "saturate rate" not in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (SERVER[:-1], "slo: set slo.ttft_s or slo.tpot_s"),
        ((*SERVER, "saturate.rate=2", "trace.rate=2"), "trace.rate has no effect with saturate.rate"),
        ((*SERVER, "timeline=true"), "timeline has no effect on kvsim saturate"),
        ((*SERVER, "saturate.attainment=2"), "saturate.attainment must be above 0 and at most 1"),
        ((*SERVER, "saturate.price_per_hour.gpu=-1"), "gpu must be 0 or more"),
    ],
)
def test_mistakes_are_found_before_any_run(
    arguments: tuple[str, ...], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert saturate(*arguments) == 2
    assert expected in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_requests_that_all_come_at_once_have_no_rate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(folder / "trace.jsonl", [0] * 10)
    assert saturate(*SERVER) == 2
    assert "all requests arrive at once" in capsys.readouterr().err


def test_requests_that_arrive_at_once_are_no_load_and_the_notes_say_so(folder: Path) -> None:
    """Five come every 3 s: at any rate, the last one waits for four, 1 s in all. Alone, or spread, none waits."""
    write_trace(folder / "trace.jsonl", [3000 * (number // 5) for number in range(REQUESTS)])
    assert saturate(*SERVER, "slo.ttft_s=0.8") == 0
    found = record()
    assert found["rate"] is None and found["runs"][0]["attainment"] == pytest.approx(0.6)
    notes = " ".join(found["notes"])
    assert "5.0 requests share a time, and times step by 3 s" in notes
    assert "run alone, 100.00% of the requests meet the objectives" in notes and "without load" not in notes
    assert saturate(*SERVER, "slo.ttft_s=0.8", "trace.spread=true") == 0
    assert record()["rate"] > 1 and not record()["notes"]


def test_prompts_that_are_too_long_by_themselves_are_named(folder: Path) -> None:
    """A token takes 1 ms, and a step 1 ms more: 512 tokens half a second, 1,024 more than a second. One of ten has 1,024."""
    lines = [
        {"timestamp": 1000 * number, "output_length": 1, "input_length": size, "hash_ids": list(range(2 * number, end))}
        for number in range(100)
        for size in [1024 if number % 10 == 0 else 512]
        for end in [2 * number + size // 512]
    ]
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert saturate(*SERVER, "hardware.fixed_s=0.001", "hardware.prefill_token_s=0.001", "slo.ttft_s=0.6", "page_tokens=512") == 0
    assert record()["notes"][-1] == (
        "even without load, 10.0% of the prompts, all of 1,024 tokens or more, take longer than 0.6 s to the first token. Best "
        "attainable: 90.00%"
    )
