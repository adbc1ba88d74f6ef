"""The settings of a shadow."""

from dataclasses import dataclass

from kvsim.numbers import Whole, check_settings

LEAST_MEMORY_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ShadowSettings:
    """How much a shadow may remember, and over how many requests its recent figures go."""

    memory_bytes: int = 2 << 30
    """The most bytes of trees, page ids and ghosts together, as the shadow counts them."""
    window_requests: int = 1000
    """Requests that the recent hit rates are of."""
    salt: bytes | None = None
    """Enters the key of every page; None: random bytes, so that keys mean nothing outside this process."""
    most_engines: int = 64
    """Engines, each rank of one counted, that are followed; what others send is counted and left out."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(LEAST_MEMORY_BYTES), "memory_bytes", hint="a shadow needs some room for its trees")
        check_settings(self, Whole(1), "window_requests")
        check_settings(self, Whole(1), "most_engines")
