"""The tests that ``kvsim new`` writes into a user's own project. They need kvsim only as it is installed."""

from kvsim.commands.templates import CHECKPOINT_RULES

EVICTION = '''
"""@Class@ by hand: each prompt is one page, and there is room for two."""

import kvsim
import pytest

from kvsim_policies.eviction.@name@ import @Class@

SETTINGS = ("tiers.gpu.capacity=2pages", "replay.hold_output=false", "rules.recompute_last_token=false")


def hits(policy: @Class@, prompts: str) -> list[int]:
    """Return the hit pages of prompts that come one after another, one per second."""
    trace = kvsim.load_trace("words", page_tokens=1, prompts=prompts.split())
    return kvsim.replay(trace, *SETTINGS, eviction=policy).hit_pages[:, 0].tolist()


def test_a_page_that_was_hit_often_outlasts_newer_ones() -> None:
    assert hits(@Class@(seconds_per_hit=100), "a a a b c a") == [0, 1, 1, 0, 0, 1]


def test_without_a_weight_for_hits_it_is_lru() -> None:
    assert hits(@Class@(seconds_per_hit=0), "a a a b c a") == [0, 1, 1, 0, 0, 0]


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds_per_hit must be 0 or more, not -1"):
        @Class@(seconds_per_hit=-1)
'''

PREFETCH = '''
"""@Class@ by hand: pages of 16 tokens."""

import pytest
from kvsim.core.request import Request
from kvsim.policies.context import PolicyContext
from kvsim.policies.prefetch.base import Offer, Refusal

from kvsim_policies.prefetch.@name@ import @Class@

REQUEST = Request(index=0, arrival_s=0.0, prompt_tokens=4096, output_tokens=1, runs=(), prompt_pages=0)


def fetched(policy: @Class@, stored: int, available: int = 100) -> int | Refusal:
    """Return what the policy fetches of ``stored`` pages if the CPU tier could take ``available``."""
    policy.bind(PolicyContext(tier=1, capacity_pages=100, page_tokens=16))
    return policy.fetch(
        Offer(request=REQUEST, first_page=0, stored_pages=stored, in_flight_pages=0, available_pages=available, queued_s=0.0)
    )


def test_it_fetches_from_the_threshold_on() -> None:
    assert fetched(@Class@(min_tokens=256), 15) is Refusal.THRESHOLD
    assert fetched(@Class@(min_tokens=256), 16) == 16


def test_it_fetches_what_fits() -> None:
    assert fetched(@Class@(), 50, available=20) == 20
    assert fetched(@Class@(), 50, available=0) is Refusal.MEMORY


def test_it_loads_what_the_cpu_has() -> None:
    assert @Class@().load(REQUEST, 1, 3, 4) == 3


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at least 1, not 0"):
        @Class@(min_tokens=0)
'''

PLACEMENT = '''
"""@Class@ by hand: each word of a prompt is one page."""

import kvsim
import pytest

from kvsim_policies.placement.@name@ import @Class@

SETTINGS = ("tiers.cpu.capacity=8pages", "replay.hold_output=false", "rules.recompute_last_token=false")


def copied(policy: @Class@, *prompts: str, gpu: int) -> int:
    """Return how many pages a replay of the prompts copies to the CPU tier."""
    trace = kvsim.load_trace("words", page_tokens=1, prompts=list(prompts))
    result = kvsim.replay(trace, *SETTINGS, f"tiers.gpu.capacity={gpu}pages", placement=policy)
    return result.record["tiers"]["cpu"]["inserted_pages"]


def test_a_page_is_copied_from_the_hits_th_use_on() -> None:
    assert copied(@Class@(hits=2), "a b", gpu=6) == 0
    assert copied(@Class@(hits=2), "a b", "a b c", gpu=6) == 2


def test_what_is_evicted_is_copied() -> None:
    assert copied(@Class@(hits=9), "a b c", "x y", gpu=3) == 2


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="hits must be at least 1, not 0"):
        @Class@(hits=0)
'''

CHECKPOINT = (
    '''
"""@Class@ by hand, in pages."""

import pytest
from kvsim.policies.checkpoint.base import Prefill

from kvsim_policies.checkpoint.@name@ import @Class@
'''
    + CHECKPOINT_RULES
)

ROUTING = '''
"""@Class@ by hand: requests that do not end."""

from dataclasses import dataclass

import numpy as np
import pytest
from kvsim.core.request import Request
from kvsim.policies.routing.context import RoutingContext

from kvsim_policies.routing.@name@ import @Class@


@dataclass
class Engine:
    """What the policy may know of an engine (EngineStatus); add what yours reads."""

    engine: int
    outstanding_requests: int = 0


def engines_of(policy: @Class@, sessions: list[int]) -> list[int]:
    """Return which of two engines gets each request, given by its session; -1 has none."""
    engines = [Engine(0), Engine(1)]
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
    assert engines_of(@Class@(max_extra_requests=2), [5] * 5) == [0, 0, 0, 1, 1]


def test_other_requests_go_to_the_idlest_engine() -> None:
    assert engines_of(@Class@(), [-1] * 4) == [0, 1, 0, 1]


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="max_extra_requests must be 0 or more, not -1"):
        @Class@(max_extra_requests=-1)
'''

SCHEDULING = '''
"""@Class@ by hand: requests are given by their arrival and the tokens of their prompts."""

import pytest
from kvsim.core.request import Request
from kvsim.core.queue_view import Waiting

from kvsim_policies.scheduling.@name@ import @Class@


def order(policy: @Class@, *requests: tuple[float, int]) -> list[int]:
    """Return the numbers of the requests in the order in which they are tried."""
    ranks = []
    for index, (arrival_s, tokens) in enumerate(requests):
        request = Request(index=index, arrival_s=arrival_s, prompt_tokens=tokens, output_tokens=1, runs=(), prompt_pages=0)
        ranks.append((policy.rank(Waiting(request, arrival_s)), index))
    return [index for _, index in sorted(ranks)]


def test_a_long_prompt_comes_later() -> None:
    assert order(@Class@(seconds_per_1024_tokens=1024), (0.0, 64), (30.0, 32), (60.0, 16)) == [1, 0, 2]


def test_without_a_weight_for_tokens_it_is_first_come_first_served() -> None:
    assert order(@Class@(seconds_per_1024_tokens=0), (0.0, 64), (30.0, 32), (60.0, 16)) == [0, 1, 2]


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds_per_1024_tokens must be 0 or more, not -1"):
        @Class@(seconds_per_1024_tokens=-1)
'''
