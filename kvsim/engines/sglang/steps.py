"""What a pass of SGLang's scheduler has formed: a step, or a leap of decode steps that are alike."""

from collections.abc import Sequence
from typing import cast

from kvsim.core.transfer import NO_TRANSFERS
from kvsim.engine.job import Job
from kvsim.engine.schedule import Step
from kvsim.engine.substrate import Work
from kvsim.engines.sglang.stepped import NodesLease

Answer = tuple[Job, NodesLease]
"""A request that decodes in a step, and its lease then."""


class Chunk:
    """A part of a prompt that a step computes."""

    __slots__ = ("begin", "end", "is_last", "job", "lease")

    def __init__(self, job: Job, lease: NodesLease, begin: int, end: int, *, is_last: bool) -> None:
        self.job = job
        self.lease = lease
        self.begin = begin
        self.end = end
        self.is_last = is_last


class NodeStep(Step):
    """A step, with the leases that it was formed for: what it computes for a request that has lost its lease is lost."""

    __slots__ = ("answers", "chunks")

    def __init__(self, work: Work, chunks: list[Chunk], answers: list[Answer]) -> None:
        super().__init__(work, NO_TRANSFERS)
        self.chunks = chunks
        self.answers = answers


def fewest_left(running: Sequence[Job]) -> int:
    """Return after how many more decode steps the first answer is complete, without those that are formed or run already."""
    return min([job.request.output_tokens - job.generated - cast(NodesLease, job.lease).flying for job in running])


def steps_with_room(running: Sequence[Job], steps: int, free_pages: int, page_tokens: int) -> int:
    """Return how many more decode steps, at most ``steps``, find a free page for each request at their beginning.

    The number may be too low, by less than half.
    """
    held = [cast(NodesLease, job.lease).tokens for job in running]
    spare = free_pages - len(held)
    while steps > 0 and _pages_begun(held, steps - 1, page_tokens) > spare:
        steps //= 2
    return steps


def _pages_begun(held: list[int], steps: int, page_tokens: int) -> int:
    """Return the pages that requests with so many tokens begin within some steps."""
    return sum([(tokens + steps - 1) // page_tokens - (tokens - 1) // page_tokens for tokens in held])
