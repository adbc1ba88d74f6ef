"""What admission policies need before a run, and what they reckon with, one question at a time. See test_gate.py for runs."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvsim.policies.admission.context import AdmissionContext
from kvsim.policies.admission.predicted_ttft import PredictedTtft
from kvsim.policies.admission.priority_shed import PriorityShed
from tests.engine.small import ask, make_requests

KNOWN = AdmissionContext(prefill_s=lambda *_: 1.0, decode_step_s=lambda requests, _: 1.0 * requests)
"""A step takes a second for each answer."""


@dataclass
class Idle:
    """The load of an engine that has nothing to do."""

    prefills: tuple[()] = ()
    decoding_requests: int = 0
    decoding_tokens: int = 0
    computing_s: float = 0.0

    def uncached_tokens(self, request: Any) -> int:
        return 1


def admits(policy: PredictedTtft, samples: int) -> bool:
    request, engine = make_requests([ask("a")])[0], Idle()
    request.samples = samples
    load: Any = Load((engine,), (engine,))
    return policy.admits(request, load)


@dataclass
class Load:
    engines: tuple[Idle, ...]
    decoders: tuple[Idle, ...]
    waited_s: float = 0.0


def test_each_answer_of_a_request_decodes_over_its_prompt() -> None:
    """A request for three answers makes steps of 3 s, over three times its prompt of 5 tokens."""
    asked: list[tuple[int, int]] = []

    def step_s(requests: int, tokens: int) -> float:
        asked.append((requests, tokens))
        return 1.0 * requests

    policy = PredictedTtft(ttft_s=1000.0, decode_load=True, tpot_s=2.5)
    policy.bind(replace(KNOWN, decode_step_s=step_s))
    assert admits(policy, 1) and admits(policy, 2) and not admits(policy, 3)
    assert asked == [(1, 5), (2, 10), (3, 15)]


def test_a_step_with_drafts_has_time_for_all_tokens_that_it_yields() -> None:
    policy = PredictedTtft(ttft_s=1000.0, decode_load=True, tpot_s=0.5)
    policy.bind(replace(KNOWN, tokens_per_step=1.9))
    assert not admits(policy, 1)
    policy.bind(replace(KNOWN, tokens_per_step=2.0))
    assert admits(policy, 1)


def test_an_objective_is_asked_for_where_it_can_be_set() -> None:
    """Where nobody knows the requests before they come, as in an emulated server, there is no section ``slo``."""
    with pytest.raises(ValueError, match=r"time to first token: set admission.ttft_s$"):
        PredictedTtft().bind(KNOWN)
    with pytest.raises(ValueError, match=r"decode_load=true: set admission.tpot_s$"):
        PredictedTtft(ttft_s=1.0, decode_load=True).bind(KNOWN)
    with pytest.raises(ValueError, match=r"set slo.ttft_s, or admission.ttft_s$"):
        PredictedTtft().bind(replace(KNOWN, requests=make_requests([ask("a")])))


def test_priorities_of_types_that_do_not_come_are_refused() -> None:
    requests = make_requests([ask("a"), ask("b")])
    requests[0].kind = "chat"
    priorities = [{"type": "chat", "priority": -1}, {"type": "chats", "priority": -2}]
    with pytest.raises(ValueError, match="has priorities for the type chats, which no request of this trace has"):
        PriorityShed(priorities=priorities).bind(AdmissionContext(requests=requests))
    PriorityShed(priorities=priorities).bind(AdmissionContext())
    PriorityShed(priorities=priorities[:1]).bind(AdmissionContext(requests=requests))
