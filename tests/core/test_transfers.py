"""Eviction, copies to the tier below and the transfers that make them, on caches small enough to follow by hand."""

from kvsim.core.cache import CLAIMED
from kvsim.core.transfer import Transfer
from kvsim.core.transfers import RUN, is_arriving, parts_from
from kvsim.core.tree import INCOMING, LEAVING
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from tests.core.small import SmallCache, now, only, small_cache

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


# --- room, call by call ----------------------------------------------------------------------------------------------


def test_room_that_cannot_be_made_costs_nothing() -> None:
    cache = small_cache(gpu=4)
    cache.run("ab")
    cache.use("xy")
    before = cache.snapshot()
    assert not cache.transfers.make_room(cache.gpu, 3, now(cache))
    assert cache.snapshot() == before
    assert cache.transfers.make_room(cache.gpu, 2, now(cache)) and cache.on("gpu") == "ab"


def test_one_node_is_evicted_as_if_it_were_the_next_victim() -> None:
    cache = small_cache(gpu=4, cpu=4, placement=WriteBack)
    cache.use("ab")
    cache.use("xy")
    cache.transfers.evict(cache.node("xy"), cache.gpu, now(cache))
    cache.move(cache.transfers.flush())
    assert (cache.on("gpu"), cache.on("cpu")) == ("ab", "xy")


def leaving() -> tuple[SmallCache, Transfer]:
    """``ab`` and ``cd`` are about to be written down for a request that needs the whole GPU."""
    cache = small_cache(gpu=4, cpu=4, placement=WriteBack)
    cache.use("ab")
    cache.use("cd")
    lease = cache.look("wxyz")
    assert cache.admit(lease, 4, now(cache))
    return cache, only(lease.waits)


def test_a_transfer_takes_its_slots_when_it_begins() -> None:
    cache, write_down = leaving()
    cpu = cache.tiers[1]
    assert (cpu.promised_pages, cpu.pool.free) == (4, 4)
    assert cache.begin(write_down, now(cache)) == RUN == cache.begin(write_down, now(cache))
    assert (cpu.promised_pages, cpu.pool.free) == (0, 0)


def test_what_has_to_end_before_slots_are_free_is_the_oldest_write_down() -> None:
    cache, write_down = leaving()
    assert cache.transfers.departing(cache.gpu) == [write_down]
    cache.move([write_down])
    assert cache.transfers.departing(cache.gpu) == []


def test_an_ended_transfer_frees_its_source_and_pins_nothing() -> None:
    cache, write_down = leaving()
    cache.begin(write_down, now(cache))
    assert write_down in cache.in_flight and write_down.pins
    cache.finish(write_down, now(cache))
    assert write_down.done and write_down.arrived_pages == cache.counts.written_pages == 4
    assert not cache.in_flight and cache.gpu.pool.free == 4 and cache.on("cpu") == "abcd"
    assert not any(any(node.pins) for node in cache.tree.root.descendants())


def test_a_load_waits_for_the_read_that_brings_what_it_loads() -> None:
    cache = small_cache(gpu=2, cpu=2, disk=8, placement=WriteBack)
    for word in ("ab", "cd", "ef"):
        cache.use(word)
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("ef", "cd", "ab")
    *_, read, load = cache.load(cache.admitted("ab"), now(cache)).transfers
    assert cache.begin(load, now(cache)) == (False, [read])
    cache.move([read])
    assert cache.begin(load, now(cache)).can_run and is_arriving(cache.node("ab"), cache.gpu)


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


def test_a_path_is_found_again_after_a_cut() -> None:
    cache = small_cache(gpu=8)
    cache.use("abcdef")
    lower = cache.node("abcdef")
    upper = cache.residency.cut(lower, 4)
    top = cache.residency.cut(upper, 1)
    assert parts_from(lower, 0) == [top, upper, lower]
    assert parts_from(lower, 1) == [upper, lower]
    assert parts_from(lower, 4) == [lower]
