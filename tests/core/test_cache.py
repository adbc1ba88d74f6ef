"""What a request goes through, call by call, on caches small enough to follow by hand. A letter is a page, a word is a prompt."""

import pytest

from kvsim.core.cache import CLAIMED
from kvsim.core.transfer import FetchPin, Transfer
from kvsim.core.tree import INCOMING
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from tests.core.small import SmallCache, now, only, small_cache

# --- match -----------------------------------------------------------------------------------------------------------


def test_an_empty_cache_matches_nothing() -> None:
    lease = small_cache(gpu=8).look("abc")
    assert (lease.gpu_pages, lease.pages_at(1), lease.far_pages) == (0, 0, 0)


def test_a_match_ends_where_prompts_part_and_cuts_the_node_there() -> None:
    cache = small_cache(gpu=8)
    cache.use("abcd")
    lease = cache.look("abxy")
    assert lease.gpu_pages == 2
    assert [node.pages for node in cache.tree.root.descendants()] == [2, 2]
    cache.check()


def test_a_match_that_cuts_takes_no_room_and_counts_no_hit() -> None:
    cache = small_cache(gpu=8)
    cache.use("abcd")
    before, hits = cache.snapshot(), cache.node("abcd").hits
    cache.look("ab")
    assert cache.snapshot() == before
    assert {node.hits for node in cache.tree.root.descendants()} == {hits}


def test_the_last_token_is_computed_even_if_every_page_is_there() -> None:
    cache = small_cache(gpu=8, recompute_last_token=True)
    cache.use("abc")
    assert cache.use("abc") == (2, 0, 0)
    assert cache.use("abcd") == (3, 0, 0)


def test_a_match_tells_the_tiers_apart_from_the_top() -> None:
    cache = small_cache(gpu=4, cpu=4, disk=8, placement=WriteBack)
    cache.use("abcd")
    cache.use("wxyz")
    cache.use("pqrs")
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("pqrs", "wxyz", "abcd")
    lease = cache.look("abcd")
    assert (lease.gpu_pages, lease.pages_at(1), lease.far_pages) == (0, 0, 4)
    assert cache.look("wxyz").pages_at(1) == 4


# --- admission -------------------------------------------------------------------------------------------------------


def test_a_request_that_does_not_fit_changes_nothing() -> None:
    cache = small_cache(gpu=4)
    cache.run("abc")
    assert cache.fails("xy")


def test_pages_to_be_reused_are_no_room_for_the_rest() -> None:
    cache = small_cache(gpu=4)
    cache.use("abc")
    assert cache.fails("abc", pages=5)
    assert cache.use("abcd") == (3, 0, 0)


def test_a_request_is_refused_that_will_not_have_room_for_its_answer() -> None:
    cache = small_cache(gpu=4)
    cache.run("ab")
    cache.use("xy")
    before = cache.snapshot()
    assert not cache.admit(cache.look("pq"), 2, now(cache), in_all=3)
    assert cache.snapshot() == before
    assert cache.admit(cache.look("pq"), 2, now(cache), in_all=2)


def test_persistent_pages_stay_until_a_reset() -> None:
    cache = small_cache(gpu=4)
    cache.use("ab", persistent=True)
    cache.use("abxy")
    cache.use("pq")
    assert cache.on("gpu") == "abpq" and cache.gpu.evictable_pages == 2
    assert cache.fails("rstu")
    cache.reset()
    cache.check()
    assert cache.gpu.pool.free == 4


def test_pages_beyond_the_prompt_are_free_again_at_the_end() -> None:
    cache = small_cache(gpu=6)
    lease = cache.run("ab", pages=6)
    assert cache.gpu.pool.free == 0
    cache.release(lease)
    assert cache.gpu.pool.free == 4 and cache.on("gpu") == "ab"


