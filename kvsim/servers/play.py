"""Plays requests against a server: what it says of itself, its empty cache, the requests, its counters."""

from collections.abc import Callable, Sequence

from kvsim.core.request import Request
from kvsim.results.observed import ObservedRun, ServerFacts
from kvsim.servers.settings import ServerSettings

Advance = Callable[[int], None]
"""Called now and then with the number of finished requests."""


def play_server(
    requests: Sequence[Request], page_tokens: int, settings: ServerSettings, advance: Advance | None = None
) -> ObservedRun:
    """Play requests, cut into pages of ``page_tokens`` tokens, against a server, once.

    What a later prompt has of an earlier answer, it has from the trace: the server generates other tokens, so it never finds an
    answer again. Simulate ``kvsim.servers.prompts.as_sent(requests, page_tokens)`` for the same.

    Raises UsageError if the server cannot be used or the requests cannot be sent to one. Once the run has begun, failures are
    the run's ``errors``: also those of all requests after the server has died.
    """
    raise NotImplementedError


def read_facts(settings: ServerSettings) -> ServerFacts:
    """Return what a server says of itself. Raises UsageError if it does not answer."""
    raise NotImplementedError
