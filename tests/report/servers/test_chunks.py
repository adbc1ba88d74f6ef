"""Steps of prompts, by hand: pages of 4 tokens, and 16 tokens a step. A step takes a second."""

import numpy as np
import pytest

from kvsim.report.servers.chunks import Pass, Prompts, passes_of
from kvsim.report.servers.pauses import Steps

CHUNK, PAGE = 16, 4


def made(
    groups: list[list[int]], ends_s: list[float], tokens: list[int], sent_s: list[float], queued_s: list[float], ahead: int = 1
) -> list[Pass]:
    ends = np.array(ends_s)
    prompts = Prompts(np.array(sent_s), np.array(queued_s), np.array(tokens))
    return passes_of(groups, prompts, Steps(ends, ends, ahead), CHUNK, PAGE)


def admissions(passes: list[Pass]) -> list[list[int]]:
    return [one.admitted for one in passes]


def test_prompts_that_fit_into_a_step_are_admitted_to_it() -> None:
    passes = made([[], [], [0, 1], []], [1, 2, 3, 4], [7, 8], [0.5, 0.5], [0.1, 0.1])
    assert admissions(passes) == [[], [], [0, 1], []]
    assert [one.formed_s for one in passes[2:]] == pytest.approx([1, 2]), "while the step before runs"
    assert all(one.is_seen for one in passes)


def test_a_long_prompt_is_computed_in_steps_that_send_no_token() -> None:
    """Of 40 tokens, 16 and 16 are computed unseen, and 8 beside the other request's 8 in the step that sends first tokens."""
    passes = made([[], [], [0, 1], []], [1, 2, 5, 6], [38, 8], [0.5, 0.5], [0.1, 2.1])
    assert admissions(passes) == [[], [], [0], [], [1], []]
    assert [one.is_seen for one in passes] == [True, True, False, False, True, True]
    assert [one.formed_s for one in passes[2:]] == pytest.approx([1, 2, 3, 4])


@pytest.mark.parametrize(("queued_s", "begins"), [(0.4, True), (0.95, True), (1.4, False)])
def test_a_prompt_may_begin_with_what_is_left_of_a_step(queued_s: float, begins: bool) -> None:
    """The second prompt has 20 tokens, 12 of which are left of the step formed at 1 s; then a step computes the other 8. If it is
    admitted at 2 s, a step of 16 is not seen. It is taken at 0.6 s at the earliest, and has been in the queue since."""
    passes = made([[], [], [0], [1], []], [1, 2, 3, 4, 5], [4, 20], [0.5, 0.6], [0.5, queued_s])
    assert admissions(passes) == ([[], [], [0, 1], [], []] if begins else [[], [], [0], [1], [], []])


def test_a_request_sent_after_a_step_was_formed_is_admitted_to_the_next_one() -> None:
    passes = made([[], [], [0], [1], []], [1, 2, 3, 4, 5], [4, 20], [0.5, 1.1], [0.5, 0.2])
    assert admissions(passes) == [[], [], [0], [1], [], []]


def test_a_prompt_does_not_begin_before_a_step_of_answers() -> None:
    passes = made([[], [], [0], [], [1], []], [1, 2, 3, 4, 5, 6], [4, 20], [0.5, 0.6], [0.5, 0.4])
    assert admissions(passes) == [[], [], [0], [], [1], [], []]


def test_an_idle_server_admits_requests_when_they_come() -> None:
    """It has looked in vain when the first step ran; the second request comes after that and the third with it."""
    passes = made([[0], [1, 2], []], [1, 5, 6], [4, 4, 4], [0.0, 3.0, 3.001], [0.0, 0.0, 0.0])
    assert admissions(passes) == [[0], [1, 2], []]
    assert [one.formed_s for one in passes] == pytest.approx([0, 3.001, 3.001])
    assert len({one.formed_s for one in passes}) == 3, "no two at one time"


def test_without_a_step_ahead_steps_are_formed_when_the_one_before_has_ended() -> None:
    passes = made([[], [0], [1]], [1, 2, 4], [4, 20], [0.5, 0.6], [0.5, 0.4], ahead=0)
    assert admissions(passes) == [[], [0, 1], []]
    assert [one.formed_s for one in passes[1:]] == pytest.approx([1, 2])
