"""LRU with states by hand: a letter is a page, a state takes three."""

from kvsim.policies.checkpoint.every_page import EveryPage
from kvsim.policies.checkpoint.last import Last
from kvsim.policies.checkpoint.none import NoCheckpoint
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.lru_with_states import LRUWithStates
from tests.core.small import small_cache
from tests.states.small_hybrid import SmallHybrid, hybrid, use


def cache_of(gpu: int, eviction: LRU | LRUWithStates, policy: Last | EveryPage | None = None) -> SmallHybrid:
    return hybrid(policy or Last(), gpu=gpu, shared_pages=3, eviction=eviction)


def test_without_states_it_is_lru() -> None:
    orders = []
    for eviction in (LRU, LRUWithStates):
        cache = small_cache(gpu=12, eviction=eviction)
        for word in ("abc", "abd", "x", "ab", "abc"):
            cache.use(word)
        orders.append(cache.leaving_order())
    assert orders[0] == orders[1]


def test_a_state_leaves_with_its_pages_though_it_was_used_longer_ago() -> None:
    """ab's state is the oldest, but prompts go on below it. Of 24 slots 19 are taken; two more are needed than are free."""
    expected = {LRUWithStates: ("abcdxe", {"ab", "abcd", "abcde"}), LRU: ("abcdxye", {"abcd", "xy", "abcde"})}
    for eviction, (pages, states) in expected.items():
        cache = cache_of(24, eviction())
        use(cache, "ab", "abcd", "xy", "abcde")
        cache.core.policy = NoCheckpoint()
        lease = cache.admitted("qrst", pages=7)
        assert (cache.on("gpu"), cache.states_on("gpu")) == (pages, states)
        cache.release(lease)
        cache.check()


def test_blocks_leave_from_the_end_of_the_path_each_with_its_state() -> None:
    """vLLM+: three blocks of one page, each with a state: 12 slots. Two pages more, with two states, push c and b out."""
    cache = cache_of(14, LRUWithStates(), EveryPage())
    use(cache, "abc", "z")
    assert cache.on("gpu") == "abz" and cache.states_on("gpu") == {"a", "ab", "z"}
    assert use(cache, "abc") == [2]


def test_states_of_pages_in_use_leave_when_nothing_else_can() -> None:
    """All 16 slots but one belong to a path that is in use: the older state on it makes the room, as no page can."""
    cache = cache_of(16, LRUWithStates(), EveryPage())
    use(cache, "abcd"[:3])
    cache.core.policy = NoCheckpoint()
    lease = cache.admitted("abcdefg")
    assert cache.on("gpu")[:3] == "abc" and "abc" in cache.states_on("gpu")
    cache.release(lease)
    cache.check()
