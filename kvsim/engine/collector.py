"""Python's cyclic garbage collector, switched off where it would find nothing."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SEARCHED_EVERY = 50_000
"""Objects that come to life between two searches of young ones, in a process that keeps many for long; Python's own is 700."""

_is_frozen = [gc.get_freeze_count() > 0]
"""Whether any object is frozen. The collector would count the frozen objects to answer that, one by one."""


def freeze() -> None:
    """Keep the collector from ever searching what is alive now, such as a trace."""
    gc.freeze()
    _is_frozen[0] = True


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Let the collector search more seldom during a block that never ends, whose nodes and blocks reference counting frees.

    At Python's own rate, the search takes a fifth of a shadow's time.
    """
    before = gc.get_threshold()
    gc.set_threshold(SEARCHED_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Switch the collector off during a block that reads or runs a trace.

    Records, nodes, leases and transfers no longer used are freed by reference counting alone. Searching the live ones for
    cycles takes half of a replay's time, and more for a longer trace. After the block, everything that it created counts as
    old, so that the next, short collection does not walk all of it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not _is_frozen[0]:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
