"""The record of pages on their way: where from, where to, and what it carries."""

import pytest

from kvsim.core.pool import Pool
from kvsim.core.tier import Tier, chain
from kvsim.core.transfer import Transfer
from kvsim.core.tree import RadixTree
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_back import WriteBack
from tests.core.small import now, only, small_cache


@pytest.mark.parametrize(("goes_down", "name"), [(True, "gpu-cpu"), (False, "cpu-gpu")])
def test_an_edge_is_crossed_either_way(goes_down: bool, name: str) -> None:
    tiers = [Tier(name, index, Pool(8), LRU()) for index, name in enumerate(("gpu", "cpu"))]
    (edge,) = chain(tiers, [WriteBack()])
    transfer = Transfer(edge, [], goes_down=goes_down)
    assert [transfer.source, transfer.target] == (tiers if goes_down else tiers[::-1])
    assert (transfer.name, transfer.edge) == (name, edge)


def test_a_new_transfer_has_neither_begun_nor_ended() -> None:
    tree = RadixTree(2)
    node = tree.add(tree.root, ((0, 3),), 3, 0.0)
    (edge,) = chain([Tier(name, index, Pool(8), LRU()) for index, name in enumerate(("gpu", "cpu"))], [WriteBack()])
    transfer = Transfer(edge, [node], goes_down=True)
    assert not (transfer.begun or transfer.done or transfer.submitted or transfer.has_fault)
    assert (transfer.pages, transfer.arrived_pages, transfer.after, transfer.pins) == (3, 0, [], [])


def test_a_node_that_is_cut_on_its_way_is_carried_in_two_parts() -> None:
    cache = small_cache(gpu=8, cpu=8)
    write_down = only(cache.insert(cache.admitted("abcd"), now(cache)))
    upper = cache.residency.cut(cache.node("abcd"), 3)
    assert write_down.nodes == [upper, cache.node("abcd")]
    assert write_down.pages == 4
