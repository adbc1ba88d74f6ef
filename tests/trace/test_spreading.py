"""Requests that share a time: said, and spread if asked for."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.core.request import Request
from kvsim.errors import TraceError
from kvsim.trace.base import in_order_of_arrival
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.spreading import shared_times, spread_arrivals


def asked(*arrivals_s: float) -> list[Request]:
    return [
        Request(index=place, arrival_s=at, prompt_tokens=1, output_tokens=1, runs=(), prompt_pages=0)
        for place, at in enumerate(arrivals_s)
    ]


def spread(*arrivals_s: float) -> list[float]:
    requests = asked(*arrivals_s)
    spread_arrivals(requests, "log")
    return [request.arrival_s for request in requests]


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def line(timestamp_ms: int, block: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": timestamp_ms, "input_length": 512, "output_length": 1, "hash_ids": [block], **more}


def test_equal_times_are_spread_evenly_over_the_step_to_the_next() -> None:
    assert spread(0, 0, 0, 3, 6, 6) == [0, 1, 2, 3, 6, 7.5], "the last ones have the usual step of 3 s"


def test_a_pause_is_longer_than_the_step_of_the_clock() -> None:
    assert spread(0, 0, 1, 2, 2, 100, 101, 101) == [0, 0.5, 1, 2, 2.5, 100, 101, 101.5]


def test_a_file_need_not_be_sorted() -> None:
    assert spread(6, 0, 6, 3, 0) == [6, 0, 7.5, 3, 1.5]


@given(st.lists(st.integers(0, 12), min_size=2, max_size=40))
def test_order_is_kept_and_no_request_passes_the_next_time(times: list[int]) -> None:
    arrivals = sorted(map(float, times))
    if len(set(arrivals)) in (1, len(arrivals)):
        with pytest.raises(TraceError, match="spread has no effect"):
            spread(*arrivals)
        return
    found = spread(*arrivals)
    assert all(one < other for one, other in pairwise(found))
    for before, after in zip(arrivals, found, strict=True):
        later = [at for at in arrivals if at > before]
        assert before <= after and (not later or after < later[0])


def test_without_equal_times_it_has_no_effect_and_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [line(0, 1), line(1000, 2)])
    with pytest.raises(TraceError, match="no two requests have the same time; leave out"):
        Mooncake(path=path, spread=True).load(512)
    untimed = [{key: value for key, value in line(0, block).items() if key != "timestamp"} for block in (1, 2)]
    with pytest.raises(TraceError, match="all requests have the same time"):
        Mooncake(path=write(tmp_path / "log.jsonl", untimed), spread=True).load(512)


def test_every_reader_and_python_spread_and_the_rate_scales_the_step(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [line(at, block) for block, at in enumerate((0, 0, 3000, 3000, 6000))])
    trace = kvsim.load_trace(path=path, spread=True, rate=3.0)
    assert [request.arrival_s for request in trace.requests] == [0, 0.5, 1, 1.5, 2]
    tokens = [{"timestamp": at, "token_ids": [1, 2], "output_length": 1} for at in (0, 0, 1000)]
    trace = kvsim.load_trace(path=write(tmp_path / "tokens.jsonl", tokens), spread=True)
    assert [request.arrival_s for request in trace.requests] == [0, 0.5, 1]


def test_ids_and_keys_of_pages_do_not_depend_on_it(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [line(at, block) for block, at in enumerate((0, 0, 3000))])
    plain, apart = Mooncake(path=path), Mooncake(path=path, spread=True)
    assert [request.runs for request in plain.load(512).requests] == [request.runs for request in apart.load(512).requests]
    assert plain.page_keys(512)(1) == apart.page_keys(512)(1)


def test_a_turn_that_waits_has_no_time_of_its_own_and_stays_behind_its_session(tmp_path: Path) -> None:
    lines = [line(0, 1), line(0, 2, session_id="a"), line(1000, 3, session_id="a", delay=100), line(3000, 4)]
    requests = Mooncake(path=write(tmp_path / "log.jsonl", lines), spread=True).load(512).requests
    assert [request.arrival_s for request in requests] == [0, 1.5, 1.5, 3]
    assert [(request.after, request.index) for request in requests] == [(-1, 0), (-1, 1), (1, 2), (-1, 3)]


def test_a_reset_stays_between_its_requests(tmp_path: Path) -> None:
    lines = [line(0, 1), line(0, 2), {"reset": "drain", "timestamp": 0}, line(0, 3), line(3000, 4)]
    requests = Mooncake(path=write(tmp_path / "log.jsonl", lines), spread=True).load(512).requests
    (reset,) = requests[2].resets
    assert requests[1].arrival_s == 1.0 <= reset.at_s <= requests[2].arrival_s == 2.0


def test_a_coarse_clock_is_told_with_its_numbers() -> None:
    shared = shared_times(asked(0, 0, 0, 3, 3, 6))
    assert shared == (2.0, 3.0)
    assert shared.warning().startswith("2.0 requests share a time, and times step by 3 s")
    assert shared_times(asked(0, 0, 0)) is None, "a file without times"
    assert shared_times(asked(0, 1, 2, 2)) is None
    turns = asked(0, 1, 1, 1, 1)
    for request in turns[2:]:
        request.after = 1
    assert shared_times(turns) is None, "turns that wait arrive when their answers end"


def test_a_simulation_warns_and_a_spread_one_does_not(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [line(3000 * (number // 4), number) for number in range(40)])
    for spread_out in (False, True):
        trace = kvsim.load_trace(path=path, spread=spread_out)
        warnings = kvsim.simulate(trace).record["warnings"]
        assert any("4.0 requests share a time" in text for text in warnings) is not spread_out
        assert not kvsim.replay(trace).record["warnings"], "a replay has no clock"


def test_spreading_is_part_of_what_identifies_a_run(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [line(3000 * (number // 2), number) for number in range(8)])
    hashes = {kvsim.replay(kvsim.load_trace(path=path, spread=value)).record["config_hash"] for value in (False, True)}
    assert len(hashes) == 2


def test_sorting_afterwards_changes_nothing() -> None:
    requests = asked(6, 0, 6, 3, 0)
    spread_arrivals(requests, "log")
    found = in_order_of_arrival(requests)
    assert np.all(np.diff([request.arrival_s for request in found]) > 0)
