"""Hybrid models by hand: a letter is a page, a word is a prompt, and a prompt is reused up to its last saved state."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from kvsim.core.cache import CLAIMED
from kvsim.core.lease import AGAIN
from kvsim.core.rules import Rules
from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill
from kvsim.policies.checkpoint.branch import Branch
from kvsim.policies.checkpoint.every_page import EveryPage
from kvsim.policies.checkpoint.interval import Interval
from kvsim.policies.checkpoint.last import Last
from kvsim.policies.checkpoint.none import NoCheckpoint
from kvsim.policies.checkpoint.retention import Retention
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from tests.core.small import make_tiers
from tests.states.small_hybrid import SmallHybrid, hybrid, use


def test_a_prompt_is_reused_up_to_the_last_state_on_its_path() -> None:
    cache = hybrid(Last())
    assert use(cache, "abc", "abcde", "abxy") == [0, 3, 0]
    assert cache.states_on("gpu") == {"abc", "abcde", "abxy"}


def test_the_second_request_saves_at_the_junction_and_the_third_hits_it() -> None:
    cache = hybrid(Branch())
    assert use(cache, "sysA", "sysB") == [0, 0]
    assert cache.states_on("gpu") == {"sys"}
    assert use(cache, "sysC") == [3]


def test_an_aligned_state_that_lands_in_unique_tokens_never_hits() -> None:
    """The system prompt of three pages ends between two places where kernels have a state."""
    cache = hybrid(Interval(tokens=4), grid=4)
    assert use(cache, "sysABCDE", "sysFGHIJ", "sysKLMNO") == [0, 0, 0]
    assert all(len(word) % 4 == 0 for word in cache.states_on("gpu"))
    assert use(hybrid(Interval(tokens=3), grid=1), "sysABCDE", "sysFGHIJ") == [0, 3]


def test_states_are_saved_only_in_what_is_computed() -> None:
    cache = hybrid(Interval(tokens=2))
    use(cache, "abcd", "abcdefgh")
    saved = cache.states.counts.saved
    assert saved == 4, "ab and abcd by the first request, abcdef and abcdefgh by the second"


ANSWERS = [
    (NoCheckpoint, set()),
    (EveryPage, {"a", "ab", "abc", "abcd", "abcde"}),
    (partial(Interval, tokens=2), {"ab", "abc", "abcd"}),
    (Last, {"abc", "abcde"}),
    (Branch, {"abcde"}),
    (partial(Branch, prompt_end=True), {"abc", "abcde"}),
    (Retention, {"ab"}),
    (partial(Retention, interval_tokens=2), {"ab", "abcd"}),
]


@pytest.mark.parametrize(("policy", "expected"), ANSWERS)
def test_states_of_a_prompt_and_of_its_answer(policy: Callable[[], CheckpointPolicy], expected: set[str]) -> None:
    """Prompt abc, answer de: what a page beyond begins from is the longest of them."""
    cache = hybrid(policy())
    assert cache.answer("abc", "de") == 0
    assert cache.states_on("gpu") == expected
    assert use(cache, "abcdef") == [max(map(len, expected), default=0)]


def test_a_request_that_is_admitted_again_counts_once() -> None:
    """abxy knows two pages and has no state; it is retracted, and then begins from the state that another has saved meanwhile."""
    cache = hybrid(Last())
    use(cache, "abc")
    retracted = cache.admitted("abxy", index=7)
    cache.release(retracted)
    assert use(cache, "ab") == [0]
    again = cache.match(cache.request("abxy", index=7), why=AGAIN)
    assert cache.admit(again, 4, next(cache.clock)) and cache.claim(again, next(cache.clock)) == CLAIMED
    assert again.gpu_pages == 2
    counts = cache.describe_checkpoints()
    assert (counts["used"], counts["tokens_lost_to_missing_state"]) == (0, 2 + 2), "abxy's at first, and ab's"
    cache.release(again)


def test_a_state_leaves_with_the_kv_before_it() -> None:
    cache = hybrid(Last(), gpu=4)
    use(cache, "abc", "wxyz")
    assert cache.on("gpu") == "wxyz" and cache.states_on("gpu") == {"wxyz"}


def test_the_state_that_a_request_starts_from_stays() -> None:
    cache = hybrid(Last(), states=1)
    use(cache, "ab")
    lease = cache.admitted("abc")
    assert lease.states.state is not None and lease.states.state.pins[0] == 1
    cache.check()
    other = cache.run("xy")
    assert cache.states_on("gpu") == {"ab"} and cache.states.counts.no_room == 1
    cache.move(cache.insert(lease, next(cache.clock)))
    cache.check()
    assert cache.states_on("gpu") == {"abc"}, "it has begun: the state before may leave"
    for held in (lease, other):
        cache.release(held)
    cache.check()


def test_a_path_keeps_its_most_recent_states() -> None:
    cache = hybrid(EveryPage(max_states_per_path=2), states=None)
    use(cache, "abcd")
    assert cache.states_on("gpu") == {"abc", "abcd"}
    assert use(cache, "abx") == [0]


# --- the CPU tier ----------------------------------------------------------------------------------------------------


def test_state_and_kv_come_back_from_the_cpu_together() -> None:
    cache = hybrid(Last(), gpu=4, cpu=8, cpu_states=4)
    use(cache, "abc", "wxyz")
    assert cache.states_on("cpu") == {"abc", "wxyz"} and cache.states_on("gpu") == {"wxyz"}
    assert cache.use("abcd") == (0, 3, 0)
    assert "abc" in cache.states_on("cpu")


def test_kv_on_the_cpu_is_worth_nothing_without_a_state() -> None:
    cache = hybrid(Last(), gpu=4, cpu=8, cpu_states=0)
    assert use(cache, "abc", "wxyz", "abcd") == [0, 0, 0]
    assert cache.states.counts.tokens_lost_to_missing_state == 3


# --- one budget ------------------------------------------------------------------------------------------------------


def test_in_one_budget_a_request_that_is_refused_does_not_bring_back_the_state_it_would_begin_from() -> None:
    """Otherwise a request that waits for that room, and one that is refused, take it from each other without end."""
    cache = hybrid(Last(), gpu=12, cpu=30, shared_pages=3, placement=WriteBack)
    use(cache, "abcdef")
    assert cache.admit(cache.look("uvwxyz"), 6, next(cache.clock), 0)
    leaving = cache.gpu.leaving_pages
    second = cache.look("abcdefg")
    assert second.gpu_pages == 6 and not cache.admit(second, 7, next(cache.clock), 0)
    assert cache.gpu.leaving_pages == leaving == 6
    cache.check()


def test_states_on_their_way_are_in_flight_like_pages() -> None:
    """An engine that is idle must wait for them, not reject a request that has no room meanwhile."""
    cache = hybrid(Last(), gpu=10, cpu=10, states=1, cpu_states=2)
    lease = cache.look("ab")
    assert cache.admit(lease, 3, 0.0) and cache.claim(lease, 0.0) == CLAIMED
    started = cache.insert(lease, 0.0)
    assert sorted(node.is_state for transfer in started for node in transfer.nodes) == [False, True]
    assert list(cache.core.in_flight) == started
    cache.move(started)
    assert not cache.core.in_flight


# --- detached --------------------------------------------------------------------------------------------------------


def test_detached_states_through_all_that_may_become_of_their_kv() -> None:
    """The GPU has four pages, the CPU eight. Once abc is gone from both, ab is computed again by others, and then abc."""
    cache = hybrid(Last(detached=True), gpu=4, cpu=8)
    assert use(cache, "abc", "wxyz") == [0, 0]
    assert cache.on("gpu") == "wxyz" and cache.states_on("gpu") == {"wxyz"}
    assert use(cache, "abc") == [3], "the CPU has the KV, and the state is kept"
    use(cache, "mnop", "qrst")
    assert not set("abc") & set(cache.on("gpu") + cache.on("cpu"))
    cache.core.policy = NoCheckpoint()
    assert use(cache, "abq") == [0], "no KV anywhere"
    assert use(cache, "abz") == [0], "that of ab is back, but the state is deeper"
    assert use(cache, "abc", "abc") == [0, 3], "that of abc is back"


def test_the_usable_length_is_the_longest_state_within_the_longest_kv() -> None:
    """A state after each page of abcde. vwx and mn leave a on the GPU and abc on the CPU; the states of b to e are detached."""
    cache = hybrid(EveryPage(detached=True), gpu=6, cpu=8, states=None)
    use(cache, "abcde")
    cache.core.policy = NoCheckpoint()
    use(cache, "vwx", "mn")
    assert sorted(cache.on("gpu")) == sorted("avwxmn") and sorted(cache.on("cpu")) == sorted("abcvwxmn")
    assert cache.detached is not None and len(cache.detached) == 4
    assert cache.use("abcdef") == (1, 2, 0)


def test_detached_states_are_few_if_their_cache_is_small() -> None:
    cache = hybrid(Last(detached=True, detached_states=1), gpu=3, cpu=20)
    use(cache, "ab", "cd", "ef", "gh")
    assert cache.detached is not None and len(cache.detached) == 1
    assert use(cache, "ab") == [0]


def test_a_request_may_push_out_the_detached_state_that_it_begins_from() -> None:
    """Room for abx is made by cd, whose state takes the only place of detached ones, that of ab."""
    cache = hybrid(Last(detached=True, detached_states=1), gpu=3, cpu=20)
    use(cache, "ab", "cd")
    assert use(cache, "abx") == [2]
    assert cache.detached is not None and len(cache.detached) == 1
    assert use(cache, "cd") == [2], "cd's state is the one that is kept"


def test_a_detached_state_whose_copy_on_the_cpu_lives_is_not_evicted() -> None:
    """abc's pages leave the GPU for those of wxyz: its state becomes detached and has a copy on the CPU as well."""
    cache = hybrid(Last(detached=True), gpu=4, cpu=20, cpu_states=2)
    use(cache, "abc", "wxyz")
    assert cache.states_on("cpu") == {"abc", "wxyz"}
    counts = cache.describe_checkpoints()
    assert (counts["saved"], counts["detached"], counts["evicted"]) == (2, 1, 0)
    use(cache, "pq", "mn")
    assert cache.states_on("cpu") == {"pq", "mn"}, "room for two"
    counts = cache.describe_checkpoints()
    assert (counts["saved"], counts["detached"], counts["evicted"]) == (4, 2, 0), "abc and wxyz are detached still"


