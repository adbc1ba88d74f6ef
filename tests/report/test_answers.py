"""The pages of curves, plans and validations begin with the answer."""

import re
from typing import Any

import pytest

from kvsim.report.curve import _head as curve_head
from kvsim.report.figure import across
from kvsim.report.headline import Tile
from kvsim.report.plan_page import _head as plan_head
from kvsim.report.plan_page import _title as plan_title
from kvsim.report.plan_page import pictures_of as plan_pictures
from kvsim.report.servers.page import render_server
from kvsim.report.validation.repeated_page import render_repeated
from kvsim.report.validation.validation import render_validation
from tests.report.fake_machine import validated
from tests.report.servers.test_page import WHOLE
from tests.report.test_html import Page
from tests.report.validation import test_repeated
from tests.report.validation.test_validation import HITS, SIMULATED, compared, run

CURVE: dict[str, Any] = {
    "unlimited": {"hit_rate": 0.5}, "prompt_tokens": 1000, "page_bytes": 2**30,
    "line": {"capacity_pages": [10, 20, 40, 80], "hit_rate": [0.2, 0.3, 0.45, 0.48]},
}  # fmt: skip


def test_a_curve_says_how_much_lru_needs() -> None:
    """Half of the hits is 0.25, 90 % are 0.45; 99 % are out of reach."""
    head = curve_head(CURVE)
    assert head.verdict == "From 40 GiB on, LRU has 90% of the hits of an unlimited cache."
    assert head.tiles == [
        Tile("unlimited cache", "50.00%", "of 1,000 prompt tokens"),
        Tile("LRU has 50% of that", "20 GiB", "20 pages"),
        Tile("LRU has 90% of that", "40 GiB", "40 pages"),
    ]


def test_a_curve_without_hits_has_no_answer() -> None:
    assert curve_head(CURVE | {"unlimited": {"hit_rate": 0.0}}) == ("", [])
    flat = CURVE | {"line": {"capacity_pages": [10], "hit_rate": [0.1]}}
    assert curve_head(flat).verdict == "" and len(curve_head(flat).tiles) == 1


def candidate(price: float, attainment: float | None, **more: Any) -> dict[str, Any]:
    known = {"engines": 2, "gpus_per_engine": 4, "gpu": "h100", "cpu_bytes": 0, "drive": "none", "policy": "", "tpot_s_p99": None}
    return known | {"price": price, "attainment": attainment, "ttft_s_p99": attainment and 1.5} | more


def plan(cheapest: int | None, *candidates: dict[str, Any]) -> dict[str, Any]:
    slo = {"attainment": 0.95, "ttft_s": 2.0, "tpot_s": None}
    return {"slo": slo, "price_unit": "USD per hour", "candidates": list(candidates), "cheapest": cheapest}


def test_a_plan_says_what_to_buy() -> None:
    record = plan(1, candidate(1, 0.5), candidate(20, 0.97))
    assert plan_title(record) == "95.00% with TTFT <= 2 s: 8x h100 (2 x TP4) at 20.00 USD per hour"
    head = plan_head(record)
    assert head.verdict.startswith("Number 1 is the cheapest that holds")
    assert [tile.value for tile in head.tiles] == ["20.00 USD", "97.00%", "1.50 s", "8x h100"]
    price = plan_head(record | {"price_unit": "per hour"}).tiles[0]
    assert price.value == "20.00" and price.note == "per hour, the cheapest that holds" == head.tiles[0].note
    assert head.tiles[3].note == "2 configurations simulated"


@pytest.mark.parametrize(("share", "line"), [(0.95, "objective of 95.00% of the requests"), (0.99, "objective")])
def test_the_objective_in_a_picture_of_a_percentile_says_whose_it_is(share: float, line: str) -> None:
    """Fewer have to meet it than the percentile says: a configuration above the line may hold."""
    record = plan(1, candidate(1, 0.5), candidate(20, 0.97))
    record["slo"]["attainment"] = share
    for one in record["candidates"]:
        one["outcome"] = "holds"
    _, times = plan_pictures(record)
    assert times.figure is not None
    assert [text["text"] for text in times.figure["layout"]["annotations"]] == [line]


def test_a_plan_without_an_answer_shows_the_best_that_was_tried() -> None:
    record = plan(None, candidate(1, 0.5), candidate(20, 0.9), candidate(2, None))
    assert plan_title(record).endswith("no configuration holds")
    head = plan_head(record)
    assert head.verdict == "No configuration holds." and head.tiles[1].value == "90.00%"
    assert head.tiles[0].note == "per hour, the best attainment that was tried"
    assert plan_head(plan(None, candidate(2, None))).tiles == []


def text_of(page: str) -> str:
    return Page(page).text


def test_a_validation_says_what_fails() -> None:
    same = text_of(render_validation(compared(SIMULATED, run(HITS, [1.0, 2.0, 3.0, 4.0], 1000, substrate="hardware"))))
    assert "4 requests on an NVIDIA H200 and simulated: all 7 tolerances hold" in same
    assert "Everything is within its tolerance." in same
    page = render_validation(compared(SIMULATED, run(HITS, [1.0, 2.0, 3.0, 4.0], 900, substrate="hardware")))
    assert "1 of 7 tolerances fails" in text_of(page)
    assert "Outside of its tolerance: link_bytes cpu-gpu is 0.1111 (must be at most 0.01)." in text_of(page)
    assert page.count("class=fails>FAILS") == 1


def test_a_validation_with_several_runs_says_what_fails() -> None:
    real = [test_repeated.measured(test_repeated.times(first)) for first in (110.0, 111.0)]
    text = text_of(render_repeated(validated(test_repeated.SIMULATED, real)))
    assert "4 requests, 2 times on an NVIDIA H200: 2 figures fail" in text
    assert "of their tolerance: ttft_p50, ttft_p99." in text
    assert not re.search(r"\de[+-]\d", text), "numbers are written in full"
    close = [test_repeated.measured(test_repeated.times(first)) for first in (9.5, 10.5)]
    assert "2 times on an NVIDIA H200: all figures hold" in text_of(render_repeated(validated(test_repeated.SIMULATED, close)))


def test_a_validation_against_a_server_says_what_fails() -> None:
    text = text_of(render_server(WHOLE))
    assert "4 requests on vLLM 0.33.0 and simulated: 1 of 5 tolerances fails" in text
    assert "identical, server's order is 0.875 (must be at least 0.99)." in text and "-0.25 points" in text


@pytest.mark.parametrize(("is_log", "height"), [(False, 100.0), (True, 2.0)])
def test_a_line_across_has_its_name_where_the_axis_has_the_height(is_log: bool, height: float) -> None:
    found = across(100.0, "objective", is_log=is_log)
    assert found["shapes"][0]["y0"] == found["shapes"][0]["y1"] == 100.0
    assert found["annotations"][0]["y"] == height and found["annotations"][0]["text"] == "objective"
    assert across(None, "objective") == {}
