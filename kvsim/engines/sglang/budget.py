"""How much one pass of SGLang's scheduler may admit (``PrefillAdder`` and the new-token ratio of SGLang 0.5.23)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvsim.core.request import Request

SPARE_TOKENS: Final = 6
"""A prompt is rejected that leaves no more tokens than these."""
MOST_PROMISED: Final = 4096
"""Tokens of an answer that are promised at most (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)."""
FIRST_RATIO: Final = 0.7
"""SGLANG_INIT_NEW_TOKEN_RATIO."""
LEAST_SHARE: Final = 0.14
"""SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR."""
DECAY_STEPS: Final = 600
"""SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS."""
RETRACT_STEPS: Final = 20
"""Decode steps that a retraction makes room for (SGLANG_RETRACT_DECODE_STEPS)."""


@dataclass(frozen=True, kw_only=True)
class PassSettings:
    """SGLang's parameters. Numbers are tokens; see ``SGLangRules``."""

    looks_ahead: bool
    mixed_chunk: bool
    conservativeness: float
    ignore_eos: bool
    declared_tokens: int | None
    """What every request declares as the longest answer, at least its own; None: the answer's length."""
    chunk_tokens: int | None
    """Prompt tokens that a pass may compute; None: no limit."""
    prefill_tokens: int


class DeclaredAnswers:
    """The length of answer that a request declares (``max_new_tokens``), which the GPU's memory bounds."""

    def __init__(self, declared_tokens: int | None, capacity_tokens: int, page_tokens: int) -> None:
        """``declared_tokens``: see ``PassSettings``."""
        self._declared_tokens = declared_tokens
        self._capacity_tokens = capacity_tokens
        self._page_tokens = page_tokens

    def takes(self, request: Request) -> bool:
        """Whether SGLang would neither reject a request nor cut its answer short."""
        if request.prompt_tokens >= self._capacity_tokens - SPARE_TOKENS:
            return False
        return not request.samples or max(1, request.output_tokens) <= self._most(request)

    def _most(self, request: Request) -> int:
        """Return the longest answer that SGLang lets a request declare."""
        capacity, page_tokens = self._capacity_tokens, self._page_tokens
        whole = -(-request.prompt_tokens // page_tokens) * page_tokens
        return min(capacity - request.prompt_tokens - 2, capacity - whole - page_tokens - 1)

    def of(self, request: Request) -> int:
        """Return the length of answer that a request declares."""
        if not request.samples:
            return 0
        own, declared = max(1, request.output_tokens), self._declared_tokens
        return own if declared is None or declared <= own else min(declared, self._most(request))


class TokenRatio:
    """The share of the declared answers that running requests are expected to need.

    a decode step   towards its least value, in 600 equal steps
    a retraction    what the remaining requests have so far, and 20 tokens each, of what they declare
    nothing to do   as at the beginning
    """

    def __init__(self, conservativeness: float) -> None:
        self._first = min(1.0, FIRST_RATIO * conservativeness)
        self._least = self._first * LEAST_SHARE
        self._decay = (self._first - self._least) / DECAY_STEPS
        self.value = self._first

    def decay(self, steps: int = 1) -> None:
        """Take note of decode steps for which all had room. Step by step, as a float depends on the order of its operations."""
        value, least = self.value, self._least
        while steps > 0 and value > least:
            value -= self._decay
            steps -= 1
        self.value = max(value, least)

    def estimate(self, generated: Sequence[int], declared: Sequence[int]) -> None:
        """Take note of a retraction: lengths of the remaining requests' answers so far, and as declared."""
        self.value = min(1.0, (sum(generated) + RETRACT_STEPS * len(generated)) / (sum(declared) + 1))

    def reset(self) -> None:
        """Take note that nothing runs and nothing waits."""
        self.value = self._first


class PassBudget:
    """What is left of a pass: tokens to compute, and memory that is promised to answers and to what was admitted.

    Sums of promises are floats, added in the engine's order: whether a request fits may depend on the last bit.
    """

    def __init__(self, settings: PassSettings, page_tokens: int, ratio: float, answers_left: Sequence[int]) -> None:
        """``answers_left`` has what each running request declares, less its answer so far, in their order."""
        share = 1.0 if settings.ignore_eos else ratio
        decoding = len(answers_left) if settings.mixed_chunk else 0
        self._page_tokens = page_tokens
        promises = [(left if left < MOST_PROMISED else MOST_PROMISED) * share for left in answers_left]
        self.promised = float(decoding) + sum(promises)
        self.chunk = None if settings.chunk_tokens is None else settings.chunk_tokens - decoding
        """Prompt tokens that the pass may still compute; None: no limit."""
        self.prompts = settings.prefill_tokens - decoding
        """The same by ``max_prefill_tokens``, which only stops the next request."""

    @property
    def is_spent(self) -> bool:
        """Whether no more tokens may be computed."""
        return self.prompts <= 0 or self.chunk is not None and self.chunk <= 0

    def rounded(self, tokens: int) -> int:
        """Return the tokens of as many pages as hold ``tokens``."""
        return -(-tokens // self._page_tokens) * self._page_tokens

    def charge(self, tokens: int, declared: int) -> None:
        """Take off a chunk and, with its last one, the answer that the request declares (0 for any other)."""
        tokens = self.rounded(tokens)
        self.promised += tokens + self._page_tokens + min(declared, MOST_PROMISED)
        self.prompts -= tokens
        if self.chunk is not None:
            self.chunk -= tokens

    def cut(self, found: int, end: int, *, is_first: bool) -> int:
        """Return where a request's first chunk ends, after ``found`` tokens; ``found`` if the pass has no tokens for it."""
        tokens = self.rounded(end - found)
        if self.chunk is None:
            return end if is_first or tokens < self.prompts else found
        if tokens <= self.chunk:
            return end
        whole = self.chunk // self._page_tokens * self._page_tokens
        return max(found, (found + whole) // self._page_tokens * self._page_tokens)
