"""A request on its way through the engine."""

from math import isnan, nan
from typing import Any, Final

from kvsim.core.lease import AGAIN, FIRST, KNOWN, Lease
from kvsim.core.pool import UNLIMITED
from kvsim.core.queue_view import Waiting
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.core.transfer import Transfer
from kvsim.engine.prefetching import Prefetch

LEAP_STEPS: Final = 64
"""Maximum number of decode steps in one leap of several requests. A leap's pages are taken when it begins, unless the cache
takes them late, so this bounds how early that is."""


def longest_leap(cache: ServedCache) -> int:
    """Return the most decode steps in one leap: no limit if only one request holds pages, since no other one then lacks those
    that a long leap takes early."""
    return LEAP_STEPS if len(cache.leases) > 1 else UNLIMITED


class Send:
    """The KV of one prompt, on its way from the GPU that computes it to the GPU that will decode."""

    __slots__ = (
        "flows",
        "is_layerwise",
        "is_withdrawn",
        "last_s",
        "next_token",
        "receiver",
        "sender",
        "source",
        "target",
        "tokens",
    )

    def __init__(self, sender: int, receiver: int, known_tokens: int, target: Lease, *, is_layerwise: bool) -> None:
        self.sender = sender
        self.receiver = receiver
        self.next_token = known_tokens
        """The first token whose KV has not been sent yet; the receiver has everything before it."""
        self.tokens = 0
        """Tokens of the prompt; set when it is computed."""
        self.source: Lease | None = None
        """Its pages on the sender; set when it is computed."""
        self.target = target
        """Its pages on the receiver."""
        self.is_layerwise = is_layerwise
        """Whether layers leave while later ones are still being computed."""
        self.is_withdrawn = False
        """Set when the sender or the receiver has failed."""
        self.flows: list[Any] = []
        """For the substrate: what is under way."""
        self.last_s = 0.0
        """For the substrate: the time before which the last layer cannot have landed."""


class Times:
    """How long a request has waited, and for what, in seconds."""

    __slots__ = ("first_token_s", "load_s", "queue_s", "queued_at_s", "refused_at_s", "waits_since_s")

    def __init__(self, arrival_s: float) -> None:
        self.first_token_s = nan
        self.queued_at_s = arrival_s
        """When it last entered a queue."""
        self.waits_since_s = arrival_s
        """Since when it waits for its turn and its pages; nan while it has them."""
        self.queue_s = 0.0
        """Seconds of such waiting so far, without that since ``waits_since_s``."""
        self.refused_at_s = nan
        """Start of the first step that could not compute it, because pages were still being loaded; nan if there is none."""
        self.load_s = 0.0
        """Seconds for which its prompt was not computed because pages were still being loaded."""

    def again(self) -> "Times":
        """Return a copy, for another engine that continues the request."""
        times = Times(self.queued_at_s)
        times.first_token_s, times.waits_since_s = self.first_token_s, self.waits_since_s
        times.queue_s, times.load_s = self.queue_s, self.load_s
        return times

    def has_pages(self, now: float) -> None:
        """Take note that it has been admitted and has its pages."""
        self.queue_s += now - self.waits_since_s
        self.waits_since_s = nan

    def is_refused(self, now: float) -> None:
        """Take note that a step cannot compute it, because pages are still being loaded."""
        if isnan(self.refused_at_s):
            self.refused_at_s = now

    def has_loads(self, now: float) -> None:
        """Take note that a step can compute it, or that it has been given up."""
        if not isnan(self.refused_at_s):
            self.load_s += now - self.refused_at_s
            self.refused_at_s = nan

    def waits_again(self, now: float) -> None:
        """Take note that it has lost its pages, if it had them."""
        self.has_loads(now)
        if isnan(self.waits_since_s):
            self.waits_since_s = now


NEW: Final = 0
"""It has not been queued, and nothing is fetched for it; it may wait for pages on the engine that will decode it."""
FETCHING: Final = 1
"""It waits for its prefetch."""
QUEUED: Final = 2
"""It waits for its turn, for the first time or again after a retraction."""
CLAIMING: Final = 3
"""It has been admitted and has reserved slots."""
PREFILLING: Final = 4
"""It has its slots, and its prompt is loaded and computed; after a retraction, its answer so far too."""
SENDING: Final = 5
"""Its KV is on the way to the engine that will decode it."""
DECODING: Final = 6
"""Its answer is being generated, or is about to be."""
ENDED: Final = 7
"""Its answer is complete, or it has been rejected."""
LOST: Final = 8
"""Its engine has failed or given it up: another job continues the request."""


class Job(Waiting):
    """A request's state on one engine: its phase, what it holds, and what it has waited for.

    ``generated`` counts the output tokens up to ``joined_step``.
    """

    __slots__ = (
        "prefetch", "phase", "lease", "loads", "ready_loads", "computed", "flying", "joined_step", "last_step", "next_page_step",
        "admissions", "turn", "is_known", "page_need", "is_counted", "counted", "decoder", "is_prefilled", "decode_lease", "send",
        "times", "told",
    )  # fmt: skip

    def __init__(self, request: Request, arrival_s: float) -> None:
        super().__init__(request, arrival_s)
        self.phase: int = NEW
        self.times = Times(arrival_s)
        self.prefetch: Prefetch | None = None
        """Its prefetch, until it is admitted or rejected."""
        self.lease: Lease | None = None
        self.loads: list[Transfer] = []
        self.ready_loads = 0
        """Number of leading ``loads`` already found to have arrived or to be far enough for a step to follow them."""
        self.computed = 0
        """Tokens whose KV is on the GPU."""
        self.flying = 0
        """Tokens of its prompt that steps in flight compute, after these."""
        self.joined_step = self.last_step = self.next_page_step = 0
        self.told = 0
        """Tokens of its answer of which the scheduling policy of its engine has been told, or that it does not concern."""
        self.page_need = 0
        """Number of its latest entry among the engine's page needs; earlier ones no longer count."""
        self.admissions = 0
        """Number of admissions, without those whose slots were lost before the job had them."""
        self.turn = 0
        """The number of its latest admission among those of the engine."""
        self.is_known = False
        """Whether the cache has ever admitted it, even if its slots were lost before it had them."""
        self.is_counted = False
        """Whether its hits have been recorded, by this job or one before it."""
        self.counted: Lease | None = None
        """What they were recorded from, if that was this job."""
        self.is_prefilled = False
        """Whether this job has ever computed the prompt."""
        self.decoder = -1
        """Number of the engine that will decode it, if that is not the one that computes its prompt."""
        self.decode_lease: Lease | None = None
        """Its pages there."""
        self.send: Send | None = None
        """What goes there."""

    @property
    def why(self) -> int:
        """Why it is matched when its turn comes."""
        if not self.is_known:
            return FIRST
        return KNOWN if self.generated > 0 or self.request.sample > 0 else AGAIN

    def again(self) -> "Job":
        """Return a job that continues the request on another engine, after the tokens generated so far."""
        job = Job(self.request, self.arrival_s)
        job.generated, job.times = self.generated, self.times.again()
        job.told = job.generated
        job.is_known, job.is_counted, job.was_running = self.is_known, self.is_counted, self.admissions > 0
        return job

    def cached_tokens(self, step: int) -> int:
        """Return how many tokens a decoding request's next token attends over, ``step`` decode steps into the run."""
        return self.target_tokens - 1 + step - self.joined_step
