"""Belady's MIN with bypass: by hand, against a slow model page by page, and against all that could be kept."""

from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import hydra
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.api import load_trace, replay, simulate
from kvsim.bounds.lru_curve import usable_pages
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.engine.outcome import REJECTED, Outcome
from kvsim.errors import UsageError
from kvsim.pages.extents import split_extents
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan, TierPlan
from kvsim.policies.eviction.belady import Belady
from kvsim.policies.eviction.lru import LRU
from kvsim.run.play import replay as run_replay
from kvsim.run.play import upper_bound
from tests.workloads import branching_requests, paths_of


def requests_of(words: list[str]) -> list[Request]:
    return [
        Request(index=index, arrival_s=0.0, prompt_tokens=4 * len(word), output_tokens=0, runs=extents, prompt_pages=len(word))
        for index, (word, extents) in enumerate(zip(words, paths_of(words), strict=True))
    ]


@cache
def plan() -> Plan:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=["page_tokens=4", "replay.hold_output=false"])
    return build_run(cfg, command="replay")


def play(requests: list[Request], capacity: int | None, *, recompute: bool = False, tiers: int = 1) -> Outcome:
    """Belady on ``tiers`` tiers of this capacity each, by ``upper_bound``."""
    names = ("gpu", "cpu", "disk")[:tiers]
    plans = [TierPlan(name=name, capacity_pages=capacity, eviction=LRU(), placement=None) for name in names]
    return upper_bound(replace(plan(), tiers=plans, rules=Rules(recompute_last_token=recompute)), requests)


def hits(words: list[str], capacity: int | None, **settings: bool) -> list[int]:
    return [int(pages) for pages in play(requests_of(words), capacity, **settings).hit_pages[:, 0]]


def test_what_is_used_again_last_leaves_first() -> None:
    """After ``cd``, two of ``a`` (used next), ``b`` (never) and ``cd`` (used last) fit: ``a`` and ``c``."""
    assert hits(["ab", "cd", "a", "cd"], 2) == [0, 0, 1, 1]


def test_what_is_never_used_again_takes_no_room() -> None:
    """LRU would lose ``a`` to ``xyz``; here ``xyz`` passes by."""
    assert hits(["abc", "xyz", "abc"], 3) == [0, 0, 3]


def test_a_use_that_cannot_be_a_hit_is_no_use() -> None:
    """The last token of the second ``ab`` is computed anyway: only ``a`` is worth a page, and ``cd`` takes the other two."""
    assert hits(["ab", "cde", "ab", "cde"], 3, recompute=True) == [0, 0, 1, 2]
    assert hits(["ab", "ab", "abc"], 3, recompute=True) == [0, 1, 2]


def test_a_request_that_no_policy_could_serve_is_rejected() -> None:
    outcome = play(requests_of(["ab", "abcd", "ab"]), 3)
    assert outcome.status.tolist() == [0, REJECTED, 0]
    assert outcome.hit_pages[:, 0].tolist() == [0, 0, 2]


def test_pages_inserted_less_pages_evicted_are_there() -> None:
    """Computed: ab, cd and d again, since only one page of ``cd`` found room beside ``a``; nothing is used again in the end."""
    outcome = play(requests_of(["ab", "cd", "a", "cd"]), 2)
    use = outcome.tiers["gpu"]
    assert (use.inserted_pages, use.evicted_pages, use.peak_pages) == (5, 5, 2)


def with_answers(words: list[tuple[str, str]]) -> list[Request]:
    """Requests of words and their answers, a page each letter and one token more, whose page is not kept."""
    whole = requests_of([word + answer for word, answer in words])
    return [
        replace(
            request,
            prompt_tokens=4 * len(word),
            output_tokens=4 * len(answer) + 1,
            runs=split_extents(request.runs, len(word))[0],
            prompt_pages=len(word),
            output_runs=split_extents(request.runs, len(word))[1],
        )
        for request, (word, answer) in zip(whole, words, strict=True)
    ]


