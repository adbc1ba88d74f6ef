"""Speculative decoding: how many tokens of an answer a step yields, and when requests that decode so need pages.

Leviathan, Kalman and Matias: Fast inference from transformers via speculative decoding (ICML 2023, arXiv:2211.17192). A draft
proposes tokens, and one step of the model checks them all: it keeps those before the first wrong one and adds one of its own.
"""

from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

import numpy as np

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.engine.decoding import Decoding
from kvsim.engine.job import DECODING, Job
from kvsim.numbers import Real, Whole, check_number, check_settings

SHARE: Final = Real(least=0, most=1)


@dataclass(kw_only=True)
class Speculation:
    """What a draft proposes, how much of it is right, and what it costs."""

    tokens: int = 0
    """Draft tokens of each request in each decode step; 0: no draft."""
    acceptance: list[float] = field(default_factory=lambda: [0.8])
    """Probability that a draft token is right if all before it in its step are, by its place; the last one holds for all further
    places."""
    draft_cost: float = 0.0
    """Time to draft one token for all requests of a step, as a share of the time in which the model generates one for each."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self, Whole(0), "tokens", "seed")
        check_settings(self, Real(least=0), "draft_cost", hint="it is a share of a decode step's time")
        chances: Any = self.acceptance  # its items may be anything
        if not chances:
            raise ValueError("acceptance must have at least one probability")
        for chance in chances:
            check_number("acceptance", SHARE, chance, hint="it is a list of probabilities, by place in the draft")

    @property
    def is_on(self) -> bool:
        """Whether anything is drafted."""
        return self.tokens > 0

    @property
    def tokens_per_request(self) -> int:
        """Tokens that a decode step computes of each request."""
        return 1 + self.tokens

    def expected_tokens(self) -> float:
        """Return the mean number of tokens that a step yields of an answer that goes on: equation 1 of the paper if all places
        have the same probability."""
        expected = chance = 1.0
        for place in range(self.tokens):
            chance *= self.acceptance[min(place, len(self.acceptance) - 1)]
            expected += chance
        return expected


class Answers:
    """How far each step goes in each answer. A step goes as far whatever else runs: that depends on the request alone.

    Each place of an answer has a number drawn for it. A draft token there is right if the number is below its probability. No
    place is decided twice, so the steps of an answer are independent of each other.
    """

    def __init__(self, settings: Speculation) -> None:
        self.settings = settings
        self._draws: dict[tuple[int, int], list[float]] = {}
        self._steps = self._accepted = self._yielded = 0

    def step(self, request: Request, generated: int) -> int:
        """Return the tokens that a step yields of an answer after ``generated`` ones, at least 1, at most what is left of it."""
        left = request.output_tokens - generated
        draws = self._draws_of(request)
        chances, last = self.settings.acceptance, len(self.settings.acceptance) - 1
        right, most = 0, min(self.settings.tokens, left)
        while right < most and draws[generated + right] < chances[right if right < last else last]:
            right += 1
        tokens = right + 1 if right < left else left
        self._steps += 1
        self._accepted += right
        self._yielded += tokens
        return tokens

    def _draws_of(self, request: Request) -> list[float]:
        key = request.index, request.sample
        draws = self._draws.get(key)
        if draws is None:
            rng = np.random.default_rng([self.settings.seed, *key])
            draws = self._draws[key] = rng.random(request.output_tokens).tolist()
        return draws

    def counts(self) -> dict[str, int]:
        """Return the steps made of all answers, the tokens drafted in them, those that were right, and all that they yielded."""
        return {
            "steps": self._steps,
            "draft_tokens": self._steps * self.settings.tokens,
            "accepted_tokens": self._accepted,
            "tokens": self._yielded,
        }

    def forget(self, request: Request) -> None:
        """Give up what was drawn for an answer that is complete, or goes on elsewhere."""
        self._draws.pop((request.index, request.sample), None)


class SpeculativeDecoding(Decoding):
    """Requests that decode with drafts: each step yields a number of tokens of its own of each. Steps are made one by one.

    A step needs room for the draft's tokens, too, as far as the answer goes on: those of wrong ones are used again by the next
    step. ``next_page_step`` counts tokens here: those for which a request has pages.
    """

    def __init__(self, page_tokens: int, answers: Answers) -> None:
        super().__init__(page_tokens)
        self.answers = answers
        self.tokens_per_request = answers.settings.tokens_per_request
        self._context = 0

    @property
    def context_tokens(self) -> int:
        return self._context

    def add(self, job: Job) -> None:
        tokens = job.target_tokens - 1
        job.phase = DECODING
        job.joined_step = self.step
        job.next_page_step = job.request.pages_for(tokens, self.page_tokens) * self.page_tokens
        self.jobs[job] = None
        self._context += tokens

    def remove(self, job: Job) -> None:
        del self.jobs[job]
        self._context -= job.target_tokens - 1
        self.answers.forget(job.request)

    def remove_ended(self) -> Job | None:
        for job in self.jobs:
            if job.generated >= job.request.output_tokens:
                self.remove(job)
                return job
        return None

    def steps_to_end(self) -> int:
        return 1

    def advance(self, steps: int) -> None:
        self.step += steps
        for job in self.jobs:
            for _ in range(steps):
                tokens = self.answers.step(job.request, job.generated)
                job.generated += tokens
                self._context += tokens
            job.joined_step = self.step

    def needs_pages(self, steps: int) -> bool:
        return any(self._pages_short(job) for job in self.jobs)

    def pages_due(self, steps: int) -> list[tuple[Job, Lease, int]]:
        due: list[tuple[Job, Lease, int]] = []
        for job in self.jobs:
            pages = self._pages_short(job)
            if pages:
                assert job.lease is not None
                due.append((job, job.lease, pages))
        return due

    def _pages_short(self, job: Job) -> int:
        """Return the pages that a request lacks for its next step."""
        left = job.request.output_tokens - job.generated
        tokens = job.target_tokens - 1 + min(self.tokens_per_request, left)
        return max(0, ceil((tokens - job.next_page_step) / self.page_tokens))

    def need_page(self, job: Job) -> None:
        """Nothing is to be noted: the needs of all requests are looked at before each step."""

    def clear(self) -> None:
        assert not self._context, "tokens of requests that do not decode any more"
