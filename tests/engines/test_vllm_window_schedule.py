"""Simulations by vLLM's rules for sliding windows, against a slow model of its scheduler, and the replay of the same requests."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvsim.cluster.cluster import Cluster
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.prefetching import Prefetching
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.engines.slow_window_schedule import SlowWindowSchedule
from tests.engines.small_window_blocks import make_cache, make_stepped, play
from tests.engines.test_vllm_schedule import FORMULA, MODEL, PAGE_TOKENS, Row, assert_same, draw, rows_of
from tests.workloads import EXAMPLES, make_request


def serve(
    requests: list[Request], capacity: int, settings: EngineSettings, *, resets: tuple[int, ...] = (), **about: Any
) -> list[Row]:
    """The engine's schedule; everything is recounted whenever a request ends, after some with an empty cache."""
    cache = make_stepped(capacity, pool=SlotPool, batch=settings.max_batch_tokens, **about)
    substrate = SimulatedSubstrate(MODEL, FORMULA, PAGE_TOKENS, links="fifo")
    engine = Engine(substrate, cache, Prefetching(cache, NoPrefetch(), Offer), settings, FCFS())

    def inspect(ended: int) -> None:
        if ended in resets:
            cache.reset()
        cache.check()

    rows = rows_of(Cluster([engine]).run(requests, inspect))
    assert cache.gpu.pool.free + cache.gpu.evictable_pages == capacity
    return rows


def drawn(random: Random, *, shares_answers: bool) -> tuple[list[Request], int, EngineSettings, dict[str, Any]]:
    requests = draw(random, shares_answers=shares_answers)
    about = {
        "groups": random.choice((1, 1, 2, 3)),
        "window": random.choice((8, 8, 12, 20)),
        "retention": random.choice((None, 0, 0, 8, 12, 16)),
        "full_first": random.choice((False, True)),
    }
    largest = max(-(-(one.prompt_tokens + one.output_tokens) // PAGE_TOKENS) for one in requests)
    capacity = largest * (1 + int(about["groups"])) + random.choice([0, 1, 2, 5, 10, 30])
    settings = EngineSettings(max_batch_tokens=random.choice([7, 16, 64]), max_running_requests=random.choice([2, 4, 16]))
    return requests, capacity, settings, about


ORDER_WITHIN_LEAPS = (1241, 5137, 5190, 6520, 6778, 26688)
"""Seeds that draw requests for which the order matters in which the steps of a leap take blocks and give them back."""

NAMED_BEFORE_RETRACTIONS = (100127, 200126, 201466, 201971)
"""Seeds that draw answers with a page in common that two requests fill in the same step, before one of them is retracted."""


@pytest.mark.parametrize(("names_answers", "shares_answers"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("seed", [*range(EXAMPLES // 2), *ORDER_WITHIN_LEAPS, *NAMED_BEFORE_RETRACTIONS])
def test_the_schedule_is_that_of_the_slow_model(seed: int, names_answers: bool, shares_answers: bool) -> None:
    """Pages of answers that other prompts contain can be found when the next page is wanted: in vLLM, one step earlier."""
    random = Random(seed)
    for _ in range(5):
        requests, capacity, settings, about = drawn(random, shares_answers=shares_answers)
        limits = settings.max_batch_tokens, settings.max_running_requests
        slow = SlowWindowSchedule(FORMULA, PAGE_TOKENS, capacity, *limits, names_late=shares_answers, **about)
        expected = slow.run(requests, names_answers=names_answers)
        assert_same(serve(requests, capacity, settings, cache_output=names_answers, **about), expected)


def test_full_pages_have_names_before_others_are_retracted_for_the_next_ones() -> None:
    """Requests 1 and 2 fill pages with the same text in the same steps. Request 1 finds no room for its next page, and 2 gives
    its blocks back: the page of 1 is the older copy, which 2 finds later."""
    about: dict[str, Any] = {"groups": 1, "window": 12, "retention": 8, "full_first": False}
    requests = [
        make_request([0, 1], prompt_tokens=9, output_tokens=16, output_runs=((2, 4),)),
        make_request([6], index=1, prompt_tokens=7, output_tokens=13, output_runs=((7, 3),)),
        make_request([6], index=2, prompt_tokens=7, output_tokens=17, output_runs=((7, 2), (10, 2))),
        make_request([6, 7], index=3, prompt_tokens=8, output_tokens=4, output_runs=()),
    ]
    slow = SlowWindowSchedule(FORMULA, PAGE_TOKENS, 19, 64, 16, names_late=True, **about)
    expected = slow.run(requests, names_answers=True)
    assert [row[:2] for row in expected] == [(0, 0), (0, 0), (1, 2), (1, 2)]
    assert_same(
        serve(requests, 19, EngineSettings(max_batch_tokens=64, max_running_requests=16), cache_output=True, **about), expected
    )


@pytest.mark.parametrize("seed", range(EXAMPLES // 4))
def test_counts_hold_when_the_cache_is_emptied_while_requests_run(seed: int) -> None:
    random = Random(seed)
    requests, capacity, settings, about = drawn(random, shares_answers=False)
    ends = len(requests)
    rows = serve(requests, capacity, settings, cache_output=True, resets=(ends // 3, ends // 2), **about)
    assert len(rows) == ends and all(last > 0 for *_, last in rows)


def alone(requests: list[Request]) -> list[Request]:
    """The same requests, each long after the one before it."""
    return [replace(one, arrival_s=100.0 * at) for at, one in enumerate(requests)]


@pytest.mark.parametrize("seed", range(EXAMPLES // 2))
def test_requests_that_never_overlap_hit_what_they_hit_in_a_replay(seed: int) -> None:
    requests, capacity, settings, about = drawn(Random(seed), shares_answers=False)
    rows = serve(alone(requests), capacity, settings, cache_output=True, **about)
    cache = make_cache(capacity, chunk=settings.max_batch_tokens, cache_output=True, **about)
    assert [pages for pages, *_ in rows] == play(cache, requests)


def test_what_a_prompt_leaves_behind_makes_room_for_a_request_that_waits() -> None:
    """The first request takes 10 + 10 blocks for its prompt, of which it has left 8 behind when it decodes; the second one needs
    3 + 3, and 4 were free."""
    about = {"groups": 1, "window": 8, "retention": 0, "full_first": False}
    requests = [
        make_request(range(10), prompt_tokens=40, output_tokens=20),
        make_request(range(10, 13), index=1, prompt_tokens=12, output_tokens=2, arrival_s=0.001),
    ]
    first, second = serve(requests, 24, EngineSettings(max_batch_tokens=64), **about)
    assert first[2] < second[2] < second[3] < first[3]


def test_a_request_fits_if_its_prompt_does_and_its_whole_answer_with_what_is_in_the_window() -> None:
    """Of 80 tokens, 20 blocks of full attention and 3 of the window; of a prompt of 44 tokens, 11 each."""
    about = {"groups": 1, "window": 8, "retention": 0, "full_first": False}
    settings = EngineSettings(max_batch_tokens=64)
    answer = [make_request(range(5), prompt_tokens=20, output_tokens=60)]
    prompt = [make_request(range(11), prompt_tokens=44, output_tokens=1)]

    def is_served(requests: list[Request], capacity: int) -> bool:
        return serve(requests, capacity, settings, **about)[0][3] > 0

    assert is_served(answer, 23) and not is_served(answer, 22)
    assert is_served(prompt, 23) and not is_served(prompt, 21)
