"""A request on its way through the engine."""

from math import isnan, nan
from typing import Any

from kvsim.core.lease import Lease
from kvsim.core.queue_view import Waiting
from kvsim.core.request import Request
from kvsim.core.transfer import Transfer
from kvsim.engine.prefetching import Prefetch

LEAP_STEPS = 64
"""Maximum number of decode steps in one leap. A leap's pages are taken when it begins, unless the cache takes
them late, so this bounds how early that is."""


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


class Job(Waiting):
    """A request's state in the engine: waiting, admitted, in prefill or decoding, and possibly again after a retraction.

    ``generated`` counts the output tokens up to ``joined_step``.
    """

    __slots__ = (
        "prefetch", "is_queued", "lease", "loads", "is_claimed", "ready_loads", "computed", "joined_step", "last_step",
        "next_page_step", "first_token_s", "admissions", "is_known", "page_need", "is_counted", "is_lost", "queued_at_s",
        "counted", "decoder", "is_prefilled", "load_s", "queue_s", "refused_at_s", "reserved", "send", "waits_since_s",
    )  # fmt: skip

    def __init__(self, request: Request, arrival_s: float) -> None:
        super().__init__(request, arrival_s)
        self.prefetch: Prefetch | None = None
        """Its prefetch, until it is admitted or rejected."""
        self.is_queued = False
        self.lease: Lease | None = None
        self.loads: list[Transfer] = []
        self.ready_loads = 0
        """Number of leading ``loads`` already found to have arrived or to be far enough for a step to follow them."""
        self.is_claimed = False
        self.computed = 0
        """Tokens whose KV is on the GPU."""
        self.joined_step = self.last_step = self.next_page_step = 0
        self.page_need = 0
        """Number of its latest entry among the engine's page needs; earlier ones no longer count."""
        self.first_token_s = float("nan")
        self.admissions = 0
        """Number of admissions, without those whose slots were lost before the job had them."""
        self.is_known = False
        """Whether the cache has ever admitted it, even if its slots were lost before it had them."""
        self.is_counted = False
        """Whether its hits have been recorded, by this job or one before it."""
        self.counted: Lease | None = None
        """What they were recorded from, if that was this job."""
        self.is_prefilled = False
        """Whether this job has computed the prompt."""
        self.is_lost = False
        """Whether its engine has failed: another job continues the request."""
        self.queued_at_s = arrival_s
        self.waits_since_s = arrival_s
        """Since when it waits for its turn and its pages; nan while it has them."""
        self.queue_s = 0.0
        """Seconds of such waiting so far, without that since ``waits_since_s``."""
        self.refused_at_s = nan
        """Start of the first step that could not compute it, because pages were still being loaded; nan if there is none."""
        self.load_s = 0.0
        """Seconds for which its prompt was not computed because pages were still being loaded."""
        self.decoder = -1
        """Number of the engine that will decode it, if that is not the one that computes its prompt."""
        self.reserved: Lease | None = None
        """Its pages there."""
        self.send: Send | None = None
        """What goes there."""

    def again(self) -> "Job":
        """Return a job that continues the request on another engine, after the tokens generated so far."""
        job = Job(self.request, self.arrival_s)
        job.generated, job.first_token_s = self.generated, self.first_token_s
        job.is_known, job.is_counted, job.was_running = self.is_known, self.is_counted, self.admissions > 0
        job.waits_since_s, job.queue_s, job.load_s = self.waits_since_s, self.queue_s, self.load_s
        return job

    def has_pages(self, now: float) -> None:
        """Take note that it has been admitted and has its pages."""
        self.queue_s += now - self.waits_since_s
        self.waits_since_s = nan

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

    def cached_tokens(self, step: int) -> int:
        """Return how many tokens a decoding request's next token attends over, ``step`` decode steps into the run."""
        return self.target_tokens - 1 + step - self.joined_step
