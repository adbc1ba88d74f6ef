"""A shadow beside engines: their events, the requests made of them, gaps, restarts, and what it shows."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.shadow.live import LiveRequest
from kvsim.shadow.settings import ShadowSettings
from kvsim.shadow.shadow import Shadow
from tests.shadow.test_ghosts import plan
from tests.shadow.test_mirror import EVENTS
from tests.shadow.written import CLEARED, PAGE_TOKENS, batch, removed, stored
from tests.workloads import EXAMPLES

PLAN = (f"page_tokens={PAGE_TOKENS}", "rules=vllm", "tiers.gpu.capacity=8pages")


def shadow_of(**about: object) -> Shadow:
    return Shadow({"engine": plan(*PLAN)}, PAGE_TOKENS, ShadowSettings(salt="", **about))  # type: ignore[arg-type]


def test_events_make_requests_that_the_ghosts_serve() -> None:
    """The second request hits two of its four blocks, by the engine's events and in the ghost."""
    shadow, told = shadow_of(), list[LiveRequest]()
    shadow.on_request = told.append
    shadow.event("e", batch(0.0, stored("abcd")))
    shadow.event("e", batch(1.0, stored("abxy", 2)))
    shadow.flush()
    seen = shadow.snapshot()
    (engine,), (ghost,) = seen.engines, seen.ghosts
    assert (seen.events, seen.requests, len(told)) == (2, 2, 2)
    assert (engine.pages, engine.stored, engine.known, engine.requests) == ({"gpu": 6}, 6, True, 2)
    assert engine.hit_rate == ghost.hit_rate == 2 * PAGE_TOKENS / (2 * (4 * PAGE_TOKENS + 1))
    assert (ghost.checked_requests, ghost.alike_requests, ghost.engine_points) == (2, 2, 0)


def test_batches_lost_before_the_first_event_are_of_one_rank_once() -> None:
    shadow = shadow_of()
    shadow.lost("e", 3, rank=1)
    for rank in (0, 1):
        shadow.event("e", batch(0.0, stored("ab"), rank=rank))
    assert [engine.lost_batches for engine in shadow.snapshot().engines] == [0, 3]
    other = shadow_of()
    other.lost("e", 3, rank=0)
    other.lost("e", 2, rank=1)
    other.restarted("e", rank=1)
    for rank in (0, 1):
        other.event("e", batch(0.0, stored("ab"), rank=rank))
    assert [engine.lost_batches for engine in other.snapshot().engines] == [3, 0]


def test_two_ranks_of_an_engine_have_a_tree_and_a_cache_each() -> None:
    shadow = shadow_of()
    for rank in (0, 1):
        shadow.event("e", batch(0.0, stored("ab"), rank=rank))
    shadow.event("e", batch(1.0, stored("abc", 2), removed("ab"), rank=1))
    shadow.flush()
    one, two = shadow.snapshot().engines
    assert (one.rank, one.pages, two.rank, two.pages) == (0, {"gpu": 2}, 1, {"gpu": 2})
    assert shadow.snapshot().ghosts[0].requests == 2


def test_a_gap_makes_trees_unknown_until_they_are_cleared() -> None:
    shadow = shadow_of()
    shadow.lost("e", 3)
    shadow.event("e", batch(0.0, stored("ab"), rank=0))
    assert [(view.known, view.lost_batches) for view in shadow.snapshot().engines] == [(False, 3)]
    shadow.event("e", batch(0.0, CLEARED, rank=0))
    shadow.event("e", batch(0.0, stored("ab"), rank=1))
    shadow.lost("e", 1, rank=0)
    assert [view.known for view in shadow.snapshot().engines] == [False, False]
    shadow.restarted("e")
    assert [(view.known, view.pages) for view in shadow.snapshot().engines] == [(True, {}), (True, {})]
    assert shadow.snapshot().gaps == 2


def test_ghosts_are_emptied_with_the_engine() -> None:
    shadow = shadow_of()
    shadow.event("e", batch(0.0, stored("abcd")))
    shadow.event("e", batch(1.0, CLEARED))
    shadow.event("e", batch(2.0, stored("abcd")))
    shadow.flush()
    assert shadow.snapshot().ghosts[0].hit_rate == 0.0


def test_requests_of_another_source_are_the_only_ones_where_that_is_said() -> None:
    shadow = shadow_of(requests_from_events=False)
    shadow.event("e", batch(0.0, stored("abcd")))
    shadow.flush()
    assert (shadow.snapshot().requests, shadow.snapshot().engines[0].pages) == (0, {"gpu": 4})


def test_blocks_of_another_size_are_said() -> None:
    shadow = Shadow({"engine": plan("page_tokens=8", *PLAN[1:])}, 8, ShadowSettings())
    shadow.event("e", batch(0.0, stored("abcd")))
    assert "blocks of another size than 8 tokens" in shadow.snapshot().notes[0]


def test_engines_beyond_the_most_are_counted() -> None:
    shadow = shadow_of(most_engines=1)
    shadow.event("e", batch(0.0, stored("ab")))
    shadow.event("f", batch(0.0, stored("ab")))
    assert [view.name for view in shadow.snapshot().engines] == ["e"]
    assert "1 batches of events were of more engines than 1" in shadow.snapshot().notes[0]


BATCHES = st.tuples(
    st.sampled_from("ef"), st.sampled_from([None, 0, 1]), st.floats(0, 300), st.lists(EVENTS, max_size=5), st.integers(0, 9)
)


@given(st.lists(BATCHES, max_size=20))
@settings(max_examples=EXAMPLES)
def test_no_stream_of_any_engines_breaks_a_shadow(batches: list) -> None:
    shadow = shadow_of(most_engines=4)
    for engine, rank, at_s, events, chance in batches:
        if "gap" in events:
            shadow.lost(engine, 1, rank if chance else None)
        if chance == 9:
            shadow.restarted(engine)
        shadow.event(engine, batch(at_s, *[event for event in events if event != "gap"], rank=rank))
        shadow.check()
    shadow.flush()
    shadow.check()
    seen = shadow.snapshot()
    assert seen.requests == sum(ghost.requests + ghost.rejected for ghost in seen.ghosts)
