"""Prompts of sessions whose later lines list only what is new."""

from typing import NamedTuple

from kvsim.pages.extents import Extent, count_pages, split_extents
from kvsim.trace.blocks import BlockPages


class Prompt(NamedTuple):
    """A prompt, and the pages that its answer completes."""

    tokens: int
    extents: tuple[Extent, ...]
    pages: int
    output_runs: tuple[Extent, ...]


class Deltas:
    """Puts prompts together: that of a session's turn is the prompt and the answer before it, and then what the line adds.

    A prompt is a sequence of numbered tokens: token t of block b is b * block_tokens + t, and answers, which no other prompt has,
    get negative numbers, as no block has. Equal sequences are equal prefixes, so pages of any size follow from them, by extents.
    """

    def __init__(self, block_tokens: int, page_tokens: int, *, partial_tail: bool) -> None:
        self._block_tokens = block_tokens
        self._page_tokens = page_tokens
        self._pages = BlockPages(1, page_tokens, partial_tail=partial_tail)
        self._texts: dict[int, tuple[Extent, ...]] = {}
        self._used = 0

    def prompt(
        self,
        session: int,
        blocks: tuple[Extent, ...],
        added_tokens: int,
        output_tokens: int,
        *,
        kept_tokens: int | None = None,
    ) -> Prompt:
        """Return the prompt of a session's next turn, which adds ``added_tokens``; without blocks, they are its own.

        Session -1 stands for no session. With ``kept_tokens``, the prompt begins with that many tokens of the prompt and the
        answer before it, and with own ones where those have fewer.
        """
        size = self._block_tokens
        added = tuple((start * size, length * size) for start, length in blocks)
        before = self._texts.get(session, ())
        if kept_tokens is not None:
            had = min(count_pages(before), kept_tokens)
            before = split_extents(before, had)[0] + self._own(kept_tokens - had)
        text = before + (split_extents(added, added_tokens)[0] if blocks else self._own(added_tokens))
        whole = text + self._own(output_tokens)
        if session >= 0:
            self._texts[session] = whole
        tokens = count_pages(text)
        extents, pages = self._pages.lookup(text, tokens)
        all_tokens = tokens + max(output_tokens - 1, 0)
        path, _ = self._pages.lookup(whole, all_tokens - all_tokens % self._page_tokens)
        return Prompt(tokens, extents, pages, split_extents(path, tokens // self._page_tokens)[1])

    def _own(self, tokens: int) -> tuple[Extent, ...]:
        """Return tokens that nothing else has."""
        self._used -= tokens + 1  # a gap: two answers are never one extent, nor an answer and a block
        return ((self._used, tokens),) if tokens else ()
