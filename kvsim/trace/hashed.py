"""The common part of traces that describe prompts by block hash ids, one request per line."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvsim.core.request import Request
from kvsim.numbers import Whole, check_settings
from kvsim.pages.extents import Extent, count_pages
from kvsim.trace.answers import ANSWERS, infer_answers, make_answer_unique
from kvsim.trace.base import TAILS, Trace, check_choice, refuse_bigram
from kvsim.trace.blocks import BlockPages
from kvsim.trace.file_trace import FileTrace
from kvsim.trace.records import AT_LEAST_ONE, Record


@dataclass(kw_only=True)
class HashedTrace(FileTrace):
    """Reads lines with the length of a prompt and the ids of its blocks, plain or compressed.

    The last block id may stand for a partial block; with ``tail=full`` it may also be absent. Ids are re-keyed, so they need
    not identify their prefix. A line that has a block size must have that of ``block_tokens``. ``limit`` counts lines.
    ``answers``: see answers.py.
    """

    LENGTH: ClassVar[tuple[str, str]] = ("input_length", "input_tokens")
    """Names of the prompt's length."""
    IDS: ClassVar[str] = "hash_ids"
    BLOCK_SIZE: ClassVar[str] = "block_size"
    IS_LINE: ClassVar[bool] = True

    tail: str = "full"
    answers: str = "none"
    block_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_bigram(self.bigram)
        check_choice("tail", self.tail, TAILS)
        check_choice("answers", self.answers, ANSWERS)
        if self.answers != "none" and self.tail == "all":
            raise ValueError(
                f"answers={self.answers} needs tail=full: no answer can follow a partial page at the end of a prompt"
            )
        check_settings(self, Whole(1), "block_tokens")

    def block_pages(self, page_tokens: int) -> BlockPages:
        """Return the index that assigns page ids to prompts. Raises UsageError for a page size that does not fit the blocks."""
        return BlockPages(self.block_tokens, page_tokens, partial_tail=self.tail == "all")

    def read_prompt(self, record: Record, pages: BlockPages, scope: int = 0) -> tuple[int, tuple[Extent, ...], int]:
        """Return the prompt of a line: its number of tokens, its pages as extents, and its number of pages.

        Prompts of different scopes share no page. Raises TraceError unless the number of ids matches the length.
        """
        blocks = self.blocks(record)
        ids = count_pages(blocks)
        prompt_tokens = self.check_length(record, ids)
        return prompt_tokens, *pages.lookup(blocks, min(prompt_tokens, ids * self.block_tokens), scope)

    def length(self, record: Record) -> int:
        """Return the number of tokens of a line's prompt."""
        return record.tokens(record.either(*self.LENGTH), self.max_tokens, AT_LEAST_ONE)

    def check_length(self, record: Record, ids: int) -> int:
        """Return the number of tokens of a line's prompt. Raises TraceError unless it takes this number of ids."""
        self._check_block_size(record)
        prompt_tokens = self.length(record)
        most = -(-prompt_tokens // self.block_tokens)
        least = prompt_tokens // self.block_tokens if self.tail == "full" else most
        if not least <= ids <= most:
            raise record.error(
                f"{self.IDS} has {ids} ids, but {record.either(*self.LENGTH)}={prompt_tokens} takes {most} blocks of "
                f"{self.block_tokens} tokens; check block_tokens and tail"
            )
        return prompt_tokens

    def blocks(self, record: Record) -> tuple[Extent, ...]:
        """Return the block ids of a line's prompt as extents."""
        return record.id_extents(self.IDS)

    def _check_block_size(self, record: Record) -> None:
        """Raise TraceError if the line names another block size."""
        name = self.BLOCK_SIZE
        if record.has(name) and record.integer(name) != self.block_tokens:
            size = record.integer(name)
            raise record.error(f"{name} is {size}, but block_tokens is {self.block_tokens}: set trace.block_tokens={size}")

    def with_answer(self, request: Request, pages: BlockPages) -> Request:
        """Return the request of a line; with ``answers=unique``, it has an answer."""
        if self.answers == "unique":
            make_answer_unique(request, pages)
        return request

    def trace(self, requests: Iterable[Request], page_tokens: int) -> Trace:
        """Make a trace of the requests: sort them by arrival and, with ``answers=inferred``, infer their answers.

        To infer answers takes all requests in memory.
        """
        ordered = self.in_order(requests)
        if self.answers == "inferred":
            ordered = list(ordered)
            infer_answers(ordered, page_tokens)
        return Trace(name=Path(self.path).name, requests=ordered, page_tokens=page_tokens, block_tokens=self.block_tokens)
