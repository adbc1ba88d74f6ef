"""The common part of traces that describe prompts by block hash ids, one request per line."""

from dataclasses import dataclass
from pathlib import Path

from kvsim.core.request import Request
from kvsim.core.runs import Run
from kvsim.trace.answers import ANSWERS, infer_answers, make_answer_unique
from kvsim.trace.base import TAILS, Trace, TraceSource, check_choice, in_order_of_arrival, refuse_bigram
from kvsim.trace.blocks import BlockPages
from kvsim.trace.records import Record, runs_of


@dataclass(kw_only=True)
class HashedTrace(TraceSource):
    """Reads lines with ``input_length`` and ``hash_ids``, plain or gzipped.

    The last block id may stand for a partial block; with ``tail=full`` it may also be absent. Ids are re-keyed, so they need
    not identify their prefix. ``limit`` counts lines. ``answers``: see answers.py.
    """

    path: str
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
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {self.block_tokens}")

    def block_pages(self, page_tokens: int) -> BlockPages:
        """Return the index that assigns page ids to prompts. Raises UsageError for a page size that does not fit the blocks."""
        return BlockPages(self.block_tokens, page_tokens, partial_tail=self.tail == "all")

    def read_prompt(self, record: Record, pages: BlockPages) -> tuple[int, tuple[Run, ...], int]:
        """Return the prompt of a line: its number of tokens, its pages as runs, and its number of pages.

        Raises TraceError unless the number of ``hash_ids`` matches ``input_length``.
        """
        prompt_tokens = record.integer("input_length", minimum=1)
        blocks = record.integers("hash_ids")
        most = -(-prompt_tokens // self.block_tokens)
        least = prompt_tokens // self.block_tokens if self.tail == "full" else most
        if not least <= len(blocks) <= most:
            raise record.error(
                f"hash_ids has {len(blocks)} ids, but input_length={prompt_tokens} takes {most} blocks of "
                f"{self.block_tokens} tokens; check block_tokens and tail"
            )
        return prompt_tokens, *pages.lookup(runs_of(blocks), min(prompt_tokens, len(blocks) * self.block_tokens))

    def with_answer(self, request: Request, pages: BlockPages) -> Request:
        """Return the request of a line; with ``answers=unique``, it has an answer."""
        if self.answers == "unique":
            make_answer_unique(request, pages)
        return request

    def trace(self, requests: list[Request], page_tokens: int) -> Trace:
        """Make a trace of the requests: sort them by arrival and, with ``answers=inferred``, infer their answers."""
        requests = in_order_of_arrival(requests)
        if self.answers == "inferred":
            infer_answers(requests, page_tokens)
        return Trace(name=Path(self.path).name, requests=requests, page_tokens=page_tokens, block_tokens=self.block_tokens)
