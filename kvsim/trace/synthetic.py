"""A seeded synthetic workload: chats, agents in tool loops, questions about long documents, shared system prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

import numpy as np

from kvsim.core.request import Request
from kvsim.numbers import SECONDS, Real, Whole, check_number, check_settings
from kvsim.pages.extents import Extent, append_extent, count_pages, split_extents
from kvsim.trace.base import OF_MAX_TOKENS, TAILS, Trace, TraceSource, check_choice, check_page_tokens, in_order_of_arrival
from kvsim.trace.blocks import BlockPages

ARRIVALS = ("open_loop", "closed_loop")
MOST_SYSTEMS = 1_000_000
MOST_REQUESTS = 20_000_000
"""What 20 GB of memory hold."""


@dataclass(kw_only=True)
class Kind:
    """A kind of session. Its prompts begin with a system prompt shared with other sessions, and optionally its own document.

    Each turn adds a message. If ``remembers``, the next prompt appends the answer and the next message; otherwise it consists
    of the opening and a new message. Tokens, turns and seconds are means; Synthetic describes their distributions.
    """

    weight: float
    systems: int
    system_tokens: int
    document_tokens: int = 0
    turns: float
    message_tokens: int
    answer_tokens: int
    pause_s: float
    remembers: bool = True

    def check(self, key: str) -> None:
        """Raise ValueError for a bad setting; ``key`` names the kind in the message."""
        check_number(f"{key}.systems", Whole(1, MOST_SYSTEMS), self.systems)
        for name in ("system_tokens", "message_tokens", "answer_tokens"):
            check_number(f"{key}.{name}", Whole(1), getattr(self, name))
        check_number(f"{key}.turns", Real(least=1), self.turns)
        check_number(f"{key}.weight", Real(least=0), self.weight)
        check_number(f"{key}.document_tokens", Whole(), self.document_tokens)
        check_number(f"{key}.pause_s", SECONDS, self.pause_s)


def default_mix() -> dict[str, Kind]:
    """Return chats with the hit rates of the Mooncake conversation trace, agents with those of the WEKA traces, and documents
    in between."""
    chat = Kind(weight=0.8, systems=20, system_tokens=600, turns=1.7, message_tokens=5000, answer_tokens=343, pause_s=60.0)
    agent = Kind(weight=0.06, systems=4, system_tokens=5000, turns=18.0, message_tokens=500, answer_tokens=200, pause_s=4.0)
    document = Kind(
        weight=0.14,
        systems=2,
        system_tokens=300,
        document_tokens=8000,
        turns=3.0,
        message_tokens=80,
        answer_tokens=300,
        pause_s=30.0,
        remembers=False,
    )
    return {"chat": chat, "agent": agent, "document": document}


class Turn(NamedTuple):
    """One request: prompt and answer as extents of token names, and the pause after the answer."""

    prompt: tuple[Extent, ...]
    answer: Extent
    pause_s: float

    @property
    def answer_tokens(self) -> int:
        return self.answer[1]


@dataclass(kw_only=True)
class Synthetic(TraceSource):
    """Generates sessions of the kinds in ``mix``, chosen by weight; they start at random times (a Poisson process).

        tokens      log-normal with the kind's mean and sigma ``spread``, limited by ``max_prompt_tokens``
        turns       geometric; a session also ends when its prompt reaches ``max_prompt_tokens``
        pauses      exponential
        systems     a session uses the i-th system prompt of its kind with probability proportional to 1 / i
        adapters    and the i-th LoRA adapter likewise; sessions with different ones share no pages

        open_loop   a turn arrives one pause after the nominal end of the previous answer, at ``answer_s_per_token``
        closed_loop a turn arrives one pause after the actual end of the previous answer; only session starts are fixed

    The same seed gives the same tokens and times at any page size, and the same tokens at any rate. ``limit`` keeps the
    requests that arrive first.
    """

    seed: int = 0
    sessions: int = 1700
    sessions_per_s: float = 1.0
    arrivals: str = "closed_loop"
    tail: str = "full"
    spread: float = 1.0
    max_prompt_tokens: int = 65_536
    answer_s_per_token: float = 0.02
    adapters: int = 0
    """LoRA adapters, of which each session has one; 0: none."""
    mix: dict[str, Kind] = field(default_factory=default_mix)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("tail", self.tail, TAILS)
        check_choice("arrivals", self.arrivals, ARRIVALS)
        self.mix = {name: kind if isinstance(kind, Kind) else Kind(**kind) for name, kind in self.mix.items()}
        for name, kind in self.mix.items():
            kind.check(f"mix.{name}")
        check_settings(self, Whole(), "seed")
        check_settings(self, Whole(0, MOST_SYSTEMS), "adapters")
        check_settings(self, Whole(1), "sessions")
        check_settings(self, Real(above=0), "sessions_per_s")
        check_settings(self, Real(least=0), "spread")
        check_settings(self, SECONDS, "answer_s_per_token")
        if not sum(kind.weight for kind in self.mix.values()) > 0:
            raise ValueError("mix must have a kind of session with a positive weight")
        self._check_size()
        longest = max(kind.system_tokens for kind in self.mix.values())
        if self.max_prompt_tokens < 2 * longest + 2:
            raise ValueError(f"max_prompt_tokens must be at least {2 * longest + 2} with system prompts of {longest} tokens")

    def _check_size(self) -> None:
        """Raise ValueError for prompts of more than ``max_tokens``, and for more requests than memory holds."""
        check_settings(self, Whole(1, self.max_tokens), "max_prompt_tokens", hint=OF_MAX_TOKENS)
        weights = sum(kind.weight for kind in self.mix.values())
        requests = self.sessions * sum(kind.weight / weights * self._mean_turns(kind) for kind in self.mix.values())
        if requests > MOST_REQUESTS:
            raise ValueError(
                f"sessions must be fewer: with the turns of mix, they make {requests:.2g} requests, above {MOST_REQUESTS:g}"
            )

    def _mean_turns(self, kind: Kind) -> float:
        """Return about how many turns a session has: fewer than ``turns`` if its prompt grows to its end first."""
        room = self.max_prompt_tokens / (kind.message_tokens + kind.answer_tokens)
        return min(kind.turns, room + 1) if kind.remembers else kind.turns

    def load(self, page_tokens: int) -> Trace:
        check_page_tokens(page_tokens)
        pages = BlockPages(1, page_tokens, partial_tail=self.tail == "all")
        requests: list[Request] = []
        adapters = self._adapters()
        for session, (begin_s, kind, turns) in enumerate(Author(self).sessions()):
            self._append(requests, pages, session, begin_s, kind, turns, adapters[session])
        return Trace(
            name="synthetic",
            requests=in_order_of_arrival(requests)[: self.limit],
            page_tokens=page_tokens,
            block_tokens=None,
        )

    def _adapters(self) -> list[str]:
        """Return the adapter of each session, drawn apart from texts and times: these do not depend on adapters."""
        if not self.adapters:
            return [""] * self.sessions
        shares = 1 / np.arange(1, self.adapters + 1)
        drawn = np.random.default_rng([self.seed, 1]).choice(self.adapters, self.sessions, p=shares / shares.sum())
        return [str(1 + adapter) for adapter in drawn.tolist()]

    def _append(
        self,
        requests: list[Request],
        pages: BlockPages,
        session: int,
        begin_s: float,
        kind: str,
        turns: Iterator[Turn],
        adapter: str,
    ) -> None:
        """Append a session's requests; ``after`` is a position in ``requests``."""
        closed = self.arrivals == "closed_loop"
        arrival_s, delay_s, scope = begin_s / self.rate, 0.0, pages.scope_of(adapter)
        for number, turn in enumerate(turns):
            prompt_tokens = count_pages(turn.prompt)
            extents, prompt_pages = self._lookup(pages, turn.prompt, prompt_tokens, scope)
            requests.append(
                Request(
                    index=0,
                    arrival_s=arrival_s,
                    prompt_tokens=prompt_tokens,
                    output_tokens=turn.answer_tokens,
                    runs=extents,
                    prompt_pages=prompt_pages,
                    after=len(requests) - 1 if closed and number else -1,
                    delay_s=delay_s if closed else 0.0,
                    session=session,
                    turn=number,
                    kind=kind,
                    output_runs=self._output_extents(pages, turn, prompt_tokens, scope),
                    adapter=adapter,
                    bigram=self.bigram,
                )
            )
            delay_s = turn.pause_s
            between_s = turn.answer_tokens * self.answer_s_per_token + turn.pause_s
            arrival_s += between_s if closed else between_s / self.rate

    def _lookup(self, pages: BlockPages, tokens: Sequence[Extent], count: int, scope: int) -> tuple[tuple[Extent, ...], int]:
        """Return the pages of a prompt of ``count`` tokens, and their number.

        With ``bigram``, a page is known by the tokens up to the one after it, so the tokens from the second one on are cut into
        pages: a text begins with a token of its own, so equal second tokens follow equal first ones.
        """
        if not self.bigram:
            return pages.lookup(tokens, count, scope)
        return pages.lookup(split_extents(tuple(tokens), 1)[1], count - 1, scope)

    def _output_extents(self, pages: BlockPages, turn: Turn, prompt_tokens: int, scope: int) -> tuple[Extent, ...]:
        """Return the pages that the answer completes; its last token has no KV."""
        whole = list(turn.prompt)
        append_extent(whole, *turn.answer)
        page_tokens, ahead = pages.page_tokens, int(self.bigram)
        full_tokens = (prompt_tokens + turn.answer_tokens - 1 - ahead) // page_tokens * page_tokens + ahead
        return split_extents(self._lookup(pages, whole, full_tokens, scope)[0], (prompt_tokens - ahead) // page_tokens)[1]


class Author:
    """Generates the sessions of one trace. A text is an extent of token names that no other text contains."""

    def __init__(self, settings: Synthetic) -> None:
        self._settings = settings
        self._random = np.random.default_rng(settings.seed)
        self._named = 0
        self._systems = {
            name: [self._text(kind.system_tokens, settings.max_prompt_tokens // 2) for _ in range(kind.systems)]
            for name, kind in settings.mix.items()
        }
        self._up_to = {name: shares_up_to(kind.systems) for name, kind in settings.mix.items()}
        """For each kind, the probability of a session to have the i-th system prompt or one before it."""

    def sessions(self) -> Iterator[tuple[float, str, Iterator[Turn]]]:
        """Yield the start, kind and turns of each session, in order of start."""
        settings = self._settings
        names = list(settings.mix)
        weights = np.array([kind.weight for kind in settings.mix.values()])
        begins_s = np.cumsum(self._random.exponential(1 / settings.sessions_per_s, settings.sessions))
        kinds = self._random.choice(len(names), settings.sessions, p=weights / weights.sum())
        for begin_s, kind in zip((begins_s - begins_s[0]).tolist(), kinds.tolist(), strict=True):
            yield begin_s, names[kind], self._turns(names[kind])

    def _turns(self, name: str) -> Iterator[Turn]:
        kind, most = self._settings.mix[name], self._settings.max_prompt_tokens
        prompt = [self._system(name)]
        if kind.document_tokens:
            append_extent(prompt, *self._text(kind.document_tokens, most - count_pages(prompt) - 1))
        for _ in range(self._random.geometric(1 / kind.turns)):
            opening = list(prompt)
            append_extent(prompt, *self._text(kind.message_tokens, most - count_pages(prompt)))
            answer = self._text(kind.answer_tokens, most)
            yield Turn(tuple(prompt), answer, float(self._random.exponential(kind.pause_s)))
            append_extent(prompt, *answer)
            prompt = prompt if kind.remembers else opening
            if count_pages(prompt) >= most:
                return

    def _system(self, name: str) -> Extent:
        return self._systems[name][int(self._up_to[name].searchsorted(self._random.random(), side="right"))]

    def _text(self, mean: int, most: int) -> Extent:
        """Return a new text of ``mean`` tokens on average, with at least 1 and at most ``most`` tokens."""
        spread = self._settings.spread
        drawn = mean * exp(spread * self._random.standard_normal() - spread * spread / 2)
        text = self._named, min(max(round(drawn), 1), most)
        self._named += text[1]
        return text


def shares_up_to(count: int) -> np.ndarray:
    """Return the probability of each place, or one before it, where that of place i alone is in proportion to 1 / i."""
    shares = 1 / np.arange(1, count + 1)
    up_to: np.ndarray = (shares / shares.sum()).cumsum()
    up_to /= up_to[-1]
    return up_to
