"""The batches that a server is measured with: prompts alone and together, decoding requests, prompts that arrive meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from math import exp, lcm, log
from typing import Annotated, Literal

import msgspec
import numpy as np

Kind = Literal["prompt", "burst", "decode", "mixed"]
PROMPT: Kind = "prompt"
BURST: Kind = "burst"
DECODE: Kind = "decode"
MIXED: Kind = "mixed"
KINDS: tuple[Kind, ...] = (PROMPT, BURST, DECODE, MIXED)
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
"""A number of tokens or requests, as a file may say it."""
Slots = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
GRAIN = 16
"""Tokens of prompts and contexts are multiples of this and of the server's page size."""
ARRIVALS = 3
"""Prompts that arrive, one after another, in a mixed batch."""
DECODED = 144
"""Tokens that decoding requests generate, beyond those while others begin: of fewer, a late client sees too little."""

PROMPTS = (
    (16, 0), (64, 0), (128, 0), (256, 0), (384, 0), (512, 0), (768, 0), (1024, 0), (1536, 0), (2048, 0), (3072, 0), (4096, 0),
    (8192, 0), (16384, 0),
    (64, 2048), (256, 4096), (16, 16384), (256, 16384), (1024, 8192), (2048, 4096), (2048, 16384),
)  # fmt: skip
"""(tokens to compute, cached tokens before them)."""
BURSTS = ((2048, 8), (8192, 6))
"""(tokens to compute of each prompt, prompts): the second keeps a GPU busy for about a second, so that it slows down."""
DECODES = (
    (1, 128), (1, 4096), (1, 16384), (4, 1024), (8, 4096), (16, 256), (16, 2048), (16, 10240), (32, 256), (32, 2048), (32, 8192),
    (48, 8192), (64, 256), (64, 1536), (128, 128), (128, 768),
)  # fmt: skip
"""(requests, cached tokens of each on average)."""
SHARED_DECODES = ((8, 8192, 2), (16, 4096, 1), (16, 8192, 4), (48, 8192, 8))
"""(requests, cached tokens of each on average, contexts that they have in common): a GPU reads what they share more quickly."""
MIXES = (
    (256, 8, 1024), (1024, 8, 1024), (4096, 8, 1024), (512, 32, 1024), (2048, 32, 1024), (256, 64, 256), (1024, 64, 1024),
    (512, 16, 8192), (2048, 32, 8192), (512, 48, 8192), (7680, 16, 8192), (7680, 48, 2048),
)  # fmt: skip
"""(tokens to compute, decoding requests, cached tokens of each on average)."""
SHORTEST = 0.5
"""The shortest context of requests that decode together, relative to their average: contexts differ, as those of real requests
do, from this to 2 - this in even steps."""
SLOTS = 16
"""Different contexts at most: further requests share those of others, so that many tokens are read though few are kept."""
HELD_OUT = {PROMPT: 6, BURST: 1, DECODE: 6, MIXED: 3}
"""How many batches of each kind only show how well the others predict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests that are sent together. Numbers of tokens are whole pages."""

    kind: Kind
    tokens: Count = 0
    """Tokens to compute of a prompt that is timed; 0 if decode steps are."""
    requests: Count = 0
    """Decoding requests, or prompts of a burst; 0 for a prompt alone."""
    context: Count = 0
    """Cached tokens before those of the prompt, or of each decoding request on average."""
    slots: Slots = SLOTS
    """Different contexts at most: one decoding request after another begins with the next one of these, and again."""
    is_held_out: bool = False

    @property
    def prompts(self) -> int:
        """How many prompts are timed; they are the first requests."""
        return {PROMPT: 1, BURST: self.requests, DECODE: 0, MIXED: ARRIVALS}[self.kind]

    @property
    def decoding(self) -> int:
        """How many requests decode; they are the last ones."""
        return self.requests if self.kind in (DECODE, MIXED) else 0

    @property
    def answer_tokens(self) -> int:
        """Length of the answers: enough that all requests of a batch decode at the same time for a while."""
        if self.kind in (PROMPT, BURST):
            return 1
        return DECODED + self.requests + (16 * ARRIVALS if self.kind == MIXED else 0)

    def contexts(self, grain: int) -> list[int]:
        """Return the cached tokens of each request that has some, in multiples of ``grain``, the longest first."""
        steps = max(self.requests, 1) - 1
        if not self.context or not steps:
            return [self.context] if self.context else []
        shares = (SHORTEST + (steps - number) / steps * 2 * (1 - SHORTEST) for number in range(steps + 1))
        return [max(1, round(share * self.context / grain)) * grain for share in shares]

    def repeated_tokens(self, grain: int) -> int:
        """Return the cached tokens that decoding requests have in common with others, without those of one of them for each."""
        own = self.contexts(grain) if self.decoding else []
        return sum(own) - sum(max(own[slot :: self.slots]) for slot in range(min(self.slots, len(own))))

    def longest_tokens(self, grain: int) -> int:
        """Return the most tokens of a prompt and its answer in the batch."""
        alone = self.tokens + (self.context if self.kind == PROMPT else 0)
        decoding = max(self.contexts(grain), default=0) + grain + self.answer_tokens
        return max(alone + 1, decoding if self.decoding else 0)

    def label(self) -> str:
        """Say what it is, in a few words."""
        after = f" after {self.context:,}" if self.context else ""
        if self.kind == PROMPT:
            return f"prompt of {self.tokens:,}{after}"
        if self.kind == BURST:
            return f"{self.requests} prompts of {self.tokens:,}"
        common = f" in {self.slots} contexts" if self.requests > self.slots != SLOTS else ""
        decoding = f"{self.requests} decoding{after}{common}"
        return f"{decoding}, prompt of {self.tokens:,}" if self.kind == MIXED else decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server can take."""

    step_tokens: int
    """Tokens that a step computes at most."""
    longest_tokens: int
    """Tokens of a prompt and its answer together."""
    requests: int
    """Requests that run at the same time."""
    context_tokens: int
    """Tokens of all contexts that are kept in the cache for the whole measurement."""

    def hold(self, batch: Batch, grain: int) -> bool:
        """Return whether a batch fits, in multiples of ``grain``. A mixed one must compute its prompt in one step."""
        is_whole = batch.kind != MIXED or batch.tokens + batch.requests <= self.step_tokens
        return (
            is_whole
            and batch.longest_tokens(grain) <= self.longest_tokens
            and batch.requests + (batch.kind == MIXED) <= self.requests
            and sum(contexts([batch], grain)) <= self.context_tokens
        )


def contexts(batches: Sequence[Batch], grain: int) -> list[int]:
    """Return the tokens of each context that the batches need: a batch begins with the first ones, cut to its lengths."""
    return [max(lengths) for lengths in zip_longest(*(batch.contexts(grain)[: batch.slots] for batch in batches), fillvalue=0)]


def design(limits: Limits, page_tokens: int, seed: int) -> list[Batch]:
    """Return the batches to measure, the held-out ones last. The largest contexts are left out until all fit."""
    grain = grain_of(page_tokens)
    designed = [
        *(Batch(kind=PROMPT, tokens=tokens, context=context) for tokens, context in PROMPTS),
        *(Batch(kind=BURST, tokens=tokens, requests=prompts) for tokens, prompts in BURSTS),
        *(Batch(kind=DECODE, requests=requests, context=context) for requests, context in DECODES),
        *(Batch(kind=DECODE, requests=requests, context=context, slots=slots) for requests, context, slots in SHARED_DECODES),
        *(Batch(kind=MIXED, tokens=tokens, requests=requests, context=context) for tokens, requests, context in MIXES),
    ]
    fitting = list(dict.fromkeys(whole(batch, grain) for batch in designed))
    fitting = [batch for batch in fitting if limits.hold(batch, grain)]
    while sum(contexts(fitting, grain)) > limits.context_tokens:
        fitting.remove(max(fitting, key=lambda batch: sum(contexts([batch], grain))))
    drawn = chain.from_iterable(held_out(fitting, limits, grain, kind, seed) for kind in KINDS)
    return [*fitting, *drawn]


def grain_of(page_tokens: int) -> int:
    """Return what numbers of tokens are multiples of, on a server with pages of ``page_tokens``."""
    return lcm(GRAIN, page_tokens)


def whole(batch: Batch, grain: int) -> Batch:
    """Return the batch with numbers of tokens rounded to whole pages; what is not 0 stays at least one."""
    tokens, context = [max(grain, round(n / grain) * grain) if n else 0 for n in (batch.tokens, batch.context)]
    return replace(batch, tokens=tokens, context=context)


def held_out(designed: Sequence[Batch], limits: Limits, grain: int, kind: Kind, seed: int) -> list[Batch]:
    """Draw batches between two of the same kind, on a straight line between the logarithms of their sizes."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    known = [batch for batch in designed if batch.kind == kind]
    drawn: list[Batch] = []
    for _ in range(100 if len(known) > 1 else 0):
        one, other = (known[number] for number in rng.choice(len(known), 2, replace=False))
        share = float(rng.uniform(0.25, 0.75))
        sizes = {
            name: between(getattr(one, name), getattr(other, name), share) for name in ("tokens", "requests", "context", "slots")
        }
        batch = whole(Batch(kind=kind, **sizes, is_held_out=True), grain)
        is_new = replace(batch, is_held_out=False) not in designed and batch not in drawn
        if is_new and limits.hold(batch, grain) and sum(contexts([*designed, *drawn, batch], grain)) <= limits.context_tokens:
            drawn.append(batch)
        if len(drawn) == HELD_OUT[kind]:
            break
    return drawn


def between(one: int, other: int, share: float) -> int:
    """Interpolate between the logarithms; 0 if one of both is."""
    return round(exp((1 - share) * log(one) + share * log(other))) if one and other else 0
