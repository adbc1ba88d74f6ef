"""Converts the block ids of a trace to page ids of any fitting page size."""

from collections.abc import Iterable

from kvsim.errors import UsageError
from kvsim.pages.extents import Extent, every_last, split_extents
from kvsim.trace.chain_index import ChainIndex


class BlockPages:
    """Assigns page ids to prompts whose blocks of ``block_tokens`` tokens have ids, extent by extent.

    Block ids are first re-keyed so that they are chained and new ids are consecutive. If a block has f pages, block b becomes
    pages b * f ... b * f + f - 1. If a page has f blocks, the page is identified by its last block and re-keyed. Equal block
    ids in different scopes (sessions) are unrelated.
    """

    def __init__(self, block_tokens: int, page_tokens: int, *, partial_tail: bool) -> None:
        if page_tokens < 1 or (block_tokens % page_tokens and page_tokens % block_tokens):
            raise UsageError(
                f"page_tokens={page_tokens} does not fit the trace's blocks of {block_tokens} tokens: "
                f"choose a divisor or a multiple of {block_tokens}"
            )
        self.block_tokens = block_tokens
        self.page_tokens = page_tokens
        self._partial_tail = partial_tail
        self._blocks = ChainIndex()
        self._pages = ChainIndex()
        self._scopes: dict[str, int] = {}

    def lookup(self, blocks: Iterable[Extent], tokens: int, scope: int = 0) -> tuple[tuple[Extent, ...], int]:
        """Return the pages of a prompt as normalised extents, and their number.

        ``tokens`` is the number of tokens covered by block ids; ``blocks`` has raw block ids for at least these, in extents.
        """
        pages = (tokens + self._partial_tail * (self.page_tokens - 1)) // self.page_tokens
        needed = -(-min(tokens, pages * self.page_tokens) // self.block_tokens)
        chained = self._blocks.lookup(split_extents(tuple(blocks), needed)[0], scope)
        if self.page_tokens == self.block_tokens:
            return chained, pages
        if self.page_tokens < self.block_tokens:
            share = self.block_tokens // self.page_tokens
            finer = tuple((start * share, length * share) for start, length in chained)
            return split_extents(finer, pages)[0], pages
        last_blocks = every_last(chained, self.page_tokens // self.block_tokens)
        return self._pages.lookup(last_blocks, scope), pages

    def scope_of(self, adapter: str) -> int:
        """Return the scope of prompts with this adapter: 0 without any."""
        return self._scopes.setdefault(adapter, len(self._scopes) + 1) if adapter else 0

    def reserve(self, pages: int) -> int:
        """Assign ``pages`` consecutive page ids that no prompt has, and return the first."""
        if self.page_tokens > self.block_tokens:
            return self._pages.reserve(pages)
        share = self.block_tokens // self.page_tokens
        return self._blocks.reserve(-(-pages // share)) * share
