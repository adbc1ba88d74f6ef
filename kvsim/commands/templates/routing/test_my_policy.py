"""MyPolicy by hand: requests that do not end."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvsim.commands.templates.routing.my_policy import MyPolicy
from kvsim.core.request import Request
from kvsim.policies.routing.context import RoutingContext


@dataclass
class Engine:
    """What the policy may know of an engine (EngineStatus); add what yours reads."""

    engine: int
    outstanding_requests: int = 0


def engines_of(policy: MyPolicy, sessions: list[int]) -> list[int]:
    """Return which of two engines gets each request, given by its session; -1 has none."""
    engines: list[Any] = [Engine(0), Engine(1)]
    policy.bind(RoutingContext(engines=range(2), capacities=[None] * 2, page_tokens=16, rng=np.random.default_rng(0)))
    chosen = []
    for index, session in enumerate(sessions):
        request = Request(
            index=index, arrival_s=0.0, prompt_tokens=16, output_tokens=1, runs=((index, 1),), prompt_pages=1, session=session
        )
        chosen.append(policy.choose(request, engines, 0.0))
        policy.on_sent(request, chosen[-1], 0.0)
        engines[chosen[-1]].outstanding_requests += 1
    return chosen


def test_a_session_stays_until_its_engine_has_too_much_to_do() -> None:
    assert engines_of(MyPolicy(max_extra_requests=2), [5] * 5) == [0, 0, 0, 1, 1]


def test_other_requests_go_to_the_idlest_engine() -> None:
    assert engines_of(MyPolicy(), [-1] * 4) == [0, 1, 0, 1]


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="max_extra_requests must be 0 or more, not -1"):
        MyPolicy(max_extra_requests=-1)
