"""What a pass of SGLang's scheduler has formed: a step, or a leap of decode steps that are alike."""

from collections.abc import Iterable

from kvsim.core.transfer import Transfer
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

    def __init__(
        self, chunks: list[Chunk], answers: list[Answer], loads: list[Transfer], *, decode_step: int, engine: int
    ) -> None:
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
        super().__init__(work, loads)
        self.chunks = chunks
        self.answers = answers

    def comes_later(self, steps: int) -> None:
        """Note that the answers have grown by ``steps`` tokens since the step was formed, before it is made."""
        self.work.decode_context_tokens += steps * self.work.decode_requests
        self.work.decode_step += steps


def jobs_in(answers: list[Answer], chunked: Job | None, steps: Iterable[NodeStep | None]) -> list[Job]:
    """Return the requests that run, are being computed or are about to leave, and have pages, each once."""
    jobs = dict.fromkeys([job for job, _ in answers])
    for step in steps:
        if step is not None:
            jobs.update(dict.fromkeys([chunk.job for chunk in step.chunks]))
            jobs.update(dict.fromkeys([job for job, _ in step.answers]))
    if chunked is not None:
        jobs[chunked] = None
    return [job for job in jobs if job.lease is not None]
