"""Page slots: counted, or numbered one by one."""

from random import Random

import numpy as np
import pytest

from kvsim.core.pool import UNLIMITED, Pool, SlotPool


@pytest.mark.parametrize("kind", [Pool, SlotPool])
def test_the_peak_is_the_most_that_was_in_use_at_once(kind: type[Pool]) -> None:
    pool = kind(6)
    pool.give(pool.take(4))
    pool.take(3)
    assert pool.peak_pages == 4


def test_a_pool_without_a_capacity_has_room_for_anything() -> None:
    pool = Pool(None)
    pool.take(1_000_000)
    assert (pool.capacity, pool.peak_pages) == (UNLIMITED, 1_000_000)


def test_numbered_slots_need_a_capacity() -> None:
    with pytest.raises(ValueError, match="needs a capacity"):
        SlotPool(None)


def test_neighbours_that_are_given_back_are_taken_again_as_neighbours() -> None:
    pool = SlotPool(9)
    first, second = pool.take(4), pool.take(5)
    pool.give(second)
    pool.give(first)
    assert pool.take(6).tolist() == [0, 1, 2, 3, 4, 5]
    assert pool.take(3).tolist() == [6, 7, 8]


def test_chosen_slots_are_taken_all_or_none() -> None:
    pool = SlotPool(6)
    pool.take(2)
    with pytest.raises(ValueError, match="only 1 of the 2 slots to take are free"):
        pool.take_these(np.array([1, 4]))
    with pytest.raises(ValueError, match="only 1 of the 2 slots to take are free"):
        pool.take_these(np.array([4, 4]))
    pool.take_these(np.array([4, 2]))
    assert (pool.free, pool.peak_pages) == (2, 4) and pool.take(2).tolist() == [3, 5]


def test_a_page_of_several_slots_has_neighbours_whatever_comes_and_goes() -> None:
    """20 slots have room for six pages of three, in any order of their ids."""
    pool, rng = SlotPool(20), Random(0)
    places, stored = pool.places(3), set[int]()
    for step in range(300):
        page = rng.randrange(12)
        if page in stored:
            stored.remove(page)
            pool.give(places.pop((page, 1)))
        elif len(stored) < 6:
            pages = 2 if len(stored) < 5 and page + 1 not in stored else 1
            stored |= {page, page + pages - 1}
            places.put((page, pages), pool.take(3 * pages))
        slots = {each: places.at([(each, 1)]).tolist() for each in stored}
        assert all(first % 3 == 0 and [first, first + 1, first + 2] == [first, *others] for first, *others in slots.values())
        taken = [slot for each in slots.values() for slot in each]
        assert sorted([*taken, *pool.free_slots().tolist()]) == list(range(20)), f"slots are lost in step {step}"
        assert places.slots == len(taken)
    pool.give(places.pop_all())
    assert (pool.free, places.slots) == (20, 0)


def test_a_pool_that_counts_counts_places_too() -> None:
    pool = Pool(20)
    places = pool.places(3)
    places.put((5, 4), pool.take(12))
    assert (places.at([(6, 2)]), places.pop((5, 1)), places.slots, places.pop_all(), places.slots) == (6, 3, 9, 9, 0)
