"""How long prompts wait for memory that answers hold, by hand and against slow models: one question at a time."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.policies.admission import room
from kvsim.policies.admission.room import AnswerLengths, Forecast, Memory
from tests.engine.drawn import SETTINGS


def lengths(*tokens: int) -> AnswerLengths:
    known = AnswerLengths()
    for one in tokens:
        known.add(one)
    return known


def test_what_is_left_of_an_answer_is_what_was_left_of_longer_ones() -> None:
    """After 5 tokens, answers of 10, 20 and 40 had 5, 15 and 35 left."""
    known = lengths(3, 40, 10, 5, 20)
    assert [known.left(5, quantile) for quantile in (0.0, 0.34, 0.99)] == [5, 15, 35]
    assert known.mean == 15.6 and known.left(40, 0.5) == 15.6, "none was longer than 40: the mean of all"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 9), st.floats(0, 0.999))
@SETTINGS
def test_only_the_latest_answers_count(tokens: list[int], generated: int, quantile: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "LATEST", 4)
        known, latest = lengths(*tokens), tokens[-4:]
    longer = sorted(one - generated for one in latest if one > generated)
    assert len(known) == len(latest) and known.mean == sum(latest) / len(latest)
    assert known.left(generated, quantile) == (longer[int(quantile * len(longer))] if longer else known.mean)


def memory(free: int, held: Sequence[tuple[int, int]] = (), left: Sequence[float] = (), most: int = 100) -> Memory:
    """With steps of a second for each answer."""
    known = Memory(free, (len(held), sum(prompt for prompt, _ in held)), lambda requests, context: float(requests), most)
    known.hold(held, left)
    return known


def forecast(known: Memory, *, steps: float = 10) -> Forecast:
    """With a second for each token of a prompt, and 10 tokens in a step."""
    return Forecast(known, lambda some, requests, context: float(sum(tokens - start for start, tokens in some)), 10, steps)


def test_memory_is_free_when_an_answer_ends() -> None:
    """Answers of 5 + 2 and 8 + 1 tokens end after 3 and 5 steps of 2 s and 1 s: 2 - 6 + 10 and then 6 - 2 + 14 are free."""
    known = memory(2, [(5, 2), (8, 1)], [3, 5])
    assert known.wait(2) == 0.0 and known.wait(6) == 6.0 and known.free == 6.0 and known.requests == 1
    assert known.wait(7) == 2.0 and known.free == 18.0
    assert known.wait(100) == 0.0, "no answer is left that could end"


def test_a_prompt_waits_until_it_fits() -> None:
    """9 tokens of a prompt of 12, with 4 free: the answer ends after 3 steps of a second."""
    assert forecast(memory(4, [(10, 5)], [3])).seconds((), [(3, 12)], 0.0) == 3 + 9
    assert forecast(memory(9, [(10, 5)], [3])).seconds((), [(3, 12)], 0.0) == 9
    assert forecast(memory(4, [(10, 5)], [3])).seconds((), [(8, 12)], 2.5) == 4 - 2.5, "the step under way began 2.5 s ago"


def test_answers_go_on_while_prompts_before_are_computed() -> None:
    """The first prompt takes 20 s in 3 steps, beside an answer that ends in the third: the second prompt need not wait."""
    assert forecast(memory(0, [(10, 5)], [3])).seconds([(0, 20)], [(0, 12)], 0.0) == 20 + 12
    assert forecast(memory(0, [(10, 5)], [5])).seconds([(0, 20)], [(0, 12)], 0.0) == 20 + 2 * 2 + 12
    assert forecast(memory(20)).seconds((), [(0, 20), (0, 12)], 0.0) == 20 + 10 + 12, "the first prompt's own answer: 10 steps"


def test_a_prompt_waits_for_a_place_to_run() -> None:
    """Two may run: the third waits for the first answer, of 3 steps of 2 s, the fourth for one of 10 steps from then on, too."""
    held = [(10, 5), (10, 5)]
    assert forecast(memory(100, held, [3, 30], 2)).seconds((), [(0, 4)], 0.0) == 3 * 2 + 4
    assert forecast(memory(100, held, [3, 30], 3)).seconds((), [(0, 4)], 0.0) == 4
    assert forecast(memory(100, held, [3, 30], 2)).seconds((), [(0, 4), (0, 4)], 0.0) == 3 * 2 + 4 + 10 * 2 + 4
    assert forecast(memory(100, most=1)).seconds([(0, 4)], [(0, 4)], 0.0) == 4 + 10 + 4, "one that is computed has a place, too"


ANSWERS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(1, 15)), max_size=6)


def slow_wait(free: int, answers: list[tuple[int, int, int]], tokens: int, most: int) -> float:
    """Step by step: every answer takes a token, then those that have ended give all of theirs back."""
    seconds, running = 0.0, [[prompt + done, left] for prompt, done, left in answers]
    while (free < tokens or len(running) >= most) and running:
        seconds += len(running)
        for one in running:
            one[0], one[1] = one[0] + 1, one[1] - 1
        free += sum(held for held, left in running if not left) - len(running)
        running = [one for one in running if one[1]]
    return seconds


@given(ANSWERS, st.integers(0, 30), st.integers(0, 60), st.integers(1, 7))
@SETTINGS
def test_waits_are_as_in_a_slow_model(answers: list[tuple[int, int, int]], free: int, tokens: int, most: int) -> None:
    """Answers that end in the same step do so one after another here; the seconds are the same."""
    known = memory(free, [(prompt, done) for prompt, done, _ in answers], [float(left) for *_, left in answers], most)
    assert known.wait(tokens) == slow_wait(free, answers, tokens, most)
