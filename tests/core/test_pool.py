"""Page slots: counted, or numbered one by one."""

import numpy as np
import pytest

from kvsim.core.pool import UNLIMITED, Pool, SlotPool


@pytest.mark.parametrize("kind", [Pool, SlotPool])
def test_what_is_taken_is_not_free_until_it_is_given_back(kind: type[Pool]) -> None:
    pool = kind(6)
    slots = pool.take(4)
    assert (pool.count(slots), pool.free) == (4, 2)
    pool.give(slots)
    assert pool.free == 6


@pytest.mark.parametrize("kind", [Pool, SlotPool])
def test_the_peak_is_the_most_that_was_in_use_at_once(kind: type[Pool]) -> None:
    pool = kind(6)
    pool.give(pool.take(4))
    pool.take(3)
    assert pool.peak_pages == 4


@pytest.mark.parametrize("kind", [Pool, SlotPool])
def test_slots_are_split_and_joined(kind: type[Pool]) -> None:
    pool = kind(6)
    first, rest = pool.split(pool.take(5), 2)
    assert (pool.count(first), pool.count(rest), pool.count(pool.join(first, rest))) == (2, 3, 5)


def test_a_pool_without_a_capacity_has_room_for_anything() -> None:
    pool = Pool(None)
    pool.take(1_000_000)
    assert (pool.capacity, pool.peak_pages) == (UNLIMITED, 1_000_000)


def test_numbered_slots_need_a_capacity() -> None:
    with pytest.raises(ValueError, match="needs a capacity"):
        SlotPool(None)


def test_each_slot_has_a_number_of_its_own_and_those_given_back_are_taken_again() -> None:
    pool = SlotPool(5)
    first, second = pool.take(2), pool.take(2)
    assert (first.tolist(), second.tolist(), pool.free_slots().tolist()) == ([0, 1], [2, 3], [4])
    pool.give(first)
    assert sorted(pool.take(3).tolist()) == [0, 1, 4]


def test_neighbours_that_are_given_back_are_taken_again_as_neighbours() -> None:
    pool = SlotPool(9)
    first, second = pool.take(4), pool.take(5)
    pool.give(second)
    pool.give(first)
    assert pool.take(6).tolist() == [0, 1, 2, 3, 4, 5]
    assert pool.take(3).tolist() == [6, 7, 8]


def test_a_cut_leaves_the_first_slots_to_the_first_pages() -> None:
    pool = SlotPool(5)
    upper, lower = pool.split(pool.take(4), 1)
    assert (upper.tolist(), lower.tolist(), pool.join(upper, lower).tolist()) == ([0], [1, 2, 3], [0, 1, 2, 3])


def test_chosen_slots_are_taken_all_or_none() -> None:
    pool = SlotPool(6)
    pool.take(2)
    with pytest.raises(ValueError, match="only 1 of the 2 slots to take are free"):
        pool.take_these(np.array([1, 4]))
    with pytest.raises(ValueError, match="only 1 of the 2 slots to take are free"):
        pool.take_these(np.array([4, 4]))
    pool.take_these(np.array([4, 2]))
    assert (pool.free, pool.peak_pages) == (2, 4) and pool.take(2).tolist() == [3, 5]