def test_running_requests_share_the_pages_of_a_common_prefix() -> None:
    cache = small_cache(gpu=6)
    first, second = cache.run("abc"), cache.run("abd")
    assert cache.gpu.pool.free == 2
    cache.release(first)
    assert cache.gpu.evictable_pages == 1, "only c: ab is still in use"
    cache.release(second)
    assert cache.gpu.evictable_pages == 4


def test_what_two_requests_compute_at_once_is_kept_once() -> None:
    cache = small_cache(gpu=8)
    first, second = cache.admitted("abc"), cache.admitted("abc")
    assert cache.gpu.pool.free == 2
    for lease in (first, second):
        cache.move(cache.insert(lease, now(cache)))
        cache.check()
    assert cache.gpu.pool.free == 5 and cache.on("gpu") == "abc"


def test_a_request_gets_more_pages_while_it_decodes() -> None:
    cache = small_cache(gpu=4, cpu=8, placement=WriteBack)
    cache.use("xy")
    lease = cache.run("a")
    assert cache.grow([(lease, 1)], now(cache)) == (True, []) and cache.claim(lease, now(cache)) == CLAIMED
    growth = cache.grow([(lease, 2)], now(cache))
    write_down = only(growth.transfers)
    assert growth.has_room and cache.claim(lease, now(cache)).waits == [write_down], "room is there only when the bytes are out"
    cache.move([write_down])
    assert cache.claim(lease, now(cache)) == CLAIMED
    assert not cache.grow([(lease, 1)], now(cache)).has_room, "everything else is the request's own"
    cache.check()


def test_several_requests_get_what_they_need_or_none_does() -> None:
    cache = small_cache(gpu=4)
    first, second = cache.run("a"), cache.run("b")
    before = cache.snapshot()
    assert not cache.grow([(first, 1), (second, 2)], now(cache)).has_room
    assert cache.snapshot() == before
    assert cache.grow([(first, 1), (second, 1)], now(cache)) == (True, [])


# --- loads and prefetches --------------------------------------------------------------------------------------------


def lower_only(word: str, *, gpu: int = 3, cpu: int = 9, disk: int = 0) -> SmallCache:
    """A cache that has a word below the GPU only."""
    cache = small_cache(gpu=gpu, cpu=cpu, disk=disk, placement=WriteBack)
    cache.use(word)
    cache.use("#" * gpu)
    return cache


def test_pages_are_ready_only_after_the_load_that_brings_them() -> None:
    cache = lower_only("abc")
    lease = cache.admitted("abc")
    load = only(cache.load(lease, now(cache)).transfers)
    assert cache.node("abc").state[0] == INCOMING and cache.on("gpu") == ""
    assert lease.arriving() == [load]
    cache.move([load])
    assert cache.on("gpu") == "abc" and lease.arriving() == []


def test_both_ends_of_a_load_are_pinned() -> None:
    cache = lower_only("abc")
    load = only(cache.load(cache.admitted("abc"), now(cache)).transfers)
    node = cache.node("abc")
    assert all(node.pins) and not node.is_evictable(1)
    cache.move([load])
    assert not node.pins[1] and node.pins[0]


def test_a_request_takes_part_in_a_load_that_is_under_way() -> None:
    cache = lower_only("abc", gpu=6)
    cache.use("######")
    first = cache.admitted("abc")
    load = only(cache.load(first, now(cache)).transfers)
    second = cache.look("abc")
    assert second.gpu_pages == 3 and cache.admit(second, 3, now(cache))
    assert second.arriving() == [load] and cache.load(second, now(cache)).transfers == []
    cache.release(first)
    cache.move([load])
    cache.check()
    assert cache.on("gpu") == "abc###" and cache.counts.loaded_pages == 3


