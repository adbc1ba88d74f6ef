"""Replay: exact numbers on the real trace, and the same hits whichever way requests go through the core."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.cache import TieredCache
from kvsim.core.instant import InstantCache
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.runs import append_run
from kvsim.core.tier import Tier
from kvsim.engine.outcome import REJECTED, Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.replay import Replay, ReplaySettings
from kvsim.engine.server import TieredServer
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
from kvsim.report.result import hit_tokens
from kvsim.trace.mooncake import Mooncake

PLACEMENTS = (WriteBack, WriteThrough, WriteThroughSelective, Exclusive)
CONVERSATION = "mooncake_conversation_trace.jsonl.gz"
EVERY_PAGE = Rules(recompute_last_token=False)


class Settled(Replay):
    """Every request goes through the general calls, transfers and all, even with one tier."""

    def __init__(self, cache: TieredCache, prefetching: Prefetching, settings: ReplaySettings) -> None:
        super().__init__(cache, prefetching, settings, TieredServer(cache, prefetching))


def make_cache(kind: type[TieredCache], capacities: tuple[int | None, ...], *, eviction: type = LRU, placement: type = WriteBack,
               rules: Rules = EVERY_PAGE, page_tokens: int = 512) -> TieredCache:  # fmt: skip
    tiers = []
    for index, capacity in enumerate(capacities):
        policy = eviction()
        policy.bind(PolicyContext(tier=index))
        tiers.append(Tier(("gpu", "cpu", "disk")[index], index, Pool(capacity), policy, placement() if index else None))
    return kind(tiers, rules, page_tokens)


def play(player: type[Replay], cache: TieredCache, requests: list[Request], *, prefetch: PrefetchPolicy | None = None,
         in_flight: int = 1, hold_output: bool = False) -> Outcome:  # fmt: skip
    policy = prefetch or NoPrefetch()
    if len(cache.tiers) > 1:
        policy.bind(PolicyContext(tier=1, page_tokens=cache.page_tokens))
    replay = player(cache, Prefetching(cache, policy, Offer), ReplaySettings(in_flight=in_flight, hold_output=hold_output))
    outcome = replay.run(requests)
    cache.check()
    assert not cache.leases and not cache.transfers
    return outcome


@pytest.fixture(scope="module")
def conversation(shared: Path) -> list[Request]:
    return Mooncake(path=str(shared / "traces" / CONVERSATION), tail="all").load(512).requests


@pytest.mark.parametrize(
    ("capacity", "page_hit_rate", "tokens_of_last_half"),
    [
        (1_000, ".044530", 3_173_822),
        (5_859, ".136076", 9_286_131),
        (10_000, ".211598", 14_910_149),
        (30_000, ".325747", 23_347_784),
        (50_000, ".354558", 25_582_964),
        (None, ".366412", 27_038_068),
    ],
)
def test_lru_hits_on_conversation_are_exact(
    conversation: list[Request], capacity: int | None, page_hit_rate: str, tokens_of_last_half: int
) -> None:
    outcome = play(Replay, make_cache(TieredCache, (capacity,)), conversation)
    pages = sum(request.prompt_pages for request in conversation)
    assert f"{outcome.hit_pages.sum() / pages:.6f}" == f"0{page_hit_rate}"
    assert hit_tokens(outcome)[6_015:].sum() == tokens_of_last_half


@pytest.mark.parametrize("page_tokens", [64, 16, 1])
def test_hits_are_the_same_at_any_page_size(shared: Path, conversation: list[Request], page_tokens: int) -> None:
    small = Mooncake(path=str(shared / "traces" / CONVERSATION), tail="all").load(page_tokens).requests
    whole = hit_tokens(play(Replay, make_cache(TieredCache, (10_000,)), conversation)).sum()
    cut = hit_tokens(play(Replay, make_cache(TieredCache, (10_000 * 512 // page_tokens,), page_tokens=page_tokens), small)).sum()
    padding = sum(request.prompt_pages * 512 / request.prompt_tokens - 1 for request in conversation) / len(conversation)
    assert whole <= cut <= whole * (1 + padding)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_instant_and_settled_transfers_hit_the_same_on_conversation(conversation: list[Request], placement: type) -> None:
    played = {}
    for kind, player in ((InstantCache, Replay), (TieredCache, Settled)):
        cache = make_cache(kind, (600, 1_500, 6_000), placement=placement)
        outcome = play(player, cache, conversation[:3_000], hold_output=True)
        played[kind] = outcome.hit_pages, outcome.tiers, outcome.placement
    (hits, tiers, counts), (settled_hits, settled_tiers, settled_counts) = played.values()
    assert np.array_equal(hits, settled_hits)
    assert counts == settled_counts
    for name, use in tiers.items():
        settled = settled_tiers[name]
        assert (use.evicted_pages, use.inserted_pages) == (settled.evicted_pages, settled.inserted_pages)


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Prompts of 1 to 6 pages that branch from one another; a page id stands for one path."""
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for index, word in enumerate(draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=40))):
        runs: list[tuple[int, int]] = []
        for end in range(1, len(word) + 1):
            append_run(runs, ids.setdefault(tuple(word[:end]), len(ids)), 1)
        output_tokens = draw(st.integers(0, 9))
        requests.append(
            Request(
                index=index,
                arrival_s=0.0,
                prompt_tokens=4 * len(word),
                output_tokens=output_tokens,
                runs=tuple(runs),
                prompt_pages=len(word),
            )
        )
    return requests


