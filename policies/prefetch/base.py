"""The contract of prefetch policies: what is read from disk ahead of need, what is loaded at admission, and what leaves the GPU
and comes back during tool calls."""

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf, nan

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import overrides
from kvsim.hardware.tier_kinds import FIRST_FAR
from kvsim.numbers import SECONDS, check_settings
from kvsim.policies.context import PolicyContext

STOP_RULES = ("best_effort", "wait_complete", "timeout")


class Refusal(Enum):
    """Why a policy does not fetch pages that the disk has."""

    THRESHOLD = "refused_by_threshold"
    RATE_LIMIT = "refused_by_rate_limit"
    MEMORY = "refused_by_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What could be fetched for a request that starts to wait."""

    request: Request
    first_page: int
    """Pages of the prompt before the stored ones, on the GPU or in the CPU tier."""
    stored_pages: int
    """Pages after that prefix that only the disk, or another tier below host memory, has."""
    in_flight_pages: int
    """Pages fetched, or being fetched, into the CPU tier for requests that still wait."""
    available_pages: int
    """Pages that the CPU tier could take after evicting everything evictable but its copies of the request's own prefix."""
    queued_s: float
    """Seconds until that tier would start reading them, after the reads queued before. 0 without a clock."""
    tier: str = FIRST_FAR
    """The tier below host memory that has the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A request has ended, and another one that continues it will arrive once a tool, or the user, has answered."""

    request: Request
    """The one that has ended."""
    path_pages: int
    """Pages of its prompt and, where answers are cached, of its answer."""
    idle_pages: int
    """Those of them, counted from the end, that no other request or path on the GPU needs there: an offload frees them."""
    unwritten_pages: int
    """Idle pages without a copy below, which an offload has to write."""
    free_pages: int
    """Pages of the GPU that are free, or will be once write-downs end, and are not reserved."""
    waiting_pages: int
    """Pages that the requests in the engine's queue need with their answers, all together; 0 if none waits."""
    duration_s: float = nan
    """How long the call will last, for a policy with ``needs_future``, if only this request is waited for; otherwise unknown."""


class Upload:
    """When the pages of a call are brought back to the GPU, in seconds after its beginning, and how long they are kept there.

    They are not brought back if requests wait then, or if there is no room for all of them.
    """

    __slots__ = ("begin_s", "until_s")

    def __init__(self, begin_s: float, until_s: float) -> None:
        self.begin_s = begin_s
        self.until_s = until_s
        """Until then, or until the request that continues the call has been admitted, they are evicted only if another request
        would have to wait for room."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefetchPolicy(metaclass=ABCMeta):
    """Decides how much is read from disk into the CPU tier while a request waits, and what is loaded when it is admitted."""

    @property
    def reads_hardware(self) -> bool:
        """Whether decisions depend on the machine's rates, even in a replay."""
        return False

    page_tokens: int = 1
    cpu_pages: float = inf

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run. The context's tier is the CPU tier."""
        self.page_tokens = context.page_tokens
        self.cpu_pages = inf if context.capacity_pages is None else context.capacity_pages

    @abstractmethod
    def fetch(self, offer: Offer) -> int | Refusal:
        """Return how many stored pages to fetch now, from the first on; 0 if none are wanted, or why they are not fetched.

        Lack of memory is the only reason to fetch fewer than all: the pages left out count as refused by memory.
        """

    @abstractmethod
    def load(self, request: Request, gpu_pages: int, cpu_pages: int, disk_pages: int) -> int:
        """Return how many of the reusable pages below the GPU an admitted request loads, from the first on.

        The GPU has the first ``gpu_pages`` of the prompt, the CPU tier the next ``cpu_pages``. The ``disk_pages`` after them
        begin with one that only the disk has; loading them means reading the disk while the request runs.
        """

    def wait_s(self, fetch_tokens: int) -> float:
        """Return how long, in seconds, a request may wait for its own prefetch of ``fetch_tokens`` tokens.

        That is from its arrival on; by the rules of SGLang, from the first time that it could be admitted.
        """
        return inf

    def without_effect(self) -> Sequence[str]:
        """Return the names of settings that have no effect because of the others: an error if the user gives one."""
        return ()

    # --- tool calls: asked in simulations only, and only of a policy that overrides ``offload`` or ``upload`` ---------------

    @property
    def needs_future(self) -> bool:
        """Whether it is told how long calls will last, which a server cannot know."""
        return False

    @property
    def follows_calls(self) -> bool:
        """Whether it decides about the pages of requests whose session waits for a tool or for the user."""
        return overrides(self, "offload") or overrides(self, "upload")

    def offload(self, call: ToolCall) -> bool:
        """Whether the idle pages of a request leave the GPU for the tier below, at the beginning of a call.

        If pages of it are still being written down then, it is asked when that has ended, unless the call has.
        """
        return False

    def upload(self, call: ToolCall) -> Upload | None:
        """Return when the pages of a request are brought back to the GPU that are in tiers below by then; None: not ahead.

        Asked at the beginning of a call, whether or not its pages are offloaded.
        """
        return None

    def on_call_end(self, call: Request, duration_s: float) -> None:
        """Called when the request arrives that continues the request ``call``, so many seconds after that has ended."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class StoppedPrefetch(PrefetchPolicy):
    """A prefetch that may be stopped before it ends: whole pages that have arrived are used, the rest are given up.

    best_effort     the request does not wait: its prefetch stops as soon as it can run
    wait_complete   the request waits until everything has arrived
    timeout         the request waits at most base_s plus per_1024_tokens_s for each 1,024 tokens of the prefetch, counted
                    from its arrival; by the rules of SGLang, from its first turn, for the tokens that storage is asked for
    """

    stop: str = "timeout"
    base_s: float = 1.0
    per_1024_tokens_s: float = 0.25

    def __post_init__(self) -> None:
        if self.stop not in STOP_RULES:
            raise ValueError(f"stop must be one of {', '.join(STOP_RULES)}, not {self.stop}")
        check_settings(self, SECONDS, "base_s", "per_1024_tokens_s")

    def wait_s(self, fetch_tokens: int) -> float:
        if self.stop == "timeout":
            return self.base_s + self.per_1024_tokens_s * fetch_tokens / 1024
        return inf if self.stop == "wait_complete" else 0.0
