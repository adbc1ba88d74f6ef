"""Lines with prompts as ids of blocks, as Mooncake's and Bailian's, to live requests."""

from collections.abc import Iterator

from kvsim.errors import UsageError
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.sources.prompts import Told
from kvsim.shadow.sources.salt import Salt
from kvsim.trace.hashed import HashedTrace
from kvsim.trace.lines import BLOCKS_OF_ANSWER
from kvsim.trace.records import Record

MODEL = "model_name"
"""LMCache's name of the model; prompts for different ones share no blocks."""


class Blocks:
    """Turns lines of a trace of block ids into requests with salted keys of pages of any fitting size."""

    def __init__(self, reader: HashedTrace, page_tokens: int, salt: Salt) -> None:
        """Raises UsageError for a page size that does not fit the blocks."""
        size = reader.block_tokens
        if size % page_tokens and page_tokens % size:
            raise UsageError(
                f"page_tokens={page_tokens} does not fit the log's blocks of {size} tokens: choose a divisor or a multiple"
            )
        self._reader = reader
        self._page_tokens = page_tokens
        self._salt = salt

    def read(self, record: Record, told: Told) -> Iterator[LiveRequest]:
        """Yield the request of a line. Raises TraceError."""
        reader, size = self._reader, self._page_tokens
        ids = [block for start, blocks in reader.blocks(record) for block in range(start, start + blocks)]
        prompt_tokens = reader.check_length(record, len(ids))
        scope = str(record.name(MODEL)) if record.has(MODEL) else ""
        name = record.either("output_length", "output_tokens")
        output_tokens = record.tokens(name, reader.max_tokens) if record.has(name) else 1
        prompt_pages = min(prompt_tokens, len(ids) * reader.block_tokens) // size
        yield LiveRequest(
            arrival_s=told.arrival_s,
            keys=tuple(self._pages(self._salt.chain(ids, scope))[:prompt_pages]),
            prompt_tokens=prompt_tokens,
            output_keys=tuple(self._answer(record, ids, prompt_tokens, output_tokens, scope)),
            output_tokens=output_tokens,
            session=told.session,
        )

    def _answer(self, record: Record, ids: list[int], prompt_tokens: int, output_tokens: int, scope: str) -> list[bytes]:
        """Return the keys of the pages that the answer completes, if the line has its blocks."""
        if not record.has(BLOCKS_OF_ANSWER) or record.has("n") and record.fields["n"] != 1:
            return []
        size, block = self._page_tokens, self._reader.block_tokens
        path = [*ids[: prompt_tokens // block], *record.integers(BLOCKS_OF_ANSWER)]
        most = (prompt_tokens + max(output_tokens, 1) - 1) // size
        return self._pages(self._salt.chain(path, scope))[prompt_tokens // size : most]

    def _pages(self, blocks: list[bytes]) -> list[bytes]:
        """Return the keys of the pages of blocks with these keys."""
        size, block = self._page_tokens, self._reader.block_tokens
        if size >= block:
            return blocks[size // block - 1 :: size // block]
        return [self._salt.key(key + part.to_bytes(4, "big")) for key in blocks for part in range(block // size)]