def play_answers(requests: list[Request], eviction: str, capacity: int, *, cache_output: bool = True) -> Outcome:
    policy = Belady() if eviction == "belady" else LRU()
    tier = TierPlan(name="gpu", capacity_pages=capacity, eviction=policy, placement=None)
    rules = Rules(recompute_last_token=False, cache_output=cache_output)
    return run_replay(replace(plan(), tiers=[tier], rules=rules), requests)


def test_pages_of_answers_are_hit_by_later_prompts() -> None:
    """ab is answered with c. Inserted are ab, c, and d; where answers are not kept, c is computed again."""
    requests = with_answers([("ab", "c"), ("abcd", "")])
    kept, dropped = play_answers(requests, "belady", 5), play_answers(requests, "belady", 5, cache_output=False)
    assert (kept.hit_pages[:, 0].tolist(), kept.tiers["gpu"].inserted_pages) == ([0, 3], 4)
    assert (dropped.hit_pages[:, 0].tolist(), dropped.tiers["gpu"].inserted_pages) == ([0, 2], 4)


def test_an_answer_that_was_known_before_is_no_hit() -> None:
    """The second answer is the first again: only a is worth a page until then, and abc afterwards."""
    requests = with_answers([("a", "bc"), ("a", "bc"), ("abc", "")])
    assert play_answers(requests, "belady", 5).hit_pages[:, 0].tolist() == [0, 1, 3]


LETTERS = st.tuples(st.text("ab", min_size=1, max_size=4), st.text("ab", max_size=3))


@given(words=st.lists(LETTERS, min_size=1, max_size=20), capacity=st.integers(8, 14))
@settings(max_examples=40)
def test_with_answers_lru_hits_no_more(words: list[tuple[str, str]], capacity: int) -> None:
    requests = with_answers(words)
    bound = play_answers(requests, "belady", capacity).hit_pages.sum()
    assert bound >= play_answers(requests, "lru", capacity).hit_pages.sum()
    tiers = [TierPlan(name=name, capacity_pages=capacity, eviction=LRU(), placement=None) for name in ("gpu", "cpu")]
    rules = Rules(recompute_last_token=False, cache_output=True)
    of_two = upper_bound(replace(plan(), tiers=tiers, rules=rules), requests).hit_pages.sum()
    assert of_two == play_answers(requests, "belady", 2 * capacity).hit_pages.sum() >= bound


def page_by_page(requests: list[Request], capacity: int, recompute: bool) -> list[int]:
    """MIN with a set of pages: insert the whole prompt, drop what is never hit again, then what is hit last, deepest first."""
    prompts = [[page for start, pages in request.runs for page in range(start, start + pages)] for request in requests]
    usable = usable_pages(requests, 4, recompute)
    kept: set[int] = set()
    depth: dict[int, int] = {}
    rows = []
    for number, prompt in enumerate(prompts):
        if len(prompt) > capacity:
            rows.append(0)
            continue
        hit = 0
        while hit < usable[number] and prompt[hit] in kept:
            hit += 1
        rows.append(hit)
        kept.update(prompt)
        depth.update({page: place for place, page in enumerate(prompt)})
        next_use = {}
        for page in kept:
            later = (j for j in range(number + 1, len(prompts)) if len(prompts[j]) <= capacity and page in prompts[j])
            user = next(later, None)
            if user is not None and depth[page] < usable[user]:
                next_use[page] = user
        kept = set(sorted(next_use, key=lambda page: (next_use[page], depth[page]))[:capacity])
    return rows


@given(requests=branching_requests(), capacity=st.integers(1, 12), recompute=st.booleans())
def test_counting_by_next_use_hits_what_a_set_of_pages_hits(requests: list[Request], capacity: int, recompute: bool) -> None:
    outcome = play(requests, capacity, recompute=recompute)
    assert outcome.hit_pages[:, 0].tolist() == page_by_page(requests, capacity, recompute)


