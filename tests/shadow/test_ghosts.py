"""Ghosts hit exactly what ``kvsim replay`` hits on the recorded trace, whatever was forgotten meanwhile."""

from collections.abc import Sequence
from functools import cache
from math import nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.request import Request, Reset
from kvsim.errors import UsageError
from kvsim.plans.plan import Plan
from kvsim.run import play
from kvsim.shadow.ghost import Ghost
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.settings import ShadowSettings
from kvsim.shadow.shadow import Shadow
from kvsim.trace.memory import trace_from_tokens
from kvsim.trace.mooncake import Mooncake
from tests import composing
from tests.shadow.live import from_requests, from_tokens
from tests.workloads import EXAMPLES, conversations

SMALL = ("tiers.gpu.capacity=24pages", "tiers.cpu.capacity=40pages")
ENGINES = {
    "preset=vllm": SMALL[:1],
    "preset=vllm_offload": SMALL,
    "preset=vllm_offload eviction@tiers.cpu.eviction=arc": SMALL,
    "preset=sglang": SMALL[:1],
    "preset=sglang_hicache": SMALL,
    "preset=sglang_hicache prefetch=threshold": (*SMALL, "tiers.disk.capacity=200pages"),
    "preset=fastdeploy": SMALL,
    "preset=lightllm": SMALL,
    "preset=lightllm tiers.cpu.page_tokens=32": SMALL,
    "preset=marconi": ("tiers.gpu.capacity=60pages",),
    "rules=default": (*SMALL, "tiers.disk.capacity=60pages"),
    "eviction=lfu": SMALL,
}
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
EXCHANGES = st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 1), min_size=1, max_size=9)), min_size=1, max_size=30)


@cache
def _plan(*overrides: str) -> Plan:
    return composing.plan(*overrides)


def plan(*overrides: str) -> Plan:
    """The plan of a replay, for one run of it."""
    return _plan(*overrides).with_own_policies()


def hits_of_replay(requests: list[Request], *overrides: str) -> list[tuple[int, ...] | None]:
    """The hits of each request in a replay; None for one that is rejected."""
    outcome = play.replay(plan(*overrides), requests)
    rows = zip(outcome.hit_pages.tolist(), outcome.status.tolist(), strict=True)
    return [None if status else tuple(hits) for hits, status in rows]


class Recording(Ghost):
    """A ghost that keeps the hits of each request."""

    def __init__(self, name: str, *rest: object) -> None:
        super().__init__(name, *rest)  # type: ignore[arg-type]
        self.rows: list[tuple[int, ...] | None] = []

    def serve(self, engine, request, cached_tokens=None, **about):  # type: ignore[no-untyped-def]
        hits = super().serve(engine, request, cached_tokens, **about)
        self.rows.append(None if hits is None else (*hits, *[0] * (len(self.tiers) - len(hits)))[: len(self.tiers)])
        return hits


