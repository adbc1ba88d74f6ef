"""The tournament that finds the lowest value, against the lowest of a list."""

from random import Random

import pytest

from kvsim.cluster.router import Changes, KnownEngine
from kvsim.policies.routing.base import EngineStatus
from kvsim.policies.routing.least_loaded import LeastLoaded
from kvsim.policies.routing.lowest import Lowest
from tests.policies.small_routing import prompt, router


def tokens(status: EngineStatus) -> int:
    return status.outstanding_tokens


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 33])
def test_the_lowest_value_wins_and_of_several_the_first(count: int) -> None:
    random, changes = Random(count), Changes()
    known = [KnownEngine(engine, changes=changes) for engine in range(count)]
    told, untold = Lowest(changes.collect()), Lowest()
    offered = tuple(known)
    for step in range(400):
        for _ in range(random.choice([0, 1, 1, 2, count])):
            one = known[random.randrange(count)]
            one.sent(prompt((0, random.randint(1, 3))), random.choice([1, -1]))
        if step % 50 == 49:
            offered = tuple(random.sample(known, random.randint(1, count)))
            offered = tuple(sorted(offered, key=lambda status: status.engine))
        expected = min(range(len(offered)), key=lambda place: (offered[place].outstanding_tokens, place))
        assert told.of(offered, tokens) == untold.of(offered, tokens) == expected
        assert told.value(expected) == offered[expected].outstanding_tokens


def test_a_choice_looks_only_at_engines_whose_requests_have_changed() -> None:
    asked: list[int] = []

    def asking(status: EngineStatus) -> int:
        asked.append(status.engine)
        return status.outstanding_tokens

    changes = Changes()
    known = tuple(KnownEngine(engine, changes=changes) for engine in range(1000))
    lowest = Lowest(changes.collect())
    assert lowest.of(known, asking) == 0 and len(asked) == 1000
    asked.clear()
    known[0].sent(prompt())
    known[7].sent(prompt())
    assert lowest.of(known, asking) == 1 and sorted(asked) == [0, 7]
    asked.clear()
    assert lowest.of(known, asking) == 1 and not asked
    known[0].sent(prompt(), -1)
    assert lowest.of(known, asking) == 0


class Handicapped(LeastLoaded):
    """Counts something besides the load, of which nobody tells the index."""

    handicap = 0

    def load_of(self, status: EngineStatus) -> int:
        return status.outstanding_requests + self.handicap * (status.engine == 0)


def test_a_class_with_loads_of_its_own_is_asked_for_that_of_every_engine() -> None:
    policy = Handicapped()
    small = router(policy)
    assert small.send(prompt(), 0.0) == 0
    small.ended(prompt(), 0, 1.0)
    policy.handicap = 1
    assert small.send(prompt(), 2.0) == 1
