"""What a request goes through, call by call, on caches small enough to follow by hand. A letter is a page, a word is a prompt."""

from kvsim.core.serving import ROOM
from kvsim.core.transfer import FetchPin, Transfer
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_through import WriteThrough
from tests.core.small import SmallCache, now, small_cache

# --- admission -------------------------------------------------------------------------------------------------------


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


def test_several_requests_get_what_they_need_or_none_does() -> None:
    cache = small_cache(gpu=4)
    first, second = cache.run("a"), cache.run("b")
    before = cache.snapshot()
    assert not cache.grow([(first, 1), (second, 2)], now(cache)).has_room
    assert cache.snapshot() == before
    assert cache.grow([(first, 1), (second, 1)], now(cache)) is ROOM


# --- loads and prefetches --------------------------------------------------------------------------------------------


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


# --- reset -----------------------------------------------------------------------------------------------------------


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
