"""Records the timeline of a run, if one is wanted: it stands between the engines and their substrate, and before their caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isnan, nan
from typing import Any, NamedTuple

from simpy import Event

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.serving import Claim, ServedCache
from kvsim.core.tier import Edge, Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.job import Send
from kvsim.engine.link_use import LinkUse
from kvsim.engine.passing_cache import PassingCache
from kvsim.engine.substrate import Substrate, Work


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


@dataclass(slots=True, kw_only=True, eq=False)
class Stay:
    """A request's time on one engine, from the moment when it has its pages until it gives them back. Times in seconds."""

    request: Request
    engine: int
    is_reserved: bool
    """Whether another engine computes the prompt: the pages wait for what that one sends."""
    claimed_s: float = nan
    """When it has its pages; nan if they are lost before."""
    loads: list[tuple[float, float]] = field(default_factory=list)
    """Times (start, end) before steps in which its prompt was not computed because pages were still being loaded. Together with
    ``Batch.stalled_s``, the ``load`` of ``Outcome.phases_s``."""
    steps: list[float] = field(default_factory=list)
    """Starts of the steps that compute its prompt."""
    computed_s: float = nan
    """When its prompt is computed or, if it is reserved, has arrived; nan if it never is."""
    released_s: float = nan
    end: str = ""
    """Why it ended: finished, retracted, handed over or lost."""
    reused_pages: tuple[int, int, int] = (0, 0, 0)
    """Pages that it did not compute, by the tier that they came from: gpu, cpu, disk."""


class Recorder:
    """A substrate that records the calls to another one, and the stays that its caches report.

    Pages are evicted when requests are admitted or grow and when transfers begin, just before the engine calls ``compute`` or
    ``copy``. So these calls inspect the tiers.
    """

    def __init__(self, substrate: Substrate, tiers: Sequence[Tier]) -> None:
        self.env = substrate.env
        self.tiers = tiers
        self.batches: list[Batch] = []
        self.stays: list[Stay] = []
        """In order of admission."""
        self.evictions: list[tuple[float, str, int]] = []
        """(time in s, tier, pages); with several engines, a tier's name is followed by the number of its engine or host."""
        self.usage: list[tuple[float, str, int]] = []
        """(time in s, tier, pages in use), at each change"""
        self.labels = labels(tiers)
        self._substrate = substrate
        self._evicted = [0] * len(tiers)
        self._used = [0] * len(tiers)
        self._open: dict[Lease, Stay] = {}
        self._load_s: dict[tuple[int, int], float] = {}
        """``Times.load_s`` after the last step of each prompt, by request and sample."""

    # --- stays -------------------------------------------------------------------------------------------------------

    def admitted(self, lease: Lease) -> None:
        """Record that a request has been admitted; it has its pages, or ``claimed`` is called when it has."""
        stay = Stay(request=lease.request, engine=lease.gpu.owner, is_reserved=lease.is_reserved)
        self._open[lease] = stay
        self.stays.append(stay)
        if not lease.promised_pages:
            stay.claimed_s = self.env.now

    def claimed(self, lease: Lease) -> None:
        """Record that a request has its pages; later claims, for its answer, are ignored."""
        stay = self._open[lease]
        if isnan(stay.claimed_s):
            stay.claimed_s = self.env.now

    def released(self, lease: Lease, end: str) -> None:
        """Record that a request gives its pages back."""
        stay = self._open.pop(lease, None)
        if stay is not None:
            stay.released_s, stay.end = self.env.now, end
            stay.reused_pages = lease.gpu_pages, lease.loaded_pages - lease.loaded_disk_pages, lease.loaded_disk_pages

    # --- the substrate -----------------------------------------------------------------------------------------------

    def copy(self, transfer: Transfer) -> Event:
        self._look()
        return self._substrate.copy(transfer)

    def cancel(self, transfer: Transfer) -> None:
        self._substrate.cancel(transfer)

    def queued_s(self, edge: Edge) -> float:
        return self._substrate.queued_s(edge)

    def compute(self, work: Work, loads: list[Transfer]) -> Event:
        self._look()
        start_s = self.env.now
        done = self._substrate.compute(work, loads)
        tokens = sum([tokens for tokens, _ in work.chunks])
        requests = tuple([job.request.index for job, _ in work.prefilling])
        computed = self._step(work, start_s) if work.prefilling else []

        def end(event: Event) -> None:
            now, stalled_s = self.env.now, work.stalled_s
            decoding = work.decode_requests, work.decode_context_tokens
            steps = max(0, event.value or 0)
            self.batches.append(Batch(start_s, now, len(work.chunks), tokens, *decoding, steps, work.engine, requests, stalled_s))
            for job, _ in work.prefilling if stalled_s else ():
                self._load_s[job.request.index, job.request.sample] += stalled_s
            for stay in computed:
                if isnan(stay.released_s):
                    stay.computed_s = now

        done.callbacks.append(end)
        return done

    def _step(self, work: Work, start_s: float) -> list[Stay]:
        """Record a step of each prompt. Returns the stays whose prompts it completes."""
        completed = []
        for job, tokens in work.prefilling:
            assert job.lease is not None
            stay = self._open[job.lease]
            key = job.request.index, job.request.sample
            load_s = min(job.times.load_s - self._load_s.get(key, 0.0), start_s - stay.claimed_s)
            if load_s > 0 and job.loads:
                stay.loads.append((start_s - load_s, start_s))
            self._load_s[key] = job.times.load_s
            stay.steps.append(start_s)
            if job.computed + tokens >= job.target_tokens:
                completed.append(stay)
        return completed

    def steps_done(self, work: Work, elapsed_s: float) -> int:
        return self._substrate.steps_done(work, elapsed_s)

    def hand_over(self, send: Send) -> Event:
        self._look()
        done, stay = self._substrate.hand_over(send), self._open.get(send.target)

        def landed(_: Event) -> None:
            if stay is not None and isnan(stay.released_s):
                stay.computed_s = self.env.now

        done.callbacks.append(landed)
        return done

    def withdraw(self, send: Send) -> None:
        self._substrate.withdraw(send)

    def on_loss(self, lost: Callable[[int], None]) -> None:
        self._substrate.on_loss(lost)

    def link_use(self) -> list[LinkUse]:
        self._look()
        return self._substrate.link_use()

    def findings(self) -> dict[str, Any]:
        return self._substrate.findings()

    def close(self) -> None:
        self._substrate.close()

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


class RecordedCache(PassingCache):
    """A cache that tells a recorder of each request's stay."""

    def __init__(self, cache: ServedCache, recorder: Recorder) -> None:
        super().__init__(cache)
        self.recorder = recorder

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0) -> bool:
        has_room = self.cache.admit(lease, pages, now, load_pages)
        if has_room:
            self.recorder.admitted(lease)
        return has_room

    def claim(self, lease: Lease, now: float) -> Claim:
        claim = self.cache.claim(lease, now)
        if not claim.waits and not claim.is_lost:
            self.recorder.claimed(lease)
        return claim

    def finish_request(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        self.recorder.released(lease, "finished")
        return self.cache.finish_request(lease, now)

    def retract(self, lease: Lease, tokens: int, now: float) -> None:
        self.recorder.released(lease, "retracted")
        self.cache.retract(lease, tokens, now)

    def release(self, lease: Lease) -> None:
        self.recorder.released(lease, "lost")
        self.cache.release(lease)

    def end_prefill(self, lease: Lease, now: float) -> list[Transfer]:
        self.recorder.released(lease, "handed over")
        return self.cache.end_prefill(lease, now)
