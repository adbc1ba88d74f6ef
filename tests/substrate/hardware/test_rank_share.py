"""What one of several ranks has, and how they stay in step."""

import os
import threading

import numpy as np
import pytest

from tests.waiting import join

pytest.importorskip("torch")

from kvsim.model.spec import ModelSpec
from kvsim.substrate.hardware.memory.host_pool import shared_file
from kvsim.substrate.hardware.model.rank_share import Lockstep, lockstep_bytes, rank_share

MODEL = ModelSpec(layers=2, hidden_size=16, vocabulary=64, heads=8, kv_heads=4, head_dim=8, mlp_width=32)


def test_a_rank_has_its_heads_and_its_part_of_every_matrix():
    share = rank_share(MODEL, 4)
    assert (share.heads, share.kv_heads, share.mlp_width, share.vocabulary) == (2, 1, 8, 16)
    assert (share.layers, share.hidden_size, share.head_dim) == (2, 16, 8)
    assert share.page_bytes(16) * 4 == MODEL.page_bytes(16)
    assert share.parameters * 4 == MODEL.parameters
    assert rank_share(MODEL, 1) is MODEL


def test_a_model_that_cannot_be_shared_equally_is_refused():
    with pytest.raises(ValueError, match=r"kv_heads=4 cannot be shared by hardware\.gpus=8"):
        rank_share(MODEL, 8)


def test_the_shares_of_a_page_differ():
    numbers = [Lockstep(None, rank, 2).of_rank(np.array([0, 1, 2])).tolist() for rank in range(2)]
    assert numbers == [[0, 2, 4], [1, 3, 5]]
    assert Lockstep(None, 0, 1).of_rank(np.array([5])).tolist() == [5]


def test_all_ranks_end_a_leap_after_the_same_step():
    """The first rank is stopped at some time; the others never are, and run at their own pace."""
    file = shared_file("steps", lockstep_bytes(3))
    steps, stopped = [0, 0, 0], threading.Event()

    def rank(number):
        lockstep = Lockstep(file, number, 3)
        for step in range(1, 10_000):
            steps[number] = step
            if lockstep.ends(stopped.is_set() and number == 0, lambda: False):
                return

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for one in ranks:
        one.start()
    while steps[0] < 20:
        assert max(steps) - min(steps) <= 1
    stopped.set()
    join(*ranks)
    os.close(file)
    assert len(set(steps)) == 1 and 20 <= steps[0] < 10_000


def test_nobody_waits_for_a_rank_that_is_lost():
    assert Lockstep(None, 0, 2).ends(False, lambda: True)
