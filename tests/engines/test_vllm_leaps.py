"""vLLM's schedule takes decode steps in leaps; what it does is what it does step by step."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from simpy import Event

from kvsim.cluster.cluster import Failure
from kvsim.core.request import Request
from kvsim.engine.substrate import Work
from kvsim.engine.watch import EngineWatch
from kvsim.engines.vllm import leaps as leaps_module
from tests.engines.recorded_schedules import Row
from tests.engines.test_vllm_offload_schedule import PAGE_TOKENS, Small, Story
from tests.workloads import EXAMPLES, Words

pytestmark = pytest.mark.skipif(
    not leaps_module.__file__.endswith(".py"), reason="a compiled schedule has its longest leap built in"
)


class Counted(EngineWatch):
    """Counts what an engine computes in one go, and the decode steps in it."""

    def __init__(self) -> None:
        self.events = self.steps = 0

    def computes(self, work: Work, done: Event) -> None:
        self.events += 1
        done.callbacks.append(self._add)

    def _add(self, done: Event) -> None:
        steps: Any = done.value
        self.steps += steps


def draw(random: Random, *, shares_answers: bool) -> list[Request]:
    """Requests with long answers, unique or shared like prompts, that arrive while others decode."""

    def letters(pages: int) -> list[str]:
        return random.choices("ab", [9, 1], k=pages)

    words, requests, now = Words(), list[Request](), 0.0
    for index in range(random.randint(2, 15)):
        now += random.choice([0.0, 0.02, 0.5, 1.0]) * random.random()
        prompt = tuple(random.choices("abc", [5, 2, 1], k=random.randint(1, 12)))
        tail, output = random.choice([0, 0, 1, 3]), random.choice([1, 3, 40, 100, 300])
        about: Any = {"page_tokens": PAGE_TOKENS, "tail": tail, "output": output, "arrival_s": now}
        requests.append(words.answered(prompt, index=index, answer=letters if shares_answers else None, **about))
    return requests


def both_ways(
    small: dict[str, Any], requests: list[Request], monkeypatch: pytest.MonkeyPatch, failures: Sequence[Failure] = ()
) -> tuple[list[Row], list[Row], Counted]:
    """The rows in leaps and step by step, and what was counted of the leaps. Both make the same number of steps."""
    leaps, steps = Counted(), Counted()
    in_leaps = Small(**small).run(requests, [leaps], failures)
    with monkeypatch.context() as patch:
        patch.setattr("kvsim.engines.vllm.leaps.LEAP_STEPS", 0)
        step_by_step = Small(**small).run(requests, [steps], failures)
    assert steps.steps == steps.events
    assert leaps.steps == steps.steps or failures
    return in_leaps, step_by_step, leaps


def check_same(in_leaps: list[Row], step_by_step: list[Row]) -> None:
    assert [row[:3] for row in in_leaps] == [row[:3] for row in step_by_step]
    assert [row[3:] for row in in_leaps] == [pytest.approx(row[3:], rel=0, abs=1e-9) for row in step_by_step]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("shares_answers", [False, True])
def test_leaps_are_steps(is_async: bool, shares_answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CPU offloading and without, in memory that is ample or too small, with copies that are fast or slow."""
    events = steps = 0
    for seed in range(EXAMPLES):
        random = Random(seed)
        requests = draw(random, shares_answers=shares_answers)
        largest = max(-(-(one.prompt_tokens + one.output_tokens) // PAGE_TOKENS) for one in requests)
        cpu = random.choice([2, 12, 40, 400]) if not is_async or random.random() < 0.7 else 0
        small = {
            "gpu": largest + random.choice([0, 2, 10, 60, 500]),
            "cpu": cpu,
            "is_async": is_async,
            "policy": random.choice(["lru", "arc"]),
            "threshold": random.choice([0, 0, 2]),
            "chunk": random.choice([1, 1, 3]),
            "prompt_only": not cpu or random.random() < 0.5,
            "load_page_s": random.choice([1e-5, 6e-3, 3e-2]),
            "store_page_s": random.choice([1e-5, 6e-3, 3e-2]),
            "batch_tokens": random.choice([7, 16, 64]),
            "seats": random.choice([1, 3, 16]),
        }
        in_leaps, step_by_step, counted = both_ways(small, requests, monkeypatch)
        check_same(in_leaps, step_by_step)
        events, steps = events + counted.events, steps + counted.steps
    assert events < 0.9 * steps


@pytest.mark.parametrize(("cpu", "is_async"), [(40, False), (40, True), (0, True)])
def test_tokens_of_a_leap_that_a_failure_cuts_off_are_not_computed_again(
    cpu: int, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"gpu": 200, "cpu": cpu, "is_async": is_async}
    requests = Story().add("abc", 0.0, output=200).add("xyz", 0.0, output=100).requests
    failures = [Failure(engine=0, at_s=at_s, back_after_s=0.5) for at_s in (0.2, 0.9)]
    in_leaps, step_by_step, counted = both_ways(small, requests, monkeypatch, failures)
    check_same(in_leaps, step_by_step)
    assert counted.events < 40


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_arrives_in_a_leap_is_computed_as_soon_as_in_steps(is_async: bool) -> None:
    """A step takes 5.01 ms and up: the prompt that arrives within the 9th one is computed in the 10th or, looking ahead, 11th."""
    story = Story().add("a", 0.0, output=200).add("x", 0.044, output=1)
    rows = Small(200, 20, is_async=is_async).check(story.requests)
    assert rows[1][3] == pytest.approx(0.056 if is_async else 0.051, abs=1e-3)
