"""The requests that decode on one engine, counted in steps: when each ends, and when it needs its next pages."""

import heapq
from typing import Final, cast

from kvsim.core.lease import Lease
from kvsim.core.pool import UNLIMITED
from kvsim.engine.job import DECODING, Job

_pop: Final = heapq.heappop
_push: Final = heapq.heappush
"""Names of this module's own: compiled, they are found at once, where imported ones are looked up each time."""


class Decoding:
    """Requests that decode on one engine in the same steps, a token each. Takes no pages itself, and makes no time pass.

    These are all that decode on the engine, unless several steps may be in flight: then each has a group of requests.
    """

    tokens_per_request: int = 1
    """Tokens that a step computes of each request."""

    def __init__(self, page_tokens: int, slides_at: int = -1) -> None:
        """``slides_at`` is that of the cache."""
        self.page_tokens = page_tokens
        self.slides_at = slides_at
        self.jobs: dict[Job, None] = {}
        """In the order in which they began."""
        self.is_flying = False
        """Whether a step of theirs is under way."""
        self.step = 0
        """Decode steps done."""
        self._ends: list[tuple[int, int, Job]] = []
        self._page_needs: list[tuple[int, int, Job]] = []
        self._slides: list[tuple[int, int, Job]] = []
        self._next_slides: dict[Job, int] = {}
        """The next step of each request in which it leaves pages behind its window."""
        self._context_offset = 0
        """Sum over the requests of (cached tokens - steps done)."""
        self.shared_answers = 0
        """Answers that other prompts may contain."""
        self._order = 0
        """Breaks ties between jobs."""

    @property
    def context_tokens(self) -> int:
        """Cached tokens of all requests together."""
        return self._context_offset + len(self.jobs) * self.step

    def add(self, job: Job) -> None:
        """Let a request decode: its next token comes with the next step."""
        request, page_tokens = job.request, self.page_tokens
        tokens = job.target_tokens - 1
        job.phase = DECODING
        job.joined_step = self.step
        job.last_step = self.step + request.output_tokens - job.generated
        room = request.pages_for(tokens, page_tokens) * page_tokens - tokens
        job.next_page_step = self.step + room + 1
        self.jobs[job] = None
        self._context_offset += tokens - self.step
        self.shared_answers += request.own_path is None
        self._order += 1
        _push(self._ends, (job.last_step, self._order, job))
        self.need_page(job)
        if self.slides_at >= 0:
            self._note_slide(job, self.step + 1 + (self.slides_at - tokens) % page_tokens)

    def _note_slide(self, job: Job, step: int) -> None:
        self._next_slides[job] = step
        self._order += 1
        _push(self._slides, (step, self._order, job))

    def slides_due(self, steps: int) -> list[tuple[Lease, int]]:
        """Remove and return which requests leave pages behind by the end of ``steps`` more steps, with their tokens before the
        last step in which they do; note the next time."""
        due: list[tuple[Lease, int]] = []
        slides, last, page_tokens = self._slides, self.step + steps, self.page_tokens
        while slides and slides[0][0] <= last:
            step, _, job = _pop(slides)
            if self._next_slides.get(job) == step:
                step += (last - step) // page_tokens * page_tokens
                due.append((cast(Lease, job.lease), job.target_tokens - 1 + step - job.joined_step - 1))
                self._note_slide(job, step + page_tokens)
        return due

    def steps_to_slide(self) -> int:
        """Return the number of steps before the next one in which a request may leave pages behind, 1 or more."""
        return max(1, self._slides[0][0] - self.step - 1) if self._slides else UNLIMITED

    def remove(self, job: Job) -> None:
        """Take out a request, which has generated a token in each step since it began."""
        del self.jobs[job]
        self._next_slides.pop(job, None)
        done = self.step - job.joined_step
        tokens = job.target_tokens - 1
        self._context_offset -= tokens - job.joined_step
        self.shared_answers -= job.request.own_path is None
        job.generated += done

    def tokens_since(self, job: Job) -> int:
        """Return how many tokens a request that decodes has generated since it began."""
        return self.step - job.joined_step

    def advance(self, steps: int) -> None:
        """Record that decode steps have been made."""
        self.step += steps

    def remove_ended(self) -> Job | None:
        """Take out and return a request whose answer is complete; None if there is none."""
        while self._ends and self._ends[0][0] <= self.step:
            _, _, job = _pop(self._ends)
            if job in self.jobs and job.last_step <= self.step:
                self.remove(job)
                return job
        return None

    def steps_to_end(self) -> int:
        """Return the number of steps until a request may end; there must be one."""
        return self._ends[0][0] - self.step

    def needs_pages(self, steps: int) -> bool:
        """Return whether a request may need pages within ``steps`` steps."""
        needs = self._page_needs
        return bool(needs) and needs[0][0] <= self.step + steps

    def steps_to_page(self) -> int:
        """Return the number of steps before the next one in which a request may need a page, 1 or more."""
        return max(1, self._page_needs[0][0] - self.step - 1) if self._page_needs else UNLIMITED

    def pages_due(self, steps: int) -> list[tuple[Job, Lease, int]]:
        """Remove and return the page needs of requests within ``steps`` steps, as (job, its lease, pages)."""
        due, needs, last = [], self._page_needs, self.step + steps
        decoding, page_tokens = self.jobs, self.page_tokens
        while needs and needs[0][0] <= last:
            step, order, job = _pop(needs)
            if job.page_need == order and job in decoding:
                until = job.last_step
                if last < until:
                    until = last
                if step <= until:
                    due.append((job, cast(Lease, job.lease), 1 + (until - step) // page_tokens))
        return due

    def pages_used(self, due: list[tuple[Job, Lease, int]], steps: int) -> list[tuple[Lease, int]]:
        """Return what ``steps`` steps use of the pages that were due for more, as (lease, pages); note the needs after them."""
        last = self.step + steps
        used: list[tuple[Lease, int]] = []
        for job, lease, _ in due:
            until = min(last, job.last_step)
            if job.next_page_step <= until:
                pages = 1 + (until - job.next_page_step) // self.page_tokens
                used.append((lease, pages))
                job.next_page_step += pages * self.page_tokens
            self.need_page(job)
        return used

    def in_turn(
        self, due: list[tuple[Job, Lease, int]], steps: int
    ) -> list[tuple[list[tuple[Lease, int]], list[tuple[Lease, int]]]]:
        """Return what ``steps`` steps change, step by step: who leaves pages behind, as ``slides_due`` says it, and who takes a
        page of those that were due for more steps, as (lease, 1); note the needs after them.

        The first step is always there; others only if something changes.
        """
        last = self.step + steps
        slides: dict[int, list[tuple[Lease, int]]] = {self.step + 1: []}
        takes: dict[int, list[tuple[Lease, int]]] = {}
        while self._slides and self._slides[0][0] <= last:
            step = self._slides[0][0]
            slides[step] = self.slides_due(step - self.step)
        for job, lease, _ in due:
            for step in range(job.next_page_step, min(last, job.last_step) + 1, self.page_tokens):
                takes.setdefault(step, []).append((lease, 1))
        self.pages_used(due, steps)
        return [(slides.get(step, []), takes.get(step, [])) for step in sorted({*slides, *takes})]

    def need_page(self, job: Job) -> None:
        """Note when a request needs its next page."""
        self._order += 1
        job.page_need = self._order
        _push(self._page_needs, (job.next_page_step, self._order, job))

    def clear(self) -> None:
        """Forget the needs of the requests, which have all been taken out."""
        self._ends.clear()
        self._page_needs.clear()
        self._slides.clear()
        assert not self._context_offset, "tokens of requests that do not decode any more"
