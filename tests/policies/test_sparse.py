"""Sparse checkpoints by hand, and their placement against trying all."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.policies.checkpoint.base import Prefill
from kvsim.policies.checkpoint.sparse import BINS, Sparse, best_places
from kvsim.policies.context import PolicyContext


def bound(**settings: object) -> Sparse:
    policy = Sparse(**settings)  # type: ignore[arg-type]
    policy.bind(PolicyContext(page_tokens=4))
    return policy


def places(policy: Sparse, full: int, *, start: int = 0, known: int = 0) -> list[int]:
    return list(policy.after_prefill(Prefill(start=start, known=known, full=full, replay=full)))


def test_spacings_that_follow_from_the_length() -> None:
    assert places(bound(spacing="log"), 20) == [1, 2, 4, 8, 16]
    assert places(bound(spacing="log"), 20, start=4) == [8, 16]
    assert places(bound(spacing="sqrt"), 20) == [4, 8, 12, 16, 20]
    assert places(bound(spacing="sqrt"), 0) == [] == places(bound(spacing="log"), 0)
    assert places(bound(spacing="balanced", states=3), 20) == [5, 10, 15]
    assert places(bound(spacing="balanced", states=8), 4) == [1, 2, 3], "no more than there are pages"


def test_answers_get_none() -> None:
    assert list(bound().after_answer(10, 14)) == []


def test_learned_begins_balanced_and_then_follows_the_departures() -> None:
    """A hundred prompts depart after page 7, every fourth after page 12: with two states, it is these."""
    policy = bound(states=2)
    assert places(policy, 30) == [10, 20]
    for number in range(100):
        places(policy, 30, known=12 if number % 4 == 0 else 7)
    assert places(policy, 30) == [7, 12]
    assert places(policy, 10) == [7], "a shorter prompt has those that it reaches"
    assert places(policy, 30, start=7) == [12]


def test_a_new_habit_outweighs_an_old_one() -> None:
    """200 departures at 9, then 300 at 4: the old ones weigh 0.99^300 = 5%."""
    policy = bound(states=1)
    for depth in [9] * 200 + [4] * 300:
        places(policy, 30, known=depth)
    assert places(policy, 30) == [4]


def test_deep_departures_share_bins() -> None:
    """Depths of up to 1,280 pages in bins of 10: 95 is in the bin that begins at 90."""
    policy = bound(states=2)
    for number in range(100):
        places(policy, 2000, known=95 if number % 2 else 10 * BINS)
    assert places(policy, 2000) == [90, 1280]


def cost(weights: list[int], chosen: tuple[int, ...]) -> int:
    return sum(
        weight * (depth - max([0, *(place for place in chosen if place <= depth)])) for depth, weight in enumerate(weights)
    )


@given(weights=st.lists(st.integers(0, 5), min_size=1, max_size=9), count=st.integers(1, 4))
def test_no_other_places_cost_less(weights: list[int], count: int) -> None:
    found = best_places(np.array(weights, dtype=float), count)
    assert len(found) <= count and found == sorted(set(found)) and all(0 < place < len(weights) for place in found)
    others = (some for size in range(count + 1) for some in combinations(range(1, len(weights)), size))
    assert cost(weights, tuple(found)) == min(cost(weights, some) for some in others)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"spacing": "dense"}, "spacing must be one of learned, balanced, sqrt, log, not dense"),
        ({"states": 0}, "states must be at least 1, not 0; null is 8"),
        ({"spacing": "log", "states": 3}, "states=3 has no effect with spacing=log"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        bound(**settings)
