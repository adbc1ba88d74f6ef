"""Leaps of vLLM's schedule: decode steps that are taken in one event, since the passes between them would change nothing."""

from collections.abc import Sequence

from kvsim.core.tier import Tier
from kvsim.engine.job import LEAP_STEPS
from kvsim.engines.vllm.offloads import Offloads
from kvsim.engines.vllm.running import RunningRequests, place_of
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

    def __init__(
        self, cache: SteppedCache, gpu: Tier, offloads: Offloads, running: RunningRequests, *, looks_ahead: bool
    ) -> None:
        self._cache = cache
        self._gpu = gpu
        self._offloads = offloads
        self._running = running
        self._looks_ahead = looks_ahead
        self.current: BlockStep | None = None
        """The leap that is formed or under way."""

    def begin(self, step: BlockStep, leaving: Sequence[Served], *, has_waiting: bool, is_settled: bool) -> None:
        """Make a leap of a step in which all running requests decode, if it is repeated; it has just been launched.

        leaving      requests whose last tokens are in flight
        has_waiting  whether requests wait in the queue, or for loads
        is_settled   whether neither the end of a store nor the loss of pages on the GPU matters to those
        """
        decoding = [served for served in self._running.all if served not in leaving] if leaving else self._running.all
        if has_waiting and (leaving or self._cache.share_answers([served.job.request for served in decoding])):
            return
        steps = 0 if self._looks_ahead else 1
        if self._offloads.may_leap(leaving, is_settled=is_settled):
            steps += self._repetitions(decoding, self._offloads.room_of_leap(self._gpu, is_settled=is_settled))
        if steps > 1:
            step.work.max_steps = steps
            self.current = step

    def _repetitions(self, decoding: Sequence[Served], room: int) -> int:
        """Return how often a step is repeated if no request arrives and no copy ends; ``room``: pages that may be taken."""
        now, flight = self._running.formed, len(self._running.flight)
        offers = [served.offered_tokens - served.base + (flight if served.wake else served.flying) for served in decoding]
        most = min(LEAP_STEPS, min([served.ends_at for served in decoding]) - now, min(offers) - now - 2)
        if len(decoding) * -(-most // self._cache.page_tokens) > room:
            held = self._held(decoding)
            while most > 0 and self._pages_due(held, most) > room:
                most //= 2
        return most

    def _held(self, some: Sequence[Served]) -> list[tuple[int, int]]:
        """Return the tokens computed and the pages of requests that the last step computes."""
        now = self._running.formed
        return [(served.base + now, served.lease.held_pages) for served in some]

    def _pages_due(self, held: Sequence[tuple[int, int]], steps: int) -> int:
        """Return the pages that requests with so many (tokens, pages) take in the ``steps`` after a step."""
        page_tokens = self._cache.page_tokens
        return sum([max(0, -(-(tokens + steps) // page_tokens) - pages) for tokens, pages in held])

    def end(self, step: BlockStep, steps: int) -> None:
        """Record all but the last step of what has ended, ``steps`` decode steps; the next one may have been formed meanwhile."""
        if self.current is step:
            self.current = None
        if steps > 1:
            self._repeat(step, steps - 1)
            following = self._running.flight[-1]
            if following is not step:
                work, requests = following.work, step.work.decode_requests
                assert work.decode_requests == requests and not work.chunks, "a leap has not been stopped"
                work.decode_context_tokens += (steps - 1) * requests

    def _repeat(self, step: BlockStep, steps: int) -> None:
        running = self._running
        running.wake_due(steps)
        chunks = [chunk for chunk in step.chunks if not chunk.served.wake and chunk.served.job.lease is not None]
        steady = running.take_needs(steps)
        takers = sorted([*steady, *[chunk.served for chunk in chunks]], key=place_of)
        held = self._held(takers)
        has_room = self._cache.pool.make_room(self._pages_due(held, steps))
        assert has_room, "a leap had no room for its pages"
        for served, (tokens, _) in zip(takers, held, strict=True):
            self._cache.reserve(served.lease, tokens + steps)
        for chunk in chunks:
            chunk.served.job.computed += steps
        self._name_shared(chunks, steps)
        for chunk in chunks:
            chunk.served.job.generated += steps
        running.repeat(steps)
        for served in steady:
            running.need_block(served)

    def _name_shared(self, chunks: Sequence[Chunk], steps: int) -> None:
        """Name the pages of answers that others can find and that ``steps`` more tokens fill, in the order in which they do."""
        turns: list[tuple[int, int]] = []
        for at, chunk in enumerate(chunks):
            job, size = chunk.served.job, self._cache.page_tokens
            if self._cache.share_answers((job.request,)):
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