def hits_of_ghosts(
    requests: Sequence[LiveRequest], page_tokens: int, *ghosts: tuple[str, ...], forget: bool = False
) -> list[list[tuple[int, ...] | None]]:  # fmt: skip
    """The hits of each request in each ghost; with ``forget``, what no ghost holds is forgotten after every request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsim.shadow.shadow.Ghost", Recording)
        plans = {str(at): plan(*overrides) for at, overrides in enumerate(ghosts)}
        shadow = Shadow(plans, page_tokens, ShadowSettings(salt=""))
    for request in requests:
        shadow.request(request)
        if forget:
            shadow._bound._forget(with_recent=False)
            for prompts in shadow._prompts.values():
                prompts.index.check()
    assert shadow.snapshot().requests == len(requests), shadow.last_problem
    return [ghost.rows for ghost in shadow.ghosts]  # type: ignore[attr-defined]


def test_hits_of_a_hand_sized_stream() -> None:
    """Pages of 4 tokens, a GPU of 4 pages: the second prompt hits two pages, and pushes out the tail of the first."""
    requests = [from_tokens(range(12), page_tokens=4), from_tokens([*range(8), 90, 91, 92, 93], page_tokens=4, at_s=1)]
    requests += [from_tokens(range(12), page_tokens=4, at_s=2)]
    shadow = Shadow(
        {"engine": plan("page_tokens=4", "tiers.gpu.capacity=3pages", "replay.hold_output=false")}, 4, ShadowSettings()
    )
    for request in requests:
        shadow.request(request)
    (ghost,) = shadow.snapshot().ghosts
    assert (ghost.requests, ghost.rejected) == (3, 0)
    assert ghost.hit_rate == (0 + 8 + 8) / 36
    assert ghost.recent_hit_rate == ghost.hit_rate
    assert ghost.occupancy == {"gpu": (3, 3)}


@pytest.mark.parametrize(
    ("engine", "forget"), [(engine, forget) for engine in ENGINES for forget in (False, True) if not (forget and "arc" in engine)]
)
def test_every_engine_s_rules_hit_what_their_replay_hits(engine: str, forget: bool) -> None:
    """Forgetting changes no hit, but for policies that remember pages that have left, as ARC does."""
    requests = conversations(2, requests=60, page_tokens=16)
    overrides = (*engine.split(), "page_tokens=16", *ENGINES[engine])
    ghosts = hits_of_ghosts(from_requests(requests), 16, overrides, forget=forget)
    assert ghosts == [hits_of_replay(requests, *overrides)]
    assert any(row and sum(row) for row in ghosts[0])


@given(EXCHANGES, st.integers(1, 3), st.booleans())
@settings(max_examples=EXAMPLES)
def test_pages_of_any_multiple_hit_what_a_replay_of_the_tokens_hits(exchanges, in_flight: int, forget: bool) -> None:
    """Each ghost has the hits of a replay of the same tokens, cut into pages of its own size."""
    sizes = (2, 4, 6)
    ghosts = [
        (f"page_tokens={size}", "tiers.gpu.capacity=40tokens", "tiers.cpu.capacity=48tokens", f"replay.in_flight={in_flight}")
        for size in sizes
    ]
    live = [from_tokens(prompt, answer, page_tokens=2, at_s=at) for at, (prompt, answer) in enumerate(exchanges)]
    rows = hits_of_ghosts(live, 2, *ghosts, forget=forget)
    for size, overrides, row in zip(sizes, ghosts, rows, strict=True):
        trace = trace_from_tokens(
            [prompt for prompt, _ in exchanges],
            answers=[answer for _, answer in exchanges],
            arrivals_s=list(map(float, range(len(exchanges)))),
            page_tokens=size,
        )
        assert row == hits_of_replay(trace.requests, *overrides)


@pytest.mark.parametrize("rules", ["default", "vllm"])
def test_a_reset_is_that_of_a_replay(rules: str) -> None:
    """A trace whose cache is reset before every seventh request."""
    requests = conversations(2, requests=40, page_tokens=16)
    live = from_requests(requests)
    for at in range(7, len(requests), 7):
        requests[at].resets = (Reset("drain", nan),)
        live[at] = live[at]._replace(after_reset=True)
    overrides = (f"rules={rules}", "page_tokens=16", *SMALL[:1])
    if rules == "default":
        assert hits_of_ghosts(live, 16, overrides) == [hits_of_replay(requests, *overrides)]
    else:  # a replay by rules of engines that know no resets begins anew
        parts = [requests[begin : begin + 7] for begin in range(0, len(requests), 7)]
        for request in requests:
            request.resets = ()
        assert hits_of_ghosts(live, 16, overrides) == [[row for part in parts for row in hits_of_replay(part, *overrides)]]


def test_mooncake_s_conversations(shared: Path) -> None:
    """A real trace, in its own pages and in twice as large ones, against kvsim replay."""
    path = str(shared / "traces" / "mooncake_conversation_trace.jsonl.gz")
    source = Mooncake(path=path, limit=1200)
    live = from_requests(source.load(512).requests)
    ghosts = [
        ("page_tokens=512", "preset=vllm", "tiers.gpu.capacity=3000pages", "rules.cache_output=false"),
        ("page_tokens=512", "tiers.gpu.capacity=3000pages", "tiers.cpu.capacity=6000pages", "eviction=arc"),
        ("page_tokens=1024", "tiers.gpu.capacity=1500pages", "tiers.cpu.capacity=3000pages"),
    ]
    rows = hits_of_ghosts(live, 512, *ghosts)
    for overrides, row in zip(ghosts, rows, strict=True):
        requests = source.load(1024 if "page_tokens=1024" in overrides else 512).requests
        assert row == hits_of_replay(requests, *overrides)


def test_a_ghost_that_needs_the_future_is_refused() -> None:
    with pytest.raises(UsageError, match="ghost best: eviction: Belady must know all requests in advance"):
        Shadow({"best": plan("eviction=belady")}, 16, ShadowSettings())


def test_a_page_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(UsageError, match="page_tokens=24 must be a multiple of the 16 tokens"):
        Shadow({"odd": plan("page_tokens=24")}, 16, ShadowSettings())


def test_each_engine_has_a_cache_of_its_own() -> None:
    shadow = Shadow({"engine": plan("page_tokens=4", "tiers.gpu.capacity=8pages")}, 4, ShadowSettings())
    for engine in ("a", "b", "a"):
        shadow.request(from_tokens(range(9), page_tokens=4)._replace(engine=engine))
    (ghost,) = shadow.snapshot().ghosts
    assert ghost.hit_rate == 8 / 27
    assert ghost.occupancy == {"gpu": (3 + 3, 2 * 8)}  # neither last request has ended: each holds a page for its tail


def test_points_differences_and_the_engine_s_own_hits() -> None:
    base = ("page_tokens=4", "tiers.gpu.capacity=4pages")
    shadow = Shadow({"engine": plan(*base), "twice": plan(*base, "tiers.gpu.capacity=8pages")}, 4, ShadowSettings())
    for at, word in enumerate((range(12), range(20, 32), range(12))):
        cached = 0 if at < 2 else 8
        shadow.request(from_tokens(word, page_tokens=4, at_s=at)._replace(cached_tokens=cached))
    engine, twice = shadow.snapshot().ghosts
    assert (engine.differs, twice.differs) == ("", "tiers.gpu.capacity=8pages")
    assert engine.points == 0
    assert twice.points == pytest.approx(100 * (8 / 36 - engine.hit_rate))
    assert (twice.checked_requests, twice.alike_requests, twice.engine_points) == (3, 3, 0)
    assert engine.engine_points == pytest.approx(100 * (engine.hit_rate - 8 / 36))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"prompt_tokens": 0}, "no tokens"),
        ({"prompt_tokens": 7}, "more pages than its prompt"),
        ({"output_keys": (b"x",) * 3, "output_tokens": 8}, "more pages than tokens"),
        ({"arrival_s": float("nan")}, "no time of arrival"),
    ],
)
def test_a_request_with_something_wrong_is_counted_and_left_out(wrong: dict, why: str) -> None:
    shadow = Shadow({"engine": plan("page_tokens=4", "tiers.gpu.capacity=8pages")}, 4, ShadowSettings())
    shadow.request(from_tokens(range(9), page_tokens=4)._replace(**wrong))
    seen = shadow.snapshot()
    assert (seen.requests, seen.skipped, seen.ghosts[0].requests) == (0, 1, 0)
    assert why in seen.notes[0]


def test_time_never_goes_back() -> None:
    shadow = Shadow({"engine": plan("page_tokens=4", "tiers.gpu.capacity=8pages")}, 4, ShadowSettings())
    for at_s in (5.0, 4.0, 6.0):
        shadow.request(from_tokens(range(9), page_tokens=4, at_s=at_s))
    seen = shadow.snapshot()
    assert (seen.requests, seen.late, seen.at_s) == (3, 1, 6.0)


def test_engines_beyond_the_most_are_left_out() -> None:
    shadow = Shadow({"engine": plan("page_tokens=4", "tiers.gpu.capacity=8pages")}, 4, ShadowSettings(most_engines=1))
    for engine in ("a", "b", "a"):
        shadow.request(from_tokens(range(9), page_tokens=4)._replace(engine=engine))
    assert (shadow.snapshot().requests, shadow.snapshot().skipped) == (2, 1)
