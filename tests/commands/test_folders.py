"""The folders of runs and sweeps: written by one process at a time, all or nothing, and read whatever is in their files."""

import csv
import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import kvsim
from kvsim.cli import main
from kvsim.errors import UsageError
from kvsim.files.locking import Lock
from tests.results.damage import DAMAGES, QUICK, SOME_DAMAGES, copied

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "kvsim"]
LINE = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'
SMALL = ("trace.sessions=3", "tiers.gpu.capacity=6000pages")
SWEPT = ("-m", "trace.sessions=3", "tiers.gpu.capacity=3000pages,6000pages")
REWRITTEN = ("sweep.json",)
"""What a sweep writes when it begins."""
MEASURED = ("load_s", "wall_s", "requests_per_s")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep of two jobs."""
    folder = tmp_path_factory.mktemp("finished") / "sweep"
    assert main(["replay", *SWEPT, f"output={folder}"]) == 0
    return folder


@contextmanager
def started(*arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """Another process with a command; it ends with the block."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def content(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name, those of kvsim's own included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open() as file:
        return [{key: value for key, value in row.items() if key not in MEASURED} for row in csv.DictReader(file)]


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


# --- two processes -----------------------------------------------------------------------------------------------------


HOLD = """
import sys
from pathlib import Path
from kvsim.files.locking import Lock

with Lock(Path(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(folder: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Another process that holds a folder; it is killed at the end of the block."""
    place = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], env=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout and holder.stdout.readline()
            yield holder
        finally:
            holder.kill()


