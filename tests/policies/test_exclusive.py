"""Exclusive: no tier has a copy of what another one has."""

from kvsim.policies.placement.exclusive import Exclusive
from tests.core.small import small_cache


def test_exclusive_moves_what_is_loaded() -> None:
    cache = small_cache(gpu=3, cpu=8, placement=Exclusive)
    cache.use("abc")
    cache.use("xyz")
    assert cache.use("abc") == (0, 3, 0)
    assert (cache.on("gpu"), cache.on("cpu")) == ("abc", "xyz")
