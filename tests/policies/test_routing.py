"""Routing policies: what every one of them owes the router, and the simple ones by hand."""

import pytest

from kvsim.policies.routing.round_robin import RoundRobin
from tests.policies.small_routing import NAMES, policy_of, prompt, router


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_that_is_up_is_chosen(name: str) -> None:
    cluster = router(policy_of(name))
    for index in range(60):
        if index == 20:
            cluster.down(1, 20.0)
        if index == 40:
            cluster.up(1, 40.0)
        chosen = cluster.send(prompt((index % 4 * 100, 3), index=index, session=index % 7), float(index))
        assert chosen in (0, 1, 2) and (chosen != 1 or not 20 <= index < 40)
        if index % 3:
            cluster.ended(prompt((index % 4 * 100, 3), index=index, session=index % 7), chosen, float(index))


@pytest.mark.parametrize("name", NAMES)
def test_one_engine_gets_everything(name: str) -> None:
    cluster = router(policy_of(name), engines=1)
    assert {cluster.send(prompt(index=index), float(index)) for index in range(20)} == {0}


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_choices(name: str) -> None:
    clusters = [router(policy_of(name), engines=5, seed=7) for _ in range(2)]
    choices = [[cluster.send(prompt(index=index), float(index)) for index in range(50)] for cluster in clusters]
    assert choices[0] == choices[1]


def test_round_robin_takes_turns() -> None:
    cluster = router(RoundRobin())
    assert [cluster.send(prompt(index=index), 0.0) for index in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_round_robin_leaves_out_an_engine_that_is_down() -> None:
    cluster = router(RoundRobin())
    assert [cluster.send(prompt(), 0.0) for _ in range(2)] == [0, 1]
    cluster.down(2, 1.0)
    assert [cluster.send(prompt(), 1.0) for _ in range(3)] == [0, 1, 0]
    cluster.up(2, 2.0)
    assert [cluster.send(prompt(), 2.0) for _ in range(3)] == [1, 2, 0]
