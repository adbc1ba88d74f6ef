"""The answers of requests that a client has recorded, found among the blocks that the engine has stored.

A client knows how long an answer was, not always what it said. The engine has told of its pages: they follow the prompt's last
whole page, and the prompt of no other request has them, unless a later turn brings the answer back.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvsim.shadow.live import LiveRequest
from kvsim.shadow.score import STORED, Happened

ROOT = b""
"""Stands for the page before the first one."""


class StoredPaths:
    """What an engine has stored, as paths of pages from the beginning of prompts on."""

    def __init__(self, events: Iterable[Happened], made: Iterable[LiveRequest]) -> None:
        """``made`` are the requests that the events tell of, which have the paths; ``events`` have the times."""
        self.first_s: dict[bytes, float] = {}
        """When each page was first stored, in seconds since the first one was."""
        self.after: dict[bytes, dict[bytes, None]] = {}
        """By page, those that follow it somewhere."""
        self.longest: dict[bytes, int] = {}
        """The pages of the longest path that begins with a page."""
        stored = [event for event in events if event.kind == STORED and event.key is not None]
        for event in stored:
            self.first_s.setdefault(event.key or ROOT, event.at_s - stored[0].at_s)
        for one in made:
            path = one.keys + one.output_keys
            for at, (before, key) in enumerate(zip((ROOT, *path), path, strict=False)):
                self.after.setdefault(before, {})[key] = None
                self.longest[key] = max(self.longest.get(key, 0), len(path) - at)


class _Rank(NamedTuple):
    """How well a page suits as the next one of an answer; the lowest is best."""

    is_of_a_prompt: bool
    is_taken: bool
    is_too_short: bool
    away_s: float


def with_answers(
    requests: Sequence[LiveRequest], stored: StoredPaths, page_tokens: int, due_s: Sequence[float]
) -> list[LiveRequest]:
    """Return requests with the pages of their answers, as far as they were stored.

    ``due_s`` is when each request was at its answer, in seconds since the first page was stored. Requests choose in that order:
    of the pages that follow, one that no prompt has, that no other answer has taken, from which a path goes on for as long as the
    answer did, and that was stored at the closest time. Where answers are the engine's own, only requests with a prompt in common
    up to its last whole page can be confused.
    """
    of_prompts = {key for request in requests for key in request.keys}
    taken: set[bytes] = set()

    def answer(number: int) -> tuple[bytes, ...]:
        request, found = requests[number], list[bytes]()
        pages = (request.prompt_tokens + max(request.output_tokens, 1) - 1) // page_tokens - len(request.keys)

        def rank(key: bytes) -> _Rank:
            is_too_short = stored.longest[key] < pages - len(found)
            away_s = abs(stored.first_s.get(key, 0.0) - due_s[number])
            return _Rank(key in of_prompts, key in taken, is_too_short, away_s)

        last = request.keys[-1] if request.keys else ROOT
        while len(found) < pages and (others := stored.after.get(last)):
            last = min(others, key=rank)
            found.append(last)
        taken.update(found)
        return tuple(found)

    answered = list(requests)
    for number in sorted(range(len(requests)), key=lambda number: due_s[number]):
        if not requests[number].output_keys:
            answered[number] = requests[number]._replace(output_keys=answer(number))
    return answered