@given(
    requests=workloads(),
    capacity=st.integers(3, 12),
    eviction=st.sampled_from((LRU, FIFO, LFU)),
    in_flight=st.integers(1, 3),
    hold_output=st.booleans(),
    rules=st.builds(Rules, recompute_last_token=st.booleans()),
)
@settings(max_examples=150, deadline=None)
def test_one_tier_in_one_pass_hits_what_the_general_calls_hit(
    requests: list[Request], capacity: int, eviction: type, in_flight: int, hold_output: bool, rules: Rules
) -> None:
    outcomes = [
        play(player, make_cache(TieredCache, (capacity,), eviction=eviction, rules=rules, page_tokens=4), requests,
             in_flight=in_flight, hold_output=hold_output)
        for player in (Replay, Settled)
    ]  # fmt: skip
    assert np.array_equal(outcomes[0].hit_pages, outcomes[1].hit_pages)
    assert np.array_equal(outcomes[0].status, outcomes[1].status)
    assert outcomes[0].tiers == outcomes[1].tiers


@given(requests=workloads(), capacities=st.tuples(st.integers(6, 12), st.integers(8, 20), st.integers(8, 40)),
       placement=st.sampled_from(PLACEMENTS), in_flight=st.integers(1, 2), prefetches=st.booleans())  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_an_instant_cache_stays_right(
    requests: list[Request], capacities: tuple[int, int, int], placement: type, in_flight: int, prefetches: bool
) -> None:
    cache = make_cache(InstantCache, capacities, placement=placement, page_tokens=4)
    prefetch = ThresholdPrefetch(min_tokens=4, in_flight_fraction=1.0) if prefetches else None
    outcome = play(Replay, cache, requests, prefetch=prefetch, in_flight=in_flight)
    unlimited = play(Replay, make_cache(TieredCache, (None,), page_tokens=4), requests)
    assert (outcome.hit_pages.sum(axis=1) <= unlimited.hit_pages.sum(axis=1)).all()


def test_a_request_larger_than_the_tier_is_rejected_and_changes_nothing() -> None:
    fits = Request(index=0, arrival_s=0.0, prompt_tokens=8, output_tokens=0, runs=((0, 2),), prompt_pages=2)
    too_long = Request(index=1, arrival_s=0.0, prompt_tokens=16, output_tokens=0, runs=((0, 4),), prompt_pages=4)
    again = Request(index=2, arrival_s=0.0, prompt_tokens=8, output_tokens=0, runs=((0, 2),), prompt_pages=2)
    outcome = play(Replay, make_cache(TieredCache, (3,), page_tokens=4), [fits, too_long, again])
    assert (outcome.status == [0, REJECTED, 0]).all()
    assert outcome.hit_pages[:, 0].tolist() == [0, 0, 2]


def test_the_answer_takes_room_only_if_held() -> None:
    long_answer = Request(index=0, arrival_s=0.0, prompt_tokens=4, output_tokens=8, runs=((0, 1),), prompt_pages=1)
    held, free = (
        play(Replay, make_cache(TieredCache, (2,), page_tokens=4), [long_answer], hold_output=hold) for hold in (True, False)
    )
    assert (held.status[0], free.status[0]) == (REJECTED, 0)


@pytest.mark.parametrize(("eviction", "nodes"), [(LRU, 1), (FIFO, 3), (LFU, 3)])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_turns_are_one_node_to_a_policy_that_reads_last_used_only(eviction: type, nodes: int, in_flight: int) -> None:
    turns = [
        Request(index=turn, arrival_s=turn, prompt_tokens=8 * turn, output_tokens=0, runs=((0, 2 * turn),), prompt_pages=2 * turn)
        for turn in (1, 2, 3)
    ]
    cache = make_cache(TieredCache, (10,), eviction=eviction, page_tokens=4)
    outcome = play(Replay, cache, turns, in_flight=in_flight)
    assert outcome.hit_pages[:, 0].tolist() == [0, 2, 4]
    assert len(list(cache.tree.root.descendants())) == (nodes if in_flight == 1 else 3)


def test_a_server_of_any_kind_is_played_and_asked_again_after_a_finish() -> None:
    class OneAtATime:
        def __init__(self) -> None:
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

    requests = [Request(index=i, arrival_s=i, prompt_tokens=4, output_tokens=0, runs=((i, 1),), prompt_pages=1) for i in range(2)]
    cache, server = make_cache(TieredCache, (3,), page_tokens=4), OneAtATime()
    outcome = Replay(cache, Prefetching(cache, NoPrefetch(), Offer), ReplaySettings(in_flight=2), server).run(requests)
    assert server.told == ["served 0", "refused 1", "finished", "served 1", "finished"]
    assert outcome.hit_pages[:, 0].tolist() == [1, 1]
