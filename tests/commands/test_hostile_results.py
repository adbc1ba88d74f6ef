"""Whatever files of results contain, ``kvsim validate results=`` compares them, or says in one line what is wrong with which."""

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given

from kvsim.cli import main
from tests.mutations import as_lines, changed, few, memory_budget, packed, shown_problem, work_budget
from tests.reused_compositions import compositions_are_reused
from tests.servers.hostile import FILES, SAVED

COST = 8
"""One example simulates three requests."""


@pytest.fixture(autouse=True, scope="module")
def compositions() -> Iterator[None]:
    with compositions_are_reused():
        yield


def validate(capsys: pytest.CaptureFixture[str], name: str, content: bytes, *words: str) -> int:
    """Write a file, compare it with a simulation of the same three requests, and return the exit code."""
    lengths = (32, 48, 16)
    lines = [{"timestamp": 1000 * at, "token_ids": list(range(size)), "output_length": 2} for at, size in enumerate(lengths)]
    Path("trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    Path(name).write_bytes(content)
    shutil.rmtree("out", ignore_errors=True)
    capsys.readouterr()
    words = ("trace.path=trace.jsonl", "hardware=h100", "model=llama3_8b", f"results={name}", "output=out", *words)
    with work_budget(), memory_budget(), warnings.catch_warnings():
        warnings.simplefilter("error")
        code = main(["validate", *words])
    shown_problem(code, capsys.readouterr().err, "")
    return code


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "sglang")) for name in FILES])
def test_a_changed_file_of_a_client_is_compared_or_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [] if name == "sglang" else ["tiers.gpu.capacity=4096tokens"]  # the only one whose file has it

    @few(cost=COST)
    @given(changed(FILES[name]))
    def run(documents: list[object]) -> None:
        validate(capsys, "bench.jsonl", as_lines(documents), *words)

    run()
    assert validate(capsys, "bench.jsonl", as_lines(FILES[name]), *words) in (0, 1)


def test_a_changed_run_that_was_saved_is_compared_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    @few(cost=COST)
    @given(changed(SAVED))
    def run(lines: list[object]) -> None:
        validate(capsys, "run.jsonl.gz", packed(as_lines(lines)))

    run()
    assert validate(capsys, "run.jsonl.gz", packed(as_lines(SAVED))) in (0, 1)
