"""Placement policies: when the lower tier gets a copy."""

from collections import OrderedDict
from functools import partial
from importlib.resources import files
from typing import Any

import hydra.utils
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kvsim.policies.context import PolicyContext
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.placement.by_length import ByLength
from kvsim.policies.placement.cost_aware import CostAware
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.store_threshold import StoreThreshold
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from tests.core.small import MACHINE, MODEL, make_request, small_cache

POLICIES = sorted(path.name for path in (files("kvsim.conf") / "placement").iterdir() if path.name.endswith(".yaml"))


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_leaks_whatever_the_policy(name: str) -> None:
    settings = OmegaConf.to_container(OmegaConf.create((files("kvsim.conf") / "placement" / name).read_text()))
    assert isinstance(settings, dict)
    policy = hydra.utils.get_class(settings.pop("_target_"))
    assert issubclass(policy, PlacementPolicy)
    cache = small_cache(gpu=4, cpu=5, disk=6, placement=lambda: policy(**settings))
    for word in ("abcd", "xy", "abcd", "pqrs", "xyz", "abcd", "uv", "pq", "abce"):
        cache.use(word)
    assert not cache.leases and not cache.in_flight
    assert all(tier.pool.free + len(cache.on(tier.name)) == tier.pool.capacity for tier in cache.tiers)


def test_write_through_copies_as_soon_as_pages_are_computed() -> None:
    cache = small_cache(gpu=4, cpu=8, disk=8, placement=WriteThrough)
    cache.use("ab")
    assert cache.on("cpu") == cache.on("disk") == "ab"


def test_write_through_tries_again_when_there_was_no_room() -> None:
    cache = small_cache(gpu=8, cpu=3, placement=WriteThrough)
    cache.use("xy")
    cache.use("abcd")
    assert cache.on("cpu") == "xya" and cache.counts.no_room_pages == 3
    cache.use("abc")
    assert cache.on("cpu") == "abc" and cache.counts.no_room_pages == 3


def test_of_a_path_that_finds_no_room_write_through_copies_the_first_pages_into_free_slots() -> None:
    cache = small_cache(gpu=6, cpu=2, placement=WriteThrough)
    cache.use("abc")
    assert cache.on("cpu") == "ab" and cache.counts.no_room_pages == 1


def test_selective_waits_for_the_second_use() -> None:
    cache = small_cache(gpu=6, cpu=8, placement=WriteThroughSelective)
    cache.use("ab")
    assert cache.on("cpu") == ""
    cache.use("abc")
    assert cache.on("cpu") == "ab"


def test_selective_refuses_a_setting_out_of_range() -> None:
    with pytest.raises(ValueError, match="hits must be at least 1, not 0"):
        WriteThroughSelective(hits=0)


def test_write_back_copies_only_what_is_evicted() -> None:
    cache = small_cache(gpu=3, cpu=8, placement=WriteBack)
    cache.use("abc")
    assert cache.on("cpu") == ""
    cache.use("xy")
    assert (cache.on("gpu"), cache.on("cpu")) == ("axy", "bc")


def test_write_back_keeps_the_lower_copy_of_what_is_loaded() -> None:
    cache = small_cache(gpu=3, cpu=8, placement=WriteBack)
    cache.use("abc")
    cache.use("xyz")
    assert cache.use("abc") == (0, 3, 0)
    assert cache.on("gpu") == "abc" and set("abc") <= set(cache.on("cpu"))


def test_exclusive_moves_what_is_loaded() -> None:
    cache = small_cache(gpu=3, cpu=8, placement=Exclusive)
    cache.use("abc")
    cache.use("xyz")
    assert cache.use("abc") == (0, 3, 0)
    assert (cache.on("gpu"), cache.on("cpu")) == ("abc", "xyz")


def test_each_edge_can_have_its_own_policy() -> None:
    cache = small_cache(gpu=3, cpu=3, disk=9, placement=[WriteThrough, WriteBack])
    cache.use("abc")
    assert (cache.on("cpu"), cache.on("disk")) == ("abc", "")
    cache.use("xyz")
    assert (cache.on("cpu"), cache.on("disk")) == ("xyz", "abc")


