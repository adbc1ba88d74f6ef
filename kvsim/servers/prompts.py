"""Token ids for the page ids of a trace, and the requests that a server then sees."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.pages.extents import Extent, count_pages, join_extents, split_extents

Tokens = npt.NDArray[np.int64]
ROOT = -1
"""Stands for the page before the first one."""


class PromptTokens:
    """Makes each request's prompt of token ids ``first ... first + count - 1``.

    equal page ids        have equal tokens, whatever follows on them
    different page ids    that follow the same page differ within their first two tokens, so prompts are equal exactly as far as
                          their page ids are. The first ``count`` different pages after a page even differ in their first token
    what has no page id   the end of a prompt, is a page of its own that no other request has
    the other tokens      are drawn at random, since experts of a model are chosen by token

    A server with pages of two tokens or more, whatever their size, therefore finds what the trace's pages say. One with pages
    of a single token may find one token more where more than ``count`` different pages follow a page (``ambiguous_pages``).
    Tokens depend on the page size that the trace was loaded with, and on nothing else but the requests up to this one.
    """

    def __init__(self, requests: Sequence[Request], page_tokens: int, first: int, count: int) -> None:
        """Raises UsageError if pages of one token cannot all differ."""
        self.page_tokens = page_tokens
        self.first = first
        self.count = count
        self.ambiguous_pages = 0
        """Pages that share their first token with another page after the same page."""
        self._turns: dict[int, int] = {}
        """By the first page of an extent, how many others follow the page before it. The page with the next id has turn 0."""
        self._ends = [0] * len(requests)
        """The same of what has no page id, by request."""
        self._following: dict[int, int] = {}
        for number, request in enumerate(requests):
            self._ends[number] = self._number(request)
        if self.ambiguous_pages and page_tokens == 1:
            raise UsageError(
                f"page_tokens=1: more than {count} different tokens follow the same prompt: give prompts more token ids"
            )

    def _number(self, request: Request) -> int:
        """Number the pages of a request among those that follow the same page. Returns the number of its end without page ids."""
        before = ROOT
        for start, pages in request.runs:
            if start != before + 1 and start not in self._turns:
                self._turns[start] = self._turn_after(before)
            before = start + pages - 1
        return self._turn_after(before) if request.prompt_tokens > request.prompt_pages * self.page_tokens else 0

    def _turn_after(self, page: int) -> int:
        turn = self._following[page] = self._following.get(page, 0) + 1
        self.ambiguous_pages += turn >= self.count
        return turn

    def prompt(self, request: Request, number: int) -> Tokens:
        """Return the tokens of the prompt of request ``number`` of those that this was made for."""
        size, before = self.page_tokens, ROOT
        parts: list[Tokens] = []
        for start, pages in request.runs:
            turn = 0 if start == before + 1 else self._turns[start]
            ids = np.arange(start, start + pages, dtype=np.int64)
            parts.append(self._pages(ids, np.concatenate(([before], ids[:-1])), turn, size))
            before = start + pages - 1
        missing = request.prompt_tokens - request.prompt_pages * size
        if missing > 0:
            name, after = np.array([-2 - number]), np.array([before])
            parts.append(self._pages(name, after, self._ends[number], missing))
        return np.concatenate(parts)[: request.prompt_tokens]

    def other(self, number: int, tokens: int) -> Tokens:
        """Return a prompt that differs from those of all requests in its first two tokens; each ``number`` has another one."""
        return self._pages(np.array([-2 - len(self._ends) - number]), np.array([ROOT]), 1 + number + self._at_root(), tokens)

    def _at_root(self) -> int:
        return self._following.get(ROOT, 0)

    def _pages(self, ids: Tokens, before: Tokens, turn: int, size: int) -> Tokens:
        """Return the tokens of pages, ``size`` each, that follow the pages ``before``: the first in its turn, the others next."""
        words = _mixed(ids[:, None] * 0x10001 + np.arange(size, dtype=np.int64)) % self.count
        turns = np.zeros(len(ids), dtype=np.int64)
        turns[0] = turn
        shift = _mixed(before)
        words[:, 0] = (shift + turns % self.count) % self.count
        if size > 1:
            words[:, 1] = (_mixed(before + 1) + turns // self.count) % self.count
        return (self.first + words).ravel()


def _mixed(values: Tokens) -> Tokens:
    """Return numbers from 0 to 2**62 that look random, equal for equal values: the finalizer of SplitMix64 (Steele, 2014)."""
    words = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((words ^ (words >> np.uint64(31))) >> np.uint64(2)).astype(np.int64)


def as_sent(requests: Sequence[Request], page_tokens: int) -> list[Request]:
    """Return the requests as a server sees them that is sent their prompts and generates answers of its own.

    Prompts have their full pages only. The pages of an answer, and those of the prompt's tokens without page ids, have ids that
    no other request has. Raises UsageError for requests that cannot be sent to a server.
    """
    free = 1 + max((start + pages - 1 for request in requests for start, pages in request.runs), default=0)
    sent = []
    for request in requests:
        check_playable(request)
        runs = split_extents(request.runs, min(request.prompt_pages, request.prompt_tokens // page_tokens))[0]
        pages = count_pages(runs)
        own = (request.prompt_tokens + max(request.output_tokens, 1) - 1) // page_tokens - pages
        answer: tuple[Extent, ...] = ((free, own),) if own else ()
        free += own
        path = join_extents(runs, answer)
        sent.append(replace(request, runs=runs, prompt_pages=pages, output_runs=answer, own_path=path))
    return sent


def check_playable(request: Request) -> None:
    """Raise UsageError for a request that no server can be sent."""
    for what, is_there in (
        ("keys of token pairs (trace.bigram)", request.bigram),
        ("several samples of an answer", request.samples > 1),
        ("images", bool(request.images)),
        ("persistent prompts", request.persistent),
        ("resets of the cache", bool(request.resets)),
    ):
        if is_there:
            raise UsageError(f"the trace has {what}, which cannot be played against a server")