def best_of_all(words: list[str], capacity: int) -> int:
    """The most hits, over everything that could be kept after each request."""

    @cache
    def best(number: int, kept: frozenset[str]) -> int:
        if number == len(words):
            return 0
        prompt = [words[number][:end] for end in range(1, len(words[number]) + 1)]
        hit = next((place for place, page in enumerate(prompt) if page not in kept), len(prompt))
        there = sorted(kept | set(prompt))
        choices = (frozenset(some) for size in range(capacity + 1) for some in combinations(there, size))
        return hit + max(best(number + 1, some) for some in choices)

    return best(0, frozenset())


@given(st.lists(st.text("ab", min_size=1, max_size=2), min_size=1, max_size=7), st.integers(2, 3))
@settings(max_examples=60)
def test_nothing_that_could_be_kept_hits_more(words: list[str], capacity: int) -> None:
    assert sum(hits(words, capacity)) == best_of_all(words, capacity)


@given(requests=branching_requests(), capacity=st.integers(6, 12), recompute=st.booleans())
@settings(max_examples=30)
def test_several_tiers_are_bounded_by_one_of_their_sum(requests: list[Request], capacity: int, recompute: bool) -> None:
    """Requests that the GPU rejects are rejected; the others hit as in one tier of three times the pages."""
    three = play(requests, capacity, recompute=recompute, tiers=3)
    fitting = [request for request in requests if request.prompt_pages <= capacity]
    one = play(fitting, 3 * capacity, recompute=recompute)
    assert three.hit_pages.sum() == one.hit_pages.sum()
    assert np.count_nonzero(three.status == REJECTED) == len(requests) - len(fitting)


@pytest.mark.long
@pytest.mark.parametrize(
    ("capacity", "page_hit_rate", "hit_rate_of_last_half"),
    [(1_000, 0.190707, 0.197028), (5_859, 0.353151, 0.376177), (10_000, 0.366412, 0.398113), (50_000, 0.366412, 0.398113)],
)
def test_the_bound_on_conversation(shared: Path, capacity: int, page_hit_rate: float, hit_rate_of_last_half: float) -> None:
    path = shared / "traces" / "mooncake_conversation_trace.jsonl.gz"
    trace = load_trace("mooncake", path=path, tail="all", page_tokens=512)
    same = (f"tiers.gpu.capacity={capacity}pages", "rules.recompute_last_token=false", "replay.hold_output=false")
    bound = replay(trace, *same, "eviction=belady")
    assert bound.page_hit_rate == pytest.approx(page_hit_rate, abs=5e-7)
    assert replay(trace, *same, "eviction=belady", "warmup=0.5").hit_rate == pytest.approx(hit_rate_of_last_half, abs=5e-7)
    for policy in ("lru", "lfu", "slru"):
        assert replay(trace, *same, f"eviction={policy}").hit_rate <= bound.hit_rate


@pytest.mark.parametrize(
    ("run", "overrides", "expected"),
    [
        (simulate, (), "eviction: Belady is a bound for kvsim replay with one tier only: choose another policy"),
        (replay, ("tiers.cpu.capacity=1GiB",), "eviction: Belady is a bound for kvsim replay with one tier only"),
        (replay, ("replay.in_flight=2",), "replay.in_flight has no effect on Belady"),
        (replay, ("rules=sglang",), "eviction: Belady is a bound under kvsim's own rules: set rules=default"),
        (replay, ("rules=vllm",), "eviction: Belady is a bound under kvsim's own rules: set rules=default"),
        (replay, ("print_tree=true", "tiers.gpu.capacity=1GiB"), "print_tree has no effect on Belady, which has no tree"),
    ],
)
def test_where_it_is_no_bound_it_is_refused(run: object, overrides: tuple[str, ...], expected: str) -> None:
    trace = load_trace("words", prompts=["a b"])
    with pytest.raises(UsageError) as error:
        run(trace, *overrides, eviction=Belady())  # type: ignore[operator]
    assert str(error.value).startswith(expected)
