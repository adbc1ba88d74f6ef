"""What a trace may contain that neither Belady's MIN nor LRU's curve accounts for."""

from collections.abc import Sequence

from kvsim.core.request import Request


def not_bounded(requests: Sequence[Request]) -> str | None:
    """Return the first of these that a trace has, as words that follow "the trace"; None if it has none."""
    for what, is_there in (
        ("resets the cache", any(request.resets for request in requests)),
        ("has images that no hit may end inside", any(request.images for request in requests)),
        ("has persistent prompts", any(request.persistent for request in requests)),
    ):
        if is_there:
            return what
    return None
