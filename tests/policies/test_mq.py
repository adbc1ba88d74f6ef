"""MQ by hand."""

from kvsim.policies.eviction.mq import MultiQueue
from tests.policies.small import filled


def test_pages_leave_by_the_logarithm_of_their_uses() -> None:
    cache = filled(MultiQueue(), *"abbccccd", gpu=4)
    assert cache.gpu.eviction.sizes == [2, 1, 1, 0, 0, 0, 0, 0]
    assert cache.leaving_order() == "adbc"


def test_an_idle_page_sinks() -> None:
    assert filled(MultiQueue(life_time=100), *"bbcdef", gpu=5).leaving_order() == "cdefb"
    assert filled(MultiQueue(life_time=3), *"bbcdef", gpu=5).leaving_order() == "cdebf", "b sank at 2 + 3, as e came"


def test_uses_are_remembered() -> None:
    policy = MultiQueue()
    cache = filled(policy, *"aaba", gpu=1)
    assert policy.mark(cache.node("a")).value == 3
    assert policy.sizes[:2] == [0, 1]


def test_the_last_queue_takes_all_that_is_above() -> None:
    assert filled(MultiQueue(queues=2), *"aaaaaaaabb", gpu=4).gpu.eviction.sizes == [0, 2]


def test_ghosts_are_bounded() -> None:
    """Of what has left, a ... h, the last three are remembered; of what is not looked up, at most twice as many are kept."""
    policy = MultiQueue(ghost=1.5)
    cache = filled(policy, *"abcdefghij", gpu=2)
    assert policy.ghosts.pages <= 6 + 1
    cache.use("e")
    assert policy.mark(cache.node("e")).value == 1
    cache.use("h")
    assert policy.mark(cache.node("h")).value == 2
