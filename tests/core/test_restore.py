"""A cache that begins with pages of an earlier run, and one whose disk cannot read a page any more."""

import pytest

from kvsim.core.pool import SlotPool
from kvsim.core.tier import DISK, GPU
from kvsim.core.transfer import Transfer
from kvsim.core.tree import INCOMING
from kvsim.policies.placement.write_back import WriteBack
from kvsim.substrate.hardware.disk.restore import recovered_paths, restore
from tests.core.small import SmallCache, small_cache
from tests.workloads import make_request


def key(page: int) -> bytes:
    return b"page %d" % page


def restored(prompts: list[str], found: str, **tiers: int) -> SmallCache:
    """A cache that is given these prompts, the pages in ``found`` recovered, those written first at the front."""
    cache = small_cache(**{"gpu": 8, "cpu": 8, "disk": 8, **tiers})
    requests = [cache.request(prompt) for prompt in prompts]
    pages = {word[-1]: page for word, page in cache.words.ids.items()}
    assert len(pages) == len(cache.words.ids), "each letter is one page"
    recovered = {key(pages[letter]): slot for slot, letter in enumerate(found)}
    restore(cache.core, requests, key, recovered, now=next(cache.clock))
    cache.check()
    return cache


# --- restore ---------------------------------------------------------------------------------------------------------


def test_restored_pages_are_hits_of_the_lowest_tier() -> None:
    cache = restored(["abcd"], "abcd")
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("", "", "abcd")
    assert cache.use("abcd") == (0, 0, 4)
    assert cache.use("abcd") == (4, 0, 0)


def test_of_each_prompt_the_pages_before_the_first_missing_one_are_restored() -> None:
    cache = restored(["abcd", "abxy", "pqr"], "abdxqr")
    assert cache.on("disk") == "abx"
    assert cache.use("abcd") == (0, 0, 2) and cache.use("abxy") == (2, 0, 1) and cache.use("pqr") == (0, 0, 0)


def test_pages_that_no_request_needs_leave_their_slots_free() -> None:
    cache = restored(["ab", "z"], "zba")
    pool = cache.tiers[-1].pool
    assert isinstance(pool, SlotPool) and pool.free == 5 and sorted(pool.free_slots().tolist()) == [3, 4, 5, 6, 7]
    pages = {word[-1]: page for word, page in cache.words.ids.items()}
    recovered = {key(99): 0, key(pages["b"]): 1, key(pages["a"]): 6, key(98): 7}
    again = small_cache(gpu=8, cpu=8, disk=8)
    assert restore(again.core, [again.request("abc")], key, recovered, now=0.0) == 2
    (node,) = again.tree.root.descendants()
    assert node.slots[DISK].tolist() == [6, 1] and again.tiers[DISK].pool.free == 6
    assert again.tiers[DISK].pool.take(6).tolist() == [0, 2, 3, 4, 5, 7]


def test_restored_pages_share_what_their_prompts_share() -> None:
    cache = restored(["abcd", "abxy", "abcd", "ab"], "abcdxy")
    assert sorted((node.depth, node.pages) for node in cache.tree.root.descendants()) == [(0, 2), (2, 2), (2, 2)]
    assert cache.tiers[DISK].pool.free == 2 and cache.tiers[DISK].evictable_pages == 6


def test_what_was_written_first_leaves_first() -> None:
    cache = restored(["ab", "cd", "ef"], "cdefab", disk=6, gpu=2, cpu=2)
    cache.use("xy")
    assert cache.on("disk") == "abefxy"
    cache.use("pq")
    assert cache.on("disk") == "abxypq"


def test_each_page_is_looked_up_once() -> None:
    asked: list[int] = []

    def counted(page: int) -> bytes:
        asked.append(page)
        return key(page)

    requests = [make_request(pages) for pages in ([0, 1, 2], [0, 1, 5, 6], [0, 1, 2, 3, 4], [0, 1, 2, 3], [7, 8])]
    paths = recovered_paths(requests, counted, {key(page): 10 + page for page in (3, 1, 0, 2, 6)})
    assert asked == [0, 1, 2, 5, 3, 4, 7]
    assert [(extents, slots.tolist()) for extents, slots in paths] == [
        (((0, 4),), [10, 11, 12, 13]),
        (((0, 2),), [10, 11]),
        (((0, 3),), [10, 11, 12]),
    ]


def test_restored_pages_are_evicted_like_any_others() -> None:
    cache = restored(["abcdefgh"], "abcdefgh", gpu=4, cpu=4, disk=8)
    cache.use("ijk")
    assert cache.on("disk") == "abcdeijk" and cache.tiers[DISK].evicted_pages == 3


