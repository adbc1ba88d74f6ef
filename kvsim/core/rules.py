"""The switches in which real engines differ."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How an engine uses its cache, apart from its policies."""

    recompute_last_token: bool = True
    """The last prompt token is always computed, since its output is needed: (prompt_tokens - 1) // page_tokens pages at most are
    reused."""
