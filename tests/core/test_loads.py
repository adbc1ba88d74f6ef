"""Loads of pages that do not arrive, and the requests that wait for them."""

from typing import Any

import pytest

from tests.core.small import only, small_cache


def reused(lease: Any) -> int:
    return int(lease.gpu_pages + lease.loaded_pages)


def begun_load(cached: str, prompt: str) -> tuple[Any, Any, Any]:
    """A request that has begun to load what it shares with pages that only the CPU has."""
    cache = small_cache(gpu=12, cpu=40)
    cache.use(cached)
    cache.leaving_order()
    lease = cache.admitted(prompt)
    return cache, lease, only(cache.load(lease, next(cache.clock)).loads)


def shared_load(*prompts: str) -> tuple[Any, list[Any], Any]:
    """Requests that share the load of "abc", which only the CPU has; the first has begun it, of which one page arrives."""
    cache = small_cache(gpu=12, cpu=40)
    cache.use("abc")
    cache.leaving_order()
    leases = [cache.admitted(prompt) for prompt in prompts]
    load = only(cache.load(leases[0], next(cache.clock)).loads)
    for lease in leases[1:]:
        assert not cache.load(lease, next(cache.clock)).transfers and lease.arriving() == [load]
    cache.abort(load, 1, next(cache.clock))
    cache.check()
    return cache, leases, load


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_requests_that_share_a_load_miss_what_it_does_not_bring(order: tuple[int, int]) -> None:
    """Each computes pages b and c, whoever is first makes them ready, and neither misses them twice."""
    cache, leases, load = shared_load("abcd", "abce")
    assert [reused(lease) for lease in leases] == [3, 3]
    for lease in leases:
        assert cache.load(lease, next(cache.clock), load).lost_pages == 2
        assert cache.load(lease, next(cache.clock), load).lost_pages == 0
    assert [(lease.gpu_pages, lease.loaded_pages) for lease in leases] == [(0, 1), (1, 0)]
    for number in order:
        cache.move(cache.insert(leases[number], next(cache.clock)))
        cache.check()
        assert set("abc") <= set(cache.on("gpu"))
    for lease in leases:
        cache.move(cache.finish(lease))
        cache.check()
    assert set(cache.on("gpu")) == set("abcde")


def test_a_request_that_shares_the_beginning_of_a_load_misses_what_it_has_of_it() -> None:
    cache, (whole, part), load = shared_load("abcd", "abx")
    assert [cache.load(lease, next(cache.clock), load).lost_pages for lease in (whole, part)] == [2, 1]
    assert [reused(lease) for lease in (whole, part)] == [1, 1]
    cache.release(whole)
    cache.check()
    cache.move(cache.insert(part, next(cache.clock)))
    cache.move(cache.finish(part))
    cache.check()
    assert set(cache.on("gpu")) == set("abx")


def test_pages_that_anothers_load_failed_to_bring_before_are_not_among_those_of_its_own_load() -> None:
    """The second request counts on the load of a, b and c, which brings only a, and then loads d and e itself."""
    cache, _, load = begun_load("abcde", "abcx")
    second = cache.admitted("abcdey")
    cache.abort(load, 1, next(cache.clock))
    begun = cache.load(second, next(cache.clock))
    (own,), lost = begun.loads, begun.lost_pages
    assert lost == 2
    assert (second.gpu_pages, second.loaded_pages) == (1, 2)
    assert cache.load(second, next(cache.clock), own).lost_pages == 0
    cache.check()


def test_pages_that_the_disk_could_not_read_are_not_among_those_from_the_disk() -> None:
    cache = small_cache(gpu=9, cpu=5, disk=40)
    for prompt in ("abc", "vwxyz", "klmno"):
        cache.use(prompt)
    cache.leaving_order()
    lease = cache.admitted("abcd")
    fetch, load = cache.load(lease, next(cache.clock)).transfers
    assert (lease.loaded_pages, lease.loaded_far_pages) == (3, 3)
    cache.begin(fetch, next(cache.clock))
    cache.abort(fetch, 1, next(cache.clock))
    cache.begin(load, next(cache.clock))
    cache.land(load, next(cache.clock))
    assert cache.load(lease, next(cache.clock), load).lost_pages == 2
    assert (lease.loaded_pages, lease.loaded_far_pages) == (1, 1)
    cache.check()
