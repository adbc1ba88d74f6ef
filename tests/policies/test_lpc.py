"""LPC: its formula by hand, and the order against the chances of all leaves."""

from math import exp, log
from random import Random
from typing import Any

import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lpc import LearnedPrefix
from tests.core.small import SmallCache, offered, small_cache
from tests.workloads import make_request, random_word


def filled(*uses: tuple[str, int, str, int], interval_s: float = 100.0, gpu: int = 40) -> SmallCache:
    """Words, each used by a request of (session, type, turn)."""
    cache = small_cache(gpu=gpu, eviction=lambda: LearnedPrefix(interval_s=interval_s))
    for index, (word, session, kind, turn) in enumerate(uses):
        cache.use(word, index=index, session=session, kind=kind, turn=turn)
    return cache


CHATS_GO_ON = [(word, session, "chat", turn) for session, word in enumerate("abc") for turn in range(3)]


def test_chances_are_counted_by_type_and_turn() -> None:
    """Three chats of three turns: (3 + 1) / (3 + 2) of the first turns go on, (0 + 1) / (3 + 2) of the last."""
    policy = filled(*CHATS_GO_ON).gpu.eviction
    assert policy.odds("chat", 0) == pytest.approx(0.8 / 0.2)
    assert policy.odds("chat", 2) == pytest.approx(0.2 / 0.8)
    assert policy.odds("search", 0) == 1, "never seen"


def test_the_order_is_that_of_the_decayed_chance() -> None:
    """At odds of 4 and 1/4, log-odds differ by 2 log 4: as much as 277 s of silence if turns come 100 s apart."""
    cache = filled(*CHATS_GO_ON, ("x", 9, "chat", 0))
    policy, x, c = cache.gpu.eviction, cache.node("x"), cache.node("c")
    assert policy.rank(c)[0] == pytest.approx(log(policy.odds("chat", 2)) + c.last_used / 100, abs=0.06)
    assert policy.rank(x)[0] - policy.rank(c)[0] > 2
    assert cache.leaving_order() == "cbax", "of the last turns, the first one was given a chance of 1/3, the last one 1/5"


def test_a_long_silence_outweighs_a_high_chance() -> None:
    """x is likely to go on, but turns come a second apart, and it has been silent for four."""
    uses = *CHATS_GO_ON, ("x", 9, "chat", 0), ("y", 8, "chat", 2)
    assert filled(*uses, interval_s=1.0).leaving_order()[-2:] == "xy"
    assert filled(*uses).leaving_order()[-1] == "x"


def test_of_shared_pages_the_likeliest_conversation_counts() -> None:
    """s is shared by one that goes on and, later, by one that does not."""
    cache = filled(*CHATS_GO_ON, ("s", 9, "chat", 0), ("s", 8, "chat", 2))
    assert cache.node("s").notes[0][1] == 9
    cache.use("s", index=20, session=9, kind="chat", turn=2)
    assert cache.node("s").notes[0][1] == 9, "what the same one says replaces what it has said"
    assert cache.node("s").notes[0][0] < 1


def test_requests_without_a_session_are_never_continued() -> None:
    policy = filled(("a", -1, "chat", 0), ("b", -1, "chat", 0)).gpu.eviction
    assert policy.odds("chat", 0) == pytest.approx((1 / 4) / (3 / 4))


@pytest.mark.parametrize("seed", range(4))
def test_the_victim_has_the_lowest_chance_of_all(seed: int) -> None:
    """By the paper's formula, from counts kept apart; each conversation has its own pages."""
    random, interval_s = Random(seed), 20.0
    cache = small_cache(gpu=30, eviction=lambda: LearnedPrefix(interval_s=interval_s))
    counts: dict[Any, list[int]] = {}
    last: dict[int, Any] = {}
    for index in range(120):
        session, word = random.randrange(6), random_word(random, longest=3)
        turn = last[session][1] + 1 if session in last else 0
        about = {"session": session, "kind": "xy"[session % 2], "turn": turn % 4}
        if session in last:
            counts[last[session][0]][1] += 1
        counts.setdefault((about["kind"], about["turn"]), [0, 0])[0] += 1
        last[session] = (about["kind"], about["turn"]), turn
        cache.use(f"{session}{word}", index=index, **about)
        requests, continued = counts[about["kind"], about["turn"]]
        chance = cache.gpu.eviction.odds(about["kind"], about["turn"])
        assert chance / (1 + chance) == pytest.approx((continued + 1) / (requests + 2))
    now = float(next(cache.clock))
    leaves = offered(cache.gpu.eviction, now)
    chances = [decayed(*node.notes[0], now, interval_s) for node in leaves]
    assert chances == sorted(chances) and len(leaves) > 5


def decayed(rank: float, _session: int, now: float, interval_s: float) -> float:
    """The chance at ``now`` from log(p / (1 - p)) + t / interval."""
    odds = exp(rank - now / interval_s)
    return odds / (1 + odds)


def test_the_rank_orders_as_the_formula_does() -> None:
    """p d / (p d + 1 - p) for two conversations, at any later moment."""
    policy = LearnedPrefix(interval_s=7.0)
    for p, since, q, later in ((0.9, 0.0, 0.3, 12.0), (0.9, 0.0, 0.3, 30.0), (0.5, 3.0, 0.5, 4.0)):
        ranks = log(p / (1 - p)) + since / policy.interval_s, log(q / (1 - q)) + later / policy.interval_s
        for now in (31.0, 50.0, 90.0):
            d, e = exp(-(now - since) / 7), exp(-(now - later) / 7)
            assert (ranks[0] < ranks[1]) == (p * d / (p * d + 1 - p) < q * e / (q * e + 1 - q))


def test_settings_and_sessions_are_needed() -> None:
    with pytest.raises(ValueError, match="interval_s must be above 0, not 0"):
        LearnedPrefix(interval_s=0)
    with pytest.raises(ValueError, match="needs the session of each request"):
        LearnedPrefix().bind(PolicyContext(requests=[make_request([0])]))