@pytest.mark.parametrize("upper", [WriteBack, Exclusive, partial(CostAware, margin=1e-9)])
def test_what_is_written_back_goes_on_to_the_disk_though_its_first_page_never_leaves_the_gpu(upper: Any) -> None:
    cache = small_cache(gpu=3, cpu=2, disk=8, placement=[upper, WriteThrough])
    cache.use("abc")
    assert (cache.on("cpu"), cache.on("disk")) == ("", "")
    cache.use("axy")
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("axy", "bc", "bc")
    cache.use("auv")
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("auv", "xy", "bcxy")
    assert cache.use("abc")[::2] == (1, 2)


def test_of_what_is_written_back_at_once_parents_go_on_to_the_disk_first() -> None:
    cache = small_cache(gpu=4, cpu=8, disk=8, placement=[WriteBack, WriteThrough])
    cache.use("ab")
    cache.use("abc")
    cache.use("xyz")
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("axyz", "bc", "bc")


def test_written_back_pages_go_on_to_the_disk_at_the_second_use_if_it_is_selective() -> None:
    cache = small_cache(gpu=3, cpu=8, disk=8, placement=[WriteBack, WriteThroughSelective])
    cache.use("abc")
    cache.use("axy")
    assert (cache.on("cpu"), cache.on("disk")) == ("bc", "")
    assert cache.use("abc") == (1, 2, 0)
    assert (cache.on("cpu"), cache.on("disk")) == ("bcxy", "bc")


def test_of_what_is_written_back_the_first_pages_go_on_to_a_disk_without_room_for_all() -> None:
    cache = small_cache(gpu=4, cpu=8, disk=2, placement=[WriteBack, WriteThrough])
    cache.use("abc")
    cache.use("abcd")
    cache.use("wxyz")
    assert (cache.on("cpu"), cache.on("disk")) == ("abcd", "ab")
    assert cache.counts.no_room_pages == 2


def test_what_the_disk_has_above_a_page_makes_no_room_for_it() -> None:
    cache = small_cache(gpu=3, cpu=1, disk=1, placement=[WriteBack, WriteThroughSelective])
    for word in ("a", "a", "xyz", "ab", "u", "ab"):
        cache.use(word)
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("abu", "x", "a")
    cache.use("rst")
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("rst", "b", "a")


@pytest.mark.parametrize("lower", [StoreThreshold, partial(ByLength, disk_min_tokens=3)])
def test_of_a_prompt_the_disk_gets_what_was_written_back_when_it_is_offered_again(lower: Any) -> None:
    cache = small_cache(gpu=3, cpu=8, disk=8, placement=[WriteBack, lower])
    cache.use("abc")
    cache.use("axy")
    assert (cache.on("cpu"), cache.on("disk")) == ("bc", "")
    assert cache.use("abc") == (1, 2, 0)
    assert cache.on("disk") == ("bc" if lower is StoreThreshold else "b")


# --- write-back above a watermark ---


def early(watermark: float = 0.5) -> partial[WriteBack]:
    return partial(WriteBack, watermark=watermark)


def test_above_the_watermark_the_first_leaves_to_leave_are_copied_before_they_have_to() -> None:
    cache = small_cache(gpu=8, cpu=8, placement=early())
    cache.use("ab")
    cache.use("cd")
    assert cache.on("cpu") == ""  # half of the GPU is free
    cache.use("ef")
    assert (cache.on("gpu"), cache.on("cpu")) == ("abcdef", "ab")
    cache.use("gh")
    assert (cache.on("gpu"), cache.on("cpu")) == ("abcdefgh", "abcd")


