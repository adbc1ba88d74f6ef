"""The orders of vLLM 0.25's CPU tier, where each use of a chunk counts: examples that can be checked by hand."""

from kvsim.pages.extents import Extent
from kvsim.policies.eviction.arc import ARC
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.offload_order import OffloadOrder, OffloadUse
from kvsim.policies.eviction.offload_order_by_use import ArcByUse, LruByUse

USE = OffloadUse(())


def stored(order: OffloadOrder, *chunks: Extent) -> OffloadOrder:
    """The order after stores of these chunks, one after another."""
    for run in chunks:
        order.store(USE, [(run, 0)])
        order.end_write([run])
    return order


def test_policies_have_an_order_by_use() -> None:
    assert isinstance(LRU().offload_order_by_use(8), LruByUse) and isinstance(ARC().offload_order_by_use(8), ArcByUse)


def test_a_look_up_makes_the_chunks_of_its_path_the_most_recent_tail_before_head() -> None:
    """0 1, then 5: a look-up of 0 1 5, of which 9 is missing, leaves 5, 1, 0."""
    order = stored(LruByUse(), (0, 2), (5, 1))
    order.look_up([(0, 2), (5, 1), (9, 3)])
    assert [order.evict(1, []) for _ in range(3)] == [[(5, 1)], [(1, 1)], [(0, 1)]]
    assert order.pages == 0


def test_chunks_become_the_most_recent_when_their_copy_ends() -> None:
    """5 is stored before 7, and is ready after it."""
    order = LruByUse()
    for run in ((5, 1), (7, 1)):
        order.store(USE, [(run, 0)])
    order.end_write([(7, 1)])
    order.end_write([(5, 1)])
    assert order.find([(5, 3)]) == [((5, 1), True), ((6, 1), False), ((7, 1), True)]
    assert order.evict(2, []) == [(7, 1), (5, 1)]


def test_chunks_that_are_loaded_are_not_moved_by_look_ups_before_the_load_has_ended() -> None:
    order = stored(LruByUse(), (0, 2), (5, 1))
    order.begin_read([(0, 2)])
    order.look_up([(5, 1)])
    order.look_up([(0, 2)])
    assert order.evict(1, [(0, 2)]) == [(5, 1)]
    order.end_read([(0, 2)])
    assert order.evict(1, []) == [(1, 1)]


def test_the_end_of_a_request_moves_nothing() -> None:
    order = stored(LruByUse(), (0, 1), (5, 1))
    order.touch(OffloadUse(((0, 1),)), [((0, 1), 0)])
    order.finish(OffloadUse(((0, 1),)))
    assert order.evict(1, []) == [(0, 1)]


def test_chunks_that_are_ready_move_to_the_second_list_of_arc_when_they_are_looked_up() -> None:
    """0 is ready, 1 is still being written: it stays in the first list, and leaves first; then 0 does."""
    order = ArcByUse(4)
    order.store(USE, [((0, 1), 0)])
    order.end_write([(0, 1)])
    order.store(USE, [((1, 1), 0)])
    order.look_up([(0, 2)])
    order.end_write([(1, 1)])
    assert (order.once.pages, order.again.pages) == (1, 1)
    assert [order.evict(1, []) for _ in range(2)] == [[(1, 1)], [(0, 1)]]


def test_each_look_up_of_a_ghost_of_arc_adapts_the_target() -> None:
    """Two ghosts of the first list, none of the second: a step of 1 for each, at every look-up, up to the four of the tier."""
    order = stored(ArcByUse(4), (0, 2))
    assert isinstance(order, ArcByUse)
    order.evict(2, [])
    targets = []
    for _ in range(3):
        order.look_up([(0, 2)])
        targets.append(order.target)
    assert targets == [2.0, 4.0, 4.0]


def test_arc_evicts_nothing_if_its_second_list_has_too_few_chunks() -> None:
    """The target is above what the first list has, so chunks must leave the second one, which has one."""
    order = stored(ArcByUse(4), (0, 2), (5, 1))
    assert isinstance(order, ArcByUse)
    order.look_up([(5, 1)])
    order.target = 3.0
    assert order.may_evict(1, []) and not order.may_evict(2, []) and not order.may_evict(1, [(5, 1)])
    order.target = 2.0
    assert order.may_evict(2, [])  # one of the first list, then one of the second