def test_a_state_is_evicted_once_it_is_nowhere() -> None:
    """Room for one detached state. abc's is pushed out by wxyz's, but lives on the CPU; there pq's and mn's push both out."""
    cache = hybrid(Last(detached=True, detached_states=1), gpu=4, cpu=20, cpu_states=2)
    use(cache, "abc", "wxyz", "pq")
    assert cache.detached is not None and len(cache.detached) == 1
    assert cache.states_on("cpu") == {"wxyz", "pq"}
    assert cache.describe_checkpoints()["evicted"] == 1, "abc's"
    use(cache, "mn")
    assert cache.describe_checkpoints()["evicted"] == 1, "wxyz's is detached"


def test_a_state_that_is_saved_again_while_it_is_detached_is_one_state() -> None:
    """Without a tier below, abc's KV is gone when wxyz comes. Computed again, it is saved again; then wxyz's becomes detached."""
    cache = hybrid(Last(detached=True), gpu=4)
    use(cache, "abc", "wxyz", "abc")
    counts = cache.describe_checkpoints()
    assert (counts["saved"], counts["detached"], counts["evicted"]) == (3, 2, 0)
    cache.reset()
    assert cache.describe_checkpoints()["evicted"] == 2 and len(cache.detached or ()) == 0


def test_the_states_of_an_answer_count_among_those_of_its_path() -> None:
    """The one that its prompt saved makes way."""
    cache = hybrid(Last(max_states_per_path=1))
    cache.answer("abc", "d")
    assert cache.states_on("gpu") == {"abcd"} and cache.states.counts.saved == 2


