"""Eviction, copies to the tier below and the transfers that make them, on caches small enough to follow by hand."""

from kvsim.policies.placement.write_back import WriteBack
from tests.core.small import now, only, small_cache


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
    cache.move(cache.land(write_down, now(cache)))
    cache.check()
    assert (cache.on("gpu"), cache.on("cpu")) == ("ab", "b")


def test_of_a_read_that_was_cut_short_the_load_brings_what_there_is() -> None:
    cache = small_cache(gpu=3, cpu=3, disk=9, placement=WriteBack)
    for word in ("abc", "def", "ghi"):
        cache.use(word)
    *writes, read, load = cache.load(cache.admitted("abc"), now(cache)).transfers
    cache.move(writes)
    assert cache.begin(read, now(cache)).can_run
    cache.abort(read, 2, now(cache))
    assert cache.begin(load, now(cache)).can_run and cache.carried(load) == "ab"
    cache.check()
