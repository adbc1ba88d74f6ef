"""Replay: exact numbers on the real trace, and what holds for any requests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.cache import Cache
from kvsim.core.copies import Counts
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.serving import Server
from kvsim.core.tier import Tier, chain
from kvsim.core.tree import READY
from kvsim.engine.columns import hit_tokens
from kvsim.engine.outcome import REJECTED, Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.lfu import LFU
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from kvsim.replaying.replay import Replay
from kvsim.replaying.server import CacheServer
from kvsim.replaying.settings import ReplaySettings
from kvsim.trace.mooncake import Mooncake
from tests.workloads import EXAMPLES, branching_requests, long_conversations, write_trace

PLACEMENTS = (WriteBack, WriteThrough, WriteThroughSelective, Exclusive)
CONVERSATION = "mooncake_conversation_trace.jsonl.gz"
EVERY_PAGE = Rules(recompute_last_token=False)


def make_cache(capacities: tuple[int | None, ...], *, eviction: type = LRU, placement: type = WriteBack,
               rules: Rules = EVERY_PAGE, page_tokens: int = 512) -> Cache:  # fmt: skip
    tiers = []
    for index, capacity in enumerate(capacities):
        policy = eviction()
        policy.bind(PolicyContext(tier=index))
        tiers.append(Tier(("gpu", "cpu", "disk")[index], index, Pool(capacity), policy))
    return Cache(tiers, chain(tiers, [placement() for _ in tiers[1:]]), rules, page_tokens)


def play(cache: Cache, requests: list[Request], *, prefetch: PrefetchPolicy | None = None, in_flight: int = 1,
         hold_output: bool = False) -> Outcome:  # fmt: skip
    policy = prefetch or NoPrefetch()
    if len(cache.tiers) > 1:
        policy.bind(PolicyContext(tier=1, page_tokens=cache.page_tokens))
    replay = Replay(
        CacheServer(cache, Prefetching(cache, policy, Offer)), ReplaySettings(in_flight=in_flight, hold_output=hold_output)
    )
    outcome = replay.run(requests)
    cache.check()
    assert not cache.leases and not cache.in_flight
    return outcome


@pytest.fixture(scope="module")
def conversation(shared: Path) -> list[Request]:
    return Mooncake(path=str(shared / "traces" / CONVERSATION), tail="all").load(512).requests


@pytest.mark.parametrize(
    ("capacity", "page_hit_rate", "tokens_of_last_half"),
    [
        pytest.param(1_000, ".044530", 3_173_822, marks=pytest.mark.long),
        (5_859, ".136076", 9_286_131),
        pytest.param(10_000, ".211598", 14_910_149, marks=pytest.mark.long),
        pytest.param(30_000, ".325747", 23_347_784, marks=pytest.mark.long),
        pytest.param(50_000, ".354558", 25_582_964, marks=pytest.mark.long),
        pytest.param(None, ".366412", 27_038_068, marks=pytest.mark.long),
    ],
)
def test_lru_hits_on_conversation_are_exact(
    conversation: list[Request], capacity: int | None, page_hit_rate: str, tokens_of_last_half: int
) -> None:
    outcome = play(make_cache((capacity,)), conversation)
    pages = sum(request.prompt_pages for request in conversation)
    assert f"{outcome.hit_pages.sum() / pages:.6f}" == f"0{page_hit_rate}"
    assert hit_tokens(outcome)[6_015:].sum() == tokens_of_last_half


@pytest.fixture(scope="module")
def long_requests() -> list[Request]:
    return long_conversations(requests=2_000, page_tokens=512)


@pytest.mark.parametrize("page_tokens", [64, 1])
def test_hits_are_the_same_at_any_page_size(tmp_path: Path, long_requests: list[Request], page_tokens: int) -> None:
    path = write_trace(tmp_path / "trace.jsonl", long_requests)
    small = Mooncake(path=str(path), tail="all").load(page_tokens).requests
    whole = hit_tokens(play(make_cache((2_000,)), long_requests)).sum()
    cut = hit_tokens(play(make_cache((2_000 * 512 // page_tokens,), page_tokens=page_tokens), small)).sum()
    padding = sum(request.prompt_pages * 512 / request.prompt_tokens - 1 for request in long_requests) / len(long_requests)
    assert whole <= cut <= whole * (1 + padding)


@given(
    requests=branching_requests(),
    capacities=st.lists(st.integers(4, 14), min_size=1, max_size=3).map(tuple),
    eviction=st.sampled_from((LRU, FIFO, LFU)),
    placement=st.sampled_from(PLACEMENTS),
    in_flight=st.integers(1, 3),
    hold_output=st.booleans(),
    prefetches=st.booleans(),
    rules=st.builds(Rules, recompute_last_token=st.booleans()),
)
@settings(max_examples=2 * EXAMPLES)
def test_hits_and_counts_stay_right(
    requests: list[Request], capacities: tuple[int, ...], eviction: type, placement: type, in_flight: int, hold_output: bool,
    prefetches: bool, rules: Rules,
) -> None:  # fmt: skip
    cache = make_cache(capacities, eviction=eviction, placement=placement, rules=rules, page_tokens=4)
    prefetch = ThresholdPrefetch(min_tokens=4, in_flight_fraction=1.0) if prefetches else None
    outcome = play(cache, requests, prefetch=prefetch, in_flight=in_flight, hold_output=hold_output)
    unlimited = play(make_cache((None,), rules=rules, page_tokens=4), requests)
    assert (outcome.hit_pages.sum(axis=1) <= unlimited.hit_pages.sum(axis=1)).all()
    assert not outcome.hit_pages[:, len(capacities) :].any()
    assert outcome.hit_pages[:, 1:].sum() <= outcome.placement["loaded_pages"]
    nodes = list(cache.tree.root.descendants())
    for tier in cache.tiers:
        held = sum(node.pages for node in nodes if node.state[tier.index] == READY)
        assert held == tier.inserted_pages - tier.evicted_pages == tier.pool.capacity - tier.pool.free <= capacities[tier.index]
    if placement is Exclusive:
        assert all(node.state.count(READY) == 1 for node in nodes)


@pytest.mark.long
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tiers_below_add_hits(long_requests: list[Request], placement: type) -> None:
    alone, three, unlimited = (
        play(make_cache(capacities, placement=placement), long_requests, hold_output=True).hit_pages
        for capacities in ((600,), (600, 1_500, 6_000), (None,))
    )
    assert (three.sum(axis=1) <= unlimited.sum(axis=1)).all()
    assert 1.1 * alone.sum() < three.sum() < unlimited.sum()
    assert three[:, 0].any() and three[:, 1].any() and (three[:, 2].any() or placement is WriteThroughSelective)


def test_a_request_larger_than_the_tier_is_rejected_and_changes_nothing() -> None:
    fits = Request(index=0, arrival_s=0.0, prompt_tokens=8, output_tokens=0, runs=((0, 2),), prompt_pages=2)
    too_long = Request(index=1, arrival_s=0.0, prompt_tokens=16, output_tokens=0, runs=((0, 4),), prompt_pages=4)
    again = Request(index=2, arrival_s=0.0, prompt_tokens=8, output_tokens=0, runs=((0, 2),), prompt_pages=2)
    outcome = play(make_cache((3,), page_tokens=4), [fits, too_long, again])
    assert (outcome.status == [0, REJECTED, 0]).all()
    assert outcome.hit_pages[:, 0].tolist() == [0, 0, 2]


def test_the_answer_takes_room_only_if_held() -> None:
    long_answer = Request(index=0, arrival_s=0.0, prompt_tokens=4, output_tokens=8, runs=((0, 1),), prompt_pages=1)
    held, free = (play(make_cache((2,), page_tokens=4), [long_answer], hold_output=hold) for hold in (True, False))
    assert (held.status[0], free.status[0]) == (REJECTED, 0)


@pytest.mark.parametrize("eviction", [LRU, FIFO, LFU])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_each_turn_hits_all_turns_before(eviction: type, in_flight: int) -> None:
    turns = [
        Request(index=turn, arrival_s=turn, prompt_tokens=8 * turn, output_tokens=0, runs=((0, 2 * turn),), prompt_pages=2 * turn)
        for turn in (1, 2, 3)
    ]
    outcome = play(make_cache((10,), eviction=eviction, page_tokens=4), turns, in_flight=in_flight)
    assert outcome.hit_pages[:, 0].tolist() == [0, 2, 4]


class OneAtATime(Server):
    """A cache that serves itself, and refuses all requests but one."""

    def __init__(self) -> None:
        self.tiers: list[Tier] = []
        self.counts = Counts()
        self.page_tokens = 4
        self.told: list[str] = []
        self.running = 0

    def serve(self, request: Request, pages: int, now: float) -> Any:
        if self.running:
            self.told.append(f"refused {request.index}")
            return None
        self.running = 1
        self.told.append(f"served {request.index}")
        return SimpleNamespace(hits=(pages, 0, 0))

    def finish_request(self, held: Any) -> None:
        self.running = 0
        self.told.append("finished")


def test_a_cache_that_serves_itself_is_asked_again_after_a_finish() -> None:
    requests = [Request(index=i, arrival_s=i, prompt_tokens=4, output_tokens=0, runs=((i, 1),), prompt_pages=1) for i in range(2)]
    cache = OneAtATime()
    outcome = Replay(cache, ReplaySettings(in_flight=2)).run(requests)
    assert cache.told == ["served 0", "refused 1", "finished", "served 1", "finished"]
    assert outcome.hit_pages[:, 0].tolist() == [1, 1]
