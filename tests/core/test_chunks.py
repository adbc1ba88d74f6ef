"""What a prefill chunk adds to the tree before the whole prompt is computed. A page has one token if nothing else is said."""

from typing import Any

import pytest

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.policies.checkpoint.last import Last
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.lru import LRU
from tests.core.small import SmallCache, now, small_cache
from tests.states.small_hybrid import hybrid


class Listening(LRU):
    """Notes what it hears of requests and of pages that are new."""

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self.heard: list[Any] = []

    def on_request(self, request: Request, now: float) -> None:
        self.heard.append(request)

    def on_insert(self, node: Any, now: float) -> None:
        self.heard.append(node.pages)


def compute(cache: SmallCache, lease: Lease, *ends: int) -> None:
    """Chunks of a prompt that end after these numbers of tokens."""
    for tokens in ends:
        cache.end_chunk(lease, tokens, now(cache))
        cache.check()


def end(cache: SmallCache, *leases: Lease) -> None:
    """The rest of these prompts is computed, one after another, and then they end."""
    for lease in leases:
        cache.move(cache.insert(lease, now(cache)))
        cache.check()
    for lease in leases:
        cache.move(cache.finish(lease))
        cache.check()


def nodes(cache: SmallCache) -> list[tuple[str, int]]:
    """The nodes as words, parents first, each with its uses."""
    return [(cache.words.text(node.runs), node.hits) for node in cache.tree.root.descendants()]


@pytest.mark.parametrize(("tokens", "found"), [(0, ""), (3, ""), (4, "a"), (11, "ab"), (12, "abc")])
def test_full_pages_are_found(tokens: int, found: str) -> None:
    cache = small_cache(gpu=9, page_tokens=4)
    lease = cache.admitted("abcde")
    compute(cache, lease, tokens)
    assert cache.on("gpu") == found
    assert cache.look("abcx").gpu_pages == len(found)
    end(cache, lease)
    assert cache.on("gpu") == "abcde"


def test_the_pages_of_a_partial_page_and_of_an_answer_are_not_found() -> None:
    """With an answer computed again after a retraction, a chunk may end after the prompt; its last page has 2 of 4 tokens."""
    cache = small_cache(gpu=9, page_tokens=4)
    lease = cache.admitted("abc", pages=6, prompt_tokens=10)
    compute(cache, lease, 20)
    assert cache.on("gpu") == "ab"
    end(cache, lease)
    assert cache.on("gpu") == "abc"


def test_chunks_are_one_node_of_one_age() -> None:
    cache = small_cache(gpu=9)
    lease = cache.admitted("abcdef")
    compute(cache, lease, 1, 3, 4)
    assert nodes(cache) == [("abcd", 1)]
    end(cache, lease)
    assert nodes(cache) == [("abcdef", 1)]


@pytest.mark.parametrize("shared", ["ab", "abc", "abcd"])
def test_pages_that_another_request_hits_meanwhile_stay_apart(shared: str) -> None:
    cache = small_cache(gpu=20)
    first = cache.admitted("abcdefg")
    compute(cache, first, 4)
    second = cache.admitted(shared + "x")
    assert second.gpu_pages == len(shared)
    compute(cache, first, 5, 6)
    end(cache, first, second)
    assert sorted(nodes(cache)) == sorted([(shared, 2), ("abcdefg"[len(shared) :], 1), ("x", 1)])


def test_what_enters_first_leaves_first_by_the_time_of_the_first_chunk() -> None:
    """The first prompt is begun before the second and ends after it: by age its pages leave first, by use last."""
    for eviction, order in ((FIFO, "dcbaxw"), (LRU, "xwdcba")):
        cache = small_cache(gpu=9, eviction=eviction)
        first, second = cache.admitted("abcd"), cache.admitted("wx")
        compute(cache, first, 2)
        end(cache, second, first)
        assert cache.leaving_order() == order


def test_policies_hear_of_a_request_once_more_before_its_chunks_and_again_only_if_another_has_come_between() -> None:
    cache = small_cache(gpu=20, eviction=Listening)
    heard = cache.gpu.eviction.heard
    first = cache.admitted("abcdef")
    compute(cache, first, 2, 4)
    assert heard == [first.request, first.request, 2, 2]
    heard.clear()
    second = cache.admitted("xy")
    compute(cache, first, 5)
    end(cache, first)
    assert heard == [second.request, first.request, 1, 1]
    end(cache, second)


def test_a_chunk_gives_back_its_copies_of_pages_that_are_there() -> None:
    """Two requests compute the same prompt side by side."""
    cache = small_cache(gpu=12)
    first, second = cache.admitted("abcdef"), cache.admitted("abcdef")
    compute(cache, first, 4)
    compute(cache, second, 2, 3)
    assert (cache.on("gpu"), cache.gpu.pool.free) == ("abcd", 3)
    compute(cache, second, 5)
    end(cache, first, second)
    assert (cache.on("gpu"), cache.gpu.pool.free, cache.gpu.inserted_pages) == ("abcdef", 6, 6)


def test_what_a_request_leaves_behind_that_ends_early_can_be_used_and_evicted() -> None:
    cache = small_cache(gpu=6)
    lease = cache.admitted("abcdef")
    compute(cache, lease, 4)
    cache.release(lease)
    cache.check()
    assert cache.on("gpu") == "abcd" and cache.gpu.evictable_pages == 4
    assert cache.use("abx")[0] == 2
    assert cache.leaving_order() == "dcxba"


def test_after_a_load_has_come_short_pages_are_found_with_the_whole_prompt() -> None:
    """Of a and b only a arrives; b, too, has to be computed."""
    cache = small_cache(gpu=5, cpu=9)
    cache.use("ab")
    cache.use("vwxyz")
    lease = cache.admitted("abcde")
    (load,) = cache.load(lease, now(cache)).transfers
    cache.begin(load, now(cache))
    cache.abort(load, 1, now(cache))
    assert cache.load(lease, now(cache), load).lost_pages == 1
    compute(cache, lease, 2, 4)
    assert cache.on("gpu") == "a"
    end(cache, lease)
    assert cache.on("gpu") == "abcde"


def test_a_reset_leaves_nothing_to_be_found() -> None:
    cache = small_cache(gpu=9)
    lease = cache.admitted("abcdef")
    compute(cache, lease, 2)
    cache.reset()
    compute(cache, lease, 4)
    assert cache.on("gpu") == ""
    end(cache, lease)
    assert (cache.on("gpu"), cache.gpu.pool.free) == ("", 9)


def test_a_hit_of_a_hybrid_model_waits_for_the_state_after_the_prompt() -> None:
    cache = hybrid(Last())
    lease = cache.admitted("abcdef")
    compute(cache, lease, 4)
    other = cache.look("abcdefgh")
    assert (cache.on("gpu"), other.gpu_pages, other.states.known_pages) == ("abcd", 0, 4)
    end(cache, lease)
    assert cache.use("abcdefgh")[0] == 6
