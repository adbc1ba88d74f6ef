"""FastDeploy's storage beside CPU memory, and its cached answers: the rules one by one, then traces against a slow model."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim import load_trace, replay
from kvsim.core.request import Request
from kvsim.engines.fastdeploy.swaps import SwapLease
from kvsim.errors import UsageError
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.s3_fifo import S3FIFO
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from tests.engines.slow_swaps import SlowSwaps
from tests.engines.small_swaps import Small, make_cache, play
from tests.workloads import EXAMPLES, branching_requests, conversations, extents_of, random_requests


def test_a_prompt_is_written_when_its_request_finishes() -> None:
    cache = Small(8, 8, 20)
    running = cache.start("abc")
    assert cache.stored == ""
    cache.finish(running)
    assert cache.stored == "abc"
    assert cache.cache.counts.written_pages == 3


def test_storage_is_looked_up_behind_gpu_and_cpu_memory() -> None:
    cache = Small(12, 30, 40)
    cache.use("abcdef", "uvwxyz")
    cache.start("ab")
    cache.use("0123456789")  # evicts ten pages: c to f and u to z
    assert cache.where == ("ab0123456789", "cdefuvwxyz")
    cache.swaps.delete(cache.cache.tiers[1], 2, 99.0)
    assert cache.on(1) == "cduvwxyz"
    assert cache.use("abcdefg") == (2, 2, 2)


def test_a_write_evicts_what_it_lacks_and_none_of_its_own_prompt() -> None:
    cache = Small(8, 0, 5)
    cache.use("abc", "xy")
    assert cache.stored == "abcxy"
    cache.use("abcdef")
    assert cache.stored == "abcde"  # x and y leave; without them there is room for two of the new pages
    assert cache.cache.counts.no_room_pages == 1


def test_storage_evicts_by_its_own_policy() -> None:
    for policy, left in ((FIFO, "c"), (None, "a")):
        cache = Small(4, 0, 3, **({"storage_eviction": policy} if policy else {}))
        cache.use("a", "b", "c", "a", "pq")
        assert cache.stored == left + "pq"


def test_any_eviction_policy_keeps_storage_in_order() -> None:
    for policy in (S3FIFO, FIFO):
        for seed in range(5):
            cache = make_cache(12, 12, 17, page_tokens=4, storage_eviction=policy)
            play(cache, random_requests(seed), in_flight=1 + seed % 3)


def test_a_placement_policy_may_want_less_in_storage() -> None:
    cache = Small(8, 0, 20, storage_placement=WriteThroughSelective)
    cache.use("ab")
    assert cache.stored == ""
    cache.use("abc")
    assert cache.stored == "ab"


# --- answers ---------------------------------------------------------------------------------------------------------


def answer(cache: Small, word: str, text: str) -> SwapLease:
    """A request that has computed the answer ``text`` to ``word``, and one token more."""
    request = cache.request(word, output=len(text) + 1)
    request.output_runs = extents_of(cache.words.pages(word + text)[len(word) :])
    lease = cache.attempt(request)
    assert lease is not None
    return lease


def test_an_answer_is_cached_when_its_request_finishes() -> None:
    cache = Small(9, 9, cache_output=True)
    running = answer(cache, "ab", "cd")
    assert cache.where == ("ab", "") and cache.swaps.gpu.pool.free == 4
    cache.finish(running)
    assert cache.where == ("abcd", "") and cache.swaps.gpu.pool.free == 5
    assert cache.use("abcde") == (4, 0)


def test_an_answer_that_is_known_in_cpu_memory_comes_back_in_the_slots_of_its_request() -> None:
    cache = Small(12, 12, cache_output=True)
    cache.use("abcd")
    running = answer(cache, "ab", "cdx")
    cache.swaps.make_room(10, 99.0)
    cache.cache._land()
    assert cache.where == ("ab", "cd")
    cache.finish(running)
    assert cache.where == ("abcdx", "") and cache.swaps.gpu.pool.free == 7


def test_a_cached_answer_goes_to_storage_with_its_prompt() -> None:
    for cache_output, stored in ((True, "abcd"), (False, "ab")):
        cache = Small(8, 0, 20, cache_output=cache_output)
        cache.finish(answer(cache, "ab", "cd"))
        assert cache.stored == stored


# --- a slower model --------------------------------------------------------------------------------------------------


def longest_prompt(requests: list[Request], gpu: int) -> int:
    """Pages of four tokens of the longest prompt that fits the GPU; CPU memory must not be smaller."""
    return max([-(-request.prompt_tokens // 4) for request in requests if request.prompt_pages <= gpu], default=1)


@pytest.mark.parametrize("hold_output", [True, False])
@pytest.mark.parametrize("has_cpu", [True, False])
def test_random_traces_hit_as_in_the_slow_model(has_cpu: bool, hold_output: bool) -> None:
    hits = [0, 0, 0]
    for seed in range(EXAMPLES):
        requests = random_requests(seed)
        gpu, in_flight, storage = 5 + seed % 19, 1 + seed % 4, 3 + seed % 31
        cpu = longest_prompt(requests, gpu) + seed % 7 * 3 if has_cpu else 0
        rows = play(make_cache(gpu, cpu, storage, page_tokens=4), requests, in_flight=in_flight, hold_output=hold_output)
        slow = SlowSwaps(gpu, cpu, storage, page_tokens=4)
        assert rows == list(slow.play(requests, in_flight=in_flight, hold_output=hold_output)), seed
        hits = [sum(row[at] for row in rows if row[0] >= 0) + hits[at] for at in range(3)]
    assert hits[0] > 0 and hits[2] > 0 and bool(hits[1]) == has_cpu


@settings(max_examples=EXAMPLES)
@given(branching_requests(), st.integers(1, 16), st.integers(0, 12), st.booleans(), st.integers(1, 4), st.integers(1, 20))
def test_branching_prompts_hit_as_in_the_slow_model(
    requests: list[Request], gpu: int, spare: int, has_cpu: bool, in_flight: int, storage: int
) -> None:
    cpu = longest_prompt(requests, gpu) + spare if has_cpu else 0
    mine = play(make_cache(gpu, cpu, storage, page_tokens=4), requests, in_flight=in_flight)
    assert mine == list(SlowSwaps(gpu, cpu, storage, page_tokens=4).play(requests, in_flight=in_flight))


@pytest.mark.parametrize(("gpu", "cpu", "storage"), [(24, 90, 400), (90, 0, 600), (60, 30, 200)])
def test_conversations_hit_as_in_the_slow_model(chats: dict[int, list[Request]], gpu: int, cpu: int, storage: int) -> None:
    requests = chats[16][:150]
    mine = play(make_cache(gpu, cpu, storage, page_tokens=16), requests, in_flight=2)
    assert mine == list(SlowSwaps(gpu, cpu, storage, page_tokens=16).play(requests, in_flight=2))
    assert sum(row[2] for row in mine) > 10


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize(("gpu", "cpu", "storage"), [(90, 0, 0), (60, 40, 0), (60, 30, 200), (50, 0, 300)])
def test_conversations_with_cached_answers_hit_as_in_the_slow_model(gpu: int, cpu: int, storage: int, in_flight: int) -> None:
    requests = conversations(2, requests=100)
    sizes = {"page_tokens": 16, "cache_output": True}
    mine = play(make_cache(gpu, cpu, storage, **sizes), requests, in_flight=in_flight)
    assert mine == list(SlowSwaps(gpu, cpu, storage, **sizes).play(requests, in_flight=in_flight))
    without = play(make_cache(gpu, cpu, storage, page_tokens=16), requests, in_flight=in_flight)
    assert sum(map(sum, mine)) > sum(map(sum, without))


# --- settings --------------------------------------------------------------------------------------------------------

DISK = "tiers.disk.capacity=600pages"


def play_preset(*overrides: str) -> Any:
    trace = load_trace("synthetic", sessions=20, page_tokens=64)
    return replay(trace, "preset=fastdeploy", "tiers.gpu.capacity=1200pages", *overrides)


@pytest.mark.parametrize("cpu", ["1200pages", "0"])
def test_the_preset_takes_storage(cpu: str) -> None:
    hits = play_preset(f"tiers.cpu.capacity={cpu}", "tiers.disk.capacity=unlimited").hit_pages.sum(axis=0)
    assert hits[2] > 0 and bool(hits[1]) == (cpu != "0")


def test_the_preset_caches_answers_unless_told_not_to() -> None:
    without, cached, by_default = (
        play_preset(*setting).hit_rate for setting in (["rules.cache_output=false"], ["rules.cache_output=true"], [])
    )
    assert by_default == cached > without


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("tiers.disk.below=cpu",), "rules: FastDeploy's storage is beside CPU memory, not below it: set tiers.disk.below=gpu"),
        (
            ("placement@tiers.disk.placement=exclusive",),
            "rules: FastDeploy copies the pages of finished requests to storage, which Exclusive does not: set placement@",
        ),
        (("placement@tiers.disk.placement=write_back",), "to storage, which WriteBack does not"),
        (("placement@tiers.disk.placement=by_length",), "to storage, which ByLength does not"),
        (("eviction=lfu",), "rules: FastDeploy evicts what was used least recently, not by LFU"),
    ],
)
def test_tiers_and_policies_that_fastdeploy_does_not_have_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        play_preset("tiers.cpu.capacity=1200pages", DISK, *overrides)


def test_storage_may_have_an_eviction_policy_of_its_own() -> None:
    overrides = "tiers.cpu.capacity=0", "tiers.disk.capacity=4000pages", "eviction@tiers.disk.eviction=s3_fifo"
    assert play_preset(*overrides).hit_pages[:, 2].sum() > 0
