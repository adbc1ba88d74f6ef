"""The event log of a run: what requests, transfers and evictions did, in order."""

import json
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.serving import NEVER_FITS, ServedCache, Server
from kvsim.core.tier import GPU, LEVELS, Tier
from kvsim.core.transfer import Transfer
from kvsim.core.transfers import Begin
from kvsim.engine.passing_cache import PassingCache
from kvsim.replaying.server import PassingServer


class EventLog:
    """Events as lines of JSON, each with ``event`` and, if the run has a clock, ``time_s``.

    match       what a request finds: ``request``, ``prompt_pages``, by tier ``gpu_pages``, ``cpu_pages``, ``disk_pages``
    admit       a request gets room: ``request``, ``pages`` in all for now, ``load_pages`` of them to be loaded from below
    wait        a request finds no room; logged once until it is admitted or another one waits
    swap_begin  a transfer has room in its target: ``transfer`` (a number), ``from``, ``to``, ``pages``, and ``request`` if the
                pages are read for one; ``states`` instead of ``pages`` for recurrent states in memory of their own
    swap_end    a transfer has ended: as above, with the pages that arrived
    free        pages evicted from a tier, or dropped from it, since the last event: ``tier``, ``pages``
    release     a request gives its pages back before it has finished: ``request``
    finish      the answer of a request is complete: ``request``
    reset       every page is dropped
    lose        an engine has failed, and the pages of its GPU are dropped: ``engine``

    With several engines, an event has the number of its ``engine``; a reset the numbers of all ``engines`` whose pages it drops.
    What happens below the GPUs has ``owner`` instead: the number of the engine, host or disk that the tier belongs to, or of
    two tiers the upper one.
    """

    def __init__(self, tiers: Sequence[Tier], clock: Callable[[], float] | None = None) -> None:
        self.lines: list[str] = []
        self._tiers = tiers
        self._clock = clock
        self._evicted = [tier.evicted_pages for tier in tiers]
        self.transfers = 0
        """Number of the next transfer to begin."""
        self.has_engines = sum([tier.level == GPU for tier in tiers]) > 1

    def place(self, *tiers: Tier) -> dict[str, int]:
        """Return the field that says where something happens that concerns these tiers; none with a single engine."""
        if not self.has_engines:
            return {}
        upper = min(tiers, key=lambda tier: tier.level)
        return {"engine" if upper.level == GPU else "owner": upper.owner}

    def add(self, event: str, **fields: object) -> None:
        """Add an event that has just happened, after the evictions that led to it."""
        for index, tier in enumerate(self._tiers):
            pages = tier.evicted_pages - self._evicted[index]
            if pages:
                self._evicted[index] += pages
                self._write({"event": "free", "tier": tier.name, "pages": pages, **self.place(tier)})
        self._write({"event": event, **fields})

    def _write(self, fields: dict[str, object]) -> None:
        if self._clock is not None:
            fields = {"event": fields.pop("event"), "time_s": self._clock(), **fields}
        self.lines.append(json.dumps(fields))


