"""Write-through: a copy below as soon as pages are computed."""

from kvsim.policies.placement.write_through import WriteThrough
from tests.core.small import small_cache


def test_write_through_copies_as_soon_as_pages_are_computed() -> None:
    cache = small_cache(gpu=4, cpu=8, disk=8, placement=WriteThrough)
    cache.use("ab")
    assert cache.on("cpu") == cache.on("disk") == "ab"
