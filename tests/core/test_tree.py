"""The radix tree alone: nodes of extents of page ids, matched, added, cut, shortened, joined and removed."""

import pytest

from kvsim.core.tree import Node, RadixTree, matching_pages
from kvsim.pages.extents import Extent

Extents = tuple[Extent, ...]


def grown() -> tuple[RadixTree, Node, Node, Node]:
    """Pages 0 to 3, and after them 4 and 5 in one branch, 20 and 21 in another."""
    tree = RadixTree(1)
    stem = tree.add(tree.root, ((0, 4),), 4, 1.0)
    return tree, stem, tree.add(stem, ((4, 2),), 2, 2.0), tree.add(stem, ((20, 2),), 2, 3.0)


@pytest.mark.parametrize(
    ("extents", "nodes", "rest"),
    [
        (((0, 9),), 2, ((6, 3),)),
        (((0, 4), (30, 5)), 1, ((30, 5),)),
        (((0, 4), (20, 2), (40, 1)), 2, ((40, 1),)),
        (((7, 2),), 0, ((7, 2),)),
        ((), 0, ()),
    ],
)
def test_what_the_tree_does_not_have_is_the_rest_of_the_path(extents: Extents, nodes: int, rest: Extents) -> None:
    tree = grown()[0]
    path, partial, agreed, left = tree.walk(tree.root, extents)
    assert (len(path), partial, agreed, left) == (nodes, None, 0, rest)


@pytest.mark.parametrize(
    ("limit", "nodes", "agreed", "rest"), [(0, 0, 0, ((0, 6),)), (3, 0, 3, ((3, 3),)), (4, 1, 0, ((4, 2),)), (5, 1, 1, ((5, 1),))]
)
def test_a_walk_ends_at_its_limit(limit: int, nodes: int, agreed: int, rest: Extents) -> None:
    tree = grown()[0]
    path, _, found, left = tree.walk(tree.root, ((0, 6),), limit)
    assert (len(path), found, left) == (nodes, agreed, rest)


def test_a_node_of_several_runs_agrees_run_by_run() -> None:
    """The node has pages 0, 1, 2, 10 and 11."""
    tree = RadixTree(1)
    node = tree.add(tree.root, ((0, 3), (10, 2)), 5, 1.0)
    assert tree.walk(tree.root, ((0, 3), (10, 2))) == ([node], None, 0, ())
    assert tree.walk(tree.root, ((0, 3), (10, 4))) == ([node], None, 0, ((12, 2),))
    assert tree.walk(tree.root, ((0, 3), (10, 1), (90, 1))) == ([], node, 4, ((90, 1),))
    assert tree.walk(tree.root, ((0, 5),)) == ([], node, 3, ((3, 2),))
    assert tree.walk(tree.root, ((0, 3), (10, 2)), limit=4) == ([], node, 4, ((11, 1),))
    assert matching_pages(node, ((7, 4), (10, 2)), 0, 4, 99) == (0, 0, 4), "it begins with another page"


def test_the_lower_part_of_a_cut_stays_the_same_node() -> None:
    tree, stem, left, _ = grown()
    stem.hits, stem.last_used, stem.pins[0] = 7, 9.0, 2
    stem.note(0, "seen")
    upper = tree.cut(stem, 3)
    assert (upper.runs, upper.depth, upper.pages) == (((0, 3),), 0, 3)
    assert (stem.runs, stem.depth, stem.pages) == (((3, 1),), 3, 1)
    assert tree.root.children == {0: upper} and upper.children == {3: stem} and stem.parent is upper
    assert left.parent is stem
    for part in (upper, stem):
        assert (part.hits, part.last_used, part.created, part.pins, part.notes) == (7, 9.0, 1.0, [2], ["seen"])
    assert upper.pins is not stem.pins and upper.notes is not stem.notes


@pytest.mark.parametrize(("pages", "upper", "lower"), [(2, ((0, 2),), ((2, 1), (10, 2))), (3, ((0, 3),), ((10, 2),))])
def test_a_node_of_several_runs_is_cut_anywhere(pages: int, upper: Extents, lower: Extents) -> None:
    tree = RadixTree(1)
    node = tree.add(tree.root, ((0, 3), (10, 2)), 5, 1.0)
    assert (tree.cut(node, pages).runs, node.runs) == (upper, lower)
    assert tree.walk(tree.root, ((0, 3), (10, 2)))[0] == [node.parent, node]


def test_nodes_share_empty_notes_until_a_policy_writes_one() -> None:
    tree, stem, left, _ = grown()
    left.note(0, 5)
    assert left.notes == [5] and stem.notes is tree.no_notes
