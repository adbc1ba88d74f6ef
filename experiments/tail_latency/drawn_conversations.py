"""Conversations as the paper has them: drawn from its stochastic model, or read from its data sets' files."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from math import nan
from typing import Any, NamedTuple

import numpy as np
from conversation_cache import Turn

from kvsim.core.request import Request
from kvsim.pages.extents import Extent, append_extent, count_pages, split_extents
from kvsim.trace.base import Trace

DRAWN_AT_ONCE = 100
"""Conversations between two looks at whether the turns before the last one's begin are enough."""
BYTES_PER_TOKEN = 4
"""Of text in a file: an estimate, without the tokenizer of the paper's model."""


@dataclass(frozen=True)
class Conversations:
    """New ones begin as a Poisson process, one per unit of time on average; the rest is drawn for each independently.

    turns            geometric (the paper's death clock), or log-normal if ``turns_spread`` is above 0
    tokens           log-normal with these means; a spread is the sigma of the logarithm
    between turns    exponential with mean ``pause``, or log-normal with median ``pause`` if ``pause_spread`` is above 0
    """

    turns: float
    prompt_tokens: float
    prompt_spread: float
    answer_tokens: float
    answer_spread: float
    pause: float
    turns_spread: float = 0.0
    pause_spread: float = 0.0
    next_prompt: int = 0
    """What T-LRU expects of the next prompt, in tokens."""


def draw(kind: Conversations, seed: int, turns: int, rate: float = 1.0) -> list[Turn]:
    """Return the first ``turns`` turns in order of arrival, with ``rate`` new conversations per unit of time."""
    random = np.random.default_rng(seed)
    found: list[Turn] = []
    begin, session = 0.0, 0
    while session % DRAWN_AT_ONCE or sum(turn.at_s <= begin for turn in found) < turns:
        begin += random.exponential(1 / rate)
        at_s, history = begin, 0
        for _ in range(number_of_turns(kind, random)):
            prompt = tokens(random, kind.prompt_tokens, kind.prompt_spread)
            answer = tokens(random, kind.answer_tokens, kind.answer_spread)
            found.append(Turn(at_s, session, history, prompt, answer))
            history += prompt + answer
            at_s += pause(kind, random)
        session += 1
    return sorted(found)[:turns]


def number_of_turns(kind: Conversations, random: np.random.Generator) -> int:
    if not kind.turns_spread:
        return int(random.geometric(1 / kind.turns))
    return tokens(random, kind.turns, kind.turns_spread)


def tokens(random: np.random.Generator, mean: float, spread: float) -> int:
    """Return a log-normal number with this mean, at least 1."""
    return max(1, round(mean * float(np.exp(spread * random.standard_normal() - spread * spread / 2))))


def pause(kind: Conversations, random: np.random.Generator) -> float:
    if not kind.pause_spread:
        return float(random.exponential(kind.pause))
    return kind.pause * float(np.exp(kind.pause_spread * random.standard_normal()))


class Exchange(NamedTuple):
    """A prompt and its answer in a file, in tokens, and when; nan without a time."""

    prompt: int
    answer: int
    at_s: float


def read(path: str, seed: int, turns: int) -> list[Turn]:
    """Return the first ``turns`` turns of a file of WildChat or ShareGPT, plain or .gz: JSON Lines, or one JSON array.

    WildChat's rows have ``conversation``, with a timestamp per answer. ShareGPT's have ``conversations`` and no times: these are
    drawn as the paper does, one new conversation per unit of time and three turns of each.
    """
    conversations = [found for row in rows_of(path) if (found := list(exchanges(row)))]
    random = np.random.default_rng(seed)
    begins = np.cumsum(random.exponential(1.0, len(conversations)))
    found = []
    for session, (conversation, begin) in enumerate(zip(conversations, begins.tolist(), strict=True)):
        history, at_s = 0, begin
        for exchange in conversation:
            found.append(Turn(at_s if exchange.at_s != exchange.at_s else exchange.at_s, session, history, *exchange[:2]))
            history += exchange.prompt + exchange.answer
            at_s += float(random.exponential(1 / 3))
    return sorted(found)[:turns]


def rows_of(path: str) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        first = file.read(1)
        file.seek(0)
        yield from json.load(file) if first == "[" else (json.loads(line) for line in file if line.strip())


def exchanges(row: dict[str, Any]) -> Iterator[Exchange]:
    """Yield the pairs of a message and the answer after it; what has no answer is left out."""
    said = [(part["role"], part["content"], part.get("timestamp")) for part in row.get("conversation", ())]
    said += [(part["from"], part["value"], None) for part in row.get("conversations", ())]
    for (who, prompt, _), (then, answer, at) in pairwise(said):
        if who in ("user", "human") and then in ("assistant", "gpt"):
            yield Exchange(estimate(prompt), estimate(answer), datetime.fromisoformat(at).timestamp() if at else nan)


def estimate(text: str) -> int:
    return max(1, len(text.encode()) // BYTES_PER_TOKEN)


def as_trace(turns: Sequence[Turn], page_tokens: int) -> Trace:
    """Return the turns as requests, each of whose prompts begins with all that was said before, answers included."""
    owned: dict[int, list[Extent]] = {}
    named, requests = 0, []
    for index, turn in enumerate(turns):
        pages = owned.setdefault(turn.session, [])
        known = count_pages(pages)
        end = (turn.end - 1) // page_tokens
        if end > known:
            append_extent(pages, named, end - known)
            named += end - known
        prompt_pages = (turn.history + turn.prompt) // page_tokens
        runs, output = split_extents(tuple(pages), prompt_pages)
        requests.append(
            Request(
                index=index, arrival_s=turn.at_s, prompt_tokens=turn.history + turn.prompt, output_tokens=turn.answer, runs=runs,
                prompt_pages=prompt_pages, session=turn.session, output_runs=output,
            )
        )  # fmt: skip
    return Trace(name="conversations", requests=requests, page_tokens=page_tokens, block_tokens=None)