def test_only_an_empty_cache_with_numbered_slots_can_be_restored() -> None:
    used = small_cache(gpu=4, cpu=4, disk=4)
    used.use("ab")
    for cache in (used, small_cache(gpu=4, cpu=4, disk=4, slots=False)):
        with pytest.raises(ValueError, match="only into an empty cache whose lowest tier numbers its slots"):
            restore(cache.core, [], key, {}, now=0.0)
    cache = small_cache(gpu=4, cpu=4, disk=4)
    with pytest.raises(ValueError, match="only 1 of the 2 slots to take are free"):
        restore(cache.core, [cache.request("ab")], key, {key(0): 0, key(1): 4}, now=0.0)
    cache.check()
    assert cache.tiers[DISK].pool.free == 4


# --- pages that cannot be read ---------------------------------------------------------------------------------------


def fail(cache: SmallCache, transfer: Transfer, arrived: int) -> None:
    """Read ``arrived`` pages; the next one is unreadable."""
    while waits := cache.begin(transfer, next(cache.clock)).waits:
        cache.move(waits)
    transfer.has_fault = True
    cache.move(cache.abort(transfer, arrived, next(cache.clock)))
    cache.check()


def test_a_page_that_cannot_be_read_is_not_offered_again() -> None:
    cache = restored(["abcd"], "abcd")
    (fetch,) = cache.fetch(cache.look("abcd"), 4, next(cache.clock)).transfers
    fail(cache, fetch, 2)
    assert (cache.on("cpu"), cache.on("disk")) == ("ab", "ab"), "what follows it could not be used without it"
    assert (cache.counts.unreadable_pages, cache.counts.dropped_pages) == (1, 1)
    assert cache.use("abcd") == (0, 2, 0)
    assert cache.on("disk") == "abcd", "it was computed, and written again"


def test_a_read_that_was_only_cancelled_loses_nothing() -> None:
    cache = restored(["abcd"], "abcd")
    (fetch,) = cache.fetch(cache.look("abcd"), 4, next(cache.clock)).transfers
    cache.begin(fetch, next(cache.clock))
    cache.move(cache.abort(fetch, 2, next(cache.clock)))
    assert cache.on("disk") == "abcd" and cache.counts.unreadable_pages == 0


def test_a_request_computes_the_page_that_its_load_could_not_read() -> None:
    cache = restored(["abcd"], "abcd")
    lease = cache.admitted("abcd")
    fetch, load = cache.load(lease, next(cache.clock)).transfers
    fail(cache, fetch, 1)
    assert cache.node("abcd").state[GPU] == INCOMING and cache.on("disk") == "acd", "b is being made: c and d wait for it"
    cache.move([load])
    assert cache.on("gpu") == "a" and cache.counts.loaded_pages == 1
    cache.move(cache.insert(lease, next(cache.clock)))
    cache.check()
    assert cache.on("gpu") == cache.on("disk") == "abcd"


def test_pages_below_an_unreadable_one_go_with_the_request_that_would_have_computed_it() -> None:
    cache = restored(["abcd"], "abcd")
    lease = cache.admitted("abcd")
    fetch, load = cache.load(lease, next(cache.clock)).transfers
    fail(cache, fetch, 1)
    cache.move([load])
    cache.release(lease)
    cache.check()
    assert cache.on("disk") == "a" and cache.counts.dropped_pages == 2
    assert cache.tiers[DISK].pool.free == 7


def test_an_unreadable_page_that_another_request_needs_stays_until_that_one_has_read_it() -> None:
    cache = restored(["abcd"], "abcd", gpu=8)
    waiting = cache.admitted("abcd", pages=4)
    (fetch,) = cache.fetch(cache.look("abcd"), 4, next(cache.clock)).transfers
    fail(cache, fetch, 1)
    assert cache.on("disk") == "abcd" and cache.counts.unreadable_pages == 0
    fetch, load = cache.load(waiting, next(cache.clock)).transfers
    fail(cache, fetch, 0)
    assert cache.counts.unreadable_pages == 1 and cache.on("disk") == "acd"
    cache.move([load])
    cache.move(cache.insert(waiting, next(cache.clock)))
    cache.check()
    assert cache.on("gpu") == "abcd"


def test_a_gap_whose_lower_copy_was_evicted_takes_along_what_follows_it() -> None:
    """Both loads of a request fail; the page that was on the CPU leaves it; then the request gives up."""
    cache = small_cache(gpu=4, cpu=2, disk=4, placement=WriteBack)
    for word in ("ab", "wxyz", "p"):
        cache.use(word)
    assert (cache.on("cpu"), cache.on("disk")) == ("az", "b")
    lease = cache.admitted("ab")
    *write_downs, fetch, load = cache.load(lease, next(cache.clock)).transfers
    cache.move(write_downs)
    for transfer in (fetch, load):
        assert cache.begin(transfer, next(cache.clock)).can_run
        cache.move(cache.abort(transfer, 0, next(cache.clock)))
        cache.check()
    assert cache.transfers.eviction.make_room(cache.tiers[1], 2, next(cache.clock))
    cache.move(cache.transfers.under_way.flush())
    assert cache.node("a").state[0] == INCOMING and not any(cache.node("a").state[1:])
    cache.release(lease)
    cache.check()
    assert "b" not in cache.on("disk") and cache.look("ab").lower_pages == 0
