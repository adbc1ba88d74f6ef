"""The running requests of vLLM's scheduler: those that a pass has to look at, and those that only decode for a while."""

from heapq import heappop, heappush

from kvsim.engine.job import DECODING, Job
from kvsim.engines.vllm.served import BlockStep, Chunk, Served


class RunningRequests:
    """The running requests, in order of admission, and the steps in flight.

    busy     a pass gives each its tokens and its blocks
    steady   gets a token in each step, and at times a block for it. Its answer does not end, no page gets a name, and no chunk
             is offered. What its job and ``Served`` count is brought up to date when it wakes

    So a pass takes time for the busy ones and for those that need blocks, which two heaps know.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.all: list[Served] = []
        self.busy: list[Served] = []
        self.steady: dict[Job, Served] = {}
        self.flight: list[BlockStep] = []
        """Steps that have been formed and have not ended."""
        self.formed = 0
        """Steps formed, each repetition of a leap that has ended included."""
        self._wakes: list[tuple[int, int, Served]] = []
        """A heap of (step that needs a request awake, its entry, the request)."""
        self._needs: list[tuple[int, int, Served]] = []
        """A heap of (step in which a steady request needs a block, its entry, the request)."""
        self._entries = self._admissions = 0
        self._computed_offset = 0
        """Sum of ``base`` over the steady requests."""

    def __len__(self) -> int:
        return len(self.all)

    @property
    def steady_context_tokens(self) -> int:
        """Tokens that the steady requests attend over in the next step."""
        return self._computed_offset + len(self.steady) * self.formed

    def computed(self, served: Served) -> int:
        """Return the tokens computed, those of steps in flight included, of a request that the last step computes."""
        return served.base + self.formed

    def is_scarce(self, most_tokens: int) -> bool:
        """Whether a step of at most so many tokens may be full before the last request has its turn."""
        busy = self.busy
        before_last = busy[:-1] if busy and busy[-1] is self.all[-1] else busy
        return len(self.steady) + sum([served.wanted_tokens for served in before_last]) >= most_tokens

    def promised(self, loading: list[Served]) -> int:
        """Return the pages that these, which load, and requests in the midst of their known tokens still lack for those."""
        incomplete = [*loading, *[served for served in self.busy if served.is_partial]]
        page_tokens = self._page_tokens
        return sum([max(0, -(-served.job.target_tokens // page_tokens) - served.lease.held_pages) for served in incomplete])

    # --- who comes and goes --------------------------------------------------------------------------------------------------

    def admit(self, served: Served) -> None:
        """Let a request run."""
        self._admissions += 1
        served.place = self._admissions
        self.all.append(served)
        self.busy.append(served)

    def remove(self, served: Served) -> None:
        """Let a request run no more."""
        if served.wake:
            self.wake([served])
        self.all.remove(served)
        self.busy.remove(served)

    def clear(self) -> None:
        """Forget the steps in flight and the heap; no request runs any more."""
        self.flight.clear()
        self._wakes.clear()
        self._needs.clear()
        assert not (self.all or self.busy or self._computed_offset), "requests that do not run any more"

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def form(self, step: BlockStep) -> BlockStep:
        """Note a step, with chunks of busy requests: those that need nothing in the next ones become steady. Returns it."""
        self.flight.append(step)
        self.formed += 1
        joined = False
        for chunk in step.chunks:
            served = chunk.served
            served.chunks = step.chunks
            served.base = served.job.computed - self.formed
            served.ends_at = self.formed + served.job.request.output_tokens - served.job.generated - served.flying
            steps = self._steady_steps(served)
            if steps > 0:
                self._join(served, steps)
                joined = True
        if joined:
            self.busy = [served for served in self.busy if not served.wake]
        return step

    def _steady_steps(self, served: Served) -> int:
        """Return for how many steps from the next one on a request needs nothing but a token in each, and blocks."""
        job, lease, flying = served.job, served.lease, served.flying
        if job.phase != DECODING or not job.is_prefilled or served.is_partial or flying != len(self.flight):
            return 0
        computed, page_tokens = job.computed, self._page_tokens
        steps = min(served.ends_at - self.formed, served.offered_tokens - computed) - 1
        return min(steps, page_tokens - 1 - (computed - flying + 1) % page_tokens) if lease.rest else steps

    def _join(self, served: Served, steps: int) -> None:
        served.flying = served.steps_out = 0
        self._entries += 1
        served.wake = self._entries
        heappush(self._wakes, (self.formed + steps + 1, served.wake, served))
        self._computed_offset += served.base
        self.steady[served.job] = served
        self.need_block(served)

    def need_block(self, served: Served) -> None:
        """Note when a steady request needs its next block."""
        room = served.lease.held_pages * self._page_tokens - served.base
        heappush(self._needs, (room + 1, served.wake, served))

    def generated(self, job: Job) -> int:
        """Return how many tokens of a request's answer there are, without those in flight."""
        served = self.steady.get(job)
        return job.generated if served is None else self._generated(served)

    def _generated(self, served: Served) -> int:
        """Return how many tokens of a steady request's answer there are."""
        return served.job.request.output_tokens - (served.ends_at - self.formed) - len(self.flight)

    def wake(self, some: list[Served]) -> None:
        """Make steady requests busy, with what is counted of them brought up to date, and chunks in the steps in flight."""
        flight = self.flight
        for served in some:
            job = served.job
            self._computed_offset -= served.base
            job.computed = served.base + self.formed
            served.flying = served.steps_out = len(flight)
            job.generated = self._generated(served)
            served.wake = 0
            del self.steady[job]
            for step in reversed(flight):
                if step.chunks is served.chunks:
                    break
                step.chunks.append(Chunk(served, job.computed, samples=True))
        if some:
            self.busy += some
            self.busy.sort(key=place_of)
            for step in flight:
                step.chunks.sort(key=_place_of_chunk)

    def wake_due(self, steps: int) -> None:
        """Wake the requests that need more than tokens and blocks in the next ``steps`` steps."""
        self.wake(self._due(self._wakes, steps))

    def turns(self) -> tuple[list[Served], int]:
        """Return those that the next step needs served, in order, and how many are at their head that only need a block each.

        ``need_block`` has to follow for the steady ones.
        """
        needs = self.take_needs(1)
        turns = sorted([*self.busy, *needs], key=place_of) if needs else self.busy.copy()
        return turns, next((at for at, served in enumerate(turns) if not served.wake), len(turns))

    def take_needs(self, steps: int) -> list[Served]:
        """Return the steady requests that need blocks in the next ``steps`` steps; ``need_block`` has to follow for each."""
        return self._due(self._needs, steps)

    def _due(self, heap: list[tuple[int, int, Served]], steps: int) -> list[Served]:
        """Take out the requests that are due within the next ``steps`` steps."""
        last, due = self.formed + steps, list[Served]()
        while heap and heap[0][0] <= last:
            _, entry, served = heappop(heap)
            if served.wake == entry:
                due.append(served)
        return due

    def wake_all(self) -> None:
        """Wake every request."""
        self.wake(list(self.steady.values()))

    def later(self, served: Served) -> list[Served]:
        """Return the steady requests that were admitted after this one."""
        return [other for other in self.steady.values() if other.place > served.place]

    def repeat(self, steps: int) -> None:
        """The oldest step in flight, a leap, has been repeated ``steps`` times, with the same requests."""
        self.formed += steps

    def ended(self) -> None:
        """The oldest step in flight has ended."""
        self.flight.pop(0)


def place_of(served: Served) -> int:
    """Return the place of a request in the order of admission."""
    return served.place


def _place_of_chunk(chunk: Chunk) -> int:
    return chunk.place
