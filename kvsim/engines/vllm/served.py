"""A request on vLLM's scheduler, what a step computes of it, and the step."""

from collections.abc import Iterable

from kvsim.core.transfer import NO_TRANSFERS
from kvsim.engine.job import DECODING, Job
from kvsim.engine.schedule import Step
from kvsim.engine.substrate import Work
from kvsim.engines.vllm.block_pool import BlockLease
from kvsim.engines.vllm.copies import NO_COPIES


class Served:
    """What the scheduler knows of a request besides its job. The job's ``computed`` counts tokens of steps that run, too."""

    lease: BlockLease
    """What it holds of the cache, once it has been admitted; after that, as long as its job has a lease."""

    __slots__ = (
        "base", "chunks", "ends_at", "flying", "is_loaded", "is_partial", "job", "last_slots", "lease", "next_chunk",
        "offered_tokens", "place", "steps_out", "stores", "wake",
    )  # fmt: skip

    def __init__(self, job: Job) -> None:
        self.job = job
        self.flying = 0
        """Tokens of its answer that steps in flight will bring."""
        self.steps_out = 0
        """Steps in flight that compute it."""
        self.is_partial = False
        """Whether its last step leaves part of the known tokens to compute."""
        self.is_loaded = False
        """Whether its load, if it has one, has ended."""
        self.next_chunk = 0
        """Position in its path of the first chunk that is offered next."""
        self.offered_tokens = 0
        """The number of its tokens with which that one is offered."""
        self.stores = 0
        """Its stores whose end has not been reported."""
        self.last_slots: list[int] = []
        """The GPU's slots of its pages when it finished, if stores read them."""
        self.place = 0
        """Its place in the order of admission."""
        self.wake = 0
        """Number of its entry among those that wake, while it is steady (``RunningRequests``); 0: it is busy."""
        self.chunks: list[Chunk] = []
        """The chunks of the last step that computed it while it was busy."""
        self.base = 0
        """Its tokens computed after that step, less the steps formed. While it is steady, they grow alike."""
        self.ends_at = 0
        """The step that brings its last token, if all from that step on compute it."""

    @property
    def wanted_tokens(self) -> int:
        """The tokens that the next step can compute; it must be busy."""
        return self.job.target_tokens + self.flying - self.job.computed

    @property
    def is_last_out(self) -> bool:
        """Whether the last token of its answer is in flight."""
        return self.flying > 0 and self.job.generated + self.flying >= max(self.job.request.output_tokens, 1)


class Chunk:
    """The tokens of a request that a step computes, up to the first ``upto`` in all."""

    __slots__ = ("place", "samples", "served", "upto")

    def __init__(self, served: Served, upto: int, samples: bool) -> None:
        self.served = served
        self.upto = upto
        self.samples = samples
        """Whether a token of the answer comes of it."""
        self.place = served.place
        """Its place among the step's chunks."""


class BlockStep(Step):
    """A step that a pass has formed, with the chunks of busy requests; perhaps it computes nothing."""

    __slots__ = ("chunks", "reported")

    def __init__(self, work: Work, chunks: list[Chunk]) -> None:
        super().__init__(work, NO_TRANSFERS)
        self.chunks = chunks
        self.reported = NO_COPIES
        """Copies whose ends take effect with its results."""

    @property
    def is_empty(self) -> bool:
        """Whether it computes nothing."""
        return not (self.work.chunks or self.work.decode_requests)


class Forming:
    """A step that a pass is forming, with the chunks of busy requests so far."""

    __slots__ = ("_chunks", "_decoding", "_work")

    def __init__(self, work: Work) -> None:
        self._work = work
        self._chunks: list[Chunk] = []
        self._decoding: list[Job] = []

    def add(self, served: Served, tokens: int, *, samples: bool) -> None:
        """Add the next ``tokens`` tokens of a request; ``samples``: whether a token of its answer comes of them."""
        job, work = served.job, self._work
        self._chunks.append(Chunk(served, job.computed + tokens, samples))
        if job.phase == DECODING:
            self._decoding.append(job)
            work.decode_context_tokens += job.computed
        else:
            work.chunks.append((tokens, job.computed))
            work.prefilling.append((job, tokens))
            work.sampled_tokens += samples

    def step(self, steady: Iterable[Job], context_tokens: int) -> BlockStep:
        """Return the step, with the steady requests, which decode after so many tokens of context in all."""
        work = self._work
        work.decoding = [*self._decoding, *steady]
        work.decode_requests = len(work.decoding)
        work.decode_context_tokens += context_tokens
        if work.chunks:
            for chunk in self._chunks:
                chunk.served.is_partial = not chunk.samples
        return BlockStep(work, self._chunks)
