"""First in, last out."""

from kvsim.policies.eviction.filo import FILO
from tests.core.small import small_cache


def test_what_was_computed_last_leaves_first_whatever_its_uses() -> None:
    cache = small_cache(gpu=4, eviction=FILO)
    for word in "abcbc":
        cache.use(word)
    assert cache.leaving_order() == "cba"
