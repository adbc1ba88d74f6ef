"""What accompanies a request from match to release."""

from kvsim.core.lease import Lease
from kvsim.core.state_lease import StateLease
from kvsim.policies.placement.write_back import WriteBack
from tests.core.small import now, small_cache


def test_a_new_lease_holds_nothing() -> None:
    cache = small_cache(gpu=4)
    lease = Lease(cache.request("ab"), cache.gpu, cache.tree.root)
    assert (lease.node, lease.path, lease.gpu_pages, lease.lower_pages) == (cache.tree.root, [], 0, 0)
    assert lease.slots is None and not lease.promised_pages and not lease.waits
    assert not lease.has_load


def test_a_match_on_the_gpu_forgets_what_was_found_below() -> None:
    cache = small_cache(gpu=4)
    cache.use("abc")
    lease = cache.look("abxy")
    lease.cpu_pages, lease.disk_pages, lease.leading_cpu_pages = 3, 2, 1
    assert lease.lower_pages == 5
    lease.set_match([cache.node("a")], 1, ((1, 1),))
    assert (lease.gpu_nodes, lease.gpu_pages, lease.rest) == (1, 1, ((1, 1),))
    assert (lease.cpu_pages, lease.disk_pages, lease.leading_cpu_pages, lease.lower_pages) == (0, 0, 0, 0)


def test_there_is_a_load_until_it_is_made() -> None:
    cache = small_cache(gpu=3, cpu=6, placement=WriteBack)
    cache.use("abc")
    cache.use("xyz")
    lease = cache.admitted("abc")
    assert lease.has_load and lease.loading is cache.node("abc")
    loads = cache.load(lease, now(cache)).transfers
    assert not lease.has_load and lease.loaded_pages == 3
    cache.move(loads)


def test_a_state_below_the_gpu_is_a_load_too() -> None:
    cache = small_cache(gpu=4)
    lease = Lease(cache.request("ab"), cache.gpu, cache.tree.root)
    lease.states = StateLease(0)
    assert not lease.has_load
    lease.states.is_below = True
    assert lease.has_load


def test_its_hits_and_slots_are_what_the_request_has() -> None:
    cache = small_cache(gpu=6)
    cache.use("ab")
    lease = cache.run("abcd", pages=6)
    assert (lease.gpu_pages, lease.gpu.pool.count(lease.slots), lease.node) == (2, 2, cache.node("abcd"))
    assert lease.rest == () and lease in cache.leases
    cache.release(lease)
    assert lease not in cache.leases
