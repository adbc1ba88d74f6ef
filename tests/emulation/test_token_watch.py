"""Tokens of an answer appear step by step, though steps are taken together."""

from simpy import Environment

from kvsim.emulation.token_watch import TokenWatch
from kvsim.engine.job import Job
from kvsim.engine.substrate import Work
from tests.workloads import make_request


def seen_tokens(work: Work, end_s: float, steps: int) -> list[tuple[float, list[int]]]:
    """When which requests get a token in work of half a second a step that ends with so many steps done."""
    env, seen = Environment(), list[tuple[float, list[int]]]()
    watch = TokenWatch(env, lambda _, steps: steps / 2, lambda numbers: seen.append((env.now, numbers)))
    watch.computes(work, env.timeout(end_s, steps))
    env.run()
    return seen


def decoding(*numbers: int, steps: int) -> Work:
    jobs = [Job(make_request([0], index=number), 0.0) for number in numbers]
    return Work(decode_requests=len(jobs), decoding=jobs, max_steps=steps)


def test_each_step_of_a_leap_yields_a_token() -> None:
    work = decoding(3, 5, steps=4)
    assert seen_tokens(work, 2.0, 4) == [(0.5, [3, 5]), (1.0, [3, 5]), (1.5, [3, 5]), (2.0, [3, 5])]


def test_a_leap_that_is_stopped_yields_those_of_its_steps() -> None:
    assert seen_tokens(decoding(3, steps=64), 1.0, 2) == [(0.5, [3]), (1.0, [3])]


def test_a_step_without_answers_yields_none() -> None:
    assert seen_tokens(Work(chunks=[(8, 0)]), 0.5, 1) == []
