"""Records the timeline of a run, if one is wanted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import NamedTuple

from simpy import Environment, Event

from kvsim.core.lease import FOR_DECODE, Lease
from kvsim.core.request import Request
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.job import Send
from kvsim.engine.substrate import Work
from kvsim.engine.watch import EngineWatch
from kvsim.hardware.tier_kinds import levels_listed


class Batch(NamedTuple):
    """One step of a batch, or several decode steps in one leap. Times in seconds."""

    start_s: float
    end_s: float
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_context_tokens: int
    """Cached tokens that the decoding requests attend over in the first step."""
    steps: int
    engine: int = 0
    requests: tuple[int, ...] = ()
    """Indices of the requests whose prompts it computes."""
    stalled_s: float = 0.0
    """How much of it waited for loads; see ``Work.stalled_s``."""
    lane: int = 0
    """The lowest number that no other step under way of the engine has; above 0 only with several in flight."""


@dataclass(slots=True, kw_only=True, eq=False)
class Admission:
    """One admission of a request to an engine, from when it has its pages until it gives them back. Times in seconds."""

    request: Request
    engine: int
    is_for_decode: bool
    """Whether another engine computes the prompt: the pages wait for what that one sends."""
    claimed_s: float = nan
    """When it has its pages; nan if they are lost before."""
    loads: list[tuple[float, float]] = field(default_factory=list)
    """Times (start, end) before steps in which its prompt was not computed because pages were still being loaded. Together with
    ``Batch.stalled_s``, the ``load`` of ``Outcome.phases_s``."""
    steps: list[float] = field(default_factory=list)
    """Starts of the steps that compute its prompt."""
    lanes: list[int] = field(default_factory=list)
    """The lane of each of them."""
    computed_s: float = nan
    """When its prompt is computed or, if it is reserved, has arrived; nan if it never is."""
    released_s: float = nan
    end: str = ""
    """Why it ended: finished, retracted, handed over or lost."""
    reused_pages: Sequence[int] = ()
    """Pages that it did not compute, by the level that they came from, from the GPU down; empty until it has ended."""


class Recorder(EngineWatch):
    """Records the steps and transfers of engines, and the admissions of their requests.

    Pages are evicted when requests are admitted or grow and when transfers begin, just before a step or a copy. So the tiers are
    inspected then.
    """

    def __init__(self, env: Environment, tiers: Sequence[Tier]) -> None:
        self.env = env
        self.tiers = tiers
        self.batches: list[Batch] = []
        self.admissions: list[Admission] = []
        """In order of admission."""
        self.evictions: list[tuple[float, str, int]] = []
        """(time in s, tier, pages); with several engines, a tier's name is followed by the number of its engine or host."""
        self.usage: list[tuple[float, str, int]] = []
        """(time in s, tier, pages in use), at each change"""
        self.labels = labels(tiers)
        self._levels = levels_listed([tier.level for tier in tiers])
        self._evicted = [0] * len(tiers)
        self._used = [0] * len(tiers)
        self._open: dict[Lease, Admission] = {}
        self._load_s: dict[tuple[int, int], float] = {}
        """``Times.load_s`` after the last step of each prompt, by request and sample."""
        self._under_way: list[tuple[Work, int]] = []
        """Steps of engines that are up, each with its lane."""

    # --- admissions --------------------------------------------------------------------------------------------------

    def admitted(self, lease: Lease, pages: int, load_pages: int) -> None:
        admission = Admission(request=lease.request, engine=lease.gpu.owner, is_for_decode=lease.why == FOR_DECODE)
        self._open[lease] = admission
        self.admissions.append(admission)
        if not lease.reserved_pages:
            admission.claimed_s = self.env.now

    def claimed(self, lease: Lease) -> None:
        """Later claims, for its answer, are ignored."""
        admission = self._open[lease]
        if isnan(admission.claimed_s):
            admission.claimed_s = self.env.now

    def released(self, lease: Lease, why: str) -> None:
        admission = self._open.pop(lease, None)
        if admission is not None:
            admission.released_s, admission.end = self.env.now, why
            admission.reused_pages = lease.reused_pages(self._levels)

    # --- steps and transfers -----------------------------------------------------------------------------------------

    def began(self, transfer: Transfer) -> None:
        self._look()

    def computes(self, work: Work, done: Event) -> None:
        self._look()
        start_s = self.env.now
        tokens = sum([tokens for tokens, _ in work.chunks])
        requests = tuple([job.request.index for job, _ in work.prefilling])
        lane = self._begin(work)
        computed = self._step(work, start_s, lane) if work.prefilling else []

        def end(event: Event) -> None:
            now, stalled_s = self.env.now, work.stalled_s
            decoding = work.decode_requests, work.decode_context_tokens
            steps = max(0, event.value or 0)
            self.batches.append(
                Batch(start_s, now, len(work.chunks), tokens, *decoding, steps, work.engine, requests, stalled_s, lane)
            )
            self._under_way = [other for other in self._under_way if other[0] is not work]
            for job, _ in work.prefilling if stalled_s else ():
                self._load_s[job.request.index, job.request.sample] += stalled_s
            for admission in computed:
                if isnan(admission.released_s):
                    admission.computed_s = now

        done.callbacks.append(end)

    def _begin(self, work: Work) -> int:
        """Note a step that begins, and return its lane. Those of an engine that has failed since are over."""
        self._under_way = [other for other in self._under_way if not other[0].is_cut]
        taken = {lane for other, lane in self._under_way if other.engine == work.engine}
        lane = next(number for number in range(len(taken) + 1) if number not in taken)
        self._under_way.append((work, lane))
        return lane

    def _step(self, work: Work, start_s: float, lane: int) -> list[Admission]:
        """Record a step of each prompt. Returns the admissions whose prompts it completes."""
        completed = []
        for job, tokens in work.prefilling:
            assert job.lease is not None
            admission = self._open[job.lease]
            key = job.request.index, job.request.sample
            load_s = min(job.times.load_s - self._load_s.get(key, 0.0), start_s - admission.claimed_s)
            if load_s > 0 and job.loads:
                admission.loads.append((start_s - load_s, start_s))
            self._load_s[key] = job.times.load_s
            admission.steps.append(start_s)
            admission.lanes.append(lane)
            if job.computed + max(tokens, job.flying) >= job.target_tokens:
                completed.append(admission)
        return completed

    def sends(self, send: Send, done: Event) -> None:
        self._look()
        admission = self._open.get(send.target)

        def landed(_: Event) -> None:
            if admission is not None and isnan(admission.released_s):
                admission.computed_s = self.env.now

        done.callbacks.append(landed)

    def run_ended(self) -> None:
        self._look()

    def _look(self) -> None:
        """Record what each tier has evicted since the last call, and its pages in use."""
        now = self.env.now
        for index, tier in enumerate(self.tiers):
            evicted, used = tier.evicted_pages, tier.pool.capacity - tier.pool.free
            if evicted != self._evicted[index]:
                self.evictions.append((now, self.labels[index], evicted - self._evicted[index]))
                self._evicted[index] = evicted
            if used != self._used[index]:
                self.usage.append((now, self.labels[index], used))
                self._used[index] = used


def labels(tiers: Sequence[Tier]) -> list[str]:
    """Return the name of each tier, with the number of its engine or host if several tiers have the same name."""
    names = [tier.name for tier in tiers]
    return [f"{tier.name} {tier.owner}" if names.count(tier.name) > 1 else tier.name for tier in tiers]
