"""Converts the block ids of a trace to page ids of any fitting page size."""

from collections.abc import Iterable

from kvsim.core.runs import Run, append_run, split_runs
from kvsim.errors import UsageError
from kvsim.trace.chain_index import ChainIndex

CLASS = 1 << 48
"""Larger than any quotient of a block id: keeps the residue classes of block ids apart."""


class BlockPages:
    """Assigns page ids to prompts whose blocks of ``block_tokens`` tokens have ids, run by run.

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
        self._block_tokens = block_tokens
        self.page_tokens = page_tokens
        self._partial_tail = partial_tail
        self._blocks = ChainIndex()
        self._pages = ChainIndex()

    def lookup(self, blocks: Iterable[Run], tokens: int, scope: int = 0) -> tuple[tuple[Run, ...], int]:
        """Return the pages of a prompt as normalised runs, and their number.

        ``tokens`` is the number of prompt tokens covered by block ids; ``blocks`` are runs of raw block ids for at least these.
        """
        pages = (tokens + self._partial_tail * (self.page_tokens - 1)) // self.page_tokens
        needed = -(-min(tokens, pages * self.page_tokens) // self._block_tokens)
        chained = self._blocks.lookup(split_runs(tuple(blocks), needed)[0], scope)
        if self.page_tokens == self._block_tokens:
            return chained, pages
        if self.page_tokens < self._block_tokens:
            share = self._block_tokens // self.page_tokens
            finer = tuple((start * share, length * share) for start, length in chained)
            return split_runs(finer, pages)[0], pages
        last_blocks = every_last(chained, self.page_tokens // self._block_tokens)
        return self._pages.lookup(last_blocks, scope), pages


def every_last(blocks: tuple[Run, ...], share: int) -> list[Run]:
    """Return the last block of every ``share`` blocks, and of the rest at the end, as runs of names.

    Names map one-to-one to block ids, and ids that differ by ``share`` have consecutive names.
    """
    names: list[Run] = []
    passed, last = 0, 0
    for start, length in blocks:
        skipped = (-passed - 1) % share
        if skipped < length:
            append_run(names, _name(start + skipped, share), (length - 1 - skipped) // share + 1)
        passed, last = passed + length, start + length - 1
    if passed % share:
        append_run(names, _name(last, share), 1)
    return names


def _name(block: int, share: int) -> int:
    return block % share * CLASS + block // share
