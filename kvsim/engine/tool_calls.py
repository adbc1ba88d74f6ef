"""What happens during tool calls to the pages of requests that one engine has served: they leave its GPU and come back."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any

from kvsim.core.answers import PolicyError, number, truth
from kvsim.core.cache import Cache
from kvsim.core.lease import AHEAD, LOST, Lease
from kvsim.core.loading import LowerTiers
from kvsim.core.offloading import Offloading
from kvsim.core.request import Request
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.kept_pages import KeptPages
from kvsim.engine.mover import Mover
from kvsim.engine.queue import JobQueue
from kvsim.pages.extents import join_extents
from kvsim.policies.prefetch.base import PrefetchPolicy, ToolCall, Upload


@dataclass
class ToolCallCounts:
    """Counts of calls and of pages. An uploaded page is *used* if the request that continues the call finds it on the GPU, and
    *wasted* if not."""

    calls: int = 0
    offloads: int = 0
    offloaded_pages: int = 0
    no_room_offloads: int = 0
    uploads: int = 0
    uploaded_pages: int = 0
    used_pages: int = 0
    wasted_pages: int = 0
    no_room_uploads: int = 0


class Call:
    """A call under way, and what is brought back for the request that continues it."""

    __slots__ = ("arrived_pages", "began_s", "expected_pages", "first_page", "is_over", "lease", "loads_left", "path", "request",
                 "upload", "used_pages")  # fmt: skip

    def __init__(self, request: Request, path: Request, began_s: float) -> None:
        self.request = request
        """The request that has ended."""
        self.path = path
        """Its prompt and its answer, as far as they may be cached, as a prompt."""
        self.began_s = began_s
        self.upload: Upload | None = None
        self.lease: Lease | None = None
        """Keeps what is brought back."""
        self.first_page = 0
        self.expected_pages = 0
        self.loads_left = 0
        self.arrived_pages = 0
        self.used_pages = 0
        self.is_over = False
        """Whether the request that continues it has been admitted, or will not find here what it left."""


class ToolCalls(KeptPages):
    """The calls of the sessions of one engine.

    offload    when a call begins, or when the last write-down of the request's pages has ended
    upload     unless requests wait: a lease like a request's, for which slots are reserved and pages evicted, and all pages are
               loaded or none. What has come back is pinned until the session's next request is admitted, or for as long as the
               policy says
    give way   pinned pages are let go of, the latest expected first, if a waiting or a running request needs their room
    """

    def __init__(
        self, cache: Cache, gpu: Tier, mover: Mover, policy: PrefetchPolicy, queue: JobQueue, wake: Callable[[], None]
    ) -> None:
        """``wake`` is called when room has been given back."""
        assert isinstance(cache.lower, LowerTiers)
        self.cache = cache
        self.gpu = gpu
        self.mover = mover
        self.env = mover.env
        self.queue = queue
        self.policy = policy
        self.counts = ToolCallCounts()
        self.lower = cache.lower
        self.offloading = Offloading(cache.lower, gpu)
        self._policy: Any = policy
        """The same object, typed so that its answers may be anything."""
        self._policy_name = f"the prefetch policy {type(policy).__name__}"
        self._wake = wake
        self._calls: dict[int, Call] = {}
        """By the index of the request that continues a call."""
        self._kept: dict[Call, None] = {}
        """Those for which pages are pinned, or slots reserved."""

    # --- from the beginning of a call to its end -----------------------------------------------------------------------------

    def begin(self, request: Request, follower: Request) -> None:
        """A call begins: ``request`` has ended, and ``follower`` will continue it."""
        call = Call(request, self._path(request), self.env.now)
        self._calls[follower.index] = call
        self.counts.calls += 1
        duration_s = follower.delay_s if self.policy.needs_future and not follower.joins else nan
        self._offload(call, duration_s)
        upload = self._asked_upload(call, duration_s)
        if upload is not None:
            call.upload = upload
            self.env.timeout(upload.begin_s).callbacks.append(lambda _: self._bring_back(call))

    def returned(self, follower: int) -> None:
        """The request with this index has arrived, somewhere: what is not on its way to the GPU by now is not brought back."""
        call = self._calls.get(follower)
        if call is not None:
            call.upload = None
            self._policy.on_call_end(call.request, self.env.now - call.began_s)
            if call.lease is None and not call.expected_pages:
                self._end(follower, 0)

    def admitted(self, request: Request, gpu_pages: int) -> None:
        call = self._calls.get(request.index)
        if call is not None:
            self._end(request.index, gpu_pages)

    def missed(self, follower: int) -> None:
        """The request with this index does not run on this engine: nothing is kept for it any more."""
        if follower in self._calls:
            self._end(follower, 0)

    def stop(self) -> None:
        """Keep nothing any more: the engine has failed."""
        for follower in list(self._calls):
            self._end(follower, 0)

    def give_way(self) -> bool:
        """Let go of what is kept for the call that is expected to end last."""
        last: Call | None = None
        for call in self._kept:
            if last is None or _expected_s(call) > _expected_s(last):
                last = call
        if last is None:
            return False
        self._let_go(last)
        return True

    def result(self) -> dict[str, int]:
        """Return all counts by name."""
        return {name: getattr(self.counts, name) for name in self.counts.__dataclass_fields__}

    def _path(self, request: Request) -> Request:
        """Return a request for all pages that a request may have left in the cache."""
        pages = request.prompt_pages
        runs = request.runs
        if self.cache.rules.cache_output and request.output_runs:
            runs = join_extents(runs, request.output_runs)
            pages += sum([count for _, count in request.output_runs])
        tokens = pages * self.cache.page_tokens + 1 + request.bigram
        return replace(request, runs=runs, prompt_pages=pages, prompt_tokens=tokens, output_runs=None, images=(), samples=1)

    def _end(self, follower: int, gpu_pages: int) -> None:
        call = self._calls.pop(follower)
        call.is_over, call.upload = True, None
        call.used_pages = min(max(0, gpu_pages - call.first_page), call.expected_pages)
        if not call.loads_left:
            self._count(call)
        self._let_go(call)

    def _count(self, call: Call) -> None:
        """Count the pages of a call that is over and whose loads have ended."""
        used = min(call.used_pages, call.arrived_pages)
        self.counts.used_pages += used
        self.counts.wasted_pages += call.arrived_pages - used

    def _let_go(self, call: Call) -> None:
        """Give back what is kept for a call. What is on its way arrives nevertheless."""
        lease, call.lease = call.lease, None
        if lease is not None:
            del self._kept[call]
            self.cache.release(lease, LOST, self.env.now)
            self._wake()

    # --- down ------------------------------------------------------------------------------------------------------------------

    def _known(self, call: Call, duration_s: float) -> ToolCall:
        """Return what the policy may know of a call."""
        nodes = self.offloading.idle(call.path.runs)
        page_tokens = self.cache.page_tokens
        return ToolCall(
            request=call.request,
            path_pages=call.path.prompt_pages,
            idle_pages=sum([node.pages for node in nodes]),
            unwritten_pages=self.offloading.unwritten(nodes),
            free_pages=max(0, self.gpu.spare_pages),
            waiting_pages=sum([job.request.pages_in_all(page_tokens) for job in self.queue]),
            duration_s=duration_s,
        )

    def _offload(self, call: Call, duration_s: float) -> None:
        """Let the idle pages of a call leave if the policy wants it, once none of its pages is being written down."""
        if call.is_over:
            return
        writes = self.offloading.writes(call.path.runs)
        if writes:
            self.mover.end_of(writes[-1]).callbacks.append(lambda _: self._offload(call, duration_s))
            return
        known = self._known(call, duration_s)
        if not known.idle_pages or not truth(self._policy_name, "offload()", self._policy.offload(known)):
            return
        transfers = self.offloading.offload(self.offloading.idle(call.path.runs), self.env.now)
        if transfers is None:
            self.counts.no_room_offloads += 1
            return
        self.counts.offloads += 1
        self.counts.offloaded_pages += known.idle_pages
        self.mover.submit(transfers)
        self._wake()

    # --- up --------------------------------------------------------------------------------------------------------------------

    def _asked_upload(self, call: Call, duration_s: float) -> Upload | None:
        """Return the policy's answer."""
        answer = self._policy.upload(self._known(call, duration_s))
        if answer is None:
            return None
        if not isinstance(answer, Upload):
            raise PolicyError(f"{self._policy_name} returned {answer!r} from upload(), not an Upload or None")
        name = "upload()"
        return Upload(number(self._policy_name, name, answer.begin_s), number(self._policy_name, name, answer.until_s))

    def _bring_back(self, call: Call) -> None:
        """Begin to load what tiers below have of a call's path, if no request waits and there is room for all of it."""
        upload = call.upload
        if upload is None or upload.until_s <= self.env.now - call.began_s:
            return
        lease = self.cache.match(call.path, self.gpu, AHEAD)
        pages = lease.lower_pages
        if not pages:
            return
        if self.queue or not self.cache.admit(lease, lease.gpu_pages + pages, self.env.now, pages):
            self.counts.no_room_uploads += 1
            return
        call.lease, call.first_page, call.expected_pages = lease, lease.gpu_pages, pages
        self._kept[call] = None
        if lease.waits:
            self.mover.submit(lease.waits)
        if upload.until_s < inf:
            left_s = max(0.0, call.began_s + upload.until_s - self.env.now)
            self.env.timeout(left_s).callbacks.append(lambda _: self._let_go(call))
        self._claim(call, lease)

    def _claim(self, call: Call, lease: Lease) -> None:
        """Load the pages as soon as their slots are free, unless they are not wanted any more."""
        if call.lease is not lease:
            return
        claim = self.cache.claim(lease, self.env.now)
        if claim.waits:
            self.mover.submit(claim.waits)
            self.mover.end_of(claim.waits[-1]).callbacks.append(lambda _: self._claim(call, lease))
        elif claim.is_lost:
            self.counts.no_room_uploads += 1
            self._let_go(call)
        else:
            self._load(call, lease)

    def _load(self, call: Call, lease: Lease) -> None:
        load = self.lower.load(lease, self.env.now)
        self.counts.uploads += 1
        call.first_page, call.expected_pages = lease.gpu_pages, lease.loaded_pages
        call.loads_left = len(load.loads)
        self.mover.submit(load.transfers)
        for transfer in load.loads:
            self._await(call, lease, transfer, transfer.pages)

    def _await(self, call: Call, lease: Lease, load: Transfer, pages: int) -> None:
        self.mover.end_of(load).callbacks.append(lambda _: self._landed(call, lease, load, pages))

    def _landed(self, call: Call, lease: Lease, load: Transfer, pages: int) -> None:
        """A load has ended. If it has brought too little, the rest of the path is given up, since nobody computes it here."""
        call.loads_left -= 1
        call.arrived_pages += load.arrived_pages
        self.counts.uploaded_pages += load.arrived_pages
        if load.arrived_pages < pages and call.lease is lease:
            self._let_go(call)
        if call.is_over and not call.loads_left:
            self._count(call)


def _expected_s(call: Call) -> float:
    """Return until when what has come back is kept for a call; of one whose request is here and waits, before all others."""
    return -inf if call.upload is None else call.began_s + call.upload.until_s
