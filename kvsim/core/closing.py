"""Ends a generator that is left before its last item."""

from collections.abc import Iterator
from typing import Any


def close(iterator: Iterator[Any]) -> None:
    """Let a generator do now what it does at its end. A compiled one does not do it when it is merely forgotten."""
    end = getattr(iterator, "close", None)
    if end is not None:
        end()