def test_pages_that_a_load_fails_to_bring_are_computed_in_its_slots() -> None:
    cache = lower_only("abc")
    lease = cache.admitted("abc")
    load = only(cache.load(lease, now(cache)).transfers)
    cache.begin(load, now(cache))
    cache.move(cache.abort(load, 1, now(cache)))
    assert cache.on("gpu") == "a"
    cache.move(cache.insert(lease, now(cache)))
    cache.check()
    assert cache.on("gpu") == "abc" and cache.gpu.pool.free == 0


def test_a_load_that_fails_changes_the_version_because_nobody_can_take_part_in_it_any_more() -> None:
    cache = lower_only("abc")
    lease = cache.admitted("abc")
    load = only(cache.load(lease, now(cache)).transfers)
    found, version = cache.found(lease.request, cache.gpu), cache.version
    cache.move(cache.abort(load, 0, now(cache)))
    assert (found, cache.found(lease.request, cache.gpu)) == ((3, 0), (0, 0))
    assert cache.version != version


def test_pages_from_disk_pass_through_the_cpu_tier() -> None:
    cache = lower_only("abc", cpu=3, disk=9)
    cache.use("+++")
    assert cache.on("disk").startswith("abc") and cache.look("abc").far_pages == 3
    lease = cache.admitted("abc")
    transfers = cache.load(lease, now(cache)).transfers
    assert [transfer.name for transfer in transfers[-2:]] == ["disk-cpu", "cpu-gpu"]
    assert transfers[-1].after == [transfers[-2]], "the load waits for what it reads"
    cache.move(transfers)
    assert lease.loaded_far_pages == 3 and cache.on("gpu") == "abc"


def test_a_prefetch_is_pinned_until_it_ends_and_keeps_whole_pages_that_arrived() -> None:
    cache = lower_only("abc", cpu=3, disk=9)
    cache.use("+++")
    *write_downs, fetch = cache.fetch(cache.look("abc"), 3, now(cache)).transfers
    cache.move(write_downs)
    assert cache.carried(fetch) == "abc" and all(node.pins[2] for node in fetch.nodes)
    while waits := cache.begin(fetch, now(cache)).waits:
        cache.move(waits)
    cache.move(cache.abort(fetch, 2, now(cache)))
    cache.check()
    assert not cache.in_flight
    assert cache.look("abc").pages_at(1) == 2 and cache.look("abc").far_pages == 1


def fetched_abcd(**capacities: int) -> tuple[SmallCache, Transfer, FetchPin]:
    """A fetch of a, b, c and d, which only the disk has; it is held but has not begun."""
    cache = small_cache(**{"gpu": 4, "cpu": 4, "disk": 20} | capacities)
    for word in ("abcd", "wxyz", "pqrs"):
        cache.use(word)
    transfers, fetch, pin = cache.fetch(cache.look("abcd"), 4, now(cache))
    assert fetch is not None and pin is not None
    cache.move(transfers[:-1])
    cache.check()
    return cache, fetch, pin


def test_fetched_pages_that_are_held_stay_after_the_fetch_until_they_are_let_go() -> None:
    cache, fetch, pin = fetched_abcd()
    cache.move([fetch])
    cache.use("mnop")
    assert cache.on("cpu") == "abcd"
    pin.let_go()
    pin.let_go()
    cache.check()
    cache.use("stuv")
    assert cache.on("cpu") == "stuv"


@pytest.mark.parametrize(("arrived", "kept"), [(0, ""), (1, "a"), (3, "abc")])
def test_of_a_fetch_that_ends_early_what_has_arrived_is_held(arrived: int, kept: str) -> None:
    cache, fetch, pin = fetched_abcd()
    assert cache.begin(fetch, now(cache)).can_run
    cache.move(cache.abort(fetch, arrived, now(cache)))
    cache.check()
    cache.use("mnop")
    assert set(cache.on("cpu")) & set("abcd") == set(kept)
    pin.let_go()
    cache.use("stuv")
    assert cache.on("cpu") == "stuv"


