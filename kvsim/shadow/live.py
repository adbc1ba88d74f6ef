"""A request as a source tells it."""

from typing import NamedTuple


class LiveRequest(NamedTuple):
    """A request as a source tells it, without its text."""

    arrival_s: float
    """Seconds on the source's clock; they do not decrease from one request to the next."""
    keys: tuple[bytes, ...]
    """Keys of the prompt's whole pages of the source's page size. Equal keys mean an equal page and history."""
    prompt_tokens: int
    output_keys: tuple[bytes, ...] = ()
    """Keys of the whole pages that the answer completes, as far as they are known. Its last token has no KV."""
    output_tokens: int = 0
    session: str | None = None
    engine: str = ""
    """Which engine served it; empty if there is one."""
    cached_tokens: int | None = None
    """How many tokens of the prompt the engine itself found; None if it did not say."""
