"""The event log of a run: what requests, transfers and evictions did, in order."""

import json
from collections.abc import Callable, Sequence

from kvsim.core.lease import FINISHED, Lease
from kvsim.core.request import Request
from kvsim.core.tier import GPU, Tier
from kvsim.core.transfer import Transfer
from kvsim.core.watch import Watch
from kvsim.hardware.tier_kinds import LEVELS, levels_listed


class EventLog:
    """Events as lines of JSON, each with ``event`` and, if the run has a clock, ``time_s``.

    match       what a request finds: ``request``, ``prompt_pages``, by tier ``gpu_pages``, ``cpu_pages`` and so on
    admit       a request gets room: ``request``, ``pages`` in all for now, ``load_pages`` of them to be loaded from below
    wait        a request finds no room; logged once until it is admitted or another one waits
    swap_begin  a transfer has room in its target: ``transfer`` (a number), ``from``, ``to``, ``pages``, and ``request`` if the
                pages are read for one; ``states`` instead of ``pages`` for recurrent states in memory of their own
    swap_end    a transfer has ended: as above, with the pages that arrived
    free        pages evicted from a tier, or dropped from it, since the last event: ``tier``, ``pages``
    release     a request gives its pages back before it has finished: ``request``
    finish      the answer of a request is complete: ``request``
    reset       every page is dropped
    lose        an engine has failed or stopped, and the pages of its GPU are dropped: ``engine``
    start       an engine begins to start, since a policy asks for more: ``engine``
    up          an engine has started, and gets requests: ``engine``
    drain       an engine gets no more requests: ``engine``
    stop        an engine is not there any more: ``engine``

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


class CacheLog(Watch):
    """Logs what happens in one cache of a run."""

    def __init__(self, log: EventLog, tiers: Sequence[Tier]) -> None:
        """``tiers`` are those of the cache."""
        self.log = log
        self._tiers = tiers
        self._levels = levels_listed([tier.level for tier in tiers])
        self._found: dict[Tier, dict[str, int]] = {}
        """What the last match on each engine has found."""
        self._waiting: dict[Tier, Request] = {}
        """The request at the head of each engine's queue that has found no room."""
        self._numbers: dict[Transfer, int] = {}
        """Numbers of the transfers that have begun and not ended."""

    def _finds(self, lease: Lease) -> dict[str, int]:
        pages = [lease.gpu_pages, *[lease.pages_at(level) for level in range(1, self._levels)]]
        return {"request": lease.request.index, "prompt_pages": lease.request.prompt_pages, **by_tier(pages)}

    def _log(self, event: str, lease: Lease, **fields: object) -> None:
        self.log.add(event, **fields, **self.log.place(lease.gpu))

    def matched(self, lease: Lease) -> None:
        found = self._found[lease.gpu] = self._finds(lease)
        if lease.request is not self._waiting.get(lease.gpu):
            self._log("match", lease, **found)

    def admitted(self, lease: Lease, pages: int, load_pages: int) -> None:
        if lease.request is self._waiting.get(lease.gpu):
            del self._waiting[lease.gpu]
            self._log("match", lease, **self._found[lease.gpu])
        self._log("admit", lease, request=lease.request.index, pages=pages, load_pages=load_pages)

    def refused(self, lease: Lease) -> None:
        if lease.request is not self._waiting.get(lease.gpu):
            self._waiting[lease.gpu] = lease.request
            self._log("wait", lease, request=lease.request.index)

    def released(self, lease: Lease, why: str) -> None:
        self._log("finish" if why == FINISHED else "release", lease, request=lease.request.index)

    def began(self, transfer: Transfer) -> None:
        self._numbers[transfer] = self.log.transfers
        self.log.transfers += 1
        self._log_transfer("swap_begin", transfer, transfer.pages)

    def ended(self, transfer: Transfer) -> None:
        if transfer in self._numbers:
            self._log_transfer("swap_end", transfer, transfer.arrived_pages)
            del self._numbers[transfer]

    def _log_transfer(self, event: str, transfer: Transfer, pages: int) -> None:
        unit = "pages" if transfer.target in self._tiers else "states"
        reader = {} if transfer.goes_down or transfer.request is None else {"request": transfer.request.index}
        ends, where = {"from": transfer.source.name, "to": transfer.target.name}, self.log.place(transfer.source, transfer.target)
        self.log.add(event, transfer=self._numbers[transfer], **ends, **{unit: pages}, **reader, **where)

    def emptied(self, gpu: Tier | None) -> None:
        if gpu is not None:
            self.log.add("lose", engine=gpu.owner)
            return
        engines = [tier.owner for tier in self._tiers if tier.level == GPU]
        self.log.add("reset", **({"engines": engines} if self.log.has_engines else {}))


def by_tier(pages: Sequence[int]) -> dict[str, int]:
    """Return numbers of pages by the names that events give them."""
    return {f"{tier}_pages": number for tier, number in zip(LEVELS, pages, strict=False)}
