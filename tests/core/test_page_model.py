"""The core hits, keeps and counts what a slow model does that goes page by page and shares no code with it.

``make_core`` and ``pages_in`` are all that knows how the core is made and looked into.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.cache import Cache
from kvsim.core.request import Request, RetentionRange
from kvsim.core.rules import Rules
from kvsim.core.tier import Tier
from kvsim.engine.outcome import FINISHED
from kvsim.engine.prefetching import Prefetching
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.filo import FILO
from kvsim.policies.eviction.gdsf import GDSF
from kvsim.policies.eviction.length_aware import LengthAware
from kvsim.policies.eviction.lfu import LFU
from kvsim.policies.eviction.lfu_da import LFUDynamicAging
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.lru_k import LRUK
from kvsim.policies.eviction.mru import MRU
from kvsim.policies.eviction.priority import Priority
from kvsim.policies.eviction.retention import RetentionPriority
from kvsim.policies.eviction.session_aware import SessionAware
from kvsim.policies.eviction.slru import SegmentedLRU
from kvsim.policies.eviction.tail_latency import TailLatency
from kvsim.policies.eviction.ttl import TimeToLive
from kvsim.policies.placement.by_length import ByLength
from kvsim.policies.placement.cost_aware import CostAware
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.store_threshold import StoreThreshold
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from kvsim.policies.prefetch.adaptive import AdaptivePrefetch
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.break_even import BreakEvenPrefetch
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from kvsim.replaying.replay import Replay
from kvsim.replaying.server import CacheServer, PassingServer
from kvsim.replaying.settings import ReplaySettings
from tests.core import page_rules as rules
from tests.core.page_model import Edge, PageModel
from tests.core.small import MACHINE, MODEL, NAMES, make_tiers
from tests.workloads import EXAMPLES, Words, long_conversations, make_request, make_requests, pages_of

Hits = tuple[int, int, int]
"""Random replays of the rarest kind; of the others, there are two to four times as many."""


# --- policies, and the same rules for the model ----------------------------------------------------------------------


def context_of(page_tokens: int, tier: int = 0, capacity: int | None = None) -> PolicyContext:
    return PolicyContext(page_tokens=page_tokens, model=MODEL, hardware=MACHINE, tier=tier, capacity_pages=capacity)


def s_per_byte(page_tokens: int) -> Callable[[int], float]:
    """Seconds per byte to compute the page that ends at the given depth."""
    context = context_of(page_tokens)
    return cache(lambda end: context.recompute_s((end - 1) * page_tokens, end * page_tokens) / MODEL.page_bytes(page_tokens))


EVICTIONS: dict[str, tuple[Callable[[], Any], Callable[[int], rules.Ranking]]] = {
    "lru": (LRU, lambda tokens: rules.LRU),
    "mru": (MRU, lambda tokens: rules.MRU),
    "fifo": (FIFO, lambda tokens: rules.FIFO),
    "filo": (FILO, lambda tokens: rules.FILO),
    "lfu": (LFU, lambda tokens: rules.LFU),
    "slru": (SegmentedLRU, lambda tokens: rules.SLRU),
    "lru_2": (LRUK, lambda tokens: rules.lru_k(2)),
    "lru_3": (lambda: LRUK(k=3), lambda tokens: rules.lru_k(3)),
    "length_aware": (LengthAware, lambda tokens: rules.LENGTH_AWARE),
    "lfu_da": (LFUDynamicAging, lambda tokens: rules.LFU_DA),
    "gdsf": (GDSF, lambda tokens: rules.gdsf(s_per_byte(tokens))),
    "priority": (Priority, lambda tokens: rules.PRIORITY),
    "tail_latency": (lambda: TailLatency(threshold=4, next_prompt_estimate=1), lambda tokens: rules.tail_latency(4, 1, tokens)),
    "ttl": (lambda: TimeToLive(ttl_s=2.5), lambda tokens: rules.ttl(2.5)),
    "session_aware": (SessionAware, lambda tokens: rules.session_aware()),
    "retention": (lambda: RetentionPriority(default_priority=35), lambda tokens: rules.retention(35, tokens)),
}
"""By name, what makes the policy and, from the tokens of a page, its rule."""


def first_page_worth_a_copy(margin: float, page_tokens: int, tier: int) -> int:
    """The first page that is recomputed no sooner than ``margin`` times as long as its bytes take to be loaded."""
    context, page = context_of(page_tokens), 0
    load_s = MODEL.page_bytes(page_tokens) / MACHINE.total_host_to_device_bytes_per_s
    if tier > 1:
        load_s += MODEL.page_bytes(page_tokens) / MACHINE.disk_read_bytes_per_s
    while context.recompute_s(page * page_tokens, (page + 1) * page_tokens) < margin * load_s:
        page += 1
    return page


PLACEMENTS: dict[str, tuple[Callable[[], Any], Callable[[int, int], rules.Placement]]] = {
    "write_back": (WriteBack, lambda tokens, tier: rules.write_back()),
    "write_back_early": (lambda: WriteBack(watermark=0.6), lambda tokens, tier: rules.write_back(0.6)),
    "write_through": (WriteThrough, lambda tokens, tier: rules.write_through()),
    "write_through_selective": (WriteThroughSelective, lambda tokens, tier: rules.write_through_selective(2)),
    "exclusive": (Exclusive, lambda tokens, tier: rules.exclusive()),
    "by_length": (
        lambda: ByLength(min_tokens=6, disk_min_tokens=9),
        lambda tokens, tier: rules.by_length(6 if tier == 1 else 9, tokens),
    ),
    "cost_aware": (
        lambda: CostAware(margin=0.075),
        lambda tokens, tier: rules.cost_aware(first_page_worth_a_copy(0.075, tokens, tier)),
    ),
    "store_0": (StoreThreshold, lambda tokens, tier: rules.store_threshold(0, 64_000)),
    "store_2": (lambda: StoreThreshold(k=2, tracker_pages=9), lambda tokens, tier: rules.store_threshold(2, 9)),
    "store_3": (lambda: StoreThreshold(k=3), lambda tokens, tier: rules.store_threshold(3, 64_000)),
}
"""By name, what makes the policy and, from the tokens of a page and the lower tier, its rule."""

PREFETCHES: dict[str, Callable[[], Any]] = {
    "none": NoPrefetch,
    "threshold": lambda: ThresholdPrefetch(min_tokens=2, in_flight_fraction=1.0, load_min_tokens=0),
    "threshold_4": lambda: ThresholdPrefetch(min_tokens=4, in_flight_fraction=0.5, load_min_tokens=3, min_prompt_tokens=6),
    "adaptive": lambda: AdaptivePrefetch(min_tokens=2, in_flight_fraction=1.0, load_min_tokens=2),
    "break_even": lambda: BreakEvenPrefetch(margin=0.006),
}
"""These policies see numbers only: the model uses them as they are."""


# --- playing ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Setting:
    """Everything about a replay but its requests. ``evictions`` from the GPU down, ``placements`` from the CPU tier down."""

    capacities: Sequence[int | None]
    above: Sequence[int] = (0, 1)
    """The tier above the CPU and that above the disk."""
    evictions: Sequence[str] = ("lru", "lru", "lru")
    placements: Sequence[str] = ("write_back", "write_back")
    prefetch: str = "none"
    page_tokens: int = 1
    recompute_last_token: bool = False
    in_flight: int = 1
    hold_output: bool = False

    def make_prefetch(self) -> Any:
        prefetch = PREFETCHES[self.prefetch]()
        prefetch.bind(context_of(self.page_tokens, tier=1, capacity=self.capacities[1] if len(self.capacities) > 1 else None))
        return prefetch


@dataclass
class Played:
    """What a replay did."""

    hits: list[Hits | None]
    """None for a request that can never run."""
    pages: list[set[int]]
    """The pages in each tier at the end."""
    inserted: list[int]
    evicted: list[int]
    dropped_pages: int
    no_room_pages: int


class Looking(PassingServer):
    """A server whose cache looks other prompts up before it serves a request: that may cut nodes, and changes nothing else."""

    def __init__(self, server: Any, cache: Any, looks: Sequence[Request]) -> None:
        super().__init__(server)
        self.cache = cache
        self.looks = iter(looks)

    def serve(self, request: Request, pages: int, now: float) -> Any:
        if (look := next(self.looks, None)) is not None:
            self.cache.match(look)
        return self.server.serve(request, pages, now)


def make_core(setting: Setting) -> tuple[Any, Replay]:
    """The core's cache, and what replays requests against it."""
    there = [at for at, capacity in enumerate(setting.capacities) if capacity != 0]
    tiers, edges = make_tiers(
        [setting.capacities[at] for at in there],
        [EVICTIONS[setting.evictions[at]][0]() for at in there],
        [PLACEMENTS[setting.placements[at - 1]][0]() for at in there[1:]],
        slots=False,
        page_tokens=setting.page_tokens,
        shape=[(NAMES[at], [there.index(setting.above[at - 1])] if at else []) for at in there],
    )
    cache = Cache(tiers, edges, Rules(recompute_last_token=setting.recompute_last_token), setting.page_tokens)
    replay_settings = ReplaySettings(in_flight=setting.in_flight, hold_output=setting.hold_output)
    return cache, Replay(CacheServer(cache, Prefetching(cache, setting.make_prefetch(), Offer)), replay_settings)


