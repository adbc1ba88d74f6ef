"""The seconds in which a request's own reads are under way. See small.py for the round numbers."""

import random

import numpy as np
import pytest

from kvsim.engine.read_times import Reads, covered_s
from tests.engine.small import ask, eager, seconds, small_engine

A, B, C = "abcd", "efgh", "ijkl"
ON_DISK = (ask(A), ask(B, 100), ask(C, 200))
"""With 5 pages on the GPU and 4 in the CPU tier, the disk alone has A now."""


def test_nothing_read_takes_no_time() -> None:
    outcome = small_engine(gpu=5, cpu=20).serve(ask(A), ask(A, 100))
    assert outcome.columns["read_s"].tolist() == [[0, 0], [0, 0]]


def test_a_load_queues_on_its_link() -> None:
    """Two pages each, at the same time: the second request's load waits 2 s for the link."""
    outcome = small_engine(gpu=6, cpu=20).serve(ask("ab"), ask("cd", 100), ask("uvwxy", 200), ask("ab", 300), ask("cd", 300))
    assert outcome.columns["read_s"][:, 0].tolist() == seconds([0, 0, 0, 2, 4])


def test_who_waits_for_the_load_of_another_has_none_of_its_own() -> None:
    outcome = small_engine(gpu=9, cpu=30).serve(ask(A), ask("efghijkl", 100), ask(A, 200), ask(A, 201))
    assert outcome.hit_pages[3].tolist() == [4, 0, 0]
    assert outcome.columns["read_s"][:, 0].tolist() == seconds([0, 0, 4, 0])


def test_pages_from_disk_take_time_on_both_links() -> None:
    """Four pages at 2 s from disk into the CPU tier, then at 1 s to the GPU."""
    outcome = small_engine(gpu=5, cpu=4, disk=40).serve(*ON_DISK, ask(A, 300))
    assert outcome.columns["read_s"][3].tolist() == seconds([4, 8])


def test_a_fetch_counts_for_the_request_that_it_was_made_for() -> None:
    outcome = small_engine(gpu=5, cpu=4, disk=40, prefetch=eager(stop="wait_complete")).serve(*ON_DISK, ask(A, 300))
    assert outcome.columns["read_s"][3].tolist() == seconds([4, 8])


@pytest.mark.parametrize("seed", range(5))
def test_overlapping_spans_count_once(seed: int) -> None:
    rng = random.Random(seed)
    spans = [(begin, begin + rng.randrange(5)) for begin in rng.sample(range(30), 8)]
    covered = np.zeros(40, bool)
    for begin, end in spans:
        covered[begin:end] = True
    assert covered_s([(float(begin), float(end)) for begin, end in spans]) == np.count_nonzero(covered)


@pytest.mark.parametrize("seed", range(5))
def test_the_reads_of_each_request_are_taken_together(seed: int) -> None:
    """Some requests have none, some one, and some several, which end in any order."""
    rng, reads = random.Random(seed), Reads()
    spans: dict[int, list[tuple[float, float]]] = {}
    for _ in range(30):
        request, begin, length = rng.randrange(25), rng.random(), rng.choice([0.0, rng.random()])
        spans.setdefault(request, []).append((begin, begin + length))
        reads.requests.append(request)
        reads.begins_s.append(begin)
        reads.ends_s.append(begin + length)
    assert {len(own) for own in spans.values()} >= {1, 2}
    assert reads.seconds(26).tolist() == [covered_s(spans.get(request, [])) for request in range(26)]
