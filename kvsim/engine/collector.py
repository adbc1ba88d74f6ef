"""Python's cyclic garbage collector, and when it has nothing to find."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Switch the collector off while a block lasts that reads a trace or runs it: records, nodes, leases and transfers that are
    done with are freed by counting references alone, and looking for cycles among those that live takes half of a replay's
    time, and more the longer the trace is. Afterwards whatever the block made counts as old, so that the next collection, a
    short one, does not walk all of it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
