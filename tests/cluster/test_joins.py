"""Requests that wait for several others: graphs of calls."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cluster.cluster import Failure
from kvsim.engine.outcome import FINISHED, REJECTED
from tests.cluster.small_cluster import Sent, small_cluster
from tests.engine.drawn import SETTINGS
from tests.engine.small import Ask, ask, hits, seconds, small_engine


@pytest.mark.parametrize(("after", "joins"), [(1, (2,)), (2, (1,)), (0, (1, 2))])
def test_in_a_diamond_the_delay_counts_from_the_last_of_the_branches(after: int, joins: tuple[int, ...]) -> None:
    """The first call ends at 5. Its branches arrive at 6 and 8, and are computed until 11 and, after that, until 16."""
    outcome = small_engine(gpu=20).serve(
        ask("a"), ask("ab", after=0, delay_s=1), ask("ac", after=0, delay_s=3), ask("abd", after=after, joins=joins, delay_s=2)
    )
    assert outcome.arrival_s.tolist() == seconds([0, 6, 8, 16 + 2])
    assert outcome.e2e_s.tolist() == seconds([5, 5, 8, 5])
    assert hits(outcome, 3) == (2, 0, 0)


def test_a_join_may_wait_for_requests_that_wait_for_none() -> None:
    """They end at 5 and, from 20 on, at 25."""
    outcome = small_engine(gpu=20).serve(ask("a"), ask("b", 20), ask("c", after=0, joins=(1,)))
    assert outcome.arrival_s.tolist() == seconds([0, 20, 25])


@pytest.mark.parametrize(("branches", "arrival_s"), [(("abcdefgh", "ab"), 13 + 2), (("abcdefgh", "efghabcd"), 8 + 2)])
def test_a_branch_that_is_rejected_has_ended(branches: tuple[str, str], arrival_s: float) -> None:
    """The branches arrive at 6 and 8; what has more pages than the GPU is rejected at once, the other one takes 5 s."""
    first, second = branches
    outcome = small_engine(gpu=5).serve(
        ask("a"), ask(first, after=0, delay_s=1), ask(second, after=0, delay_s=3), ask("a", after=1, joins=(2,), delay_s=2)
    )
    assert outcome.status.tolist() == [FINISHED, REJECTED, REJECTED if len(second) > 5 else FINISHED, FINISHED]
    assert outcome.arrival_s[3] == seconds(arrival_s)


def test_a_branch_whose_engine_fails_is_waited_for() -> None:
    """Both branches are computed from 5 on. Engine 1 fails at 7: engine 0 computes its branch, too, once it has ended its own at
    18, having found "a", until 35."""
    branches = ask("abcd", after=0), ask("pqrs", after=0)
    cluster = small_cluster(gpu=20, routing=Sent(0, 0, 1, 0), failures=[Failure(engine=1, at_s=7.0)])
    outcome = cluster.serve(ask("a"), *branches, ask("a", after=1, joins=(2,), delay_s=1))
    ends_s = outcome.arrival_s + outcome.e2e_s
    assert ends_s.tolist()[1:3] == seconds([18, 35])
    assert outcome.arrival_s[3] == seconds(36)


@st.composite
def graphs(draw: st.DrawFn) -> list[Ask]:
    """Requests of which any may wait for any earlier ones; a few are too long for the GPU."""
    found: list[Ask] = []
    for number in range(draw(st.integers(1, 9))):
        before = draw(st.lists(st.integers(0, number - 1), max_size=3, unique=True)) if number else []
        word = draw(st.text("ab", max_size=5) | st.just("a" * 12))
        about: dict[str, Any] = {"tokens": draw(st.integers(1, 3)), "output": draw(st.integers(1, 4))}
        if before:
            about |= {"after": before[0], "joins": tuple(before[1:]), "delay_s": draw(st.sampled_from([0.0, 0.5, 7.0]))}
        found.append(ask(word, draw(st.sampled_from([0.0, 3.0, 11.5])) if not before else 0.0, **about))
    return found


@SETTINGS
@given(graphs(), st.lists(st.integers(0, 1), min_size=9, max_size=9), st.none() | st.floats(0.0, 40.0))
def test_no_request_arrives_before_all_that_it_waits_for_have_ended(
    asks: list[Ask], engines: list[int], fails_at_s: float | None
) -> None:
    failures = [] if fails_at_s is None else [Failure(engine=1, at_s=fails_at_s, back_after_s=5.0)]
    outcome = small_cluster(gpu=10, cpu=6, routing=Sent(*engines), failures=failures).serve(*asks)
    ends_s = outcome.arrival_s + outcome.e2e_s
    for index, one in enumerate(asks):
        before = [one.after, *one.joins] if one.after >= 0 else []
        if not before:
            assert outcome.arrival_s[index] == seconds(one.at)
        elif not np.isnan(ends_s[before]).any():
            assert outcome.arrival_s[index] == seconds(ends_s[before].max() + one.delay_s)
        else:  # when a request was rejected is not recorded
            least_s = max(np.nanmax([ends_s[before], outcome.arrival_s[before]]), 0.0)
            assert outcome.arrival_s[index] >= least_s + one.delay_s - 1e-9
