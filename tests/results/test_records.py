"""A result that was damaged or written by hand is refused in one line, or shown; it never ends in a traceback."""

import copy
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.errors import UsageError
from kvsim.report.comparison.csv_text import comparison_csv, means_csv
from kvsim.report.comparison.html import render_comparison
from kvsim.report.html import render
from kvsim.results.fields import FIELDS
from kvsim.results.records import Damaged, read_bound, read_failure, read_requests, read_result, read_saturation
from kvsim.results.result import to_json
from kvsim.results.runs import read_runs
from kvsim.results.schema import WRITTEN, Field

WRONG = st.sampled_from(
    [None, True, 0, 1, -1, 0.5, -0.5, 1e17, 1e308, 2**63, 2**64, 10**30, "", "x", "'", "../x", "${x}", "\0", "\ud800", [], [1],
     {}, {"a": 1}, float("nan"), float("inf")]
)  # fmt: skip
CHANGE = st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(["set", "delete", "add"]), WRONG)
CHANGES = st.lists(CHANGE, min_size=1, max_size=4)


@cache
def real(command: str) -> str:
    """The ``result.json`` of a run with all that a result may have."""
    trace = kvsim.load_trace(sessions=4)
    tiers = ["tiers.gpu.capacity=3000pages", "tiers.cpu.capacity=4000pages", "tiers.disk.capacity=5000pages"]
    if command == "replay":
        return to_json(kvsim.replay(trace, *tiers).record)
    more = ["cluster.engines=2", "slo.ttft_s=1", "timeline=true", "prefetch=threshold", "warmup=0.1"]
    return to_json(kvsim.simulate(trace, *tiers, *more).record)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all fields, and of the first items of lists."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(record: dict[str, Any], changes: list[tuple[float, str, Any]]) -> dict[str, Any]:
    record = copy.deepcopy(record)
    for where, how, wrong in changes:
        found = list(places(record))
        if not found:
            return record
        *path, last = found[int(where * len(found))]
        owner: Any = record
        for key in path:
            owner = owner[key]
        if how == "delete":
            del owner[last]
        elif how == "add" and isinstance(owner, list):
            owner.append(copy.deepcopy(wrong))
        elif how == "add":
            owner[str(wrong)] = copy.deepcopy(owner[last])
        else:
            owner[last] = copy.deepcopy(wrong)
    return record


def check_shown(record: dict[str, Any]) -> None:
    """Read a record from a file, beside a real one; what is read can be shown."""
    with TemporaryDirectory() as name:
        for job, text in (("0", json.dumps(record)), ("1", real("replay"))):
            Path(name, job).mkdir()
            Path(name, job, "result.json").write_text(text)
        runs = read_runs([Path(name)], damaged_fail=True)
        if (error := runs[0].error) is not None:
            assert error.startswith(f"{name}/0/result.json: ") and "\n" not in error
            return
        page = render_comparison(runs, "kvsim report", folder=Path(name))
        assert re.search(r"<title>.*: 2 runs.*</title>", page)
        assert comparison_csv(runs).count("\n") >= 3
        means_csv(runs)
        assert runs[0].result is not None and render(runs[0].result, "script.js")


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["simulate", "replay"]), CHANGES)
def test_a_changed_result_is_refused_or_shown(command: str, changes: list[tuple[float, str, Any]]) -> None:
    check_shown(changed(json.loads(real(command)), changes))


def refusal(folder: Path, record: dict[str, Any]) -> str:
    """What reading a record says; empty if it is read."""
    (folder / "result.json").write_text(json.dumps(record))
    try:
        read_result(folder)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("row", [row for row in FIELDS if row.name != "schema"], ids=lambda row: row.name)
def test_a_field_is_checked_by_its_row(tmp_path: Path, row: Field) -> None:
    """Of a text, a negative number, a list and an object, no field may be more than one; and without it, a result is none."""
    record = json.loads(real("simulate"))
    refusals = [refusal(tmp_path, record | {row.name: wrong}) for wrong in ("\0", -1.5, [None], {"?": None})]
    assert refusals.count("") <= 1
    assert all(f"`$.{row.name}" in text or "in `$" in text for text in refusals if text)
    record.pop(row.name, None)
    missing = refusal(tmp_path, record)
    assert (f"`{row.name}`" in missing or "earlier version" in missing) if row.presence == WRITTEN else "required" not in missing


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("hit_rate",), 1.5, "Expected `float` <= 1.0 - at `$.hit_rate`"),
        (("ttft_s", "p99"), -1, ">= 0"),
        (("requests",), 2**63, "at `$.requests`"),
        (("prompt_tokens",), 3, "more hit tokens than prompt tokens"),
        (("hit_tokens",), {"gpu": 0, "cpu": 0}, "hit_tokens of too few tiers"),
        (("tiers", "Remote store"), {}, "matching regex"),
        (("bounds", "belady"), "../../secret", "matching regex"),
        (("command_line",), "kvsim 'replay", "No closing quotation"),
        (("timeline", "links", "edges_s"), [0.0], "values of gpu-cpu for 0 bins"),
        (("timeline", "hits", "hit_rate"), {}, "no hit rate of a tier"),
        (("timeline", "engines", "load", "requests", "7"), [0.0] * 200, "a timeline of an engine that there is not"),
        (("tiers", "gpu", "capacity_pages"), 0, "free pages of a tier without a capacity"),
        (("imbalance", "both"), {}, "imbalance without busy"),
        (("ttft_quantiles_s",), [1.0], "1 percentiles in place of 101"),
    ],
)
def test_what_a_result_cannot_be_is_named(tmp_path: Path, path: tuple[str, ...], value: Any, problem: str) -> None:
    record = json.loads(real("simulate"))
    owner = record
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    said = refusal(tmp_path, record)
    assert said.startswith(f"{tmp_path}/result.json: not a valid result: ") and problem in said
    assert said.endswith(": repeat the run")


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    for command in ("simulate", "replay"):
        (tmp_path / "result.json").write_text(real(command))
        assert read_result(tmp_path) == json.loads(real(command))


@pytest.mark.parametrize("text", ["", "[]", '{"hit_rate": NaN}', '{"hit_rate": 2}', '{"hit_rate": 0.5}', "\xff"])
def test_a_damaged_bound_counts_as_missing_and_a_damaged_error_is_said_to_be(tmp_path: Path, text: str) -> None:
    (tmp_path / "belady-0.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "error.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "saturate.json").write_bytes(text.encode("latin-1"))
    assert read_bound(tmp_path, "belady-0") is None
    record = read_failure(tmp_path)
    assert record["error"].startswith(f"what failed cannot be read: {tmp_path}/error.json: ") and not record["is_crash"]
    with pytest.raises(UsageError, match=r"saturate.json: not a valid result"):
        read_saturation(tmp_path)


@pytest.mark.parametrize("name", ["result.json", "requests.csv.gz"])
def test_a_pipe_in_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(Damaged, match="it is not a file"):
        read_result(tmp_path) if name == "result.json" else read_requests(tmp_path, {"hit_pages": {"gpu": 1}})
