"""What a trace may contain that neither Belady's MIN nor LRU's curve accounts for."""

from collections.abc import Sequence

from kvsim.core.request import Request
from kvsim.core.requests import values_of


def not_bounded(requests: Sequence[Request]) -> str | None:
    """Return the first of these that a trace has, as words that follow "the trace"; None if it has none."""
    for what, is_there in (
        ("resets the cache", any(values_of(requests, "resets"))),
        ("has images that no hit may end inside", any(values_of(requests, "images"))),
        ("has persistent prompts", any(values_of(requests, "persistent"))),
    ):
        if is_there:
            return what
    return None
