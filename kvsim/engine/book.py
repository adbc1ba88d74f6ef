"""The record of a run, request by request, which the engines write."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsim.core.request import Request
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.columns import COLUMNS, recorded
from kvsim.engine.job import Job
from kvsim.engine.outcome import REJECTED, SHED, tier_names
from kvsim.engine.read_times import ReadTimes


class Book:
    """What has become of each request. ``columns`` has an array of numbers for each recorded row of ``COLUMNS``, or a list of
    what each tier has: one entry per request, in trace order. Where requests come and go (``keep_rows``), it has a dictionary
    instead, by the request's index."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.columns: dict[str, Any] = {
            column.name: column.blank(len(requests)) for column in COLUMNS if column.is_recorded and not column.is_below_gpu
        }
        self.read_times: ReadTimes | None = ReadTimes()
        """Times of reads, until ``close``; None where requests come and go."""

    def keep_rows(self) -> None:
        """Begin without requests, to be told of each with ``add`` before it arrives, and with ``forget`` after its end."""
        self.requests = ()
        self.columns = {column.name: {} for column in COLUMNS if column.is_recorded}
        self.read_times = None

    def add(self, index: int) -> None:
        """Take in a request, of which nothing is known yet."""
        for column in COLUMNS:
            if column.is_recorded:
                self.columns[column.name][index] = () if column.is_by_tier else column.missing

    def forget(self, index: int) -> None:
        """Give up what has been recorded of a request."""
        for rows in self.columns.values():
            rows.pop(index, None)

    def arrived(self, request: Request, now: float) -> None:
        """Record when a request arrived."""
        self.columns["arrival_s"][request.index] = now
        self.columns["retractions"][request.index] = 0

    def reject(self, request: Request) -> None:
        """Record that a request could not run even alone."""
        self.columns["status"][request.index] = REJECTED

    def shed(self, request: Request) -> None:
        """Record that a request was refused, or is never sent as one before it was."""
        self.columns["status"][request.index] = SHED

    def hit(self, request: Request, pages: tuple[int, ...], engine: int) -> None:
        """Record the pages that a request hit in each tier, from the top down, and the engine that admitted it first."""
        self.columns["hit_pages"][request.index] = pages
        self.columns["engine"][request.index] = engine

    def unread(self, request: Request, pages: int) -> None:
        """Take pages that a load did not bring, or that cannot be used without them, out of a request's hits, lowest first."""
        hits = list(self.columns["hit_pages"][request.index])
        for tier in reversed(range(len(hits))):
            taken = min(pages, hits[tier])
            hits[tier] -= taken
            pages -= taken
        self.columns["hit_pages"][request.index] = tuple(hits)

    def retracted(self, request: Request) -> None:
        """Record that a request had to give its pages back."""
        self.columns["retractions"][request.index] += 1

    def waited(self, job: Job) -> None:
        """Record for how long a request has waited until its prompt was computed: for its turn, and for pages being loaded."""
        self.columns["queue_s"][job.request.index] = job.times.queue_s
        self.columns["load_s"][job.request.index] = job.times.load_s

    def finished(self, job: Job, engine: int, now: float) -> None:
        """Record the end of a request, or of one of its samples, that an engine has decoded."""
        request, index = job.request, job.request.index
        if not request.sample:
            self.columns["ttft_s"][index] = job.times.first_token_s - job.arrival_s
        if request.output_tokens > 1:
            self.columns["tpot_s"][index] = (now - job.times.first_token_s) / (request.output_tokens - 1)
        self.columns["e2e_s"][index] = now - job.arrival_s
        self.columns["decoder"][index] = engine

    def read(self, transfer: Transfer, now: float) -> None:
        """Record the time that a read took, which has ended."""
        if self.read_times is not None:
            self.read_times.add(transfer, now)

    def close(self, tiers: Sequence[Tier]) -> dict[str, np.ndarray]:
        """Return everything recorded, as ``Outcome.columns``: nothing is recorded after that.

        Parts of a time to first token that never came are unknown.
        """
        assert self.read_times is not None, "requests come and go"
        names = tier_names(tiers)
        levels = {tier.name: tier.level for tier in tiers}
        read_s = self.read_times.seconds(len(self.requests), [levels.get(name, -1) for name in names[1:]])
        self.read_times = None
        columns = recorded(self.requests, len(names), {**self.columns, "read_s": read_s})
        for name in ("queue_s", "load_s"):
            columns[name][np.isnan(columns["ttft_s"])] = np.nan
        return columns
