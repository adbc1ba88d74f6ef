"""Leaves of one rank leave in order, however they came; and what is removed in between is forgotten."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.tree import RadixTree
from kvsim.policies.eviction.graded import Entry, Grade
from kvsim.policies.eviction.leaf_queue import LEFT
from kvsim.policies.eviction.leaves import Pool
from tests.workloads import EXAMPLES

NODE = RadixTree(1).root


@given(steps=st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(0, 9))), max_size=400))
@settings(max_examples=EXAMPLES)
def test_a_grade_is_a_sorted_list(steps: list[tuple[int, int] | None]) -> None:
    """A step adds an entry or, if it is None, removes the first one."""
    slow: list[tuple[float, float]] = []
    grade = Grade(1.0)
    for step in steps:
        if step is not None:
            used_s, place = float(step[0]), float(step[1])
            slow.append((used_s, place))
            grade.add(Entry(used_s, place, NODE))
        elif slow:
            first = grade.first()
            assert (first.used_s, first.place) == min(slow)
            slow.remove(min(slow))
            assert grade.pop() is first and grade.is_empty() == (not slow)
        assert sorted((entry.used_s, entry.place) for entry in grade.all()) == sorted(slow)


def test_places_of_entries_that_have_left_are_freed() -> None:
    grade = Grade(1.0)
    grade.add(Entry(0.0, 0.0, NODE))
    for number in range(1, 1000):
        grade.add(Entry(float(number), 0.0, NODE))
        assert grade.pop().used_s == number - 1 and not grade.is_empty()
        assert len(grade.by_use.entries) <= LEFT + 2


def test_a_leaf_that_is_taken_is_gone_and_the_last_one_takes_its_place() -> None:
    tree, leaves = RadixTree(1), Pool()
    first, second, third = nodes = [tree.add(tree.root, ((number, 1),), 1, 0.0) for number in range(3)]
    for node in nodes:
        leaves.add(node)
    assert leaves.take(0) is first and leaves.nodes == [third, second]
    assert leaves.take(1) is second and leaves.nodes == [third] and leaves.members == {third}
    assert leaves.take(0) is third and not leaves.nodes and not leaves.members
