"""What pages begin with: the title, the verdict, and the numbers asked for first."""

from typing import Any

import pytest

from kvsim.engine.outcome import Outcome
from kvsim.report.headline import Tile, shared_subject, subject, tiles, title_of, verdict
from kvsim.results.result import RunRecord, summarize

CHOICES = {"hardware": "h100", "model": "llama3_70b", "trace": "mooncake"}


def record_of(outcome: Outcome, **more: Any) -> RunRecord:
    config = {"hardware": {"gpus": 8}, "trace": {"path": "/home/someone/logs/monday.jsonl"}}
    made = summarize(
        outcome, command="simulate", config=config, choices=CHOICES, seed=0, warmup=0, load_s=0, versions={}, page_bytes=1
    )
    return made | more


def test_the_title_is_what_ran_and_what_came_of_it(simulated: Outcome, replayed: Outcome) -> None:
    assert title_of(record_of(simulated)) == "llama3_70b, 8x h100, monday.jsonl: 33.33% reused, TTFT p99 5.92 s"
    assert subject(record_of(simulated, command="replay", config={})) == ["llama3_70b", "mooncake"]
    assert subject(record_of(simulated, engines=[{}, {}]))[1] == "2 engines of 8x h100"
    assert title_of(record_of(replayed, choices={}, config={}, command="replay", hit_rate=None)) == (
        "kvsim replay: no request was served"
    )


def test_four_numbers_are_asked_for_first(simulated: Outcome) -> None:
    busy = {"bottleneck": "gpu", "busy": {"gpu": 0.5, "cpu-gpu": 0.75}}
    slo = {"ttft_s": 1.0, "tpot_s": None, "attainment": 0.9, "goodput_requests_per_s": 3.0}
    found = tiles(record_of(simulated, diagnosis=busy, slo=slo))
    assert [tile.name for tile in found] == ["hit rate", "TTFT p50 / p99", "goodput", "busiest resource"]
    assert found[0] == Tile("hit rate", "33.33%", "of 120 prompt tokens")
    assert found[2] == Tile("goodput", "3.00 requests/s", "90.00% have TTFT <= 1 s")
    assert found[3] == Tile("busiest resource", "cpu-gpu 75.00%", "then GPU, 50.00% busy")
    assert tiles(record_of(simulated, slo=None, diagnosis=busy))[2].name == "throughput"


def test_a_run_without_a_clock_has_hit_rates_only(replayed: Outcome) -> None:
    assert [tile.name for tile in tiles(record_of(replayed))] == ["hit rate", "hit rate of pages", "requests with a hit"]
    assert verdict(record_of(replayed)) == ""


@pytest.mark.parametrize(
    ("bottleneck", "begin"),
    [("none", "Requests hardly wait"), ("room", "Requests wait for room on the GPU"), ("gpu", "Requests wait for the GPU, not"),
     ("cpu-gpu", "Requests wait for loads: cpu-gpu is"), ("cpu-disk", "Requests wait for room that becomes free")],
)  # fmt: skip
def test_the_verdict_says_what_requests_wait_for(bottleneck: str, begin: str, simulated: Outcome) -> None:
    found = {"bottleneck": bottleneck, "busy": {"gpu": 0.9, "cpu-gpu": 0.12, "cpu-disk": 0.3}}
    assert verdict(record_of(simulated, diagnosis=found)).startswith(begin)


def test_machines_of_one_kind_share_its_name(simulated: Outcome) -> None:
    one = record_of(simulated)
    less = record_of(simulated, config=one["config"] | {"hardware": {"gpus": 4}})
    other = record_of(simulated, choices=one["choices"] | {"hardware": "h200"})
    assert shared_subject([one, one]) == ["llama3_70b", "8x h100", "monday.jsonl"]
    assert shared_subject([one, less]) == ["llama3_70b", "h100", "monday.jsonl"]
    assert shared_subject([one, other]) == ["llama3_70b", "monday.jsonl"]


@pytest.mark.parametrize(
    ("share", "shown"), [(0.672, "67%"), (0.9949, "99%"), (0.9951, "99.5%"), (0.99999, "99.9%"), (1.0, "100%"), (1.004, "100%")]
)
def test_only_all_of_a_bound_is_all_of_it(share: float, shown: str, simulated: Outcome) -> None:
    assert f", {shown} of Belady's bound" in tiles(record_of(simulated), share)[0].note
