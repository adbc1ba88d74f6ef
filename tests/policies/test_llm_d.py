"""llm-d's scheduler by hand, in pages of 4 tokens: one scorer at a time, then their sum."""

from typing import Any

import pytest

import kvsim
from kvsim.cluster.router import Report
from kvsim.errors import UsageError
from kvsim.policies.routing.llm_d import WEIGHTS, LlmD
from tests.policies.small_routing import SmallRouter, prompt, router, sent_to

EIGHT = prompt((0, 8), index=99)


def only(name: str, weight: float = 1.0, **more: Any) -> LlmD:
    """A scheduler with one scorer."""
    return LlmD(**(dict.fromkeys(WEIGHTS, 0.0) | {name: weight} | more))


def chosen(small: SmallRouter, request: Any = EIGHT) -> set[int]:
    """The engines that get a request with some seed: those with the highest score."""
    found = set()
    for _ in range(20):
        engine = small.policy.choose(request, small._offered, 0.0)
        assert engine is not None
        found.add(engine)
    return found


def report(small: SmallRouter, engine: int, pending: int = 0, in_use: int = 0) -> None:
    small.report(engine, Report(pending_requests=pending, pages_in_use=in_use), 0.0)


def scores(small: SmallRouter) -> list[float]:
    """What is reported, weighted."""
    policy = small.policy
    assert isinstance(policy, LlmD)
    found: list[float] = policy._load_scores(small._offered).tolist()
    return found


def test_the_approximate_prefix_is_the_share_that_was_sent_there() -> None:
    small = router(only("prefix_weight"))
    sent_to(small, 1, prompt((0, 3), index=0))
    sent_to(small, 2, prompt((0, 4), index=1))
    assert chosen(small) == {2}
    policy = small.policy
    assert isinstance(policy, LlmD)
    assert policy._found(EIGHT, small._offered, 0.0) == ({1: 3, 2: 4}, {1: 3 / 8, 2: 4 / 8})
    assert chosen(small, prompt((50, 3))) == {0, 1, 2}


def test_pages_beyond_the_capacity_are_forgotten() -> None:
    """An engine holds 4 pages, or is believed to hold 2."""
    for settings, expected in (({}, {0: 4}), ({"lru_capacity_pages": 2}, {0: 2}), ({"max_prefix_pages": 3}, {0: 3})):
        small = router(only("prefix_weight", **settings), capacity=4)
        sent_to(small, 0, EIGHT)
        policy = small.policy
        assert isinstance(policy, LlmD)
        found, shares = policy._found(EIGHT, small._offered, 0.0)
        assert found == expected
        assert shares == {0: expected[0] / (3 if "max_prefix_pages" in settings else 8)}


def test_the_precise_prefix_is_scaled_between_engines_that_have_some() -> None:
    """Of 4, 3 and 2 pages, the last is worth as little as none; as the only ones, equal pages are worth 1."""
    policy = only("prefix_weight", prefix="precise")
    small = router(policy, engines=4)
    for engine, pages in ((0, 4), (1, 3), (2, 2)):
        small.cached(engine, (0, pages))
    assert policy._prefix_scores({0: 4, 1: 3, 2: 2}, {}, 4).tolist() == [1.0, 0.5, 0.0, 0.0]
    assert policy._prefix_scores({1: 3, 2: 3}, {}, 4).tolist() == [0.0, 1.0, 1.0, 0.0]
    assert chosen(small) == {0}


def test_queues_are_scaled_between_the_longest_and_the_shortest() -> None:
    small = router(only("queue_weight", 2.0))
    assert scores(small) == [2.0, 2.0, 2.0]
    for engine, pending in enumerate((4, 1, 2)):
        report(small, engine, pending)
    assert scores(small) == pytest.approx([0.0, 2.0, 4 / 3])


def test_memory_in_use_counts_against_an_engine() -> None:
    small = router(only("kv_cache_utilization_weight"), capacity=10)
    for engine, in_use in enumerate((5, 2, 10)):
        report(small, engine, in_use=in_use)
    assert scores(small) == [0.5, 0.8, 0.0]
    unlimited = router(only("kv_cache_utilization_weight"))
    assert scores(unlimited) == [1.0, 1.0, 1.0]


def test_the_load_aware_score_knows_no_other_engine() -> None:
    small = router(only("load_aware_weight", load_threshold=4))
    for engine, pending in enumerate((0, 1, 9)):
        report(small, engine, pending)
    assert scores(small) == [0.5, 0.375, 0.0]


