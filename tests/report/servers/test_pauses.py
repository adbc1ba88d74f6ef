"""Steps and preemptions as clients see them, by hand: a step each 10 ms."""

import numpy as np
import pytest

from kvsim.report.servers.pauses import Steps, pauses, steps_of

NEVER = np.array([-1.0])


def at(*steps: int) -> np.ndarray:
    return np.array(steps) / 100


def every(first: int, last: int) -> np.ndarray:
    return np.arange(first, last + 1) / 100


def seen(*tokens_s: np.ndarray, ahead: int = 0) -> Steps:
    return steps_of(tokens_s, ahead)


def test_a_step_ends_with_its_last_token_and_the_next_begins_with_a_second_one_of_a_request_or_after_a_while() -> None:
    steps = seen(np.array([1.0, 1.008, 1.03]), np.array([1.002, 1.0105]), np.array([1.0031]))
    assert steps.begin_s.tolist() == [1.0, 1.008, 1.03]
    assert steps.end_s.tolist() == [1.0031, 1.0105, 1.03]
    late = seen(np.array([1.0, 1.0]), np.array([1.0]))
    assert late.end_s.tolist() == [1.0]
    assert seen().end_s.tolist() == []


@pytest.mark.parametrize(("ahead", "formed"), [(0, [1, 2, 3]), (1, [1, 1, 2])])
def test_a_step_is_formed_when_the_one_before_it_ends_or_a_step_earlier(ahead: int, formed: list[int]) -> None:
    assert seen(every(1, 4), ahead=ahead).formed_s(at(2 - ahead, 3, 4)).tolist() == at(*formed).tolist()


@pytest.mark.parametrize(("ahead", "lost", "again"), [(0, 5, 9), (1, 4, 8)])
def test_a_request_is_preempted_after_its_last_token_and_has_pages_when_the_step_of_its_next_one_is_formed(
    ahead: int, lost: int, again: int
) -> None:
    """It has the tokens of steps 1 to 5 and 10 to 14, the others those of all."""
    tokens_s = [every(0, 20), np.concatenate([every(1, 5), every(10, 14)]), every(2, 18), every(7, 18)]
    found = pauses(tokens_s, NEVER, seen(*tokens_s, ahead=ahead), most=1)
    assert found == {1: [(lost / 100, again / 100)]}
    earlier = pauses(tokens_s, at(7), seen(*tokens_s, ahead=ahead), most=1)
    assert earlier == {1: [(lost / 100, 0.07)]}, "nobody else is admitted before it"
    assert pauses(tokens_s, NEVER, seen(*tokens_s), most=0) == {}


def test_a_request_that_goes_to_the_end_of_the_queue_is_passed_by_others_and_loses_what_a_step_in_flight_computes() -> None:
    """As above, with a step ahead: step 6 computes it, and when the step after that is formed, at 5, it loses its pages. The one
    that is admitted at 7 does not take its place."""
    tokens_s = [every(0, 20), np.concatenate([every(1, 5), every(10, 14)]), every(2, 18), every(7, 18)]
    found = pauses(tokens_s, at(7), seen(*tokens_s, ahead=1), most=1, goes_last=True)
    assert found == {1: [(0.05, 0.08)]}
    assert pauses(tokens_s, at(7), seen(*tokens_s), most=1, goes_last=True) == {1: [(0.05, 0.09)]}, "none is in flight"


def test_an_engine_that_stands_still_and_a_late_client_preempt_nobody() -> None:
    stalled = [np.concatenate([every(0, 5), every(50, 60)]), np.concatenate([every(1, 5), every(50, 58)])]
    assert pauses(stalled, NEVER, seen(*stalled), most=5) == {}
    late = [every(0, 20), np.delete(every(0, 20), 7)]
    assert pauses(late, NEVER, seen(*late), most=5) == {}
    alone = [np.concatenate([every(0, 5), every(50, 60)])]
    assert pauses(alone, NEVER, seen(*alone), most=5) == {}
    assert pauses([at(3), every(0, 9)], NEVER, seen(at(3), every(0, 9)), most=5) == {}


def test_the_longest_pauses_are_the_ones_that_the_server_has_counted() -> None:
    tokens_s = [every(0, 40), np.delete(every(0, 40), [5, 6, 7, 20, 21, 22, 23]), every(0, 40), np.delete(every(0, 40), [10, 11])]
    steps = seen(*tokens_s)
    assert pauses(tokens_s, NEVER, steps, most=1) == {1: [(0.19, 0.23)]}
    assert pauses(tokens_s, NEVER, steps, most=2) == {1: [(0.04, 0.07), (0.19, 0.23)]}
    assert pauses(tokens_s, NEVER, steps, most=9) == {1: [(0.04, 0.07), (0.19, 0.23)], 3: [(0.09, 0.11)]}
