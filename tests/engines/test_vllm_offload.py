"""vLLM's CPU tier: a test for each rule, then random and real traces against slow models and the engine's recorded hits."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import hydra
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.pool import Pool, SlotPool
from kvsim.core.request import Request
from kvsim.core.tier import Edge, Tier
from kvsim.engines.vllm.cache import VLLMCache
from kvsim.engines.vllm.offload import OffloadCounts, OffloadTier, use_at_once
from kvsim.errors import UsageError
from kvsim.plans.build import build_run
from kvsim.policies.eviction.arc import ARC
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.offload_order import ArcOffload, OffloadUse, add_repeatedly
from kvsim.policies.placement.store_threshold import StoreThreshold
from kvsim.run.assembly import build_setup
from kvsim.run.play import build_tiers, replay
from tests.engines.recorded import golden_rows, reference
from tests.engines.slow_blocks import SlowArc, SlowBlocks, SlowOffload, play_slowly
from tests.engines.small_blocks import PAGE_TOKENS, Small, make_cache, play
from tests.workloads import Words, as_records, extents_of, random_requests

POLICIES: dict[str, tuple[Callable[[], EvictionPolicy], type[SlowOffload]]] = {"lru": (LRU, SlowOffload), "arc": (ARC, SlowArc)}


class Started(NamedTuple):
    """A request that runs."""

    loaded_pages: int
    use: OffloadUse


class SmallTier:
    """The CPU tier alone, for prompts that are words. ``hit`` pages are on the GPU; all but the last ``spare`` may be reused."""

    def __init__(self, capacity: int, eviction: type[EvictionPolicy] = LRU, *, k: int = 0, tracker_pages: int = 64_000) -> None:
        self.counts = OffloadCounts()
        placement = StoreThreshold(k=k, tracker_pages=tracker_pages)
        gpu, cpu = Tier("gpu", 0, Pool(None), LRU()), Tier("cpu", 1, Pool(capacity), eviction())
        self.tier = OffloadTier(Edge(gpu, cpu, placement), self.counts)
        self.words = Words()

    def start(self, word: str, *, hit: int = 0, spare: int = 0) -> Started:
        use = OffloadUse(extents_of(self.words.pages(word)))
        loaded = use_at_once(self.tier, use, hit, len(word) - spare)
        assert self.tier.order.pages == self.tier.tier.pool.capacity - self.tier.tier.pool.free
        return Started(loaded, use)

    def finish(self, started: Started) -> None:
        self.tier.finish(started.use)

    def serve(self, *words: str, hit: int = 0) -> int:
        """Serve requests one after another. Returns the pages that the last one loaded."""
        for word in words:
            started = self.start(word, hit=hit)
            self.finish(started)
        return started.loaded_pages

    def here(self, word: str) -> str:
        """The letters of the word whose pages are in the tier."""
        pieces = self.tier.order.find([(page, 1) for page in self.words.pages(word)])
        return "".join(letter for letter, (_, here) in zip(word, pieces, strict=True) if here)

    @property
    def arc(self) -> ArcOffload:
        assert isinstance(self.tier.order, ArcOffload)
        return self.tier.order


def with_gap() -> SmallTier:
    """A tier of four pages that has a, c and d of abcd, and x."""
    tier = SmallTier(4)
    tier.serve("abcd")
    tier.serve("abcd", hit=2)  # loads c and d only: b and a are the oldest
    tier.serve("x")
    assert tier.here("abcd") == "acd"
    return tier


# --- look-up and load ----------------------------------------------------------------------------------------------------


def test_a_look_up_starts_after_the_gpu_s_hit_and_ends_at_the_first_miss() -> None:
    assert with_gap().start("abcd", hit=0).loaded_pages == 1
    assert with_gap().start("abcd", hit=1).loaded_pages == 0
    assert with_gap().start("abcd", hit=2).loaded_pages == 2


def test_the_page_of_the_last_token_is_not_loaded() -> None:
    tier = SmallTier(4)
    tier.serve("abc")
    assert tier.start("abc", hit=1, spare=1).loaded_pages == 1
    assert tier.start("abc", hit=2, spare=1).loaded_pages == 0


def test_loaded_pages_become_the_most_recent() -> None:
    tier = SmallTier(3)
    tier.serve("ab", "x")
    tier.serve("ab", hit=1)  # loads b
    tier.serve("y")
    assert (tier.here("ab"), tier.here("x")) == ("b", "x")


def test_with_a_load_the_pages_after_it_are_offered() -> None:
    tier = SmallTier(4)
    tier.serve("abc")
    tier.serve("abc", hit=1)  # a is the oldest
    tier.serve("xy")
    assert tier.here("abc") == "bc"
    assert tier.serve("abcd", hit=1) == 2
    assert tier.here("abcd") == "bcd"


# --- store_threshold ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "offers"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_a_page_is_stored_at_its_kth_offer(k: int, offers: int) -> None:
    tier = SmallTier(4, k=k)
    for _ in range(offers - 1):
        tier.serve("ab")
        assert tier.here("ab") == ""
    tier.serve("abc")
    assert tier.here("abc") == ("abc" if k < 2 else "ab")


def test_pages_below_the_threshold_are_counted() -> None:
    tier = SmallTier(4, k=2)
    tier.serve("ab", "abc")
    assert (tier.counts.below_threshold_pages, tier.counts.written_pages) == (3, 2)


def test_known_pages_of_an_offer_become_the_most_recent_and_then_the_new_ones() -> None:
    offers = StoreThreshold(k=2, tracker_pages=3).offer_table()
    a, b, c, d, e, f = ((page, 1) for page in range(0, 12, 2))
    for run in (a, b, c):
        offers.count((run,))
    offers.count((d, a))  # b leaves; then c, a, d
    assert [offers.known.count([run]) for run in (a, b, c, d)] == [1, 0, 1, 1]
    offers.count((e,))
    assert [offers.known.count([run]) for run in (a, c, d)] == [1, 0, 1]
    offers.count((f,))
    assert [offers.known.count([run]) for run in (a, d)] == [0, 1]


# --- what leaves ----------------------------------------------------------------------------------------------------------


def test_the_tail_leaves_before_the_head() -> None:
    tier = SmallTier(3)
    tier.serve("abc", "x")
    assert tier.here("abc") == "ab"


def test_a_request_is_as_recent_as_its_end() -> None:
    tier = SmallTier(2)
    first, second = tier.start("a"), tier.start("b")
    tier.finish(second)
    tier.finish(first)
    tier.serve("x")
    assert (tier.here("a"), tier.here("b")) == ("a", "")


@pytest.mark.parametrize("eviction", [LRU, ARC])
def test_offered_and_loaded_pages_do_not_make_room_and_the_store_is_dropped_whole(eviction: type[EvictionPolicy]) -> None:
    tier = SmallTier(3, eviction)
    tier.serve("ab", "x")
    tier.serve("abcd")  # loads a and b; c and d would need two pages, and x is one
    assert (tier.here("abcd"), tier.here("x")) == ("ab", "x")
    assert (tier.counts.no_room_pages, tier.tier.tier.evicted_pages) == (2, 0)
    tier.serve("abc", hit=2)
    assert (tier.here("abc"), tier.here("x")) == ("abc", "")


# --- ARC ------------------------------------------------------------------------------------------------------------------


def test_a_page_is_used_again_only_by_a_later_request_and_at_its_end() -> None:
    tier = SmallTier(4, ARC)
    tier.serve("ab")
    assert (tier.arc.once.pages, tier.arc.again.pages) == (2, 0)
    running = tier.start("a")
    assert (tier.arc.once.pages, tier.arc.again.pages) == (2, 0)
    tier.finish(running)
    assert (tier.arc.once.pages, tier.arc.again.pages) == (1, 1)


def test_pages_used_once_leave_first_and_become_ghosts() -> None:
    tier = SmallTier(3, ARC)
    tier.serve("a", "a", "b", "c", "d")
    assert (tier.here("a"), tier.here("b"), tier.here("c"), tier.here("d")) == ("a", "", "c", "d")
    assert tier.arc.once_ghosts.count([(tier.words.pages("b")[0], 1)]) == 1


def test_a_ghost_of_once_raises_the_target_and_is_no_ghost_when_it_is_stored() -> None:
    tier = SmallTier(2, ARC)
    tier.serve("a", "b", "c")
    assert tier.arc.target == 0.0
    tier.serve("a")
    assert tier.arc.target == 1.0
    assert (tier.arc.once_ghosts.count([(tier.words.pages("a")[0], 1)]), tier.arc.once_ghosts.pages) == (0, 1)


def test_a_ghost_of_again_lowers_the_target() -> None:
    tier = SmallTier(2, ARC)
    tier.serve("a", "a", "b", "b", "c")  # once is empty: a leaves again
    assert tier.arc.again_ghosts.pages == 1
    tier.arc.target = 1.5
    tier.start("a")
    assert tier.arc.target == 0.5


def test_a_ghost_counts_for_more_if_there_are_more_of_the_other_kind() -> None:
    tier = SmallTier(4, ARC)
    tier.arc.once_ghosts.append([(100, 2)])
    tier.arc.again_ghosts.append([(200, 3)])
    tier.words.ids = {"a": 101}
    tier.start("a")
    assert tier.arc.target == 1.5


def test_the_target_stays_between_nothing_and_the_capacity() -> None:
    tier = SmallTier(3, ARC)
    tier.arc.once_ghosts.append([(100, 6)])
    tier.words.ids = {"abcdef"[:end]: 99 + end for end in range(1, 7)}
    tier.start("abcdef")
    assert tier.arc.target == 3
    tier.arc.once_ghosts.remove([(100, 6)])
    tier.arc.again_ghosts.append([(100, 6)])
    tier.start("abcdef")
    assert tier.arc.target == 0


def test_once_gives_pages_while_it_has_as_many_as_the_target_says() -> None:
    tier = SmallTier(4, ARC)
    tier.serve("a", "a", "b", "c", "d")
    tier.arc.target = 2.9  # its whole part counts: once, with three pages, gives two
    tier.serve("xy")
    assert [tier.here(word) for word in ("a", "b", "c", "d")] == ["a", "", "", "d"]
    tier.arc.target = 4.0
    tier.serve("v")
    assert [tier.here(word) for word in ("a", "d", "xy")] == ["", "d", "xy"]


def test_the_other_gives_where_only_offered_pages_are_left() -> None:
    tier = SmallTier(3, ARC)
    tier.serve("a", "a", "bc")
    tier.serve("bcd")  # b and c, all of once, are offered
    assert (tier.here("a"), tier.here("bcd")) == ("", "bcd")


def test_each_list_of_ghosts_has_as_many_pages_as_the_tier_at_most() -> None:
    tier = SmallTier(2, ARC)
    tier.serve(*"abcdefg")
    assert tier.arc.once_ghosts.pages == 2
    assert tier.arc.once_ghosts.count([(page, 1) for word in "de" for page in tier.words.pages(word)]) == 2


@given(
    value=st.floats(0, 5_000),
    step=st.one_of(st.floats(1, 60), st.sampled_from([1.0, 7 / 3, 1.1, 2.5])),
    times=st.integers(0, 4_000),
    most=st.sampled_from([1, 300, 12_000, 1 << 60]),
    rises=st.booleans(),
)
def test_many_sums_at_once_are_those_of_a_loop(value: float, step: float, times: int, most: int, rises: bool) -> None:
    value = start = min(value, most)
    for _ in range(times):
        value = min(value + step, most) if rises else max(value - step, 0)
    assert add_repeatedly(start, step if rises else -step, times, most=most) == value


# --- against slower models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_random_traces_hit_what_the_slow_models_hit(policy: str, seed: int) -> None:
    requests = random_requests(seed)
    ours, slow = POLICIES[policy]
    cases = ((9, 12, 1, 0, 99), (12, 7, 2, 2, 99), (16, 12, 3, 3, 6), (24, 20, 4, 2, 11), (10, 40, 4, 1, 99), (10, 4, 2, 0, 99))
    for gpu, cpu, in_flight, k, tracker_pages in cases:
        cache = make_cache(gpu, cpu, cpu_eviction=ours, k=k, tracker_pages=tracker_pages)
        expected = play_slowly(SlowBlocks(gpu, slow(cpu, k, tracker_pages)), requests, in_flight)
        assert play(cache, requests, in_flight) == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("page_tokens", "gpu", "cpu", "in_flight", "k", "tracker_pages"),
    [(16, 24, 60, 1, 0, 9), (16, 40, 90, 3, 2, 400), (512, 60, 90, 2, 2, 150), (512, 30, 40, 1, 1, 9)],
)
def test_conversations_hit_what_the_slow_models_hit(
    chats: dict[int, list[Request]],
    policy: str, page_tokens: int, gpu: int, cpu: int, in_flight: int, k: int, tracker_pages: int,
) -> None:  # fmt: skip
    ours, slow = POLICIES[policy]
    cache = make_cache(gpu, cpu, cpu_eviction=ours, k=k, tracker_pages=tracker_pages, page_tokens=page_tokens)
    rows = play(cache, chats[page_tokens], in_flight)
    slow_pool = SlowBlocks(gpu, slow(cpu, k, tracker_pages), page_tokens=page_tokens)
    assert rows == play_slowly(slow_pool, chats[page_tokens], in_flight)
    assert sum(cpu for _, cpu in rows) > 50


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_random_traces_hit_what_the_reference_hits(shared: Path, policy: str) -> None:
    model = reference(shared, "vllm_model")
    loaded = 0
    for seed in range(2_000, 2_080):
        requests = random_requests(seed)
        for gpu, cpu, in_flight, k, tracked in ((8, 10, 1, 0, 99), (11, 14, 2, 2, 9), (15, 6, 3, 3, 20), (20, 25, 4, 1, 99)):
            model.TRACKED_OFFERS = tracked
            expected = model.play(as_records(requests), gpu, in_flight, cpu, k, policy, PAGE_TOKENS)
            cache = make_cache(gpu, cpu, cpu_eviction=POLICIES[policy][0], k=k, tracker_pages=tracked)
            assert play(cache, requests, in_flight) == [row[2:4] for row in expected]
            loaded += cache.counts.loaded_pages
    assert loaded > 1_000


@pytest.mark.parametrize(("policy", "k"), [("lru", 0), ("lru", 2), ("arc", 0)])
def test_the_engine_s_own_hits_on_conversation(shared: Path, conversation: list[Request], policy: str, k: int) -> None:
    cache = make_cache(6_000, 12_000, cpu_eviction=POLICIES[policy][0], k=k, page_tokens=512)
    assert play(cache, conversation) == golden_rows(shared, f"conv.vllm_6000_cpu12000_{policy}_thr{k}", 2_000)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("gpu", "cpu", "in_flight", "k"), [(600, 900, 1, 0), (600, 400, 4, 2), (2_000, 1_500, 2, 3)])
def test_the_reference_s_hits_on_conversation(
    shared: Path, conversation: list[Request], policy: str, gpu: int, cpu: int, in_flight: int, k: int
) -> None:
    expected = reference(shared, "vllm_model").play(as_records(conversation), gpu, in_flight, cpu, k, policy)
    cache = make_cache(gpu, cpu, cpu_eviction=POLICIES[policy][0], k=k, page_tokens=512)
    assert play(cache, conversation, in_flight) == [row[2:4] for row in expected]


def test_slots_may_be_numbered() -> None:
    for seed in range(10):
        requests = random_requests(seed)
        numbered = make_cache(12, 9, pool=SlotPool)
        assert play(numbered, requests, 2) == play(make_cache(12, 9), requests, 2)
        assert len(set(numbered.tiers[1].pool.free_slots().tolist()) | set(numbered.offload._slots.tolist())) == 9


# --- both tiers, and the configuration ------------------------------------------------------------------------------------


def test_what_left_the_gpu_is_loaded_from_cpu_memory() -> None:
    cache = Small(3, 9)
    assert cache.serve("abc", "xyz", "abc") == (0, 2)
    assert cache.on_cpu("abc") == "abc"


def test_the_preset_s_choices_make_the_tier() -> None:
    overrides = ["preset=vllm_offload", "eviction@tiers.cpu.eviction=arc", "placement.k=2", "placement.tracker_pages=77"]
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        plan = build_run(hydra.compose("config", overrides=overrides), command="replay", overrides=overrides)
    cache = plan.rules.server(build_setup(plan, build_tiers(plan), []))
    assert isinstance(cache, VLLMCache) and cache.offload is not None
    assert isinstance(cache.offload.order, ArcOffload)
    assert (cache.offload.offers.threshold, cache.offload.offers.capacity) == (2, 77)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eviction@tiers.cpu.eviction=fifo", "FIFO cannot order .*: choose lru or arc"),
        ("placement=write_through", "WriteThrough cannot decide .*: choose placement=store_threshold"),
    ],
)
def test_policies_that_the_tier_cannot_follow_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["preset=vllm_offload", override]
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        plan = build_run(hydra.compose("config", overrides=overrides), command="replay", overrides=overrides)
    with pytest.raises(UsageError, match=f"^rules: {message}"):
        replay(plan, [])
