"""Requests that a program has made or changed are the ones that everything runs, and no command says that it repeats that."""

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvsim
from kvsim.core.request import Reset
from kvsim.errors import UsageError
from kvsim.trace.base import Trace
from kvsim.trace.memory import content_of
from kvsim.trace.synthetic import Synthetic
from tests.reused_compositions import compositions_are_reused

PRICES = {"per": "hour", "gpus": {"h100": 3}}
SLO = {"slo.ttft_s": 2, "saturate.attainment": 0.5}
ROOM = {"tiers.gpu.capacity": "5GiB"}


@pytest.fixture(autouse=True, scope="module")
def compositions() -> Iterator[None]:
    with compositions_are_reused():
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(sessions: int = 20) -> Trace:
    return kvsim.load_trace("synthetic", sessions=sessions, arrivals="open_loop")


def made(number: int) -> Trace:
    return Trace(name="made", requests=loaded().requests[:number], page_tokens=16, block_tokens=None)


def assigned(trace: Trace) -> Trace:
    trace.requests = trace.requests[:10]
    return trace


def in_place(trace: Trace) -> Trace:
    del trace.requests[10:]
    return trace


def of_one_request(trace: Trace) -> Trace:
    trace.requests = trace.requests[:10]
    trace.content = content_of(trace)
    trace.requests[3].output_tokens += 1
    return trace


def served(run: Any) -> int:
    """Requests of a run, those of its warm-up included."""
    return int(run.record["requests"] + run.record["warmup_requests"])


CHANGES = [lambda trace: replace(trace, requests=trace.requests[:10]), assigned, in_place, of_one_request]


def test_plans_of_a_programs_traces_are_told_apart(folder: Path) -> None:
    for number in (10, 20):
        found = kvsim.plan(made(number), SLO, prices=PRICES, output="out")
        assert served(found.best) == number
        assert found.best.config["trace"]["name"] == found.choices["trace"] == "made"
    described = kvsim.plan(loaded(), SLO, prices=PRICES, output="out")
    assert served(described.best) == len(loaded().requests) > 20


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_trace_is_what_a_program_has_made(change: Callable[[Trace], Trace]) -> None:
    trace = change(loaded())
    assert served(kvsim.saturate(trace, SLO, ROOM, saturate={"tolerance": 0.5}).runs[0]) == 10
    assert served(kvsim.plan(trace, SLO, prices=PRICES).best) == 10
    (run,) = kvsim.sweep(trace, {"eviction": ["lru"]}, ROOM, output="swept")
    (whole,) = kvsim.sweep(loaded(), {"eviction": ["lru"]}, ROOM, output="swept")
    assert served(run) == 10 < served(whole)
    assert "content" in run.config["trace"] and whole.config["trace"]["sessions"] == 20


def test_bounds_of_a_changed_trace_are_not_those_of_the_whole_one() -> None:
    kvsim.replay(assigned(loaded()), ROOM, output="cut")
    kvsim.replay(loaded(), ROOM, output="whole")
    cut, whole = kvsim.report("cut"), kvsim.report("whole")
    assert "belady_hit_rate" in whole.table and not any(rate > 0 for rate in cut.table.get("belady_hit_rate", []))


def test_a_trace_that_is_as_it_was_loaded_keeps_its_description() -> None:
    trace = loaded()
    copied = replace(trace, requests=[replace(request) for request in trace.requests])
    for same in (trace, copied):
        assert kvsim.replay(same, ROOM).config["trace"]["sessions"] == 20
    assert content_of(trace) == content_of(copied)
    copied.requests[0].resets = (Reset("drain", float("nan")),)
    assert content_of(trace) != content_of(copied) == content_of(replace(copied, requests=list(copied.requests)))
    assert content_of(trace) != content_of(replace(trace, page_tokens=32))


def test_requests_changed_between_two_runs_are_not_those_of_the_first() -> None:
    trace = made(20)
    first = kvsim.plan(trace, SLO, prices=PRICES).best
    trace.requests[0].output_tokens += 100
    assert kvsim.plan(made(20), SLO, prices=PRICES).best.e2e_mean == first.e2e_mean


def test_no_command_repeats_what_only_a_program_has() -> None:
    options: dict[str, Any] = {"saturate": {"tolerance": 0.5}}
    searches = [
        kvsim.plan(made(10), SLO, prices=PRICES, output="plan"),
        kvsim.saturate(made(10), SLO, ROOM, output="saturate", **options),
    ]
    for found in searches:
        assert found.record["command_line"] is None and found.best.record.get("command_line") is None
        page = Path(f"{found.record['command']}/{found.record['command']}.html").read_text()
        assert "It was run from Python" in page and "kvsim simulate" not in page
    assert searches[0].simulate is None
    kvsim.sweep(made(10), {"eviction": ["lru"]}, ROOM, output="swept")
    assert json.loads(Path("swept/sweep.json").read_text())["command_line"] is None
    assert len(kvsim.report("swept")) == 1


def test_the_command_of_a_plan_has_its_file_of_prices() -> None:
    Path("my prices.yaml").write_text(json.dumps(PRICES))
    found = kvsim.plan(loaded(), SLO, prices="my prices.yaml")
    assert "plan.prices=" in found.record["command_line"] and "my prices.yaml" in found.record["command_line"]
    assert "output=" not in found.record["command_line"] and found.simulate.startswith("kvsim simulate trace=synthetic")
    assert kvsim.plan(loaded(), SLO, prices=PRICES).record["command_line"] is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("trace.rate=8", r"trace\.rate=8: the trace is already loaded"),
        ("page_tokens=32", r"page_tokens=32: the trace is already loaded"),
        ("plan.prices=other.yaml", r"plan\.prices: kvsim\.plan takes prices by its argument"),
    ],
)
def test_a_plan_refuses_what_would_have_no_effect(given: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        kvsim.plan(loaded(), SLO, given, prices=PRICES)


def test_requests_are_no_trace() -> None:
    requests: Any = [[1, 2, 3]]
    with pytest.raises(UsageError, match=r"trace: give a Trace \(load_trace, .*\), a file or a name .*, not a list"):
        kvsim.replay(requests)


def test_prices_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match="prices: give a file, or a mapping with its content, not 3"):
        kvsim.plan(loaded(), SLO, prices=3)  # type: ignore[arg-type]


def test_no_cycles_are_searched_for_while_a_trace_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search would walk all requests loaded so far, again and again."""
    searched: list[bool] = []
    load = Synthetic.load

    def noted(source: Synthetic, page_tokens: int) -> Trace:
        searched.append(gc.isenabled())
        return load(source, page_tokens)

    monkeypatch.setattr(Synthetic, "load", noted)
    assert gc.isenabled()
    loaded()
    assert searched == [False] and gc.isenabled()
