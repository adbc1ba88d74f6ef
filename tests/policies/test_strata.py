"""Strata's order by hand. Prompts are words: a page of 16 tokens for each letter in queues, of 4 tokens and 4 s on engines."""

from typing import Any

import pytest

import kvsim
from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.policies.context import PolicyContext
from kvsim.policies.scheduling.strata import Strata
from tests.engine.small import HARDWARE, MODEL, ask, hits, make_requests, seconds, small_engine
from tests.policies.small_queue import SmallQueue, small_queue


def admit(small: SmallQueue) -> str:
    """The words that are admitted in a round in which there is room for all."""
    small.queue.begin_round(0.0)
    words = []
    while small.queue and (job := small.queue.first()) is not None:
        tokens = job.target_tokens - small.queue._look_ups.cached_tokens(job)  # type: ignore[attr-defined]
        small.queue.remove(job)
        small.queue.admitted(job, tokens)
        words.append(small.words[job.place])
    return " ".join(words)


def test_a_delay_hit_waits_until_the_prefix_is_computed() -> None:
    """abcx shares 48 tokens with abcd; abcd is cached as far as ab when the second one asks."""
    small = small_queue(Strata(delay_hit_tokens=40))
    first, *_ = small.wait("abcd", "abcx", "q", "abz")
    assert admit(small) == "abcd q abz", "abz shares 32 tokens"
    assert len(small.queue) == 1
    small.queue.computed(first)
    assert admit(small) == "abcx"
    small = small_queue(Strata(delay_hit_tokens=40), "ab")
    small.wait("abcd", "abcx")
    assert admit(small) == "abcd abcx", "16 tokens are missing"


def test_only_the_head_of_the_queue_is_looked_at() -> None:
    small = small_queue(Strata(delay_hit_tokens=16, look_ahead=2))
    first, *_ = small.wait("ab", "ac", "ad", "q")
    assert admit(small) == "ab"
    small.queue.computed(first)
    assert admit(small) == "ac q"


def test_what_must_be_loaded_waits_for_something_to_compute() -> None:
    """The GPU has 4 pages; abcd is in the CPU tier. abcd1 loads 64 tokens and computes 16, q computes 16, xyz 48: with a ratio of
    1, q and xyz, with 64 tokens to compute, go before abcd1."""
    small = small_queue(Strata(load_ratio=1.0), "abcd mnop", gpu=4, cpu=20)
    assert small.cache.on("gpu") == "mnop"
    small.wait("abcd1", "q", "xyz", "r")
    assert admit(small) == "q xyz abcd1 r"
    small = small_queue(Strata(load_ratio=4.0), "abcd mnop", gpu=4, cpu=20)
    small.wait("abcd1", "q")
    assert admit(small) == "abcd1 q"
    small = small_queue(Strata(load_ratio=0.0), "abcd mnop", gpu=4, cpu=20)
    small.wait("abcd1", "abcd2")
    assert admit(small) == "abcd1 abcd2", "nothing to compute waits"


def test_the_ratio_is_that_of_the_machine() -> None:
    """A page is computed in 4 s and loaded in 1 s; without a tier below, nothing is loaded."""
    policy = Strata()
    known: dict[str, Any] = {"page_tokens": 4, "model": MODEL, "hardware": HardwareSpec(**HARDWARE)}
    policy.bind(PolicyContext(lower_tier_name="cpu", **known))
    assert policy.ratio == pytest.approx(4.0)
    policy.bind(PolicyContext(**known))
    assert policy.ratio == float("inf")


def test_an_engine_computes_a_shared_prefix_once() -> None:
    """By arrival, 17 + 17 + 5 tokens are computed in one step. Here, abcx waits for abcd and q, 22 s, and then computes 5."""
    requests = [ask("abcd"), ask("abcx"), ask("q")]
    by_arrival = small_engine(gpu=20).run(make_requests(requests))
    assert by_arrival.ttft_s.tolist() == seconds([39, 39, 39])
    engine = small_engine(gpu=20, scheduling=bound(Strata(delay_hit_tokens=8)))
    outcome = engine.run(make_requests(requests))
    assert hits(outcome, 1) == (3, 0, 0)
    assert outcome.ttft_s.tolist() == seconds([22, 27, 22])


def bound(policy: Strata) -> Strata:
    policy.bind(PolicyContext(page_tokens=4))
    return policy


def test_a_request_that_is_retracted_holds_nobody_up() -> None:
    """The pages run out while efgh is computed or decodes beside abcd: it gives up, and is not waited for any more."""
    policy = bound(Strata(delay_hit_tokens=4))
    engine = small_engine(gpu=11, scheduling=policy, max_batch_tokens=6)
    outcome = engine.run(make_requests([ask("abcd", output=20), ask("efgh", 15.0, output=20), ask("efgx", 16.0)]))
    assert outcome.status.tolist() == [0, 0, 0]
    assert outcome.retractions > 0
    assert (len(policy._batch), policy._batch.loaded, policy._batch.computed, policy._batch._prompts.pages) == (0, 0, 0, 0)


def test_fewer_tokens_are_computed_of_contexts_that_many_ask_about_at_once() -> None:
    trace: Any = kvsim.load_trace("synthetic", limit=150, rate=60.0)
    machine = ("tiers.gpu.capacity=4000pages", "tiers.cpu.capacity=20000pages", "engine.max_batch_tokens=65536")
    computed = {}
    for name in ("strata", "fcfs"):
        result = kvsim.simulate(trace, *machine, f"scheduling={name}")
        computed[name] = result.hit_rate
    assert computed["strata"] > computed["fcfs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("scheduling.delay_hit_tokens=0",), "scheduling.delay_hit_tokens must be at least 1, not 0"),
        (("scheduling.load_ratio=-1",), "scheduling.load_ratio must be 0 or more, not -1"),
        (("rules=vllm",), "vLLM's schedule is by arrival"),
    ],
)
def test_what_cannot_be(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kvsim.simulate(kvsim.load_trace("synthetic", limit=2), "scheduling=strata", *words)