class LoggedCache(PassingCache):
    """A cache that passes every call on to another one and logs it."""

    def __init__(self, cache: ServedCache, log: EventLog) -> None:
        super().__init__(cache)
        self.log = log
        self._waiting: dict[Tier, Request] = {}
        """The request at the head of each engine's queue that has found no room."""
        self._numbers: dict[Transfer, int] = {}
        """Numbers of the transfers that have begun and not ended."""

    def match(self, request: Request, gpu: Tier | None = None) -> Lease:
        return self._matched(self.cache.match(request, gpu))

    def resume(self, request: Request, tokens: int, gpu: Tier | None = None) -> Lease:
        return self._matched(self.cache.resume(request, tokens, gpu))

    def _matched(self, lease: Lease) -> Lease:
        if lease.request is not self._waiting.get(lease.gpu):
            self._log("match", lease, **_found(lease))
        return lease

    def _log(self, event: str, lease: Lease, **fields: object) -> None:
        self.log.add(event, **fields, **self.log.place(lease.gpu))

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0) -> bool:
        request, found = lease.request, _found(lease)
        has_room = self.cache.admit(lease, pages, now, load_pages)
        if request is self._waiting.get(lease.gpu):
            if has_room:
                del self._waiting[lease.gpu]
                self._log("match", lease, **found)
        elif not has_room:
            self._waiting[lease.gpu] = request
            self._log("wait", lease, request=request.index)
        if has_room:
            self._log("admit", lease, request=request.index, pages=pages, load_pages=load_pages)
        return has_room

    def finish_request(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        transfers = self.cache.finish_request(lease, now)
        self._log("finish", lease, request=lease.request.index)
        return transfers

    def retract(self, lease: Lease, tokens: int, now: float) -> None:
        self.cache.retract(lease, tokens, now)
        self._log("release", lease, request=lease.request.index)

    def release(self, lease: Lease) -> None:
        self.cache.release(lease)
        self._log("release", lease, request=lease.request.index)

    def end_prefill(self, lease: Lease, now: float) -> list[Transfer]:
        transfers = self.cache.end_prefill(lease, now)
        self._log("release", lease, request=lease.request.index)
        return transfers

    def lose(self, gpu: Tier, now: float) -> None:
        self.cache.lose(gpu, now)
        self.log.add("lose", engine=gpu.owner)

    def begin(self, transfer: Transfer, now: float) -> Begin:
        begun = self.cache.begin(transfer, now)
        if begun.can_run and transfer not in self._numbers:
            self._numbers[transfer] = self.log.transfers
            self.log.transfers += 1
            self._log_transfer("swap_begin", transfer, transfer.pages)
        return begun

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        return self._ended(transfer, self.cache.finish(transfer, now))

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        return self._ended(transfer, self.cache.abort(transfer, pages_arrived, now))

    def _ended(self, transfer: Transfer, follow_ups: list[Transfer]) -> list[Transfer]:
        if transfer in self._numbers:
            self._log_transfer("swap_end", transfer, transfer.arrived_pages)
            del self._numbers[transfer]
        return follow_ups

    def _log_transfer(self, event: str, transfer: Transfer, pages: int) -> None:
        unit = "pages" if transfer.target in self.tiers else "states"
        reader = {} if transfer.goes_down or transfer.request is None else {"request": transfer.request.index}
        ends, where = {"from": transfer.source.name, "to": transfer.target.name}, self.log.place(transfer.source, transfer.target)
        self.log.add(event, transfer=self._numbers[transfer], **ends, **{unit: pages}, **reader, **where)

    def reset(self) -> None:
        self.cache.reset()
        engines = [tier.owner for tier in self.tiers if tier.level == GPU]
        self.log.add("reset", **({"engines": engines} if self.log.has_engines else {}))


def _found(lease: Lease) -> dict[str, int]:
    return {
        "request": lease.request.index,
        "prompt_pages": lease.request.prompt_pages,
        **_by_tier((lease.gpu_pages, lease.cpu_pages, lease.disk_pages)),
    }


def _by_tier(pages: Sequence[int]) -> dict[str, int]:
    return {f"{tier}_pages": number for tier, number in zip(LEVELS, pages, strict=False)}


class LoggedServer(PassingServer):
    """An engine's own cache that logs every request. Its transfers begin and end at once, before the request is admitted."""

    def __init__(self, server: Server, log: EventLog) -> None:
        super().__init__(server)
        self.log = log
        self._waiting: Request | None = None
        self._moved = (0, 0)

    def serve(self, request: Request, pages: int, now: float) -> Any:
        lease = self.server.serve(request, pages, now)
        if lease is NEVER_FITS:
            return lease
        if lease is None:
            if request is not self._waiting:
                self.log.add("wait", request=request.index)
            self._waiting = request
            return None
        found = _by_tier(lease.hits)
        self.log.add("match", request=request.index, prompt_pages=request.prompt_pages, **found)
        self._log_moves()
        self.log.add("admit", request=request.index, pages=pages, load_pages=sum(lease.hits[1:]))
        return lease

    def finish_request(self, lease: Any) -> None:
        self.server.finish_request(lease)
        self._log_moves()
        self.log.add("finish", request=lease.request.index)

    def _log_moves(self) -> None:
        """Log what has moved between the two tiers since the last call."""
        if len(self.tiers) < 2:
            return
        upper, lower = self.tiers[0].name, self.tiers[1].name
        before, self._moved = self._moved, (self.counts.written_pages, self.counts.loaded_pages)
        for source, target, now, then in ((upper, lower, self._moved[0], before[0]), (lower, upper, self._moved[1], before[1])):
            if now > then:
                for event in ("swap_begin", "swap_end"):
                    ends = {"from": source, "to": target}
                    self.log.add(event, transfer=self.log.transfers, **ends, pages=now - then)
                self.log.transfers += 1
