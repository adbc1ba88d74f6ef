"""A request on its way through the engine."""

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.transfer import Transfer
from kvsim.core.waiting import Waiting
from kvsim.engine.prefetching import Prefetch

LEAP_STEPS = 64
"""Maximum number of decode steps in one leap. A leap's pages are taken when it begins, unless the cache takes
them late, so this bounds how early that is."""


class Job(Waiting):
    """A request's state in the engine: waiting, admitted, in prefill or decoding, and possibly again after a retraction.

    ``generated`` counts the output tokens up to ``joined_step``.
    """

    __slots__ = (
        "prefetch", "is_queued", "lease", "loads", "is_claimed", "ready_loads", "computed", "joined_step", "last_step",
        "next_page_step", "first_token_s", "admissions", "is_known", "page_need",
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

    def cached_tokens(self, step: int) -> int:
        """Return how many tokens a decoding request's next token attends over, ``step`` decode steps into the run."""
        return self.target_tokens - 1 + step - self.joined_step