# --- tiers of other shapes ---

CHAIN = (("gpu", ()), ("cpu", (0,)), ("disk", (1,)))
BESIDE = (("gpu", ()), ("cpu", (0,)), ("disk", (0,)))
STRAIGHT = (("gpu", ()), ("disk", (0,)))


def hybrid_of(shape: Sequence[tuple[str, Sequence[int]]], *capacities: int) -> SmallHybrid:
    """States among the pages, of a page each, in tiers that are written through."""
    policy = Last()
    policy.bind(PolicyContext(page_tokens=1))
    placements = [WriteThrough() for _ in capacities[1:]]
    tiers, edges = make_tiers(capacities, [LRU() for _ in capacities], placements, slots=True, page_tokens=1, shape=shape)
    rules = Rules(recompute_last_token=False)
    return SmallHybrid(tiers, edges, rules, 1, policy=policy, prefill=Prefill, grid_pages=1, state_bytes=100, state_pages=1)


def ways(cache: SmallHybrid, word: str) -> list[tuple[str, str, int]]:
    """The transfers that bring what is known of a word to the GPU: (link, pages of KV, pages of states)."""
    lease = cache.admitted(word)
    transfers = cache.load(lease, next(cache.clock)).transfers
    told = [
        (transfer.name, cache.carried(transfer), sum(node.pages for node in transfer.nodes if node.is_state))
        for transfer in transfers
    ]
    cache.move(transfers)
    cache.move(cache.insert(lease, next(cache.clock)))
    cache.move(cache.finish(lease))
    cache.check()
    return told


