"""Whatever the files of runs and sweeps contain: a report, or one line that names the file."""

import gzip
import json
import shutil
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cli import main
from kvsim.results.records import read_requests, read_result
from tests.mutations import (
    bomb,
    changed_bytes,
    few,
    gzipped,
    json_files,
    memory_budget,
    refusal,
    shown_problem,
    work_budget,
)

SMALL = ("trace.sessions=2", "tiers.gpu.capacity=3000pages", "slo.ttft_s=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("run") / "run"
    assert main(["simulate", *SMALL, f"output={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep with two jobs, of which one has failed."""
    folder = tmp_path_factory.mktemp("sweep") / "sweep"
    main(["replay", "-m", *SMALL[:1], "tiers.gpu.capacity=3000pages,1pages", f"output={folder}"])
    assert (folder / "1" / "error.json").exists() and list(folder.glob("bounds/*.json"))
    return folder


def read(folder: Path, content: bytes) -> str:
    """Write the requests of a run and read them back; the line of the error, if they are refused."""
    path = folder / "requests.csv.gz"
    path.write_bytes(content)
    return refusal(lambda: read_requests(folder, read_result(folder)), f"{path}")


def test_changed_requests_are_read_or_refused(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "result.json", tmp_path)
    packed = (run / "requests.csv.gz").read_bytes()
    whole = gzip.decompress(packed)
    cells = st.tuples(
        st.integers(0, 400),
        st.sampled_from(["nan", "inf", "-1", "1e999", "9999999999999999999", "x", "\x00", "1_0", "[" * 3_000, "٣", "0x1"]),
    )

    def with_cell(change: tuple[int, str]) -> bytes:
        rows = [line.split(",") for line in whole.decode().splitlines()]
        at, text = change
        row = rows[1 + at % (len(rows) - 1)]
        row[at % len(row)] = text
        return "\n".join(map(",".join, rows)).encode()

    @few(cost=2)
    @given(gzipped(changed_bytes(whole) | cells.map(with_cell), whole))
    def check(content: bytes) -> None:
        read(tmp_path, content)

    check()
    read(tmp_path, gzip.compress(with_cell((1, "[" * 3_000))))
    assert read(tmp_path, packed) == ""


@pytest.mark.parametrize("repeated", [b"\x00", b"1,", b"1\n", b'"\n'], ids=["zeros", "cells", "rows", "one cell"])
def test_requests_that_unpack_to_more_than_memory_are_refused(repeated: bytes, run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "result.json", tmp_path)
    header = gzip.decompress((run / "requests.csv.gz").read_bytes()).split(b"\n")[0] + b"\n"
    assert read(tmp_path, bomb(header, repeated))


@pytest.mark.parametrize("name", ["1/error.json", "sweep.json", pytest.param("bounds/*.json", marks=pytest.mark.long)])
def test_a_changed_file_of_a_sweep_is_reported_or_refused(
    name: str, sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    shutil.copytree(sweep, folder)
    path = sorted(folder.glob(name))[0]
    whole = path.read_bytes()

    def report(content: bytes) -> int:
        path.write_bytes(content)
        capsys.readouterr()
        with work_budget(), memory_budget(), warnings.catch_warnings():
            warnings.simplefilter("error")
            code = main(["report", f"{folder}"])
        shown_problem(code, capsys.readouterr().err, f"{path}")
        return code

    @few(cost=8)
    @given(json_files(json.loads(whole)))
    def check(content: bytes) -> None:
        report(content)

    check()
    assert report(whole) == 0