@pytest.mark.parametrize("is_over", [True, False])
def test_a_reset_lets_go_of_what_was_fetched(is_over: bool) -> None:
    cache, fetch, pin = fetched_abcd()
    if is_over:
        cache.move([fetch])
    cache.reset()
    cache.check()
    if not is_over:
        cache.move([fetch])
    pin.let_go()
    cache.check()
    assert cache.tiers[1].pool.free == 4 and not cache.transfers.fetch_pins


def test_held_pages_that_lose_the_pages_before_them_are_freed_when_they_are_let_go() -> None:
    """The CPU tier is full of held pages, so what leaves the GPU is lost: a and b, and c and d with them."""
    cache = small_cache(gpu=4, cpu=4, disk=20, placement=Exclusive)
    for word in ("abcd", "wxyz", "pqrs", "ab", "tu"):
        cache.use(word)
    fetch_pins = []
    for word in ("abcd", "wxyz"):
        transfers, _, pin = cache.fetch(cache.look(word), 2, now(cache))
        assert pin is not None
        fetch_pins.append(pin)
        cache.move(transfers)
    assert (cache.on("gpu"), cache.on("cpu")) == ("abtu", "cdwx")
    cache.use("mnop")
    assert (cache.on("gpu"), cache.on("cpu"), cache.tiers[1].pool.free) == ("mnop", "wx", 0)
    for pin in fetch_pins:
        pin.let_go()
    cache.check()
    assert cache.tiers[1].pool.free == 2 and not cache.residency.doomed


def test_a_prefetch_that_the_cpu_tier_cannot_hold_is_not_begun() -> None:
    cache = lower_only("abcd", gpu=4, cpu=4, disk=12)
    cache.use("++++")
    lease = cache.admitted("####")
    assert all(cache.node("####").pins[1:2]), "it is about to be loaded from there"
    assert cache.look("abcd").far_pages == 4 and cache.fetch(cache.look("abcd"), 4, now(cache)).fetch is None
    cache.move(cache.load(lease, now(cache)).transfers)
    *_, fetch = cache.fetch(cache.look("abcd"), 4, now(cache)).transfers
    assert cache.carried(fetch) == "abcd"
    cache.check()


# --- reset -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["admitted", "loading", "inserted"])
def test_a_reset_forgets_every_page_and_running_requests_give_theirs_back(phase: str) -> None:
    cache = lower_only("abc", gpu=4)
    lease = cache.admitted("abcd")
    transfers: list[Transfer] = []
    if phase != "admitted":
        transfers = cache.load(lease, now(cache)).transfers
        cache.begin(transfers[-1], now(cache))
    if phase == "inserted":
        cache.move(transfers)
        transfers = cache.insert(lease, now(cache))
    cache.reset()
    cache.check()
    assert cache.look("abc").lower_pages == 0 and cache.look("abc").gpu_pages == 0
    cache.move(transfers)
    cache.move(cache.insert(lease, now(cache)))
    cache.release(lease)
    cache.check()
    assert [tier.pool.free for tier in cache.tiers] == [tier.pool.capacity for tier in cache.tiers]


def test_what_is_given_up_before_it_has_room_below_is_not_copied() -> None:
    cache = small_cache(gpu=4, cpu=4, placement=WriteThrough)
    lease = cache.admitted("abc")
    [write] = cache.insert(lease, now(cache))
    assert write.pages == 3
    cache.reset()
    assert cache.begin(write, now(cache)).can_run and write.pages == 0
    cache.check()
    cache.land(write, now(cache))
    cache.release(lease)
    cache.check()
    assert [tier.pool.free for tier in cache.tiers] == [4, 4] and cache.counts.written_pages == 0


def test_after_a_reset_the_same_prompts_are_cached_anew() -> None:
    cache = small_cache(gpu=4, cpu=4, placement=WriteThrough)
    cache.use("abc")
    cache.reset()
    assert cache.use("abc") == (0, 0, 0)
    assert cache.use("abc") == (3, 0, 0)