def pages_in(cache: Any, tier: Tier) -> set[int]:
    """The numbers of the pages that a tier of the core's cache has."""
    extents = [extent for node in cache.tree.root.descendants() if node.state[tier.index] for extent in node.runs]
    return set(pages_of(extents))


def play_core(requests: list[Request], setting: Setting, looks: Sequence[Request] = ()) -> Played:
    """Replay; before each request, one of ``looks`` is looked up."""
    cache, replay = make_core(setting)
    if looks:
        replay.server = Looking(replay.server, cache, looks)
    outcome = replay.run(requests)
    cache.check()
    rows = zip(outcome.hit_pages.tolist(), outcome.status, strict=True)
    levels = range(len(setting.capacities))
    tiers: dict[int, Tier] = {tier.level: tier for tier in cache.tiers}
    return Played(
        hits=[tuple(row) if status == FINISHED else None for row, status in rows],
        pages=[pages_in(cache, tiers[level]) if level in tiers else set() for level in levels],
        inserted=[tiers[level].inserted_pages if level in tiers else 0 for level in levels],
        evicted=[tiers[level].evicted_pages if level in tiers else 0 for level in levels],
        dropped_pages=cache.counts.dropped_pages,
        no_room_pages=cache.counts.no_room_pages,
    )


def make_model(setting: Setting) -> PageModel:
    """The model with the same settings."""
    tokens, capacities = setting.page_tokens, setting.capacities
    return PageModel(
        [inf if capacity is None else capacity for capacity in capacities],
        [EVICTIONS[name][1](tokens) for name in setting.evictions[: len(capacities)]],
        [
            Edge(upper, at + 1, PLACEMENTS[setting.placements[at]][1](tokens, at + 1))
            for at, upper in enumerate(setting.above[: len(capacities) - 1])
            if capacities[at + 1]
        ],
        prefetch=setting.make_prefetch(),
        page_tokens=tokens,
        recompute_last_token=setting.recompute_last_token,
        in_flight=setting.in_flight,
        hold_output=setting.hold_output,
    )


