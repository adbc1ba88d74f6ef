"""The index of owners of pages, against a set of pages for each engine."""

from random import Random

import pytest

from kvsim.pages.extents import Extent
from kvsim.pages.page_owners import BLOCK_BITS, MANY, Leading, OwnCounts, PageOwners
from tests.workloads import pages_of


def pages_by_engine(leading: Leading, engines: int) -> list[int]:
    """The pages of each; none has more than ``most`` says."""
    pages: list[int] = leading.of_all(engines).tolist()
    assert max(pages) <= leading.most()
    return pages


def leading_pages(extents: tuple[Extent, ...], owned: set[int]) -> int:
    pages = pages_of(extents)
    return next((at for at, page in enumerate(pages) if page not in owned), len(pages))


def test_each_engine_owns_a_path_up_to_its_first_gap() -> None:
    """Engine 0 has pages 0 to 5 and 10 to 12; engine 1 has 0 to 2 and 4, 5; engine 2 has none of the first ones."""
    owners = PageOwners(4)
    owners.add(0, 0, 6)
    owners.add(0, 10, 13)
    owners.add(1, 0, 6)
    owners.remove(1, 3, 4)
    owners.add(2, 3, 20)
    assert pages_by_engine(owners.leading(((0, 6), (10, 5))), 4) == [9, 3, 0, 0]
    assert sorted(owners.of(3)) == [0, 2] and sorted(owners.of(0)) == [0, 1] and sorted(owners.of(19)) == [2]
    assert list(owners.of(20)) == list(owners.of(100_000)) == []


def test_pieces_that_the_same_engines_own_become_one() -> None:
    owners = PageOwners(2)
    for start in range(0, 100, 10):
        owners.add(0, start, start + 10)
    assert len(owners._segments[0]) == 10
    assert pages_by_engine(owners.leading(((0, 100),)), 2) == [100, 0]
    assert len(owners._segments[0]) == 1


def test_what_nobody_owns_takes_no_room() -> None:
    owners = PageOwners(2)
    owners.add(0, 10, 3 << BLOCK_BITS)
    owners.add(1, 12, 20)
    assert len(owners._segments) == 3
    owners.remove(1, 12, 20)
    owners.remove(0, 10, 3 << BLOCK_BITS)
    assert owners._segments == owners._starts == {}


@pytest.mark.parametrize(("engines", "steps"), [(1, 200), (3, 400), (MANY + 40, 1500), (3 * MANY, 2500)])
@pytest.mark.parametrize("seed", range(3))
def test_the_index_is_that_of_single_pages(engines: int, steps: int, seed: int) -> None:
    """Around the end of a block, with pages that nearly all engines own at times, and few at others."""
    random, owners = Random(seed), PageOwners(engines)
    owned: list[set[int]] = [set() for _ in range(engines)]
    base, wide = (1 << BLOCK_BITS) - 12, 0
    for step in range(steps):
        engine, start = random.randrange(engines), base + random.randrange(24)
        end = start + random.randint(1, 8)
        if random.random() < (0.85 if step % 1000 < 700 else 0.1):
            owners.add(engine, start, end)
            owned[engine] |= set(range(start, end))
        else:
            owners.remove(engine, start, end)
            owned[engine] -= set(range(start, end))
        if step % 5 == 0:
            first = base + random.randrange(20)
            path = ((first, random.randint(1, 6)), (base + random.randrange(24), random.randint(1, 6)))
            found = owners.leading(path)
            wide += bool(found.many)
            assert pages_by_engine(found, engines) == [leading_pages(path, pages) for pages in owned]
            assert sorted(owners.of(first)) == [number for number, pages in enumerate(owned) if first in pages]
    assert (wide > 0) == (engines > MANY)


def test_counted_pages_are_owned_until_the_last_count_is_gone() -> None:
    owners = PageOwners(2)
    counts = OwnCounts(owners, 1)
    counts.add(((0, 4),))
    counts.add(((2, 4),))
    counts.remove(((0, 4),))
    assert pages_by_engine(owners.leading(((0, 6),)), 2) == [0, 0]
    assert pages_by_engine(owners.leading(((2, 6),)), 2) == [0, 4]
