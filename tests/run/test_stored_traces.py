"""A trace in a file is played like the same one in memory."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsim.core.request import Request, Reset
from kvsim.report.folder import request_lines
from kvsim.run.curves import CurveSettings
from kvsim.run.execute import Result, draw, execute
from kvsim.run.upper_bounds import compute_bound
from kvsim.trace import stored
from kvsim.trace.base import Trace
from kvsim.trace.stored import StoredRequests
from tests.composing import plan
from tests.workloads import conversations

TIERS = ("tiers.gpu.capacity=60pages", "tiers.cpu.capacity=90pages")
ALL_TIERS = (*TIERS, "tiers.disk.capacity=300pages")
OF_THE_RUN = {"load_s", "wall_s", "requests_per_s"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "PART", 7)
    monkeypatch.setattr(stored, "PARTS_KEPT", 2)


def closed_loop(requests: list[Request]) -> list[Request]:
    """Turns wait for the one before; a few resets come in between."""
    last: dict[int, int] = {}
    made = []
    for request in requests:
        before = last.get(request.session, -1)
        last[request.session] = request.index
        resets = (Reset("drain", float("nan")), Reset("now", request.arrival_s)) if request.index % 13 == 7 else ()
        made.append(replace(request, after=before, delay_s=2.0 if before >= 0 else 0.0, resets=resets))
    return made


def with_samples(requests: list[Request]) -> list[Request]:
    return [replace(request, samples=1 + request.index % 3) for request in requests]


RUNS: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "replay": ("replay", ALL_TIERS, None),
    "one_after_another": ("replay", (*TIERS, "replay.in_flight=3", "eviction=arc"), None),
    "belady": ("replay", ("tiers.gpu.capacity=60pages", "eviction=belady"), None),
    "answers": ("replay", ("tiers.gpu.capacity=60pages", "eviction=belady", "rules.cache_output=true"), None),
    "samples": ("replay", TIERS, with_samples),
    "resets": ("replay", TIERS, closed_loop),
    "vllm": ("replay", ("preset=vllm_offload", *TIERS), None),
    "sglang": ("simulate", ("preset=sglang_hicache", *TIERS), None),
    "simulate": ("simulate", (*ALL_TIERS, "slo.ttft_s=1", "warmup=0.2", "timeline=true"), None),
    "closed_loop": ("simulate", (*TIERS, "events=true"), closed_loop),
    "several": ("simulate", (*TIERS, "cluster.engines=3", "routing=prefix_aware"), closed_loop),
    "apart": ("simulate", (*TIERS, "cluster.prefill=1", "cluster.decode=1"), None),
    "priorities": ("simulate", (*TIERS, "scheduling=priority"), with_samples),
    "hybrid": ("replay", ("model=jamba_1_5_mini", "tiers.gpu.capacity=2GiB"), None),
}


def trace_of(requests: Any) -> Trace:
    return Trace(name="drawn", requests=requests, page_tokens=16, block_tokens=None)


def described(result: Result) -> dict[str, Any]:
    outcome = result.outcome
    return {
        "record": {name: value for name, value in result.record.items() if name not in OF_THE_RUN},
        "lines": list(request_lines(outcome)),
        "columns": {name: column.tolist() for name, column in outcome.columns.items()},
        "events": None if outcome.events is None else list(outcome.events.lines),
    }


@pytest.mark.parametrize("name", RUNS)
def test_results_are_the_same(name: str) -> None:
    command, words, change = RUNS[name]
    requests = conversations(2, requests=60)
    requests = change(requests) if change else requests
    overrides = ("trace=synthetic", "page_tokens=16", *words)
    known = described(execute(command, plan(*overrides, command=command), trace_of(requests)))
    found = described(execute(command, plan(*overrides, command=command), trace_of(StoredRequests(requests))))
    assert repr(found) == repr(known)
    assert known["record"]["rejected"] < 60 and np.sum(known["columns"]["hit_pages"]) > 0


def test_bounds_and_curves_are_the_same() -> None:
    requests = conversations(2, requests=60)
    made = plan("trace=synthetic", "page_tokens=16", "tiers.gpu.capacity=60pages")
    for kind in ("belady", "unlimited"):
        assert compute_bound(made, kind, StoredRequests(requests)) == compute_bound(made, kind, requests)
    drawn = plan("trace=synthetic", "page_tokens=16", command="curve")
    settings = CurveSettings(capacities=["60pages", "100pages"], policies=["fifo"], fraction=0.5)
    one, other = (draw(drawn, settings, trace_of(given)).curve for given in (requests, StoredRequests(requests)))
    assert one.points == other.points and one.line == other.line


def test_a_policy_that_changes_requests_of_a_stored_trace_is_found() -> None:
    from kvsim.errors import PolicyFailed
    from kvsim.policies.eviction.lru import LRU

    class Changing(LRU):
        def on_request(self, request: Request, now: float) -> None:
            request.priority += 1

    made = plan("trace=synthetic", "page_tokens=16", "tiers.gpu.capacity=60pages")
    made = replace(made, tiers=[replace(made.tiers[0], eviction=Changing())])
    with pytest.raises(PolicyFailed, match="priority of request"):
        execute("replay", made, trace_of(StoredRequests(conversations(2, requests=60))))
