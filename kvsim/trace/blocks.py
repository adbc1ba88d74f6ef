"""From the blocks in which a trace names its prompts to pages of any fitting size."""

from collections.abc import Iterable

from kvsim.core.runs import Run, append_run, split_runs
from kvsim.errors import UsageError
from kvsim.trace.chain_index import ChainIndex

CLASS = 1 << 48
"""More than any block id divided by anything: keeps residue classes of block ids apart."""


class BlockPages:
    """Names the pages of prompts whose blocks of ``block_tokens`` tokens have ids, run by run.

    Block ids of any kind are first re-keyed so that they are chained and new ones are consecutive. Then, with f pages to a
    block, block b becomes pages b * f ... b * f + f - 1. With f blocks to a page, a page is named by its last block and
    re-keyed. Equal block ids in different scopes (sessions) have nothing in common.
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
        """The pages of a prompt as normalised runs, and their number.

        ``blocks`` are runs of raw block ids that cover at least ``tokens``, the tokens of the prompt that have an id.
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
    """The last block of every ``share`` blocks, and of what is left at the end, as runs of names.

    The name of a block id is one-to-one, and such that ids ``share`` apart have consecutive names.
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
