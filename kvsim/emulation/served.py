"""A request on an emulated server, and who may be told what becomes of it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from typing import NamedTuple

from kvsim.core.request import Request


class Extras(NamedTuple):
    """What a client says of a request besides its prompt and the length of its answer."""

    salt: str | None = None
    """Its prompt has pages in common only with those of the same salt: ``cache_salt``."""
    session: str | None = None
    """What it belongs to: ``session_id``."""
    reports_hits: bool = False
    """Whether its hits are told as KV events: vLLM's ``kv_cache_report_mode`` is full."""


NO_EXTRAS = Extras()


@dataclass(eq=False)
class Served:
    """A request on its way, and what is known of it. Times are those of the simulation."""

    request: Request
    answer: list[int]
    """The tokens that it will have."""
    most_tokens: int
    """The tokens that it may have."""
    is_streamed: bool = False
    """Whether its client gets them one by one."""
    extras: Extras = NO_EXTRAS
    generated: int = 0
    """How many of them have been generated."""
    is_ended: bool = False
    is_rejected: bool = False
    """Whether it could not run even alone."""
    is_shed: bool = False
    """Whether the admission policy has refused it."""
    is_aborted: bool = False
    """Whether it was given up: it ends, or has ended, before its answer is complete."""
    first_token_s: float = nan
    last_token_s: float = nan
    """When its last token so far has been generated."""
    end_s: float = nan
    cached_tokens: tuple[int, ...] = ()
    """By the emulator's ``tier_names``; known from the first token on."""
    queued_s: float = nan
    retractions: int = 0
    """How often it has given its pages back; known at its end."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when any of this has changed."""

    @property
    def is_refused(self) -> bool:
        """Whether it is not computed: it was rejected or shed."""
        return self.is_rejected or self.is_shed

    @property
    def reason(self) -> str:
        """Why its answer ends: length, stop or abort."""
        return "abort" if self.is_aborted else "length" if len(self.answer) >= self.most_tokens else "stop"

    @property
    def number(self) -> int:
        """Its number among all requests, in order of arrival."""
        return self.request.index


class ServedWatch:
    """Is told what becomes of requests, once it has happened, and changes nothing. Override what is to be known."""

    def comes(self, served: Served, tokens: Sequence[int]) -> None:
        """A request is about to arrive; ``tokens`` are those of its prompt and of its answer but the last."""

    def arrived(self, served: Served) -> None:
        """A request has arrived."""

    def first_token(self, served: Served) -> None:
        """Its prompt has been computed, and its first token is there."""

    def token(self, served: Served, after_s: float) -> None:
        """Its next token is there, ``after_s`` after the one before."""

    def ended(self, served: Served) -> None:
        """It is complete, aborted, rejected or shed."""