def test_a_state_that_only_the_disk_has_passes_through_the_cpu_tier_as_its_pages_do() -> None:
    cache = hybrid_of(CHAIN, 5, 5, 30)
    use(cache, "abc", "xyzu")
    assert (cache.on("gpu"), cache.on("cpu")) == ("xyzu", "xyzu")
    assert ways(cache, "abc") == [
        ("disk-cpu", "", 1),
        ("cpu-gpu", "", 1),
        ("disk-cpu", "abc", 0),
        ("cpu-gpu", "abc", 0),
    ]


@pytest.mark.parametrize(("shape", "capacities"), [(STRAIGHT, (5, 30)), (BESIDE, (5, 5, 30))], ids=["alone", "beside a CPU tier"])
def test_a_state_on_a_disk_directly_below_comes_straight(shape: Any, capacities: tuple[int, ...]) -> None:
    cache = hybrid_of(shape, *capacities)
    use(cache, "abc", "xyzu")
    assert ways(cache, "abc") == [("disk-gpu", "", 1), ("disk-gpu", "abc", 0)]


def test_what_is_cached_reaches_to_a_state_that_only_the_disk_has() -> None:
    """Page a is still on the GPU; b, c and the state after them are not."""
    cache = hybrid_of(STRAIGHT, 9, 30)
    use(cache, "abc", "xyz", "klm")
    assert cache.on("gpu") == "axyzklm"
    assert cache.found(cache.request("abcd")) == (1, 0)
    lease = cache.look("abcd")
    assert (lease.gpu_pages, lease.far_pages) == (1, 2)


def test_without_room_on_its_way_a_state_stays_below_and_the_prompt_is_computed() -> None:
    cache = hybrid_of(CHAIN, 9, 4, 30)
    use(cache, "abc", "xyzu", "klmnopq")
    cpu = cache.tiers[1]
    kept = [node for node in cache.tree.root.descendants() if node.is_evictable(1)]
    for node in kept:
        cache.residency.pin(node, cpu)  # as transfers that last would
    lease = cache.admitted("abc")
    assert lease.lower_pages == 3
    assert not cache.load(lease, next(cache.clock)).loads
    for node in kept:
        cache.residency.unpin(node, cpu)
    assert (lease.gpu_pages, lease.loaded_pages) == (0, 0)
    cache.move(cache.insert(lease, next(cache.clock)))
    cache.move(cache.finish(lease))
    cache.check()
    assert use(cache, "abcd") == [3]


def test_a_request_begins_from_no_state_if_the_gpu_has_no_room_for_it_beside_the_prompt() -> None:
    """A prompt of 7 pages and a state of 2 exceed 8; what the request does not reuse makes room."""
    cache = hybrid(EveryPage(), gpu=8, shared_pages=2)
    assert use(cache, "abc", "abcd", "abcdefg") == [0, 3, 0]
    cache.check()


@pytest.mark.parametrize("cpu", [4, 20])
def test_nor_does_it_load_one(cpu: int) -> None:
    cache = hybrid(EveryPage(), gpu=8, cpu=cpu, shared_pages=2)
    use(cache, "abc", "pqrstu")
    assert use(cache, "abcdefg") == [0]
    cache.check()
