"""Two runs side by side: numbers small enough to check by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.engine.link_use import LinkUse
from kvsim.engine.outcome import Outcome
from kvsim.errors import UsageError
from kvsim.report.validation.recording import Recording, recorded
from kvsim.report.validation.validation import compare, failures, render_validation, write_validation
from kvsim.results.result import RunRecord, summarize
from kvsim.results.tolerances import Tolerances
from tests.outcomes import make_outcome
from tests.report.test_html import Page

FOUND = {"device": "NVIDIA H200", "verified_pages": 9, "wrong_words": 0, "wrong_pages": 0, "disk_faults": {}}
CONFIG = {"page_tokens": 10, "disk": {"folder": None}}


def played(hit_pages: list[tuple[int, int, int]], ttft_s: list[float], n_bytes: int, *, substrate: str) -> Outcome:
    """Four prompts of 100 tokens, in pages of 10."""
    links = {"cpu-gpu": LinkUse(bytes=n_bytes, transfers=1, busy_s=0.5)} if n_bytes else {}
    outcome = make_outcome([100] * 4, hit_pages, ttft_s=ttft_s, links=links)
    outcome.hardware = FOUND if substrate == "hardware" else {}
    return outcome


def run(hit_pages: list[tuple[int, int, int]], ttft_s: list[float], n_bytes: int, *, substrate: str = "simulated") -> Recording:
    return as_recorded(played(hit_pages, ttft_s, n_bytes, substrate=substrate), CONFIG | {"substrate": substrate})


def as_recorded(outcome: Outcome, config: dict[str, Any], warmup: float = 0.0) -> Recording:
    record = summarize(outcome, command="simulate", config=config, seed=0, warmup=warmup, load_s=0.0)
    return recorded(str(config["substrate"]), record, outcome)


def compared(one: Recording, other: Recording, **tolerances: float) -> RunRecord:
    return compare(one, other, Tolerances(**tolerances), "kvsim validate")


HITS = [(0, 0, 0), (5, 0, 0), (0, 5, 0), (5, 0, 0)]
SIMULATED = run(HITS, [1.0, 2.0, 3.0, 4.0], 1000)


def test_equal_runs_hold() -> None:
    record = compared(SIMULATED, run(HITS, [1.0, 2.0, 3.0, 4.0], 1000, substrate="hardware"))
    assert record["holds"] and failures(record) == ""
    assert record["identical"] == 1 and record["first_different_requests"] == []
    assert [check["name"] for check in record["checks"]] == [
        "hit_rate gpu", "hit_rate cpu", "hit_rate all", "identical", "link_bytes cpu-gpu", "ttft_p50", "ttft_p99",
    ]  # fmt: skip


def test_every_difference_is_reported_with_its_size() -> None:
    measured = run([(0, 0, 0), (5, 0, 0), (1, 4, 0), (5, 0, 0)], [1.0, 2.0, 3.0, 2.0], 800, substrate="hardware")
    record = compared(SIMULATED, measured)
    assert record["hit_rate"]["gpu"] == {
        "simulated": 0.25,
        "hardware": 0.275,
        "difference": pytest.approx(-0.025),
        "error": pytest.approx(-1 / 11),
    }
    assert (record["identical"], record["first_different_requests"]) == (0.75, [2])
    assert record["links"]["cpu-gpu"]["bytes"]["error"] == pytest.approx(0.25)
    assert record["ttft_s"]["p50"] == {"simulated": 2.5, "hardware": 2.0, "difference": 0.5, "error": 0.25}
    assert not record["holds"]
    assert {check["name"] for check in record["checks"] if check["holds"]} == {"hit_rate all"}
    assert "identical is 0.75 (must be at least 0.99)" in failures(record)
    wide = {"hit_rate": 0.026, "identical": 0.75, "link_bytes": 0.25, "ttft_p50": 0.25, "ttft_p99": 0.5}
    assert compared(SIMULATED, measured, **wide)["holds"]


def test_a_link_that_only_one_run_used_fails() -> None:
    record = compared(SIMULATED, run(HITS, [1.0, 2.0, 3.0, 4.0], 0, substrate="hardware"))
    (check,) = [check for check in record["checks"] if check["name"].startswith("link_bytes")]
    assert (check["measured"], check["holds"]) == (None, False)


def test_every_link_of_either_run_is_compared() -> None:
    pairs = []
    for substrate, names in (("simulated", ("gpu-disk", "disk-gpu")), ("hardware", ("gpu-cpu", "disk-gpu"))):
        outcome = played(HITS, [1.0, 2.0, 3.0, 4.0], 0, substrate=substrate)
        outcome.links = {name: LinkUse(bytes=1000, transfers=1, busy_s=0.5) for name in names}
        pairs.append(as_recorded(outcome, CONFIG | {"substrate": substrate}))
    record = compared(*pairs)
    assert list(record["links"]) == ["disk-gpu", "gpu-cpu", "gpu-disk"]
    moved = {name: (link["bytes"]["simulated"], link["bytes"]["hardware"]) for name, link in record["links"].items()}
    assert moved == {"disk-gpu": (1000, 1000), "gpu-cpu": (0, 1000), "gpu-disk": (1000, 0)}
    assert all(name in render_validation(record) for name in moved)
    holds = {check["name"]: check["holds"] for check in record["checks"] if check["name"].startswith("link_bytes")}
    assert holds == {"link_bytes disk-gpu": True, "link_bytes gpu-cpu": False, "link_bytes gpu-disk": False}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"config": {"page_tokens": 20}}, "the two runs differ in page_tokens"),
        ({"requests": 3}, r"different requests \(4 and 3\)"),
        ({"rejected": [1]}, "rejected in only one of the two runs: request 1 and 0 others"),
    ],
)
def test_what_cannot_be_compared_is_an_error(change: dict[str, Any], problem: str) -> None:
    count = change.get("requests", 4)
    outcome = make_outcome([100] * count, HITS[:count], ttft_s=[1.0] * count, rejected=change.get("rejected", ()))
    outcome.hardware = FOUND
    with pytest.raises(UsageError, match=problem):
        compared(SIMULATED, as_recorded(outcome, CONFIG | {"substrate": "hardware"} | change.get("config", {})))


def test_the_warm_up_is_not_compared() -> None:
    pairs = []
    for substrate, hits in (("simulated", HITS), ("hardware", [(9, 0, 0), *HITS[1:]])):
        outcome = played(hits, [1.0, 2.0, 3.0, 4.0], 1000, substrate=substrate)
        pairs.append(as_recorded(outcome, CONFIG | {"substrate": substrate}, warmup=0.25))
    record = compared(*pairs)
    assert record["holds"] and len(record["requests_ttft_s"][0]) == 3


def test_the_folder_has_the_record_and_a_page_of_its_own(tmp_path: Path) -> None:
    record = compared(SIMULATED, run(HITS, [1.0, 2.0, 3.0, np.nan], 1000, substrate="hardware"))
    write_validation(tmp_path, record, render_validation(record))
    assert json.loads((tmp_path / "validate.json").read_text()) == record
    page = (tmp_path / "validate.html").read_text()
    assert "Time to first token by request" in page and "NVIDIA H200" in page
    assert not {name for name, _ in Page(page).attributes} & {"src", "href", "srcset", "action"}
    assert render_validation(record) == page


@pytest.mark.parametrize(("name", "value"), [("hit_rate", -0.1), ("identical", 1.5), ("ttft_p99", float("nan"))])
def test_tolerances_are_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Tolerances(**{name: value})