def test_what_was_copied_early_frees_at_once() -> None:
    cache = small_cache(gpu=4, cpu=8, placement=early(0.0))
    cache.use("abcd")
    lease = cache.look("wx")
    assert cache.admit(lease, 2, 100.0) and lease.waits and lease.promised_pages == 2
    cache = small_cache(gpu=4, cpu=8, placement=early(0.5))
    cache.use("abcd")
    lease = cache.look("wx")
    assert cache.admit(lease, 2, 100.0) and not lease.waits and not lease.promised_pages


def test_an_early_copy_that_finds_no_room_is_not_made_and_counted() -> None:
    cache = small_cache(gpu=8, cpu=1, placement=early())
    cache.use("abcdef")
    assert (cache.on("gpu"), cache.on("cpu")) == ("abcdef", "f")
    assert cache.counts.no_room_pages == 1 and cache.counts.dropped_pages == 0


def test_early_copies_are_made_again_only_after_half_as_much_was_inserted() -> None:
    cache = small_cache(gpu=20, cpu=40, placement=early(0.6))  # 8 pages are to be free or copied
    cache.use("abcdefghijklm")
    assert cache.on("cpu") == "m"
    cache.use("nop")
    assert cache.on("cpu") == "m"
    cache.use("q")
    assert cache.on("cpu") == "ijklm"


def test_a_watermark_works_on_the_edge_to_the_disk_too() -> None:
    cache = small_cache(gpu=2, cpu=4, disk=8, placement=[WriteBack, early()])
    for word in ("ab", "cd", "ef"):
        cache.use(word)
    assert (cache.on("cpu"), cache.on("disk")) == ("abcd", "ab")


def test_write_back_refuses_a_watermark_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"watermark must be at least 0 and below 1, not 1"):
        WriteBack(watermark=1.0)


# --- store_threshold ---


def test_pages_are_stored_at_the_kth_offer() -> None:
    cache = small_cache(gpu=9, cpu=9, placement=partial(StoreThreshold, k=3))
    for count, stored in ((1, ""), (2, ""), (3, "abc")):
        cache.use("abc")
        assert cache.on("cpu") == stored, count


@pytest.mark.parametrize("k", [0, 1])
def test_thresholds_of_0_and_1_store_at_once(k: int) -> None:
    cache = small_cache(gpu=9, cpu=9, placement=partial(StoreThreshold, k=k))
    cache.use("abc")
    assert cache.on("cpu") == "abc"


def test_a_prompt_is_stored_up_to_its_first_page_that_was_offered_too_seldom() -> None:
    cache = small_cache(gpu=9, cpu=9, placement=partial(StoreThreshold, k=2))
    cache.use("abc")
    cache.use("abxy")
    assert cache.on("cpu") == "ab"


def test_offers_are_counted_also_for_pages_that_were_computed_again() -> None:
    cache = small_cache(gpu=4, cpu=9, placement=partial(StoreThreshold, k=2))
    cache.use("ab")
    cache.use("wxyz")
    assert cache.use("abcd") == (0, 0, 0)
    assert cache.on("cpu") == "ab"


def test_a_store_that_does_not_fit_is_dropped_whole() -> None:
    cache = small_cache(gpu=9, cpu=4, placement=StoreThreshold)
    cache.use("ab")
    cache.use("vwxyz")
    assert cache.on("cpu") == "ab" and cache.counts.no_room_pages == 5
    cache.use("abcd")
    assert cache.on("cpu") == "abcd"


def test_pages_of_the_prompt_that_are_there_make_no_room_for_the_rest() -> None:
    cache = small_cache(gpu=9, cpu=4, placement=StoreThreshold)
    cache.use("abc")
    cache.use("abcde")
    assert cache.on("cpu") == "abc" and cache.counts.no_room_pages == 2


def test_a_store_that_was_dropped_is_offered_again() -> None:
    cache = small_cache(gpu=9, cpu=4, placement=partial(StoreThreshold, k=2))
    for _ in range(2):
        cache.use("abcde")
    assert cache.counts.no_room_pages == 5
    cache.use("abcd")
    assert cache.on("cpu") == "abcd"


