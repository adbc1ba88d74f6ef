"""The queue of leaves against a list that is sorted anew."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.tree import RadixTree
from kvsim.policies.eviction.leaf_queue import Leaf, LeafQueue
from tests.workloads import EXAMPLES

TREE = RadixTree(1)
NODES = [TREE.add(TREE.root, ((number, 1),), 1, 0.0) for number in range(5)]
STEPS = st.one_of(
    st.none(),
    st.just("compact"),
    st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3), st.sampled_from(NODES)),
)


def order(leaf: Leaf) -> tuple[int, float, int, int]:
    return leaf.place, leaf.used_s, -leaf.end, leaf.number


@given(steps=st.lists(STEPS, max_size=400))
@settings(max_examples=EXAMPLES)
def test_the_lowest_entry_comes_first(steps: list[object]) -> None:
    """A step adds an entry, removes the first one (None), or keeps the last one of each node."""
    slow: list[Leaf] = []
    queue = LeafQueue()
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            place, used, end, node = step
            slow.append(Leaf(place, float(used), end, number, node))
            queue.push(slow[-1])
        elif step is None and slow:
            queue.remove(slow.pop(0))
        elif step == "compact":
            slow = list({leaf.node: leaf for leaf in slow}.values())
            queue.keep_latest(queue.all())
        slow.sort(key=order)
        assert len(queue) == len(slow) == len(queue.all())
        assert queue.first() is (slow[0] if slow else None)


def test_each_source_may_have_the_first_entry() -> None:
    """In order, before all others, and in between: 5 and 9 are in the line, 3 and 1 on the stack, 7, 6 and 2 in the heap."""
    queue = LeafQueue()
    for place in (5, 9, 3, 7, 1, 6, 2):
        queue.push(Leaf(place, 0.0, 0, place, NODES[0]))
    left = []
    while (first := queue.first()) is not None:
        left.append(first.place)
        queue.remove(first)
    assert left == [1, 2, 3, 5, 6, 7, 9]


def test_places_of_entries_that_have_left_are_freed() -> None:
    queue = LeafQueue()
    queue.push(Leaf(0, 0.0, 0, 0, NODES[0]))
    for number in range(1, 1000):
        queue.push(Leaf(number, 0.0, 0, number, NODES[0]))
        first = queue.first()
        assert first is not None
        queue.remove(first)
        assert len(queue) == 1 and len(queue._line) <= 130
