"""A request as a live source tells of it, and the key that stands for each of its pages."""

import secrets
from collections.abc import Sequence
from math import isfinite
from struct import error as StructError
from struct import pack
from typing import NamedTuple

import xxhash

MOST_PAGES = 1 << 21
"""The most pages of one request: beyond the longest contexts of models, even in pages of a few tokens."""


class LiveRequest(NamedTuple):
    """A request as a source tells it, without its text."""

    arrival_s: float
    """In seconds, from any origin that is the same for all requests of a source."""
    keys: tuple[bytes, ...]
    """Chain keys of the prompt's whole pages of the source's page size: equal keys mean an equal page and equal pages before."""
    prompt_tokens: int
    output_keys: tuple[bytes, ...] = ()
    """The keys that follow, of prompt and answer together, as far as they are known."""
    output_tokens: int = 0
    session: str | None = None
    engine: str = ""
    """Which engine served it."""
    cached_tokens: int | None = None
    """The prompt tokens that the engine itself says it did not compute; None if it does not say."""
    after_reset: bool = False
    """Whether the engine's cache was emptied since its request before this one."""


class ChainKeys:
    """Makes keys of pages: hashes of their tokens, of everything before them and of a salt. Tokens are not kept.

    A key is the XXH3-128 of the key before it and of whatever tells the page from others. Without the salt, nobody can tell
    whether a page is among the keys.
    """

    def __init__(self, salt: bytes | None = None) -> None:
        """``salt``: by default random bytes, so that keys of different processes have nothing in common."""
        self._root = xxhash.xxh3_128_digest(b"kvsim shadow" + (secrets.token_bytes(32) if salt is None else salt))

    def root(self, scope: object = None) -> bytes:
        """Return the key before the first page; prompts of different scopes (a LoRA adapter, a tenant) share no page."""
        return self._root if scope is None else self.after(self._root, repr(scope).encode("utf-8", "surrogatepass"))

    @staticmethod
    def after(key: bytes, page: bytes) -> bytes:
        """Return the key of the page that follows ``key``; ``page`` is all that tells it from others in that place."""
        return xxhash.xxh3_128_digest(key + page)

    def of_prompt(self, tokens: Sequence[int], page_tokens: int) -> tuple[bytes, ...]:
        """Return the keys of the whole pages of a prompt."""
        keys = [self.root()]
        for end in range(page_tokens, len(tokens) + 1, page_tokens):
            keys.append(self.after(keys[-1], token_bytes(tokens[end - page_tokens : end])))
        return tuple(keys[1:])


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as little-endian 64-bit words. Raises ValueError for tokens that do not fit."""
    try:
        return pack(f"<{len(tokens)}q", *tokens)
    except StructError as error:
        raise ValueError("tokens must be whole numbers below 2**63") from error


def problem_of(request: LiveRequest, page_tokens: int) -> str:
    """Say what is wrong with a request, in a few words; empty if nothing is."""
    tokens = request.prompt_tokens + max(request.output_tokens, 1) - 1
    if not isfinite(request.arrival_s):
        return "it has no time of arrival"
    if request.prompt_tokens < 1 or request.output_tokens < 0:
        return "it has no tokens"
    if len(request.keys) > request.prompt_tokens // page_tokens:
        return "it has more pages than its prompt"
    if len(request.keys) + len(request.output_keys) > min(tokens // page_tokens, MOST_PAGES):
        return "it has more pages than tokens"
    return ""
