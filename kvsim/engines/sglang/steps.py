"""What a pass of SGLang's scheduler has formed: a step, or a leap of decode steps that are alike."""

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

    def __init__(self, chunks: list[Chunk], answers: list[Answer], *, decode_step: int, engine: int) -> None:
        work = Work(
            decode_requests=len(answers),
            decode_context_tokens=sum([lease.tokens for _, lease in answers]) - len(answers),
            decoding=[job for job, _ in answers],
            decode_step=decode_step,
            engine=engine,
            forms_each_step=True,
        )
        if chunks:
            work.chunks = [(chunk.end - chunk.begin, chunk.begin) for chunk in chunks]
            work.sampled_tokens = sum([chunk.is_last for chunk in chunks])
            work.prefilling = [(chunk.job, chunk.end - chunk.begin) for chunk in chunks]
        super().__init__(work, NO_TRANSFERS)
        self.chunks = chunks
        self.answers = answers


def steps_alike(running: list[Answer], free_pages: int, page_tokens: int) -> int:
    """Return how many decode steps may follow those formed before an answer ends or there is not a free page for each request.

    The answer that ends first may get its last token in the last of them.
    """
    steps = min([job.request.output_tokens - job.generated - lease.flying for job, lease in running])
    return min(steps, steps_with_room([lease.tokens for _, lease in running], free_pages, page_tokens)) if steps > 0 else 0


def steps_with_room(held: list[int], free_pages: int, page_tokens: int) -> int:
    """Return how many decode steps find a free page for each request, of those that have memory for so many tokens."""
    spare = free_pages - len(held)
    if spare < 0:
        return 0
    rounds, left = divmod(spare, len(held))  # in a round of page_tokens steps, each request begins a page
    begin_after = sorted([-tokens % page_tokens for tokens in held])
    return rounds * page_tokens + begin_after[left] + 1
