"""Leaps of vLLM's schedule: decode steps that are taken in one event, since the passes between them would change nothing."""

from collections.abc import Sequence

from kvsim.core.tier import Tier
from kvsim.engines.vllm.offloads import Offloads
from kvsim.engines.vllm.served import BlockStep, Chunk, Served
from kvsim.engines.vllm.stepped import SteppedCache


class Leaps:
    """A step in which all running requests decode is repeated as long as the passes in between would form it again.

    length  until a request may end, a chunk is offered to the CPU tier, or pages run out
    stop    what a pass could see ends a leap at the next boundary between steps: an arrival, the end of a copy
    ahead   with the overlap loop, the step after a leap is formed when the leap begins, as if it were its second: it is the
            last repetition
    pages   are taken when the leap has ended; those of answers that others can find get their names in the order of the steps
    """

    def __init__(self, cache: SteppedCache, gpu: Tier, offloads: Offloads, *, looks_ahead: bool) -> None:
        self._cache = cache
        self._gpu = gpu
        self._offloads = offloads
        self._looks_ahead = looks_ahead
        self.current: BlockStep | None = None
        """The leap that is formed or under way."""

    def begin(self, step: BlockStep, leaving: Sequence[Served], *, has_waiting: bool, is_settled: bool) -> None:
        """Make a leap of a step in which all running requests decode, if it is repeated; it has just been launched.

        leaving      requests whose last tokens are in flight
        has_waiting  whether requests wait in the queue, or for loads
        is_settled   whether neither the end of a store nor the loss of pages on the GPU matters to those
        """
        if has_waiting and (leaving or any(self._cache.shares_answer(chunk.served.job.request) for chunk in step.chunks)):
            return
        steps = self._repetitions(step.chunks, leaving, is_settled=is_settled) + (0 if self._looks_ahead else 1)
        if steps > 1:
            step.work.max_steps = steps
            self.current = step

    def _repetitions(self, chunks: Sequence[Chunk], leaving: Sequence[Served], *, is_settled: bool) -> int:
        """Return how often a step is repeated if no request arrives and no copy ends."""
        most = self._offloads.repetitions(chunks, leaving, is_settled=is_settled)
        for chunk in chunks:
            job = chunk.served.job
            most = min(most, job.request.output_tokens - job.generated - chunk.served.flying)
        room = self._offloads.room_of_leap(self._gpu, is_settled=is_settled)
        while most > 0 and self._pages_due(chunks, most) > room:
            most //= 2
        return most

    def _pages_due(self, chunks: Sequence[Chunk], steps: int) -> int:
        """Return the pages that requests take in the ``steps`` after a step."""
        page_tokens = self._cache.page_tokens
        leases = [(chunk.served.job.computed + steps, chunk.served.lease) for chunk in chunks]
        return sum([max(0, -(-tokens // page_tokens) - lease.held_pages) for tokens, lease in leases])

    def end(self, step: BlockStep, steps: int, following: BlockStep | None) -> None:
        """Record all but the last step of what has ended, ``steps`` decode steps; ``following`` has been formed meanwhile."""
        if self.current is step:
            self.current = None
        if steps > 1:
            self._repeat(step.chunks, steps - 1)
            if following is not None:
                work, requests = following.work, len(step.chunks)
                assert work.decode_requests == requests == len(following.chunks), "a leap has not been stopped"
                work.decode_context_tokens += (steps - 1) * requests

    def _repeat(self, chunks: Sequence[Chunk], steps: int) -> None:
        has_room = self._cache.pool.make_room(self._pages_due(chunks, steps))
        assert has_room, "a leap had no room for its pages"
        for chunk in chunks:
            job = chunk.served.job
            job.computed += steps
            self._cache.reserve(chunk.served.lease, job.computed)
        self._name_shared(chunks, steps)
        for chunk in chunks:
            chunk.served.job.generated += steps

    def _name_shared(self, chunks: Sequence[Chunk], steps: int) -> None:
        """Name the pages of answers that others can find and that ``steps`` more tokens fill, in the order in which they do."""
        turns: list[tuple[int, int]] = []
        for at, chunk in enumerate(chunks):
            job, size = chunk.served.job, self._cache.page_tokens
            if self._cache.shares_answer(job.request):
                turns += [(tokens, at) for tokens in range(size - job.target_tokens % size, steps + 1, size)]
        for tokens, at in sorted(turns):
            served = chunks[at].served
            self._cache.name(served.lease, served.job.target_tokens + tokens)

    def stop(self, steps: int) -> None:
        """Record the tokens of a leap that is cut off after ``steps`` steps, since the engine has failed."""
        if self.current is not None:
            for chunk in self.current.chunks:
                chunk.served.job.generated += steps
            self.current = None
