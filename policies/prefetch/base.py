"""The contract of prefetch policies: reads from disk ahead of need, and what is loaded at admission."""

from abc import ABCMeta, abstractmethod
from dataclasses import dataclass
from enum import Enum
from math import inf

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.context import PolicyContext

STOP_RULES = ("best_effort", "wait_complete", "timeout")


class Refusal(Enum):
    """Why a policy does not fetch what the disk has."""

    THRESHOLD = "refused_by_threshold"
    RATE_LIMIT = "refused_by_rate_limit"
    MEMORY = "refused_by_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What could be fetched for a request that begins to wait."""

    request: Request
    first_page: int
    """So many pages of its prompt come before, on the GPU or in the CPU tier."""
    stored_pages: int
    """The continuation of the request's prefix that the disk has and no other tier."""
    in_flight_pages: int
    """Being fetched into the CPU tier now."""
    available_pages: int
    """Room in the CPU tier, after evicting all that may be evicted."""
    queued_s: float
    """Seconds until the disk would begin to read them: what it has to read before. 0 without a clock."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefetchPolicy(metaclass=ABCMeta):
    """Says how much is read from disk into the CPU tier while a request waits, and what is loaded when it is admitted."""

    @property
    def reads_hardware(self) -> bool:
        """Whether decisions depend on the machine's rates, also in a replay."""
        return False

    page_tokens: int = 1
    cpu_pages: float = inf

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run. The context's tier is the CPU tier."""
        self.page_tokens = context.page_tokens
        self.cpu_pages = inf if context.capacity_pages is None else context.capacity_pages

    @abstractmethod
    def fetch(self, offer: Offer) -> int | Refusal:
        """Pages to fetch now, from the first that is stored on; 0 if none are wanted, or why wanted ones are not fetched.

        Only memory is a reason to fetch some and not all of them: what is left out counts as refused by memory.
        """

    @abstractmethod
    def load(self, request: Request, gpu_pages: int, cpu_pages: int, disk_pages: int) -> int:
        """How many of the pages below the GPU that an admitted request could reuse are loaded, from the first on.

        The GPU has the first ``gpu_pages`` of its prompt, the CPU the next ``cpu_pages``. Then follow ``disk_pages``, the
        first of which only the disk has: loading them means reading the disk while the request runs.
        """

    def wait_s(self, fetch_tokens: int) -> float:
        """How long after its arrival a request may be kept from running by its own prefetch of so many tokens, in seconds."""
        return inf


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class StoppedPrefetch(PrefetchPolicy):
    """A prefetch that may be stopped before it ends: the whole pages that have arrived are used, the others given back.

    best_effort     the request waits for nothing: as soon as it can run, its prefetch stops
    wait_complete   the request waits until everything has arrived
    timeout         it waits base_s + per_1024_tokens_s for each 1,024 tokens of the prefetch at most, from its arrival
    """

    stop: str = "timeout"
    base_s: float = 1.0
    per_1024_tokens_s: float = 0.25

    def __post_init__(self) -> None:
        if self.stop not in STOP_RULES:
            raise ValueError(f"stop must be one of {', '.join(STOP_RULES)}, not {self.stop}")
        for name in ("base_s", "per_1024_tokens_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")

    def wait_s(self, fetch_tokens: int) -> float:
        if self.stop == "timeout":
            return self.base_s + self.per_1024_tokens_s * fetch_tokens / 1024
        return inf if self.stop == "wait_complete" else 0.0
