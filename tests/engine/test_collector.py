"""The garbage collector during and after runs."""

import gc
from collections.abc import Iterator

import pytest

from kvsim.engine import collector
from kvsim.engine.collector import SEARCHED_EVERY, freeze, seldom_collecting, without_garbage_collector


@pytest.fixture
def is_frozen() -> Iterator[list[bool]]:
    """Whether kvsim knows of frozen objects: not at first."""
    before = collector._is_frozen[0]
    collector._is_frozen[0] = False
    yield collector._is_frozen
    collector._is_frozen[0] = before
    gc.unfreeze()
    if before:
        gc.freeze()


def test_a_run_is_not_searched_and_what_it_made_is_old_afterwards(is_frozen: list[bool]) -> None:
    gc.collect()
    with without_garbage_collector():
        assert not gc.isenabled()
        kept = [[number] for number in range(5_000)]
    assert gc.isenabled() and gc.get_freeze_count() == 0 and len(kept) == 5_000
    assert not any(made is some for made in gc.get_objects(generation=0) for some in kept[:3])


def test_what_is_frozen_stays_frozen_through_a_run(is_frozen: list[bool]) -> None:
    kept = [[number] for number in range(3)]
    freeze()
    with without_garbage_collector():
        pass
    assert not any(alive is some for alive in gc.get_objects() for some in kept)


def test_a_run_does_not_count_what_is_frozen(is_frozen: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting takes a second for a hundred million objects, and a sweep has many short runs."""
    freeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("frozen objects were counted"))
    with without_garbage_collector():
        pass


def test_the_collector_searches_seldom_during_a_block_only() -> None:
    before = gc.get_threshold()
    with seldom_collecting():
        assert gc.isenabled() and gc.get_threshold()[0] == SEARCHED_EVERY > before[0]
    assert gc.get_threshold() == before
