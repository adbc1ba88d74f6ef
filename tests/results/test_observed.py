"""Observed runs, and their files."""

import gzip
from dataclasses import fields, replace
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from kvsim.errors import UsageError
from kvsim.results.observed import NOT_TOLD, ObservedRun, ServerFacts
from kvsim.results.observed_file import Facts, Head, Line, read_observed, write_observed

FACTS = ServerFacts(
    engine="sglang",
    version="0.5.23",
    model="m",
    page_tokens=1,
    capacity_tokens=1000,
    host_capacity_tokens=2000,
    settings={"schedule_policy": "lpm", "chunked_prefill_size": 8192, "hicache_ratio": 2.0, "enable_metrics": True},
)
RUN = ObservedRun(
    source="http://localhost:30000",
    client="kvsim",
    due_s=np.array([0.0, 0.1, 0.2]),
    sent_s=np.array([0.001, 0.1015, nan]),
    first_token_s=np.array([0.5, 0.3, nan]),
    end_s=np.array([0.7, 0.3, nan]),
    token_gaps_s=[np.array([0.1, 1 / 3]), np.array([]), np.array([])],
    prompt_tokens=np.array([10, 20, 30]),
    output_tokens=np.array([3, 1, 0]),
    cached_tokens=np.array([0, 8, NOT_TOLD]),
    tier_tokens={"device": np.array([NOT_TOLD, 6, NOT_TOLD]), "host": np.array([NOT_TOLD, 2, NOT_TOLD])},
    queued_s=np.array([0.2, 0.01, nan]),
    prefill_s=np.array([nan, 0.05, nan]),
    errors=[None, None, "HTTP 429: too many"],
    facts=FACTS,
    counters={'sglang:cached_tokens_total{cache_source="device"}': 6.0},
    speed=2.0,
    concurrency=4,
    stall_s=0.25,
    is_client_bound=True,
    notes=["the client was late"],
)


def assert_same(one: ObservedRun, other: ObservedRun) -> None:
    for field in fields(ObservedRun):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "tier_tokens":
            assert a.keys() == b.keys()
            a, b = list(a.values()), list(b.values())
        np.testing.assert_equal(a, b, err_msg=field.name)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_observed(tmp_path / "run.jsonl.gz", RUN)
    assert_same(read_observed(tmp_path / "run.jsonl.gz"), RUN)


def test_a_run_of_another_client_knows_less(tmp_path: Path) -> None:
    run = replace(RUN, facts=None, tier_tokens={}, concurrency=None, counters={}, notes=[])
    write_observed(tmp_path / "run.jsonl.gz", run)
    assert_same(read_observed(tmp_path / "run.jsonl.gz"), run)


def test_files_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    write_observed(path, RUN)
    whole = path.read_bytes()
    lines = gzip.decompress(whole).splitlines()
    for content, problem in (
        (whole[:-20], "not an observed run"),
        (b"plain text", "cannot be read: Not a gzipped file"),
        (gzip.compress(b""), "not an observed run"),
        (gzip.compress(b'{"kvsim": 1}'), "not an observed run"),
        (gzip.compress(b"\n".join(lines[:-1])), "has 2 of its 3 requests"),
        (gzip.compress(lines[0].replace(b'"kvsim_observed":1', b'"kvsim_observed":7')), "schema 7"),
        (gzip.compress(b"\n".join([*lines[:-1], b'{"due_s":"soon"}'])), "not an observed run"),
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=problem) as raised:
            read_observed(path)
        assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_observed(tmp_path / "none.jsonl.gz")


def test_admission_is_before_the_first_token_or_at_the_end_of_the_queue_or_the_first_token() -> None:
    np.testing.assert_allclose(RUN.admitted_s(), [0.201, 0.25, nan])
    assert RUN.admitted().tolist() == [0, 1]
    untold = replace(RUN, prefill_s=np.full(3, nan))
    assert untold.admitted().tolist() == [1, 0], "in the queue until 0.1115 and 0.201"
    assert replace(untold, queued_s=np.full(3, nan), first_token_s=np.array([0.2, 0.3, nan])).admitted().tolist() == [0, 1]


def test_a_run_is_shown_in_one_line() -> None:
    assert repr(RUN) == "ObservedRun(kvsim, http://localhost:30000: 3 requests, 1 failed)"


def test_failures_are_one_line() -> None:
    assert RUN.failures() == "1 of 3 requests failed: 1 x HTTP 429: too many"
    assert replace(RUN, errors=[None] * 3).failures() == ""
    many = replace(RUN, errors=["a", "b", "b", "c", "d", None])
    assert many.failures() == "5 of 6 requests failed: 2 x b; 1 x a; 1 x c; 1 other reasons"


def test_lateness_is_of_what_was_sent() -> None:
    assert RUN.late_s(1.0) == pytest.approx(0.0015)
    assert replace(RUN, sent_s=np.full(3, nan)).late_s() == 0.0
    assert RUN.late_s(0.0) < inf


def test_the_reference_has_every_field_of_the_file() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "results.md").read_text()
    section = page[page.index("### Observed runs") :].split("\n### ")[0]
    for kind in (Head, Line, Facts):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in section, f"{kind.__name__}.{name}"