def play_model(requests: list[Request], setting: Setting) -> Played:
    model = make_model(setting)
    hits = model.play(requests)
    assert not any(model.coming) and not any(model.leaving) and not any(model.kept)
    pages = [{page.number for page in on} for on in model.on]
    return Played(hits, pages, model.inserted, model.evicted, model.dropped_pages, model.no_room_pages)


def compare(requests: list[Request], setting: Setting, looks: Sequence[Request] = ()) -> Played:
    """Assert that the core does what the model does; returns that."""
    expected, played = play_model(requests, setting), play_core(requests, setting, looks)
    assert played.hits == expected.hits
    assert played.pages == expected.pages
    assert (played.inserted, played.evicted) == (expected.inserted, expected.evicted)
    assert (played.dropped_pages, played.no_room_pages) == (expected.dropped_pages, expected.no_room_pages)
    held = [inserted - evicted for inserted, evicted in zip(played.inserted, played.evicted, strict=True)]
    assert held == [len(pages) for pages in played.pages]
    return played


# --- workloads -------------------------------------------------------------------------------------------------------


@st.composite
def prompts(draw: st.DrawFn, longest: int) -> list[list[int]]:
    """Prompts as lists of letters: new ones, and parts, repeats, extensions and branches of earlier ones."""
    letters = iter(range(10**6))
    history: list[list[int]] = [[next(letters) for _ in range(longest)]]
    kinds = st.sampled_from(["new", "new", "part", "again", "again", "extend", "branch", "branch"])
    for kind in draw(st.lists(kinds, min_size=10, max_size=40)):
        earlier = history[draw(st.sampled_from([-1, -2, -3, 0, 1, 2, len(history) // 2])) % len(history)]
        kept = {"new": 0, "again": len(earlier), "extend": len(earlier)}.get(kind)
        kept = draw(st.integers(1, len(earlier))) if kept is None else kept
        new = draw(st.integers(1, longest)) if kind in ("new", "extend", "branch") else 0
        history.append((earlier[:kept] + [next(letters) for _ in range(new)])[:longest])
    return history


class Workload(list[Request]):
    """Requests that show what matters of them: arrival, page ids, tokens of prompt and answer, session and priority."""

    def __repr__(self) -> str:
        lines = []
        for request in self:
            ids = ",".join(str(page) for page in pages_of(request.runs))
            tokens = f"{request.prompt_tokens}+{request.output_tokens}"
            lines.append(
                f"{request.arrival_s:g}: {ids} ({tokens} tokens, session {request.session}, priority {request.priority}, "
                f"retention {[tuple(one) for one in request.retention]})"
            )
        return "\n".join(["", *lines, ""])


@st.composite
def workloads(draw: st.DrawFn, page_tokens: int, longest: int) -> Workload:
    """Requests with such prompts, with and without a partial page at the end, some at one moment, of some sessions."""
    ids, requests, now = Words(), Workload(), 0.0
    for index, prompt in enumerate(draw(prompts(longest))):
        now += draw(st.integers(0, 2))
        requests.append(
            make_request(
                ids.pages(tuple(prompt)),
                index=index,
                prompt_tokens=page_tokens * len(prompt) + draw(st.integers(1 - page_tokens, page_tokens - 1)),
                output_tokens=draw(st.sampled_from([0, 0, 1, 2 * page_tokens])),
                arrival_s=now,
                session=draw(st.integers(-1, 2)),
                priority=draw(st.integers(0, 2)),
                retention=draw(directives(page_tokens * longest)),
            )
        )
    return requests


@st.composite
def directives(draw: st.DrawFn, tokens: int) -> tuple[RetentionRange, ...]:
    """Of most requests none; else one or two that do not overlap, some without an end."""
    if draw(st.integers(0, 2)):
        return ()
    begin, middle, end = sorted(draw(st.lists(st.integers(0, 2 * tokens), min_size=3, max_size=3, unique=True)))
    of = st.tuples(st.sampled_from([0, 20, 35, 50]), st.sampled_from([1.0, 3.5, inf]))
    return (RetentionRange(begin, middle, *draw(of)), RetentionRange(middle, end, *draw(of)))[: draw(st.integers(1, 2))]


@st.composite
def replays(
    draw: st.DrawFn, *, tiers: int, evictions: Sequence[str] = tuple(EVICTIONS), placements: Sequence[str] = tuple(PLACEMENTS),
    prefetches: Sequence[str] = tuple(PREFETCHES), capacities: Sequence[tuple[int, int]] = ((1, 12), (1, 12), (1, 12)),
) -> tuple[Workload, Setting]:  # fmt: skip
    """Requests, and a setting with the given number of tiers, of any sizes and policies."""
    page_tokens = draw(st.integers(1, 4))
    setting = Setting(
        capacities=[draw(st.integers(*bounds)) for bounds in capacities[:tiers]],
        evictions=[draw(st.sampled_from(evictions)) for _ in range(tiers)],
        placements=[draw(st.sampled_from(placements)) for _ in range(tiers - 1)],
        prefetch=draw(st.sampled_from(prefetches)) if tiers == 3 else "none",
        page_tokens=page_tokens,
        recompute_last_token=draw(st.booleans()),
        in_flight=draw(st.integers(1, 3)),
        hold_output=draw(st.booleans()),
    )
    longest = max(1, min(setting.capacities[0] or 1, 8) + draw(st.sampled_from([0, 0, 0, -1, -2, 1])))
    return draw(workloads(page_tokens, longest)), setting


@st.composite
def looks(draw: st.DrawFn, requests: list[Request], page_tokens: int) -> Workload:
    """For each request, a part of some prompt to look up before it."""
    parts = Workload()
    for _ in requests:
        request = draw(st.sampled_from(requests))
        numbers = pages_of(request.runs)
        pages = draw(st.integers(1, len(numbers)))
        parts.append(make_request(numbers[:pages], prompt_tokens=pages * page_tokens + 1))
    return parts


SINKING = ("write_back", "write_back", "write_back_early", "exclusive", "cost_aware")
SMALL_CPU = ((2, 7), (1, 5), (8, 30))


def examples(times: int) -> settings:
    """Always the same ones. A failure is shown at its smallest, which can take a minute."""
    return settings(max_examples=times * EXAMPLES, report_multiple_bugs=False)


# --- any workload, any setting ---------------------------------------------------------------------------------------


@given(replay=replays(tiers=1))
@examples(2)
def test_one_tier_does_what_the_model_does(replay: tuple[Workload, Setting]) -> None:
    compare(*replay)


@given(replay=replays(tiers=2))
@examples(3)
def test_two_tiers_do_what_the_model_does(replay: tuple[Workload, Setting]) -> None:
    compare(*replay)


@given(replay=replays(tiers=3))
@examples(4)
def test_three_tiers_do_what_the_model_does(replay: tuple[Workload, Setting]) -> None:
    compare(*replay)


@given(replay=replays(tiers=3, placements=SINKING, capacities=SMALL_CPU))
@examples(3)
def test_a_disk_behind_a_small_cpu_tier_does_what_the_model_does(replay: tuple[Workload, Setting]) -> None:
    compare(*replay)


def prompts_at(*prompts: tuple[float, Sequence[int], int]) -> list[Request]:
    """Requests without answers: when each arrives, the ids of its pages of one token, and its session."""
    return [
        make_request(pages, index=index, arrival_s=arrival_s, session=session)
        for index, (arrival_s, pages, session) in enumerate(prompts)
    ]


def test_copies_of_a_prompt_land_before_the_next_one_arrives() -> None:
    """Page 5 comes to the disk at second 2. Then page 4 leaves, whose last request had no session; at second 3, the others that
    are there would have expired too, and the oldest of them would leave."""
    early = [(0, [page], 0) for page in (0, 1, 2, 3, 4, 4)]
    requests = prompts_at(*early, (2, [4], 0), (2, [4], 0), (2, [4], -1), (2, [5], 0), (3, [6], 0))
    through = Setting(
        capacities=[1, 1, 3], evictions=["lru", "lru", "ttl"], placements=["write_through", "write_through"], in_flight=2
    )
    assert compare(requests, through).pages == [{6}, {6}, {3, 5, 6}]


def test_what_a_watermark_sends_down_is_no_prompt() -> None:
    """The disk is offered the prompt of pages 8 to 15 once: not again when page 15 comes to the CPU tier early."""
    long, other = list(range(8, 16)), list(range(16, 23))
    requests = prompts_at(*((0, pages, 0) for pages in (list(range(8)), [8], long, other, long)))
    early = Setting(capacities=[11, 5, 1], evictions=["lru", "mru", "lru"], placements=["write_back_early", "store_0"])
    assert compare(requests, early).no_room_pages == 1


def test_two_watermarks_of_one_tier_look_on_their_own() -> None:
    requests = prompts_at(*((0, pages, 0) for pages in ([0, 1], [2], [3], [4], [5], [6], [6], [6])))
    both = Setting(capacities=[2, 1, 1], above=(0, 0), placements=["write_back_early", "write_back_early"])
    assert compare(requests, both).pages == [{5, 6}, {5}, {6}]


@given(replay=replays(tiers=3), has_cpu=st.booleans())
@settings(max_examples=EXAMPLES)
def test_a_disk_below_the_gpu_does_what_the_model_does(replay: tuple[list[Request], Setting], has_cpu: bool) -> None:
    requests, setting = replay
    capacities = [capacity if has_cpu or at != 1 else 0 for at, capacity in enumerate(setting.capacities)]
    compare(requests, dataclasses.replace(setting, above=(0, 0), prefetch="none", capacities=capacities))


@given(data=st.data(), tiers=st.integers(1, 3))
@examples(2)
def test_how_pages_are_grouped_into_nodes_changes_nothing(data: st.DataObject, tiers: int) -> None:
    requests, setting = data.draw(replays(tiers=tiers))
    compare(requests, setting, data.draw(looks(requests, setting.page_tokens)))


# --- examples to follow by hand: letters are pages, words are prompts ------------------------------------------------


def play_both(words: str, **setting: Any) -> Played:
    return compare(make_requests(words.split()), Setting(**setting))


def letters(words: str, pages: set[int]) -> list[str]:
    """The beginnings of prompts that end with these pages."""
    requests = make_requests(words.split())
    named = {}
    for word, request in zip(words.split(), requests, strict=True):
        numbers = pages_of(request.runs)
        named.update({number: word[: end + 1] for end, number in enumerate(numbers)})
    return sorted(named[page] for page in pages)


@pytest.mark.parametrize("words", ["abcdef wxyz abcdef", "ab abcd abcde abcdef wxyz abcdef"])
def test_what_is_written_back_does_not_depend_on_how_a_prompt_grew(words: str) -> None:
    assert play_both(words, capacities=[6, 2], placements=["write_back"]).hits[-1] == (2, 2, 0)


@pytest.mark.parametrize("words", ["ab abcd abcdef stuvwxyz abcdef", "ab abcd stuvwxyz abcdef"])
def test_a_prompt_that_cannot_be_written_through_evicts_nothing(words: str) -> None:
    assert play_both(words, capacities=[8, 4], placements=["write_through"]).hits[-1] == (0, 4, 0)


@pytest.mark.parametrize("words", ["abcdef", "ab abcd abcdef", "abc abcdef", "abcde abcdef"])
def test_as_much_of_a_prompt_is_written_through_as_there_is_room_for(words: str) -> None:
    played = play_both(words, capacities=[8, 4], placements=["write_through"])
    assert letters(words, played.pages[1]) == ["a", "ab", "abc", "abcd"]


def test_a_prompt_that_fits_after_evictions_is_written_through_as_a_whole() -> None:
    words = "xyz abcd"
    played = play_both(words, capacities=[8, 4], placements=["write_through"])
    assert letters(words, played.pages[1]) == ["a", "ab", "abc", "abcd"]


GROWN = [f"{grown} w x y z s t abcd" for grown in ("abcd", "ab abcd", "a ab abc abcd", "abc abcd")]
"""Pages sink one by one. In the end, before the last prompt, a CPU tier of 3 has a, w and x, and the disk has b, c and d."""


@pytest.mark.parametrize("words", GROWN)
def test_a_load_takes_as_many_pages_from_disk_as_the_cpu_tier_has_room_for(words: str) -> None:
    assert play_both(words, capacities=[4, 3, 12]).hits[-1] == (0, 1, 2)


@pytest.mark.parametrize("words", GROWN)
def test_an_adaptive_fetch_takes_as_many_pages_as_the_cpu_tier_has_room_for_beside_those_it_continues(words: str) -> None:
    played = play_both(words, capacities=[4, 3, 12], prefetch="adaptive")
    assert played.hits[-1] == (0, 1, 2)
    assert letters(words, played.pages[1]) == ["a", "ab", "abc"]


@pytest.mark.parametrize("words", GROWN)
def test_a_fetch_by_threshold_needs_room_for_all_of_it_beside_the_pages_that_it_continues(words: str) -> None:
    assert play_both(words, capacities=[4, 3, 12], prefetch="threshold").hits[-1] == (0, 1, 0)
    assert play_both(words, capacities=[4, 4, 12], prefetch="threshold").hits[-1] == (0, 2, 2)


def test_exclusive_tiers_hold_no_page_twice_though_the_last_one_is_computed_again() -> None:
    played = play_both("abc xyz abc", capacities=[3, 6], placements=["exclusive"], recompute_last_token=True)
    assert played.hits[-1] == (0, 2, 0)
    assert not played.pages[0] & played.pages[1]


# --- a disk beside the CPU tier, or instead of it --------------------------------------------------------------------


def play_beside(words: str, **setting: Any) -> Played:
    """With the disk right below the GPU."""
    return compare(make_requests(words.split()), Setting(above=(0, 0), **setting))


def test_what_the_cpu_tier_does_not_want_goes_to_the_disk_beside_it_and_comes_back_straight() -> None:
    words = "ab cd cd wxyz"
    setting: dict[str, Any] = {"capacities": [4, 2, 4], "placements": ["write_through_selective", "write_back"]}
    played = play_beside(words, **setting)
    assert letters(words, played.pages[1]) == ["c", "cd"]
    assert letters(words, played.pages[2]) == ["a", "ab"]
    assert play_beside(words + " ab", **setting).hits[-1] == (0, 0, 2)
    assert play_beside(words + " cd", **setting).hits[-1] == (0, 2, 0)


def test_a_victim_goes_to_the_first_tier_that_wants_it() -> None:
    words = "abcd wxyz"
    played = play_beside(words, capacities=[4, 2, 4], placements=["write_back", "write_back"])
    assert letters(words, played.pages[1]) == ["a", "ab"]
    assert not played.pages[2]
    assert played.no_room_pages == 2


@pytest.mark.parametrize(("placement", "copies"), [("write_back", 4), ("exclusive", 0)])
def test_a_disk_right_below_the_gpu(placement: str, copies: int) -> None:
    words = "abcd wxyz abcd"
    played = play_beside(words, capacities=[4, 0, 8], placements=["write_back", placement])
    assert played.hits[-1] == (0, 0, 4)
    assert len(played.pages[0] & played.pages[2]) == copies


# --- long prompts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_requests() -> list[Request]:
    return long_conversations(requests=1_500, page_tokens=512)


@pytest.mark.long
@pytest.mark.parametrize(("eviction", "in_flight"), [("lru", 1), ("lru", 5), ("fifo", 1), ("lfu", 2), ("slru", 1), ("gdsf", 1)])
def test_one_tier_does_the_same_on_long_prompts(long_requests: list[Request], eviction: str, in_flight: int) -> None:
    several = in_flight > 1
    setting = Setting(
        capacities=[1_000], evictions=[eviction], page_tokens=512,
        recompute_last_token=several, in_flight=in_flight, hold_output=several,
    )  # fmt: skip
    played = compare(long_requests, setting)
    assert sum(hits[0] for hits in played.hits if hits) > 500


@pytest.mark.long
@pytest.mark.parametrize(
    ("placement", "cpu", "cpu_hits"),
    [
        ("write_back", 500, 50),
        ("write_back", 3_000, 500),
        ("write_through", 3_000, 500),
        ("write_through_selective", 3_000, 50),
        ("store_0", 3_000, 500),
        ("exclusive", 500, 50),
    ],
)
def test_two_tiers_do_the_same_on_long_prompts(long_requests: list[Request], placement: str, cpu: int, cpu_hits: int) -> None:
    setting = Setting(
        capacities=[1_000, cpu], placements=[placement], page_tokens=512,
        recompute_last_token=True, in_flight=2, hold_output=True,
    )  # fmt: skip
    played = compare(long_requests, setting)
    assert sum(hits[1] for hits in played.hits if hits) > cpu_hits


@pytest.mark.long
@pytest.mark.parametrize("placement", ["write_through", "exclusive"])
def test_three_tiers_do_the_same_on_long_prompts(long_requests: list[Request], placement: str) -> None:
    setting = Setting(
        capacities=[600, 300, 4_000], placements=["write_back", placement], prefetch="adaptive", page_tokens=512,
        in_flight=2, hold_output=True,
    )  # fmt: skip
    played = compare(long_requests[:1_000], setting)
    assert sum(hits[2] for hits in played.hits if hits) > 500
