"""The requests of a round: cached contexts, then batch after batch, each on an idle server."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvsim.calibration.server.batches import ARRIVALS, BURST, MIXED, PROMPT, SLOTS, Batch
from kvsim.core.request import Request
from kvsim.pages.extents import Extent, count_pages

PAUSE_S = 0.02
"""Idle time before a batch, beyond what its predecessor's other requests may take after the last one."""
TOUCHED_PAUSE_S = 0.2
BETWEEN_S = 4e-3
"""From one decoding request of a batch to the next, so that a server takes them in order: the last one usually ends last."""
BURST_LEAD_S = 0.02
"""From the first prompt of a burst to the others: a server begins with the first one alone, and has the others when that ends."""
LEAD_STEPS, SPARE_STEPS = 10, 6
"""Decode steps before the first prompt of a mixed batch arrives, and between two of them beside the step of the prompt itself."""


class Pace(NamedTuple):
    """About how long the parts of a batch of several requests take."""

    begin_s: float
    """From the last request to the time when all decode."""
    decode_step_s: float
    mixed_step_s: float
    others_s: float
    """From the end of the last request until the others have ended, which a late client may have sent after it."""


class Round(NamedTuple):
    """The requests of a round, and which of them belong to each batch, in the order in which these are sent."""

    requests: list[Request]
    members: list[range]


class RoundMaker:
    """Makes rounds whose contexts are the same pages in every round, and whose other pages are new in each.

    Every round begins with the contexts, in the same order: a server that has lost some computes them again, and their tokens
    depend on that order. Page ids begin at ``first_page``: a server that has seen others has none of these in its cache.
    """

    def __init__(self, contexts: Sequence[int], page_tokens: int, first_page: int) -> None:
        self.page_tokens = page_tokens
        self._contexts: list[Extent] = []
        begin = first_page
        for tokens in contexts:
            self._contexts.append((begin, tokens // page_tokens))
            begin += tokens // page_tokens
        self._free = begin + 1

    def make(self, batches: Sequence[Batch], pace: Callable[[Batch], Pace]) -> Round:
        """Return a round of these batches, in this order, whose parts take about as long as ``pace`` says."""
        requests: list[Request] = []
        for slot, context in enumerate(self._contexts):
            self._add(requests, (context,), 1, arrival_s=slot * BETWEEN_S)
        members, pause_s = [], TOUCHED_PAUSE_S
        for batch in batches:
            first, last = len(requests), len(requests) - 1
            self._add_batch(requests, batch, pace, last, pause_s)
            members.append(range(first, len(requests)))
            pause_s = PAUSE_S + (pace(batch).others_s if len(members[-1]) > 1 else 0.0)
        return Round(requests, members)

    def _add_batch(
        self, requests: list[Request], batch: Batch, pace_of: Callable[[Batch], Pace], after: int, pause_s: float
    ) -> None:
        """Add a batch. Its last request is one that ends last if all are sent in time and computed in order."""
        if batch.kind == PROMPT:
            self._add(requests, self._path(0, batch.context, batch.tokens), 1, after, pause_s)
        if batch.kind == BURST:
            for number in range(batch.requests):
                lead_s = BURST_LEAD_S if number else 0.0
                self._add(requests, self._path(0, 0, batch.tokens), 1, after, pause_s + lead_s)
        if batch.kind == MIXED:
            pace = pace_of(batch)
            begin_s = pause_s + (batch.requests - 1) * BETWEEN_S + pace.begin_s + LEAD_STEPS * pace.decode_step_s
            between_s = pace.mixed_step_s + SPARE_STEPS * pace.decode_step_s
            for number in range(ARRIVALS):
                self._add(requests, self._path(0, 0, batch.tokens), 1, after, begin_s + number * between_s)
        own = batch.contexts(self.page_tokens) or [0] * batch.decoding
        for slot in range(batch.decoding):
            self._add(
                requests,
                self._path(slot % batch.slots, own[slot], self.page_tokens),
                batch.answer_tokens,
                after,
                pause_s + slot * BETWEEN_S,
            )

    def _path(self, slot: int, context_tokens: int, tokens: int) -> tuple[Extent, ...]:
        """Return the beginning of a context, and new pages."""
        own = self._free, tokens // self.page_tokens
        self._free += own[1] + 1
        if not context_tokens:
            return (own,)
        return (self._contexts[slot % SLOTS][0], context_tokens // self.page_tokens), own

    def _add(
        self,
        requests: list[Request],
        runs: tuple[Extent, ...],
        answer: int,
        after: int = -1,
        delay_s: float = 0.0,
        arrival_s: float = 0.0,
    ) -> None:
        pages = count_pages(runs)
        requests.append(
            Request(
                index=len(requests),
                arrival_s=arrival_s,
                prompt_tokens=pages * self.page_tokens,
                output_tokens=answer,
                runs=runs,
                prompt_pages=pages,
                after=after,
                delay_s=delay_s,
            )
        )
