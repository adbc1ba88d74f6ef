"""What a result warns of, and what it does not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvsim.engine.outcome import Outcome
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.results.warnings import warnings
from kvsim.run.execute import execute
from tests.composing import plan
from tests.engine.small import Ask, ask, small_engine
from tests.outcomes import make_outcome

REQUESTS = 6000
TOKENS = 10
"""Of each prompt; a token takes 1 s."""


def queued(rho: float, seed: int, *, is_random: bool = False) -> Outcome:
    """The waiting times of Poisson arrivals at one server, by Lindley's recursion; a request takes 1 s, or 1 s on average."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rho, REQUESTS)
    service = rng.exponential(1.0, REQUESTS) if is_random else np.ones(REQUESTS)
    waits = np.zeros(REQUESTS)
    for at in range(1, REQUESTS):
        waits[at] = max(0.0, waits[at - 1] + service[at - 1] - gaps[at])
    outcome = make_outcome([10] * REQUESTS, [(0, 0, 0)] * REQUESTS, ttft_s=waits + service, arrival_s=np.cumsum(gaps))
    outcome.columns |= {"queue_s": waits, "load_s": np.zeros(REQUESTS)}
    return outcome


@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_stable_queue_is_nothing_to_warn_of_and_an_overloaded_one_is(seed: int, is_random: bool) -> None:
    for rho in (0.5, 0.8, 0.9):
        assert not warnings(queued(rho, seed, is_random=is_random)), rho
    for rho in (1.1, 1.3, 3.0):
        assert "the queue grew without end" in warnings(queued(rho, seed, is_random=is_random))[0], rho


def test_the_warning_gives_the_numbers() -> None:
    """Requests come every half second and take one each: of n that have come, half wait, so 37.5% and 87.5% of 50 on average."""
    arrivals = np.arange(101) / 2
    outcome = make_outcome([10] * 101, [(0, 0, 0)] * 101, ttft_s=arrivals + 1, arrival_s=arrivals)
    outcome.columns |= {"queue_s": arrivals, "load_s": np.zeros(101)}
    (text,) = warnings(outcome)
    assert "19 requests waited in the second quarter of the time of arrivals, 44 in the last" in text
    assert "2.04 requests/s arrived and 1.04 were admitted" in text


def served(rho: float, **settings: Any) -> list[str]:
    """What a run of 600 random prompts warns of, one at a time on the engine, as in an M/D/1 queue of load ``rho``."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(TOKENS / rho, 600))
    asks: list[Ask] = [ask("", float(at), tokens=TOKENS) for at in arrivals]
    return warnings(small_engine(gpu=10, max_running_requests=1, **settings).serve(*asks))


def test_an_engine_is_such_a_queue() -> None:
    assert not served(0.9)
    assert "grew without end" in served(1.25)[0]


@pytest.mark.parametrize("burst", [0, 50, 99])
def test_one_burst_is_not_growth_without_end(burst: int) -> None:
    """100 requests at once, and one every 2 s before and after; each takes 1 s."""
    arrivals = np.sort(np.concatenate((np.arange(0, 200, 2.0), np.full(100, 2.0 * burst))))
    starts = arrivals.copy()
    for at in range(1, len(starts)):
        starts[at] = max(starts[at], starts[at - 1] + 1)
    outcome = make_outcome([10] * 200, [(0, 0, 0)] * 200, ttft_s=starts - arrivals + 1, arrival_s=arrivals)
    outcome.columns |= {"queue_s": starts - arrivals, "load_s": np.zeros(200)}
    assert not warnings(outcome)


def test_all_at_once_is_not_growth_either() -> None:
    assert not warnings(small_engine(gpu=10).serve(*[ask("x") for _ in range(40)]))


def test_without_a_clock_there_is_no_queue(replayed: Outcome) -> None:
    assert warnings(replayed) == []


# --- a tier without effect ---

STREAM = [ask(word, 100.0 * at) for at, word in enumerate(("abcd", "efgh", "ijkl", "abcd", "mnop", "efgh"))]
"""Each prompt comes back after two others; a GPU of 9 pages has the last two."""


def about_tiers(outcome: Outcome) -> list[str]:
    return [text for text in warnings(outcome) if text.startswith("tiers.")]


def test_a_tier_of_copies_is_without_effect() -> None:
    """Written through, the CPU tier drops each page before the GPU does."""
    (text,) = about_tiers(small_engine(gpu=9, cpu=6, placement=WriteThrough).serve(*STREAM))
    assert text.startswith("tiers.cpu has next to no effect: none of its pages was ever hit, and all 6 pages that it held")
    assert "were also in a tier above." in text


def test_a_tier_that_is_hit_has_an_effect() -> None:
    assert not about_tiers(small_engine(gpu=9, cpu=20, placement=WriteThrough).serve(*STREAM))
    assert not about_tiers(small_engine(gpu=9, cpu=6, placement=WriteBack).serve(*STREAM))


def test_a_tier_that_could_be_hit_is_no_mistake() -> None:
    """Nothing comes back, but the CPU tier has pages that the GPU does not have."""
    asks = [ask(word, 100.0 * at) for at, word in enumerate(("abcd", "efgh", "ijkl"))]
    assert not about_tiers(small_engine(gpu=9, cpu=20).serve(*asks))


def test_a_tier_with_a_quarter_of_its_own_pages_is_the_limit(outcome_of: Callable[..., Outcome]) -> None:
    outcome = outcome_of([40], [(0, 0, 0)], ttft_s=[1.0])
    outcome.tiers["cpu"].held_pages, outcome.tiers["cpu"].own_pages = 100, 25
    assert "and 75 of the 100 pages that it held at the end were also in a tier above" in about_tiers(outcome)[0]
    outcome.tiers["cpu"].own_pages = 26
    assert not about_tiers(outcome)


def test_a_tier_that_is_never_written_to_is_not_judged() -> None:
    assert not about_tiers(small_engine(gpu=40, cpu=6, placement=WriteBack).serve(*STREAM))


@pytest.mark.parametrize(("rate", "gpus", "times"), [("null", 2, 1), ("1e9", 2, 0), ("null", 1, 0)])
def test_communication_that_takes_no_time_is_told_once(rate: str, gpus: int, times: int) -> None:
    words = ("trace.sessions=2", "tiers.gpu.capacity=3000pages", f"hardware.gpus={gpus}")
    rates = (f"hardware.allreduce_bytes_per_s={rate}",) if gpus > 1 else ()
    found = execute("simulate", plan(*words, *rates, command="simulate")).record["warnings"]
    assert sum("communication of the GPUs takes no time with this description" in text for text in found) == times