def test_the_table_forgets_the_pages_that_were_offered_longest_ago() -> None:
    cache = small_cache(gpu=20, cpu=20, placement=partial(StoreThreshold, k=2, tracker_pages=4))
    cache.use("abc")
    cache.use("xy")  # forgets a
    cache.use("abc")
    assert cache.on("cpu") == ""
    cache.use("abc")
    assert cache.on("cpu") == "abc"


class PlainTable:
    """The offer table page by page, as an ordered map."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.counts: OrderedDict[int, int] = OrderedDict()

    def offer(self, pages: list[int]) -> None:
        known = [page for page in pages if page in self.counts]
        for page in known:
            self.counts[page] += 1
            self.counts.move_to_end(page)
        for page in [page for page in pages if page not in self.counts][: self.capacity - len(known)]:
            self.counts[page] = 1
        while len(self.counts) > self.capacity:
            self.counts.popitem(last=False)


@given(
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 12)), max_size=40),
    capacity=st.integers(1, 15),
    k=st.integers(2, 4),
)
def test_the_table_counts_like_one_that_holds_single_pages(prompts: list[tuple[int, int, int]], capacity: int, k: int) -> None:
    policy, plain = StoreThreshold(k=k, tracker_pages=capacity), PlainTable(capacity)
    policy.bind(PolicyContext(tier=1))
    for branch, shared, pages in prompts:
        path = [*range(shared), *range(100 * (branch + 1) + 20 * shared, 100 * (branch + 1) + 20 * shared + pages)]
        policy.on_request(make_request(path), 0.0)
        plain.offer(path)
        counted = {run[0] + at: offers for run, _, offers in policy._table.known.oldest_first() for at in range(run[1])}
        assert counted == {page: min(count, k) for page, count in plain.counts.items()}


# --- by_length ---


def test_short_prompts_stay_on_the_gpu() -> None:
    cache = small_cache(gpu=20, cpu=20, disk=20, placement=partial(ByLength, min_tokens=4, disk_min_tokens=6))
    for word in ("abc", "pqrs", "uvwxyz"):
        cache.use(word)
    assert cache.on("cpu") == "pqruvwxy"
    assert cache.on("disk") == "uvwxy"


def test_the_page_of_the_last_token_is_not_stored() -> None:
    cache = small_cache(gpu=20, cpu=20, page_tokens=4, placement=partial(ByLength, min_tokens=8))
    cache.run("ab")
    assert cache.on("cpu") == "a"
    cache.run("xyz")
    assert cache.on("cpu") == "axy"


def test_a_long_prompt_takes_the_pages_down_that_short_ones_left_on_the_gpu() -> None:
    cache = small_cache(gpu=20, cpu=20, placement=partial(ByLength, min_tokens=5))
    cache.use("abc")
    cache.use("abcdef")
    assert cache.on("cpu") == "abcde"


def by_length(capacities: tuple[int | None, ...], tier: int) -> ByLength:
    policy = ByLength(min_tokens=10, disk_min_tokens=20, adaptive=True)
    policy.bind(PolicyContext(tier=tier, capacities=capacities, page_tokens=1))
    return policy


def learn(policy: ByLength, lengths: list[int]) -> float:
    for tokens in lengths:
        policy.on_request(make_request([], prompt_tokens=tokens), 0.0)
    return policy.boundary


def test_the_boundary_is_the_configured_one_until_512_prompts_were_seen() -> None:
    assert learn(by_length((50, 50), 1), [100] * 511) == 10
    assert learn(by_length((50, 50), 2), [100] * 511) == 20


def test_the_boundary_gives_the_gpu_its_share_of_the_tokens() -> None:
    # 400 prompts of 10 tokens, 100 of 40, 12 of 1,000: 4,000 + 4,000 + 12,000 tokens.
    lengths = [10] * 400 + [40] * 100 + [1_000] * 12
    assert learn(by_length((10, 90), 1), lengths) == 10
    assert learn(by_length((20, 80), 1), lengths) == 40
    assert learn(by_length((40, 60), 1), lengths) == 1_000
    assert learn(by_length((70, 10, 20), 2), lengths) == 1_000
    assert learn(by_length((60, None), 1), lengths) == 10
    assert learn(by_length((None, 60), 1), lengths) == float("inf")


def test_the_boundary_follows_the_last_512_prompts() -> None:
    policy = by_length((50, 50), 1)
    assert learn(policy, [10] * 512) == 10
    assert learn(policy, [30] * 500) == 30
    assert learn(policy, [10] * 512) == 10


# --- cost_aware ---


def cost_aware(tier: int, **settings: float) -> CostAware:
    """Of 4-token pages, the one after p others takes 4,928 + 512 p us to compute, 64,000 to load, 640,000 more from disk."""
    policy = CostAware(**settings)
    policy.bind(PolicyContext(tier=tier, page_tokens=4, model=MODEL, hardware=MACHINE))
    return policy


def test_pages_are_worth_a_copy_from_the_depth_on_where_loading_beats_recomputing() -> None:
    assert cost_aware(1, margin=0.1).first_page == 3  # 4,928 + 512 * 3 = 6,464
    assert cost_aware(2, margin=0.01).first_page == 5  # 4,928 + 512 * 5 = 7,488
    assert cost_aware(1, margin=0.05).first_page == 0
    assert cost_aware(1).first_page == 116


def test_cost_aware_drops_short_prompts_and_keeps_long_ones_whole() -> None:
    cache = small_cache(gpu=5, cpu=9, page_tokens=4, placement=partial(CostAware, margin=0.1))
    cache.use("ab")
    cache.use("cdefg")
    assert (cache.on("gpu"), cache.on("cpu")) == ("cdefg", "")
    assert cache.counts.dropped_pages == 2
    cache.use("vwxyz")
    assert (cache.on("gpu"), cache.on("cpu")) == ("vwxyz", "cdefg")


def test_cost_aware_keeps_what_precedes_a_copy() -> None:
    cache = small_cache(gpu=4, cpu=9, page_tokens=4, placement=partial(CostAware, margin=0.1))
    cache.use("abcd")
    cache.use("xy")
    assert cache.on("cpu") == "cd"
    cache.use("wz")
    assert (cache.on("gpu"), cache.on("cpu")) == ("xywz", "abcd")


# --- edges ---


EDGES: dict[str, tuple[Any, list[str]]] = {
    "write_back": (early(), ["", "abcd", "abcd"]),
    "store_threshold": (partial(StoreThreshold, k=2), ["", "", "abcd"]),
    "by_length": (partial(ByLength, disk_min_tokens=4), ["abc", "abcefg", "abcefg"]),
    "cost_aware": (partial(CostAware, margin=0.001), ["", "", ""]),
}


@pytest.mark.parametrize("name", EDGES)
def test_the_edge_to_the_disk_may_have_any_policy_of_its_own(name: str) -> None:
    below, on_disk = EDGES[name]
    cache = small_cache(gpu=4, cpu=8, disk=20, placement=[WriteThrough, below])
    for word, expected in zip(("abcd", "efgh", "abcd"), on_disk, strict=True):
        cache.use(word)
        assert cache.on("disk") == expected, word
    cache.use("ij")
    assert cache.on("cpu") == "abcdefij"
    assert ("gh" in cache.on("disk")) == (name in ("write_back", "cost_aware"))


@pytest.mark.parametrize(
    ("policy", "setting", "value", "message"),
    [
        (StoreThreshold, "k", -1, "k must be 0 or more, not -1"),
        (StoreThreshold, "tracker_pages", 0, "tracker_pages must be at least 1, not 0"),
        (ByLength, "min_tokens", 0, "min_tokens must be at least 1, not 0"),
        (ByLength, "disk_min_tokens", 0, "disk_min_tokens must be at least 1, not 0"),
        (CostAware, "margin", 0.0, "margin must be positive, not 0"),
    ],
)
def test_settings_out_of_range_are_refused(policy: type, setting: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(**{setting: value})