@pytest.mark.parametrize("command", ["replay", "curve", "saturate"])
def test_a_second_run_into_a_folder_is_told_who_holds_it(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["trace.sessions=3", *(["slo.ttft_s=1"] if command == "saturate" else []), "output=run"]
    with held("run") as holder:
        assert main([command, *settings]) == 2
        (line,) = said(capsys)
        assert line.startswith(f"kvsim: output: run is in use by process {holder.pid} on ")
    assert main([command, *settings]) == 0, "the killed one does not block the folder"


@pytest.mark.long
def test_of_many_runs_at_once_the_folder_has_one_whole(folder: Path) -> None:
    """Six processes, each with its own number of requests. Those that come too late say so."""
    with ExitStack() as stack:
        sizes = [f"trace.sessions={5 * number}" for number in range(1, 7)]
        runs = [stack.enter_context(started("simulate", size, *SMALL[1:], "output=run")) for size in sizes]
        ends = [(run.communicate(timeout=300)[1].splitlines(), run.returncode) for run in runs]
    assert ([], 0) in ends
    assert all(code == 2 and len(lines) == 1 and "is in use by" in lines[0] for lines, code in ends if code)
    record = json.loads((folder / "run" / "result.json").read_text())
    with gzip.open("run/requests.csv.gz", "rt") as file:
        assert len(list(csv.DictReader(file))) == record["requests"]
    assert f"{record['requests']:,} counted" in (folder / "run" / "report.html").read_text()


def test_two_sweeps_in_one_folder(folder: Path, sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second ends before its first job. Reports on the folder are not disturbed."""
    own = copied(sweep, folder / "sweep")
    before = content(own)
    with held("sweep") as holder:
        assert main(["replay", *SWEPT, "output=sweep"]) == 2
        (line,) = said(capsys)
        assert f"output: sweep is in use by process {holder.pid} on " in line
        with pytest.raises(UsageError, match="is in use by process"):
            kvsim.sweep(kvsim.load_trace(sessions=3), {"eviction": ["lru"]}, output="sweep")
        assert main(["report", "sweep", "output=elsewhere.html"]) == 0
    assert {name: before[name] for name in before if "/" in name} == {name: content(own)[name] for name in before if "/" in name}
    assert main(["replay", *SWEPT, "output=sweep"]) == 0, "the killed one does not block the folder"
    assert table(own) == table(sweep)


def test_a_job_whose_folder_another_run_holds_fails_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Lock(folder / "sweep" / "1", again=False):
        held = subprocess.run([*COMMAND, "replay", *SWEPT, "output=sweep"], env={**os.environ, "PYTHONPATH": str(ROOT)},
                              capture_output=True, text=True, timeout=60)  # fmt: skip
    assert held.returncode == 2
    assert f"job 1 failed: output: sweep/1 is in use by process {os.getpid()} on " in held.stderr
    assert [row["status"] for row in table(folder / "sweep")] == ["finished", "failed"]


# --- writes that fail --------------------------------------------------------------------------------------------------


@contextmanager
def longest_file(n_bytes: int) -> Iterator[None]:
    """No file can be longer than this: what a full disk says, this says, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("arguments", "limits"),
    [
        (("simulate", *SMALL, "timeline=true"), (500, 20_000)),
        (("replay", *SWEPT), (3000,)),
        (("curve", SMALL[0]), (0,)),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else "",
)
def test_a_disk_that_is_full_costs_no_earlier_result(
    arguments: tuple[str, ...], limits: tuple[int, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "output=run"]) == 0
    before = content(folder / "run")
    capsys.readouterr()
    for limit in limits:
        with longest_file(limit):
            assert main([*arguments, "seed=1", "output=run"]) == 2
        lines = said(capsys)
        assert len(lines) == 1 or "-m" in arguments
        assert any("cannot write" in line and os.strerror(27) in line for line in lines)
        after = content(folder / "run")
        assert {name: after[name] for name in before if name not in REWRITTEN} == {
            name: text for name, text in before.items() if name not in REWRITTEN
        }


# --- damaged files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", SOME_DAMAGES)
def test_a_sweep_goes_on_whatever_is_in_its_files(
    damage: str, sweep: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged result is recomputed, unless something is in its place; bounds are, and the rest is written anew."""
    own = copied(sweep, folder / "sweep")
    for path in (*own.glob("bounds/*.json"), own / "sweep.csv", own / "report.html", own / "0" / "requests.csv.gz"):
        DAMAGES[damage](path) if damage != "folder" or path.parent.name == "bounds" else None
    DAMAGES[damage](own / "0" / "result.json")
    (own / "1" / "error.json").write_text("left")
    DAMAGES[damage](own / "1" / "error.json")
    code = main(["replay", *SWEPT, "output=sweep"])
    lines = said(capsys)
    assert all(line.startswith("kvsim: ") for line in lines)
    if damage == "folder":
        assert code == 2 and len(lines) == 1 and lines[0].endswith("of an earlier sweep: Is a directory")
        (own / "1" / "error.json").rmdir()
        assert main(["replay", *SWEPT, "output=sweep"]) == 2
        assert any(
            "job 0-failed failed: output: cannot write sweep/0/result.json: Is a directory" in line for line in said(capsys)
        )
        (own / "0" / "result.json").rmdir()
        for path in own.glob("bounds/*.json"):
            path.rmdir()
        assert main(["replay", *SWEPT, "output=sweep"]) == 0
    else:
        assert code == 0
    assert table(own) == table(sweep)
    assert (own / "0" / "requests.csv.gz").read_bytes() == (sweep / "0" / "requests.csv.gz").read_bytes()


def test_a_damaged_result_of_another_sweep_is_a_failed_job(sweep: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = copied(sweep, folder / "sweep")
    (own / "7").mkdir()
    (own / "7" / "result.json").write_text("{")
    assert main(["replay", *SWEPT, "output=sweep"]) == 2
    (line,) = said(capsys)
    assert line.startswith("kvsim: 1 of 3 jobs failed; the first is job 7: sweep/7/result.json: not a valid result")
    assert [row["status"] for row in table(own)] == ["finished", "finished", "failed"]


def test_a_job_that_fails_is_not_taken_for_the_earlier_one_of_its_number(
    sweep: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its number's folder has the result of another configuration."""
    own = copied(sweep, folder / "sweep")
    before = content(own / "0")
    assert main(["replay", "-m", "trace.sessions=3", "tiers.gpu.capacity=40,5000pages", "output=sweep"]) == 2
    first, reason, *_ = said(capsys)
    assert first == "kvsim: 1 of 2 jobs cannot run; the others do:"
    assert reason.startswith("  job 0: tiers.gpu.capacity: 40 has no unit")
    assert content(own / "0") == before
    assert [(row["job"], row["status"]) for row in table(own)][:2] == [("0", "finished"), ("0-failed", "failed")]


@pytest.mark.parametrize("damage", SOME_DAMAGES)
def test_a_report_on_a_sweep_whose_other_files_are_damaged(damage: str, sweep: Path, folder: Path) -> None:
    """Bounds are computed again, a damaged ``error.json`` is an error whose text is lost."""
    own = copied(sweep, folder / "sweep")
    for path in (*own.glob("bounds/*.json"), own / "sweep.json"):
        DAMAGES[damage](path)
    (own / "9").mkdir()
    (own / "9" / "error.json").write_text("{}")
    DAMAGES[damage](own / "9" / "error.json")
    assert main(["report", "sweep", "output=page.html"]) == 0
    page = (folder / "page.html").read_text()
    assert "what failed cannot be read" in page
    assert "belady" in page


def test_damaged_requests_are_one_error(sweep: Path, folder: Path) -> None:
    own = copied(sweep, folder / "sweep")
    trace = kvsim.load_trace(sessions=3)
    run = kvsim.sweep(trace, {"tiers.gpu.capacity": ["3000pages", "6000pages"]}, output="sweep")[1]
    assert run.name == "1"
    for damage in (DAMAGES[name] for name in QUICK):
        shutil.rmtree(own / "1")
        copied(sweep / "1", own / "1")
        damage(own / "1" / "requests.csv.gz")
        with pytest.raises(UsageError, match=r"sweep/1/requests.csv.gz: not the requests of the run beside it"):
            _ = run.requests
