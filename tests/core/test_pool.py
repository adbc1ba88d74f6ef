"""Page slots: counted, or numbered one by one."""

import numpy as np
import pytest

from kvsim.core.pool import SlotPool


def test_chosen_slots_are_taken_all_or_none() -> None:
    pool = SlotPool(6)
    pool.take(2)
    with pytest.raises(ValueError, match="of 2 slots to take, only 1 are free"):
        pool.take_these(np.array([1, 4]))
    with pytest.raises(ValueError, match="of 2 slots to take, only 1 are free"):
        pool.take_these(np.array([4, 4]))
    pool.take_these(np.array([4, 2]))
    assert (pool.free, pool.peak_pages) == (2, 4) and pool.take(2).tolist() == [3, 5]
