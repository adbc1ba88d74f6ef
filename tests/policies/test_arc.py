"""ARC by hand."""

from kvsim.policies.eviction.arc import ARC
from tests.policies.small import filled


def test_a_ghost_of_t1_makes_t1_larger() -> None:
    policy = ARC()
    cache = filled(policy, *"ababcde", gpu=4)
    assert policy.sizes == [2, 2] and cache.on("gpu") == "abde", "T1 had more than p = 0 pages, and c was its first"
    cache.use("c")
    assert policy.target_pages == 1
    assert policy.sizes == [1, 3] and cache.on("gpu") == "abce", "c is in T2 now; d made room, since T1 had 2 pages"
    assert cache.leaving_order() == "abce"


def test_what_leaves_with_a_reset_is_no_ghost() -> None:
    policy = ARC()
    cache = filled(policy, *"abc", gpu=4)
    cache.reset()
    assert policy.sizes == [0, 0] and not policy.pages() and not policy.b1.pages
