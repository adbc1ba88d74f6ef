"""The requests that decode under SGLang's scheduler, its ``running_batch``."""

from kvsim.engine.job import DECODING, ENDED
from kvsim.engines.sglang.stepped import SteppedNodes
from kvsim.engines.sglang.steps import Answer, NodeStep


class RunningBatch:
    """Requests that decode, or are about to leave, in the engine's order.

    is_full  while set, no request is tried: memory or the number of requests has run out, and nobody has left since
    """

    def __init__(self, cache: SteppedNodes, *, looks_ahead: bool) -> None:
        """``looks_ahead``: passes take place before the results of the step that runs are known."""
        self.cache = cache
        self.pool = cache.gpu.pool
        self.page_tokens = cache.page_tokens
        self.looks_ahead = looks_ahead
        self.answers: list[Answer] = []
        """Steps keep this list: it is not changed in place."""
        self.is_full = False

    def __len__(self) -> int:
        return len(self.answers)

    # --- who comes and goes --------------------------------------------------------------------------------------------------

    def join(self, last: NodeStep) -> None:
        """Let the requests of the last step with prompts join, except those that have dropped out or are still chunked."""
        joining = [(chunk.job, chunk.lease) for chunk in last.chunks if chunk.is_last and chunk.job.lease is chunk.lease]
        joining += [(job, lease) for job, lease in last.answers if job.lease is lease]
        if len(joining) < len(last.chunks) + len(last.answers) or not self.answers:
            self.is_full = False
        for job, _ in joining:
            job.phase = DECODING
        self.answers = self.answers + joining

    def leave_ended(self) -> None:
        """Let those leave that have ended."""
        self._keep([(job, lease) for job, lease in self.answers if job.phase != ENDED])

    def leave_before_last(self) -> bool:
        """Let those leave whose last token is being computed. Returns whether there are any."""
        if not self.looks_ahead or self.cache.differs.decodes_past_end:
            return False
        answers = self.answers
        return self._keep(
            [(job, lease) for job, lease in answers if job.generated + lease.flying < lease.declared or not lease.flying]
        )

    def _keep(self, staying: list[Answer]) -> bool:
        has_left = len(staying) < len(self.answers)
        if has_left:
            self.replace(staying)
        return has_left

    def replace(self, answers: list[Answer]) -> None:
        """Let these requests be those that run, others than before: a request may be tried again."""
        self.answers, self.is_full = answers, False

    # --- memory --------------------------------------------------------------------------------------------------------------

    def has_room(self, answers: list[Answer]) -> bool:
        """Make room for the pages that a decode step of these requests begins. Returns whether there is."""
        return self.cache.has_room([lease for _, lease in answers])

    def take_tokens(self) -> list[Answer]:
        """Take the memory of all requests' next tokens. Returns those that decode: all."""
        leases = [lease for _, lease in self.answers]
        self.cache.take_tokens(leases)
        for lease in leases:
            lease.flying += 1
        return self.answers

    def repetitions(self) -> int:
        """Return how often the decode step just formed may be repeated before an answer ends or memory must be evicted.

        The answer that ends first may get its last token in the last repetition.
        """
        most = min([job.request.output_tokens - job.generated - lease.flying for job, lease in self.answers])
        if most <= 0:
            return 0
        return min(most, steps_with_room([lease.tokens for _, lease in self.answers], self.pool.free, self.page_tokens))


def steps_with_room(held: list[int], free_pages: int, page_tokens: int) -> int:
    """Return how many decode steps find a free page for each request, of those that have memory for so many tokens."""
    spare = free_pages - len(held)
    if spare < 0:
        return 0
    rounds, left = divmod(spare, len(held))  # in a round of page_tokens steps, each request begins a page
    begin_after = sorted([-tokens % page_tokens for tokens in held])
    return rounds * page_tokens + begin_after[left] + 1
