"""What the traces have in common that name their prompts by the hash ids of blocks, one request a line."""

from dataclasses import dataclass
from pathlib import Path

from kvsim.core.request import Request
from kvsim.core.runs import Run
from kvsim.trace.answers import ANSWERS, infer_answers
from kvsim.trace.base import TAILS, Trace, TraceSource, check_choice, in_order_of_arrival
from kvsim.trace.blocks import BlockPages
from kvsim.trace.records import Record, runs_of


@dataclass(kw_only=True)
class HashedTrace(TraceSource):
    """Lines with ``input_length`` and ``hash_ids``, plain or gzipped.

    The last block id may stand for a partial block, or be absent with ``tail=full``. Ids that do not name what precedes them
    are re-keyed. ``limit`` counts lines. ``answers=inferred``: see answers.py.
    """

    path: str
    tail: str = "full"
    answers: str = "none"
    block_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("tail", self.tail, TAILS)
        check_choice("answers", self.answers, ANSWERS)
        if self.answers == "inferred" and self.tail == "all":
            raise ValueError("answers=inferred needs tail=full: a prompt with a partial page at its end does not go on")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {self.block_tokens}")

    def block_pages(self, page_tokens: int) -> BlockPages:
        """Names the pages of this trace's prompts. Raises UsageError for a page size that does not fit the blocks."""
        return BlockPages(self.block_tokens, page_tokens, partial_tail=self.tail == "all")

    def read_prompt(self, record: Record, pages: BlockPages) -> tuple[int, tuple[Run, ...], int]:
        """The prompt of a line: its tokens, its pages as runs, and their number.

        Raises TraceError unless it has as many ``hash_ids`` as it needs, neither fewer nor more.
        """
        prompt_tokens = record.integer("input_length", minimum=1)
        blocks = record.integers("hash_ids")
        most = -(-prompt_tokens // self.block_tokens)
        least = prompt_tokens // self.block_tokens if self.tail == "full" else most
        if not least <= len(blocks) <= most:
            raise record.error(
                f"hash_ids has {len(blocks)} ids, but input_length {prompt_tokens} is {most} blocks of "
                f"{self.block_tokens} tokens; see block_tokens and tail"
            )
        return prompt_tokens, *pages.lookup(runs_of(blocks), min(prompt_tokens, len(blocks) * self.block_tokens))

    def trace(self, requests: list[Request], page_tokens: int) -> Trace:
        """The lines' requests as a trace, in the order of their arrival, with their answers if these are to be inferred."""
        requests = in_order_of_arrival(requests)
        if self.answers == "inferred":
            infer_answers(requests, page_tokens)
        return Trace(name=Path(self.path).name, requests=requests, page_tokens=page_tokens, block_tokens=self.block_tokens)
