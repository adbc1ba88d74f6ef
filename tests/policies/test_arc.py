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


def test_a_ghost_of_t2_makes_t1_smaller() -> None:
    policy = ARC()
    cache = filled(policy, *"aabbcac", gpu=2)
    assert policy.target_pages == 1, "a was in B2 when p was 0; then c was in B1"
    cache.use("b")
    assert policy.target_pages == 0


def test_each_page_of_a_request_counts() -> None:
    policy = ARC()
    cache = filled(policy, "ab", "ab", "cd", "ef", gpu=4)
    assert cache.on("gpu") == "abef" and policy.b1.pages == 2
    cache.use("cd")
    assert policy.target_pages == 2
    assert cache.on("gpu") == "acde", "T2 gave a page, then T1 had one too many: the page that came in its stead counts"


def test_the_smaller_ghost_list_counts_for_more() -> None:
    policy = ARC()
    cache = filled(policy, *"aabbccddeeff", gpu=4)
    assert (policy.b1.pages, policy.b2.pages) == (0, 2)
    cache.use("g")
    cache.use("h")
    assert (policy.b1.pages, policy.b2.pages) == (1, 3), "g left T1"
    cache.use("g")
    assert policy.target_pages == 3
    assert policy.b1.pages == 0


def test_a_node_whose_pages_are_remembered_in_part_is_cut_when_it_leaves() -> None:
    policy = ARC()
    cache = filled(policy, "pq", "pq", "abcd", "xyz", gpu=8)
    assert cache.on("gpu") == "pqabcxyz"
    cache.use("abcde")
    assert policy.sizes == [2, 6], "x and e; d came back"
    assert cache.node("abcd") is cache.node("abcde")
    assert cache.leaving_order() == "xqpedcba"


def test_ghosts_are_bounded() -> None:
    policy = ARC()
    cache = filled(policy, *"abcdefghijklmnopaabbccddeeffgghhii", gpu=4)
    assert policy.sizes[0] + policy.b1.pages <= 4
    assert sum(policy.sizes) + policy.b1.pages + policy.b2.pages <= 8
    assert cache.gpu.pool.free == 0


def test_what_leaves_with_a_reset_is_no_ghost() -> None:
    policy = ARC()
    cache = filled(policy, *"abc", gpu=4)
    cache.reset()
    assert policy.sizes == [0, 0] and not policy.pages() and not policy.b1.pages
