"""Determines the slots and pages of a step, from the requests' leases, before the tree changes."""

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.transfers import is_gap
from kvsim.engine.substrate import Work
from kvsim.pages.extents import Extent, count_pages, split_extents
from kvsim.substrate.hardware.orders import NOTHING, ChunkPages, DecodePages

if TYPE_CHECKING:
    from kvsim.engine.job import Job
    from kvsim.substrate.hardware.state_slots import StateSlots


class StepPages:
    """Determines the pages that one engine's work reads and writes.

    With ``caches_output``, answer pages have ids and may be reused. ``states`` has the recurrent states of a hybrid model.
    """

    def __init__(self, page_tokens: int, *, caches_output: bool) -> None:
        self.page_tokens = page_tokens
        self.caches_output = caches_output
        self.states: StateSlots | None = None
        self._begun: dict[Job, Lease] = {}
        """Lease of the last chunk of each running request."""
        self._decoding: dict[Lease, tuple[int, np.ndarray]] = {}
        """Number and slots of each decoding request; the list of a request only grows."""
        self._numbers = count()

    def chunks(self, work: Work) -> list[ChunkPages]:
        """Return the chunks of a step."""
        self._begun = {job: lease for job, lease in self._begun.items() if job.lease is lease}
        return [self._chunk(job, tokens) for job, tokens in work.prefilling]

    def decodes(self, work: Work) -> list[DecodePages]:
        """Return the decoding requests of a leap."""
        known, self._decoding = self._decoding, {}
        decodes = []
        for job in work.decoding:
            lease = job.lease
            assert lease is not None
            is_new = lease not in known
            number, slots = (next(self._numbers), NOTHING) if is_new else known[lease]
            pages = lease.node.depth + lease.node.pages + len(lease.slots)
            has_changed = len(slots) != pages
            if has_changed:
                slots = slots_of(lease)
            self._decoding[lease] = number, slots
            item = self._decode(job, number, slots, work, has_changed=has_changed)
            if is_new and self._begun.get(job) is not lease:
                item = self._with_sent_pages(item, job.request, slots[: lease.node.depth + lease.node.pages])
            decodes.append(item)
        return decodes

    def _chunk(self, job: "Job", tokens: int) -> ChunkPages:
        lease, start, end = job.lease, job.computed, job.computed + tokens
        assert lease is not None
        path = lease.node.path()
        is_first, is_last = self._begun.get(job) is not lease, end == job.target_tokens
        self._begun[job] = lease
        all_slots = slots_of(lease)
        ids = ids_of(self._extents(job.request))
        is_there = np.repeat([not is_gap(node, lease.gpu) for node in path], [node.pages for node in path]).astype(bool)
        beyond = lease.gpu_pages + lease.loaded_pages - len(is_there)  # loaded pages that are in no node yet
        is_there = np.append(is_there, np.ones(max(0, beyond), dtype=bool))
        pages = -(-end // self.page_tokens)
        reused = np.flatnonzero(is_there[:pages]) if is_first else NOTHING  # a hit that ends early for its state pins more
        filled = np.arange(start // self.page_tokens, self._whole_pages(job.request, end, len(ids)))
        filled = filled[(filled >= len(is_there)) | ~np.append(is_there, False)[np.minimum(filled, len(is_there))]]
        if is_last:
            filled = np.union1d(filled, np.flatnonzero(~is_there))
        return ChunkPages(
            tokens=tokens,
            start=start,
            is_sampled=is_last,
            slots=all_slots[:pages],
            reused=reused,
            reused_ids=ids[reused],
            filled_slots=all_slots[filled],
            filled_ids=ids[filled],
            state=0 if self.states is None else self.states.of(lease),
            begins=self.states.start_of(lease) if self.states is not None and is_first else None,
        )

    def _decode(self, job: "Job", number: int, slots: np.ndarray, work: Work, *, has_changed: bool) -> DecodePages:
        lease = job.lease
        assert lease is not None
        context, filled, filled_ids = job.cached_tokens(work.decode_step), NOTHING, NOTHING
        first, end = context // self.page_tokens, (context + work.max_steps) // self.page_tokens
        if self.caches_output:
            extents = self._extents(job.request)
            filled = np.arange(first, min(end, count_pages(extents)))
            filled_ids = ids_of(split_extents(split_extents(extents, first)[1], len(filled))[0])
        return DecodePages(
            request=number,
            context_tokens=context,
            slots=slots if has_changed else None,
            filled_slots=slots[filled],
            filled_ids=filled_ids,
            state=0 if self.states is None else self.states.of(lease),
        )

    def _with_sent_pages(self, item: DecodePages, request: Request, slots: np.ndarray) -> DecodePages:
        """Let the pages of a prompt that another engine, or another answer's request, has computed be verified."""
        ids = ids_of(request.runs)[: len(slots)]
        return replace(item, reused_slots=slots[: len(ids)], reused_ids=ids)

    def _whole_pages(self, request: Request, tokens: int, named_pages: int) -> int:
        """Return how many named pages are complete after ``tokens`` tokens; the prompt's last page may be partial."""
        pages = tokens // self.page_tokens
        return min(max(pages, request.prompt_pages) if tokens >= request.prompt_tokens else pages, named_pages)

    def _extents(self, request: Request) -> tuple[Extent, ...]:
        """Return the ids of a request's pages: those of its prompt and, if they may be reused, of its answer."""
        return (*request.runs, *(request.output_runs or ())) if self.caches_output else request.runs


def slots_of(lease: Lease) -> np.ndarray:
    """Return the slots of all pages of a request on its GPU tier, in order."""
    return np.concatenate((*(node.slots[lease.gpu.index] for node in lease.node.path()), lease.slots))


def ids_of(extents: tuple[Extent, ...]) -> np.ndarray:
    """Return all page ids of some extents."""
    return np.concatenate([np.arange(start, start + pages, dtype=np.int64) for start, pages in extents]) if extents else NOTHING
