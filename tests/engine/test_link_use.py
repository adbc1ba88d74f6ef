"""The traffic of links that are counted together."""

import numpy as np

from kvsim.engine.link_use import LinkUse, joined


def lane(owner: int, *starts_s: float) -> LinkUse:
    rows = np.array([[start_s, start_s + 1.0, 8.0, owner] for start_s in starts_s]).reshape(-1, 4)
    return LinkUse(name="gpu-cpu", owner=owner, bytes=8 * len(rows), transfers=len(rows), busy_s=1.0 * len(rows), intervals=rows)


def test_the_transfers_of_all_links_of_a_name_are_in_the_order_of_their_starts() -> None:
    """Of those that are equal, a link's transfers come before those of the links after it."""
    links = joined([lane(0, 0.0, 2.0, 2.0), lane(1, 1.0, 2.0), lane(2), lane(3, 0.0)])
    both = links["gpu-cpu"]
    assert (both.lanes, both.bytes, both.transfers, both.busy_s) == (4, 48, 6, 6.0)
    assert both.intervals[:, [0, 3]].tolist() == [[0, 0], [0, 3], [1, 1], [2, 0], [2, 0], [2, 1]]


def test_a_link_that_is_alone_keeps_the_order_of_its_transfers() -> None:
    alone = lane(0, 2.0, 1.0)
    assert joined([alone])["gpu-cpu"].intervals.tolist() == alone.intervals.tolist()
