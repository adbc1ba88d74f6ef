"""Eviction, copies to the tier below and the transfers that make them, on caches small enough to follow by hand."""

from kvsim.core.cache import CLAIMED
from kvsim.core.tree import INCOMING, LEAVING
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from tests.core.small import now, only, small_cache

# --- eviction --------------------------------------------------------------------------------------------------------


def test_as_many_pages_leave_as_are_needed_the_deepest_first() -> None:
    cache = small_cache(gpu=5)
    cache.use("abcde")
    cache.use("xy")
    assert cache.on("gpu") == "abcxy"


def test_a_parent_leaves_after_its_last_child() -> None:
    cache = small_cache(gpu=4)
    cache.use("abc")
    cache.use("abd")
    cache.use("xy")
    assert cache.on("gpu") == "abxy"
    cache.use("xyz")
    assert cache.on("gpu") == "axyz"


def test_a_page_whose_last_copy_goes_takes_along_what_follows_it() -> None:
    cache = small_cache(gpu=2, cpu=4, placement=[WriteThrough])
    cache.use("ab")
    cache.use("xy")
    assert cache.on("cpu") == "abxy"
    cache.use("pq")
    assert (cache.on("gpu"), cache.on("cpu")) == ("pq", "xypq")
    assert cache.look("ab").cpu_pages == 0


def test_a_copy_below_makes_eviction_free_at_once() -> None:
    cache = small_cache(gpu=2, cpu=4, placement=WriteThrough)
    cache.use("ab")
    lease = cache.look("xy")
    assert cache.admit(lease, 2, now(cache)) and lease.waits == [] and cache.claim(lease, now(cache)) == CLAIMED
    assert cache.on("cpu") == "ab"


def test_without_a_copy_below_the_bytes_must_be_out_first() -> None:
    cache = small_cache(gpu=2, cpu=4, placement=WriteBack)
    cache.use("ab")
    node = cache.node("ab")
    lease = cache.look("xy")
    assert cache.admit(lease, 2, now(cache))
    assert node.state == [LEAVING, INCOMING] and cache.carried(only(lease.waits)) == "ab"
    assert cache.claim(lease, now(cache)).waits == lease.waits
    cache.move(lease.waits)
    assert cache.claim(lease, now(cache)) == CLAIMED and cache.on("cpu") == "ab"


def test_one_pass_writes_down_in_one_transfer() -> None:
    cache = small_cache(gpu=4, cpu=8, placement=WriteBack)
    cache.use("ab")
    cache.use("cd")
    lease = cache.look("wxyz")
    assert cache.admit(lease, 4, now(cache))
    assert cache.carried(only(lease.waits)) == "abcd"


def test_without_room_below_the_first_victims_are_dropped() -> None:
    cache = small_cache(gpu=4, cpu=2, placement=WriteBack)
    cache.use("ab")
    cache.use("cd")
    cache.use("wxyz")
    assert (cache.on("gpu"), cache.on("cpu")) == ("wxyz", "cd")
    assert cache.counts.no_room_pages == cache.counts.dropped_pages == 2


# --- revival ---------------------------------------------------------------------------------------------------------


def test_pages_on_their_way_down_that_are_used_again_stay_and_their_copy_is_completed() -> None:
    cache = small_cache(gpu=4, cpu=4, placement=WriteBack)
    cache.use("ab")
    first = cache.look("wxy")
    assert cache.admit(first, 3, now(cache))
    write_down = only(first.waits)
    cache.begin(write_down, now(cache))
    assert cache.carried(write_down) == "b", "one page was enough"
    cache.release(first)
    second = cache.look("ab")
    assert second.gpu_pages == 2 and cache.admit(second, 2, now(cache))
    assert cache.counts.revived_pages == 1
    cache.move(cache.finish(write_down, now(cache)))
    cache.check()
    assert (cache.on("gpu"), cache.on("cpu")) == ("ab", "b")


def test_a_write_down_that_fails_gives_back_the_slots_below() -> None:
    cache = small_cache(gpu=2, cpu=4, placement=WriteThrough)
    lease = cache.admitted("ab")
    write_down = only(cache.insert(lease, now(cache)))
    cache.begin(write_down, now(cache))
    assert cache.tiers[1].pool.free == 2
    cache.move(cache.abort(write_down, 0, now(cache)))
    cache.check()
    assert cache.tiers[1].pool.free == 4 and (cache.on("gpu"), cache.on("cpu")) == ("ab", "")


def test_of_a_write_down_that_is_cut_short_whole_pages_are_kept() -> None:
    cache = small_cache(gpu=4, cpu=4, placement=WriteThrough)
    lease = cache.admitted("abc")
    write_down = only(cache.insert(lease, now(cache)))
    cache.begin(write_down, now(cache))
    cache.move(cache.abort(write_down, 2, now(cache)))
    cache.check()
    assert (cache.on("gpu"), cache.on("cpu")) == ("abc", "ab")


# --- one copy only ---------------------------------------------------------------------------------------------------


def test_exclusive_tiers_never_hold_a_page_twice() -> None:
    cache = small_cache(gpu=3, cpu=6, placement=Exclusive)
    for word in ("abc", "xyz", "abc", "abd", "xyz"):
        cache.use(word)
        assert not set(cache.on("gpu")) & set(cache.on("cpu"))
