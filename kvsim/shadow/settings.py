"""The settings of a shadow."""

from dataclasses import dataclass

from kvsim.numbers import Whole, check_settings
from kvsim.plans.capacity import bytes_of

LEAST_MEMORY_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ShadowSettings:
    """How much a shadow may remember, and over how many requests its recent figures go."""

    memory: str = "2GiB"
    """The most that trees, page ids and ghosts may take together, as the shadow counts them."""
    window_requests: int = 1000
    """Requests that the recent hit rates are of."""
    salt: str | None = None
    """Enters the key of every page; null: random bytes, so that keys mean nothing outside this process."""
    most_engines: int = 64
    """Engines, each rank of one counted, that are followed; what others send is counted and left out."""
    requests_from_events: bool = True
    """Whether events make requests; false where another source tells of all requests."""

    def __post_init__(self) -> None:
        if self.memory_bytes < LEAST_MEMORY_BYTES:
            raise ValueError(f"memory must be at least 1MiB, since a shadow keeps trees, not {self.memory}")
        check_settings(self, Whole(1), "window_requests")
        check_settings(self, Whole(1), "most_engines")

    @property
    def memory_bytes(self) -> int:
        """``memory`` in bytes. Raises ValueError for a text that is no size."""
        return bytes_of(self.memory, "memory")

    @property
    def salt_bytes(self) -> bytes | None:
        """``salt`` as bytes."""
        return None if self.salt is None else self.salt.encode()
