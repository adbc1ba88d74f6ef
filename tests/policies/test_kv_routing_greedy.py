"""KVRouting's greedy routing by hand: pages of 4 tokens, a second for a token, a half-life of 10 s."""

from typing import Any

import pytest

import kvsim
from kvsim.errors import UsageError
from kvsim.policies.routing.kv_routing_greedy import KVRoutingGreedy, Learned
from tests.policies.small_routing import SmallRouter, prompt, router, sent_to


def greedy(**settings: Any) -> KVRoutingGreedy:
    return KVRoutingGreedy(**({"uncached_s_per_token": 1.0, "half_life_s": 10.0, "slack_s": 0.5} | settings))


def learned(small: SmallRouter) -> list[tuple[float, float]]:
    """The learned delay of each engine, and its work at 10 s."""
    policy = small.policy
    assert isinstance(policy, KVRoutingGreedy)
    return [(one.delay_s, one.workload_s(10.0, 10.0)) for one in policy._learned.values()]


def test_the_shortest_expected_time_decides() -> None:
    """Engine 0 was sent 5 of the 6 pages, 21 tokens: 10 s later 10.5 s of work are left, and 5 tokens of the prompt. 25 s on the
    others, as long as nothing is learned."""
    small = router(greedy())
    sent_to(small, 0, prompt((0, 5), index=0), 0.0)
    assert learned(small)[0] == (0.0, 10.5)
    assert small.send(prompt((0, 6), index=1), 10.0) == 0
    assert learned(small)[0][1] == 15.5
    assert small.send(prompt((0, 6), index=2), 10.0) == 0, "15.5 + 1 s"
    assert small.send(prompt((50, 6), index=3), 10.0) == 1


def test_a_later_engine_must_be_sooner_by_the_slack() -> None:
    small = router(greedy(slack_s=3.0), engines=2)
    sent_to(small, 0, prompt((50, 1), index=0), 0.0)
    assert small.send(prompt((0, 1), index=1), 10.0) == 0, "2.5 + 5 s against 5 s"
    assert small.send(prompt((9, 1), index=2), 10.0) == 1, "7.5 + 5 s"


def test_delays_are_learned_from_answers() -> None:
    """A prompt of 5 tokens ends after 45 s, one sent at 50 s, when nothing but 5 / 32 s is left, after 16 s."""
    small = router(greedy(forgetting=0.5), engines=1)
    first = sent_to(small, 0, prompt((0, 1), index=0), 0.0, is_computed=True)
    small.ended(first, 0, 45.0)
    assert learned(small)[0][0] == pytest.approx(40.0, rel=1e-5), "without uncertainty before"
    second = sent_to(small, 0, prompt((20, 1), index=1), 50.0, is_computed=True)
    small.ended(second, 0, 66.0)
    assert learned(small)[0][0] == pytest.approx((40 * 0.5 + 11) / 1.5, rel=1e-5)
    third = sent_to(small, 0, prompt((40, 1), index=2), 100.0)
    small.ended(third, 0, 1000.0)
    assert learned(small)[0][0] == pytest.approx((40 * 0.5 + 11) / 1.5, rel=1e-5), "rejected"


def test_with_no_forgetting_the_delay_is_the_mean() -> None:
    one = Learned()
    for delay_s in (3.0, 9.0, 6.0, 2.0):
        one.learn(delay_s, 1.0)
    assert one.delay_s == pytest.approx(5.0, rel=1e-5)


def test_work_that_has_ended_is_none() -> None:
    small = router(greedy(), engines=1)
    first = sent_to(small, 0, prompt((0, 1), index=0), 0.0)
    sent_to(small, 0, prompt((20, 2), index=1), 0.0)
    assert learned(small)[0][1] == pytest.approx((5 + 9) / 2)
    small.ended(first, 0, 5.0)
    assert learned(small)[0][1] == pytest.approx(9 / 2)


def test_engines_that_only_decode_compute_nothing() -> None:
    """0.5 s each: a later engine is chosen if it is more than that sooner."""
    small = router(greedy(), prefills=False)
    assert [small.send(prompt((0, 5), index=index), 0.0) for index in range(4)] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("routing.half_life_s=0",), "routing.half_life_s must be above 0"),
        (("routing.forgetting=1.5",), "routing.forgetting must be above 0 and at most 1, not 1.5"),
    ],
)
def test_settings_that_cannot_be(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kvsim.simulate(kvsim.load_trace("synthetic", limit=2), "cluster.engines=2", "routing=kv_routing_greedy", *words)


def test_a_cluster_hits_more_than_by_turns() -> None:
    trace: Any = kvsim.load_trace("synthetic", limit=150)
    cluster = ("cluster.engines=4", "cluster.engines_per_host=1")
    aware, unaware = (kvsim.simulate(trace, *cluster, f"routing={name}") for name in ("kv_routing_greedy", "round_robin"))
    assert aware.hit_rate > unaware.hit_rate
