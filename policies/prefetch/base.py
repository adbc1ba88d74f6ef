"""The contract of prefetch policies: reads from disk ahead of need, and what is loaded at admission."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from math import inf

from kvsim.policies.context import PolicyContext

STOP_RULES = ("best_effort", "wait_complete", "timeout")


class Refusal(Enum):
    """Why a policy does not fetch what the disk has."""

    THRESHOLD = "refused_by_threshold"
    RATE_LIMIT = "refused_by_rate_limit"
    MEMORY = "refused_by_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What could be fetched for a request that begins to wait. All in pages."""

    stored_pages: int
    """The continuation of the request's prefix that the disk has and no other tier."""
    in_flight_pages: int
    """Being fetched into the CPU tier now."""
    available_pages: int
    """Room in the CPU tier, after evicting all that may be evicted."""


class PrefetchPolicy(ABC):
    """Says how much is read from disk into the CPU tier while a request waits, and what is loaded when it is admitted."""

    page_tokens: int = 1
    cpu_pages: float = inf

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run. The context's tier is the CPU tier."""
        self.page_tokens = context.page_tokens
        self.cpu_pages = inf if context.capacity_pages is None else context.capacity_pages

    @abstractmethod
    def fetch(self, offer: Offer) -> int | Refusal:
        """Pages to fetch now, from the first that is stored on; 0 if none are wanted, or why wanted ones are not fetched."""

    @abstractmethod
    def load(self, cpu_pages: int, disk_pages: int) -> int:
        """Of the pages below the GPU that an admitted request could reuse, so many are loaded, from the first on.

        The CPU has the first ``cpu_pages``. Then follow ``disk_pages``, the first of which only the disk has: loading them
        means reading the disk while the request runs.
        """

    def wait_s(self, prompt_tokens: int) -> float:
        """How long after its arrival a request may be kept from running by its own prefetch, in seconds."""
        return inf
