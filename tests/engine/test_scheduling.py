"""The waiting queue in the engine. See small.py for the round numbers: a page of four tokens takes 4 s to compute.

A prompt is a word, a page for each letter, and one token more.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from kvsim.engine.outcome import Outcome
from kvsim.policies.context import PolicyContext
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.policies.scheduling.dfs_weight import DfsWeight
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.policies.scheduling.longest_prefix import LongestPrefix
from kvsim.policies.scheduling.priority import Priority
from kvsim.policies.scheduling.shortest_prefill import ShortestPrefill
from kvsim.policies.scheduling.shortest_prompt import ShortestPrompt
from tests.engine.small import PAGE_TOKENS, STEP_READS, Ask, ask, check_idle, hits, make_requests, seconds, small_engine
from tests.workloads import random_requests


def bound(policy: SchedulingPolicy) -> SchedulingPolicy:
    policy.bind(PolicyContext(page_tokens=PAGE_TOKENS))
    return policy


def serve(policy: SchedulingPolicy, *asks: Ask, priorities: Sequence[int] = (), **settings: Any) -> Outcome:
    engine = small_engine(scheduling=bound(policy), **({"gpu": 100} | settings))
    requests = make_requests(asks)
    for request, priority in zip(requests, priorities, strict=False):
        request.priority = priority
    outcome = engine.run(requests)
    check_idle(engine)
    return outcome


def order(outcome: Outcome) -> list[int]:
    """Requests in the order of their first tokens."""
    return sorted(range(len(outcome.requests)), key=lambda index: outcome.arrival_s[index] + outcome.ttft_s[index])


def fine(**settings: Any) -> dict[str, Any]:
    """Settings of prefix policies for pages of 4 tokens: 2 pages shared make a duplicate, if none is cached."""
    return {"check_up_to_tokens": 0, "shared_tokens": 8} | settings


# --- the order ---------------------------------------------------------------------------------------------------------------

ASKS = (ask("abc"), ask("wxyz", 1), ask("q", 1), ask("abd", 1), ask("wxyv", 1), ask("abce", 1))
"""One at a time: all others wait while the first computes abc, until 13 s."""


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (FCFS(), [0, 1, 2, 3, 4, 5]),
        (Priority(), [0, 4, 2, 5, 1, 3]),
        (ShortestPrompt(), [0, 2, 3, 1, 4, 5]),
        # Left to compute: 17, 5, 5 (ab is cached), 17, 5 tokens; wxyv has 5 left once wxyz has been computed.
        (ShortestPrefill(**fine()), [0, 2, 3, 5, 1, 4]),
        # Cached: none, none, ab, none, abc; wxyv comes before q once wxyz has been computed.
        (LongestPrefix(**fine()), [0, 5, 3, 1, 4, 2]),
        # Below ab two requests, of which abce goes deeper than abd. All others have nothing cached.
        (DfsWeight(), [0, 5, 3, 1, 4, 2]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, SchedulingPolicy) else "",
)
def test_first_tokens_come_in_the_order_of_the_policy(policy: SchedulingPolicy, expected: list[int]) -> None:
    outcome = serve(policy, *ASKS, max_running_requests=1, priorities=(0, 1, 2, 0, 3, 2))
    assert order(outcome) == expected


def test_a_request_that_does_not_fit_keeps_the_others_waiting() -> None:
    """6 pages. The first takes 3 until 31 s. Priority 1 needs 5 pages and waits; priority 0 would fit, but comes after it."""
    asks = (ask("ab", output=4), ask("q", 1), ask("vwxy", 1))
    outcome = serve(Priority(), *asks, gpu=6, priorities=(0, 0, 1))
    assert order(outcome) == [0, 2, 1]
    outcome = serve(Priority(), *asks, gpu=6, priorities=(0, 1, 0))
    assert order(outcome) == [0, 1, 2]


# --- starvation --------------------------------------------------------------------------------------------------------------


def test_nobody_starves_with_a_bound() -> None:
    """A prompt of 5 tokens comes every 5 s and takes 5 s. The long one arrives at 1 s; it has waited for 12 s at 15 s."""
    short = [ask(letter, 5.0 * number) for number, letter in enumerate("abcdefgh")]
    asks = (short[0], ask("wxyz", 1), *short[1:])
    starved = serve(ShortestPrompt(), *asks, max_running_requests=1)
    assert order(starved)[-1] == 1 and starved.ttft_s[1] == seconds(40 + 17 - 1)
    outcome = serve(ShortestPrompt(max_wait_s=12.0), *asks, max_running_requests=1)
    assert outcome.ttft_s[1] == seconds(15 + 17 - 1)


@pytest.mark.parametrize("kind", [Priority, ShortestPrompt, ShortestPrefill, LongestPrefix, DfsWeight])
@pytest.mark.parametrize("seed", range(5))
def test_a_bound_of_nothing_serves_by_arrival(kind: Any, seed: int) -> None:
    """Whoever waits is overdue, so the order is that of arrival, whatever the policy."""
    requests = random_requests(seed, requests=30)
    for request in requests:
        request.arrival_s += 0.001 * request.index
        request.priority = request.index % 3
    first, second = (
        small_engine(gpu=60, scheduling=bound(policy), max_running_requests=2) for policy in (FCFS(), kind(max_wait_s=0.0))
    )
    assert (first.run(requests).ttft_s == second.run(requests).ttft_s).all()


# --- in-batch duplicates -----------------------------------------------------------------------------------------------------


def test_duplicates_hit_what_the_first_has_computed() -> None:
    """A step computes 34 tokens, two prompts of 17. abce is a duplicate of abcd: it comes after xyzw and finds abc."""
    asks = (ask("abcd"), ask("abce"), ask("xyzw"))
    together = serve(LongestPrefix(**fine(in_batch_duplicates="equal")), *asks, max_batch_tokens=34)
    assert [hits(together, index)[0] for index in range(3)] == [0, 0, 0]
    assert list(together.ttft_s) == seconds([34, 34, 51])
    apart = serve(LongestPrefix(**fine()), *asks, max_batch_tokens=34)
    assert [hits(apart, index)[0] for index in range(3)] == [0, 3, 0]
    assert list(apart.ttft_s) == seconds([34, 39, 34])


def test_a_duplicate_that_fits_into_the_step_does_not_wait() -> None:
    """As in SGLang: it is tried last, but in the same round, and computes the shared pages, too."""
    outcome = serve(LongestPrefix(**fine()), ask("abcd"), ask("abce"), max_batch_tokens=34)
    assert list(outcome.ttft_s) == seconds([34, 34]) and hits(outcome, 1) == (0, 0, 0)


# --- retractions -------------------------------------------------------------------------------------------------------------

FULL = {"gpu": 4, "hardware": STEP_READS}
"""Two prompts of 5 tokens take all 4 pages; with their fifth output token, both need a third page. A step takes 1 s."""


@pytest.mark.parametrize(
    ("policy", "priorities", "expected"),
    [
        (FCFS(), (0, 0), [0, 1]),
        (ShortestPrompt(), (0, 1), [0, 1]),
        (LongestPrefix(), (0, 1), [0, 1]),
        (Priority(), (1, 0), [0, 1]),
        (Priority(), (0, 1), [1, 0]),
        (Priority(), (1, 1), [0, 1]),
    ],
)
def test_the_least_important_or_the_youngest_is_retracted(
    policy: SchedulingPolicy, priorities: tuple[int, int], expected: list[int]
) -> None:
    outcome = serve(policy, ask("a", output=8), ask("b", output=8), priorities=priorities, **FULL)
    assert outcome.columns["retractions"].tolist() == expected


@pytest.mark.parametrize(("policy", "expected"), [(FCFS(), [0, 1, 2]), (LongestPrefix(**fine()), [0, 2, 1])])
def test_where_a_retracted_request_waits(policy: SchedulingPolicy, expected: list[int]) -> None:
    """The second request is retracted while the third waits. Of 2 pages, and prompts of less than one, nothing is cached."""
    asks = (ask("", tokens=3, output=4), ask("", tokens=3, output=4), ask("", 1, tokens=3))
    outcome = serve(policy, *asks, gpu=2, max_running_requests=2, hardware=STEP_READS)
    assert outcome.retractions == 1
    ends = outcome.arrival_s + outcome.e2e_s
    assert sorted(range(3), key=lambda index: ends[index]) == expected
