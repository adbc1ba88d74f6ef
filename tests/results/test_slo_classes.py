"""Classes of requests with objectives of their own, counted by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.engine.outcome import Outcome
from kvsim.errors import UsageError
from kvsim.report.summary import facts, objective_text
from kvsim.results.result import summarize
from kvsim.results.slo import Slo


@pytest.fixture
def served(outcome_of: Callable[..., Outcome]) -> Outcome:
    """Six requests, one a second from 0 on; each answer takes 4 x 0.5 s after the first token. The last ends at 7 s.

    | request | type | priority | TTFT |
    |---|---|---|---|
    | 0 | chat | 0 | 1 |
    | 1 | chat | 0 | 2 |
    | 2 | chat | 1 | 3 |
    | 3 | agent | 1 | 1 |
    | 4 | agent | 1 | 1 |
    | 5 | agent | 10 | rejected |
    """
    outcome = outcome_of([40] * 6, [(0, 0, 0)] * 6, rejected=[5], ttft_s=[1, 2, 3, 1, 1, np.nan])
    for request, kind, priority in zip(outcome.requests, ["chat"] * 3 + ["agent"] * 3, [0, 0, 1, 1, 1, 10], strict=True):
        request.kind, request.priority = kind, priority
    return outcome


def told(outcome: Outcome, **objectives: Any) -> Any:
    slo = Slo(**objectives)
    slo.check(outcome.requests)
    return summarize(outcome, command="simulate", config={}, seed=0, warmup=0.0, load_s=0, versions={}, slo=slo)


def attainments(record: Any, by: str) -> dict[str, float]:
    return {one["class"]: one["attainment"] for one in record["slo"]["classes"] if one["by"] == by}


def test_each_class_has_its_own_objective(served: Outcome) -> None:
    """Chats within 1 s: one of three. Agents within 0.5 s: none of three. Of all six, one."""
    record = told(served, by="type", classes=[{"class": "chat", "ttft_s": 1.0}, {"class": "agent", "ttft_s": 0.5}])
    assert attainments(record, "type") == {"chat": 1 / 3, "agent": 0.0}
    assert record["slo"]["attainment"] == 1 / 6


def test_a_class_has_the_objectives_of_all_as_far_as_it_has_none(served: Outcome) -> None:
    """All within 2 s and 0.5 s per token; agents within 0.4 s per token, which none is: two chats are left."""
    record = told(served, ttft_s=2.0, tpot_s=0.5, by="type", classes=[{"class": "agent", "tpot_s": 0.4}])
    assert attainments(record, "type") == {"chat": 2 / 3, "agent": 0.0}


def test_null_takes_an_objective_away(served: Outcome) -> None:
    record = told(served, ttft_s=1.0, by="type", classes=[{"class": "chat", "ttft_s": None}])
    assert attainments(record, "type") == {"chat": 1.0, "agent": 2 / 3}


def test_classes_may_be_priorities(served: Outcome) -> None:
    record = told(served, ttft_s=1.0, by="priority", classes=[{"class": 1, "ttft_s": 3.0}])
    assert attainments(record, "priority") == {"0": 1 / 2, "1": 1.0, "10": 0.0}


def test_goodputs_of_classes_add_up(served: Outcome) -> None:
    """Over 7 s: two chats and two agents meet 2 s."""
    record = told(served, ttft_s=2.0)
    goodputs = {one["class"]: one["goodput_requests_per_s"] for one in record["slo"]["classes"] if one["by"] == "type"}
    assert goodputs == {"chat": 2 / 7, "agent": 2 / 7}
    assert record["slo"]["goodput_requests_per_s"] == pytest.approx(sum(goodputs.values()))


def test_the_record_and_the_summary_say_what_was_asked_for(served: Outcome) -> None:
    classes = [{"class": "agent", "ttft_s": 5.0, "tpot_s": 0.1}, {"class": "chat", "ttft_s": None}]
    record = told(served, ttft_s=2.0, by="type", classes=classes)
    assert record["slo"]["by"] == "type" and record["slo"]["by_class"]["agent"] == {"ttft_s": 5.0, "tpot_s": 0.1}
    expected = "TTFT <= 2 s; by type: agent TTFT <= 5 s and TPOT <= 0.1 s, chat without any"
    assert objective_text(record["slo"]) == expected and expected in dict(facts(record))["SLO"]


def test_a_class_that_the_trace_does_not_have_is_refused(served: Outcome) -> None:
    with pytest.raises(ValueError, match="classes: the trace has no request whose type is chats; it has agent, chat"):
        told(served, by="type", classes=[{"class": "chats", "ttft_s": 1.0}])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"by": "kind", "classes": [{"class": "a", "ttft_s": 1.0}]}, "by must be one of type, tenant, priority, not kind"),
        ({"by": "type"}, "by and classes belong together"),
        ({"classes": [{"class": "a", "ttft_s": 1.0}]}, "by and classes belong together"),
        ({"by": "type", "classes": [{"class": "a"}]}, r"classes\[0\] must have class, and ttft_s or tpot_s or both, not "),
        ({"by": "type", "classes": [{"class": "a", "e2e_s": 1.0}]}, r"classes\[0\] must have class, and ttft_s or tpot_s"),
        ({"by": "type", "classes": [{"class": "a", "ttft_s": 0.0}]}, r"classes\[0\].ttft_s must be above 0, not 0.0"),
        ({"by": "type", "classes": [{"class": "a", "ttft_s": 1.0}] * 2}, "classes has a class twice"),
    ],
)
def test_objectives_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slo(**settings)


def test_a_run_takes_objectives_of_classes() -> None:
    trace = kvsim.load_trace("synthetic", sessions=10)
    words = ["slo.by=type", "slo.classes=[{class: document, ttft_s: 0.5}, {class: chat, ttft_s: 100}]"]
    record = kvsim.simulate(trace, *words).record
    assert record["slo"]["by_class"] == {"document": {"ttft_s": 0.5}, "chat": {"ttft_s": 100}}
    assert attainments(record, "type")["chat"] == 1.0
    with pytest.raises(UsageError, match=r"slo\.classes: the trace has no request whose type is robot; it has chat, document"):
        kvsim.simulate(trace, "slo.by=type", "slo.classes=[{class: robot, ttft_s: 1}]")


def test_a_search_goes_by_the_objectives_of_all() -> None:
    trace = kvsim.load_trace("synthetic", sessions=4)
    with pytest.raises(UsageError, match=r"slo\.classes: kvsim saturate searches by the objectives of all requests"):
        kvsim.saturate(trace, "slo.by=type", "slo.classes=[{class: chat, ttft_s: 1}]")
