"""The numbers of vLLM's blocks are taken and given back in the order of ``SlotPool``."""

from random import Random

import numpy as np

from kvsim.core.pool import SlotPool
from kvsim.engines.vllm.block_numbers import BlockNumbers


def test_blocks_given_back_last_are_taken_first_and_neighbours_stay_neighbours() -> None:
    blocks = BlockNumbers(6)
    first = blocks.take(3)
    assert first == [0, 1, 2] and blocks.take(1) == [3]
    blocks.give(first[:2])
    assert blocks.take(3) == [0, 1, 4] and blocks.free == 1


def test_blocks_are_those_of_a_slot_pool() -> None:
    random, blocks, slots = Random(0), BlockNumbers(40), SlotPool(40)
    taken: list[tuple[list[int], list[int]]] = []
    for _ in range(500):
        if taken and random.random() < 0.5:
            mine, theirs = taken.pop(random.randrange(len(taken)))
            at = random.randint(0, len(mine))
            given, kept = blocks.split(mine, at)
            blocks.give(given)
            slots.give(np.array(theirs[:at], dtype=np.int64))
            taken.append((kept, theirs[at:]))
        else:
            pages = random.randint(0, blocks.free)
            taken.append((blocks.take(pages), slots.take(pages).tolist()))
        assert all(mine == theirs for mine, theirs in taken)
        assert (blocks.free, blocks.least_free) == (slots.free, slots.least_free)
        assert blocks.free_slots() == slots.free_slots().tolist()