def test_requests_under_way_count_as_soon_as_they_are_sent() -> None:
    """Of 4, 1 and 0 requests: 0, 3/4 and 1."""
    small = router(only("active_request_weight"))
    assert chosen(small) == {0, 1, 2}
    for engine, count in ((0, 4), (1, 1)):
        for index in range(count):
            sent_to(small, engine, prompt((100 * index + 10 * engine, 1), index=index))
    assert chosen(small) == {2}
    small = router(LlmD(prefix_weight=2.0, kv_cache_utilization_weight=0.0, active_request_weight=1.0), engines=2)
    sent_to(small, 0, prompt((0, 4), index=0))
    assert chosen(small) == {0, 1}, "half of the prompt at 2, an idle engine at 1"


def test_new_prompts_go_to_the_engine_that_had_none_for_longest() -> None:
    small = router(only("no_hit_lru_weight"))
    assert [small.send(prompt((100 * index, 1), index=index), 0.0) for index in range(1, 7)] == [0, 1, 2, 0, 1, 2]
    sent_to(small, 1, prompt((900, 1), index=7))
    assert [small.send(prompt((1000 * index, 1), index=index), 0.0) for index in range(8, 11)] == [0, 2, 1]
    assert chosen(small, prompt((100, 1))) == {0, 1, 2}, "cached somewhere: all are alike"
    policy = small.policy
    assert isinstance(policy, LlmD)
    assert policy._cold_scores(small._offered).tolist() == [1.0, 0.0, 0.5]


def test_a_session_stays_with_its_engine() -> None:
    small = router(only("session_affinity_weight"))
    first = small.send(prompt((0, 1), session=5), 0.0)
    assert chosen(small, prompt((50, 1), session=5)) == {first}
    assert chosen(small, prompt((50, 1), session=6)) == {0, 1, 2}
    assert first is not None
    small.down(first, 1.0)
    assert chosen(small, prompt((50, 1), session=5)) == {0, 1, 2} - {first}


def test_the_weighted_sum_decides() -> None:
    """Half of the prompt at a weight of 3 is worth less than an empty queue at 2, more than one at 1."""
    for queue_weight, expected in ((2.0, {1}), (1.0, {0})):
        small = router(LlmD(queue_weight=queue_weight, kv_cache_utilization_weight=0.0), engines=2)
        sent_to(small, 0, prompt((0, 4), index=0))
        report(small, 0, 3)
        assert chosen(small) == expected


def test_only_engines_with_enough_of_the_prompt_are_considered() -> None:
    settings: dict[str, Any] = {"affinity_threshold": 0.5, "exploration_probability": 0.0}
    small = router(only("queue_weight", **settings))
    sent_to(small, 0, prompt((0, 4), index=0))
    sent_to(small, 2, prompt((0, 7), index=1))
    report(small, 0, 3)
    report(small, 2, 2)
    assert chosen(small) == {2}
    assert chosen(small, prompt((50, 2))) == {1}
    settings["exploration_probability"] = 1.0
    small = router(only("queue_weight", **settings))
    sent_to(small, 0, prompt((0, 4), index=0))
    report(small, 0, 3)
    assert chosen(small) == {1, 2}


def test_engines_can_be_drawn_by_their_scores() -> None:
    """Scores of 1, 1/3 and 0."""
    small = router(only("queue_weight", picker="weighted_random"))
    for engine, pending in enumerate((0, 2, 3)):
        report(small, engine, pending)
    found = [small.policy.choose(EIGHT, small._offered, 0.0) for _ in range(2000)]
    assert 1400 < found.count(0) < 1600
    assert found.count(2) == 0
    assert chosen(router(only("no_hit_lru_weight", 0.0, picker="weighted_random"))) == {0, 1, 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("routing.prefix=exact",), "routing.prefix must be one of approximate, precise, not exact"),
        (("routing.picker=first",), "routing.picker must be one of max_score, weighted_random, not first"),
        (("routing.queue_weight=-1",), "routing.queue_weight must be 0 or more, not -1"),
        (("routing.prefix=precise", "routing.max_prefix_pages=2"), "routing.max_prefix_pages has no effect"),
        (("routing.load_threshold=2",), "routing.load_threshold has no effect"),
        (("routing.exploration_probability=0.1",), "routing.exploration_probability has no effect"),
    ],
)
def test_settings_that_cannot_be(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kvsim.simulate(kvsim.load_trace("synthetic", limit=2), "cluster.engines=2", "routing=llm_d", *words)


@pytest.mark.parametrize("words", [(), ("routing.prefix=precise", "routing.staleness_s=0.05", "routing.affinity_threshold=0.8")])
def test_a_cluster_hits_more_with_prefixes_than_with_load_alone(words: tuple[str, ...]) -> None:
    trace = kvsim.load_trace("synthetic", limit=150)
    cluster = ("cluster.engines=4", "cluster.engines_per_host=1", "routing=llm_d", *words)
    with_prefixes, without = (kvsim.simulate(trace, *cluster, *more) for more in ((), ("routing.prefix_weight=0",)))
    assert with_prefixes.hit_rate > without.hit_rate
