"""Traces in Mooncake's format: one request a line, its prompt named by the ids of its blocks.

Qin et al., Mooncake: Trading More Storage for Less Computation (FAST 2025), and the traces released with it.
"""

from dataclasses import dataclass
from pathlib import Path

from kvsim.core.request import Request
from kvsim.trace.answers import ANSWERS, infer_answers
from kvsim.trace.base import TAILS, Trace, TraceSource, check_choice, in_order_of_arrival
from kvsim.trace.blocks import BlockPages
from kvsim.trace.records import Record, read_records, runs_of
from kvsim.trace.timetable import Timetable


@dataclass(kw_only=True)
class Mooncake(TraceSource):
    """Reads ``{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}``, plain or gzipped.

    A line holds its whole prompt, also in a session. The last block id may stand for a partial block, or be absent with
    ``tail=full``. Ids that do not name what precedes them are re-keyed. ``session_id`` and ``delay`` are optional, see
    Timetable; so is ``priority``, an integer, 0 if absent. ``limit`` counts lines. ``answers=inferred``: see answers.py.
    """

    path: str
    tail: str = "full"
    answers: str = "none"
    block_tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("tail", self.tail, TAILS)
        check_choice("answers", self.answers, ANSWERS)
        if self.answers == "inferred" and self.tail == "all":
            raise ValueError("answers=inferred needs tail=full: a prompt with a partial page at its end does not go on")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {self.block_tokens}")

    def load(self, page_tokens: int) -> Trace:
        pages = BlockPages(self.block_tokens, page_tokens, partial_tail=self.tail == "all")
        times = Timetable(self.rate)
        requests = [self._request(record, times, pages) for record in read_records(self.path, self.limit)]
        requests = in_order_of_arrival(requests)
        if self.answers == "inferred":
            infer_answers(requests, page_tokens)
        return Trace(
            name=Path(self.path).name,
            requests=requests,
            page_tokens=page_tokens,
            block_tokens=self.block_tokens,
        )

    def _request(self, record: Record, times: Timetable, pages: BlockPages) -> Request:
        place = times.place(record)
        prompt_tokens = record.integer("input_length", minimum=1)
        blocks = read_blocks(record, prompt_tokens, self.block_tokens, self.tail)
        runs, prompt_pages = pages.lookup(runs_of(blocks), min(prompt_tokens, len(blocks) * self.block_tokens))
        return Request(
            index=0,
            prompt_tokens=prompt_tokens,
            output_tokens=record.integer("output_length"),
            runs=runs,
            prompt_pages=prompt_pages,
            priority=record.integer("priority", minimum=None) if record.has("priority") else 0,
            **place._asdict(),
        )


def read_blocks(record: Record, prompt_tokens: int, block_tokens: int, tail: str) -> list[int]:
    """The ``hash_ids`` of a prompt, neither fewer nor more than it needs."""
    blocks = record.integers("hash_ids")
    most = -(-prompt_tokens // block_tokens)
    least = prompt_tokens // block_tokens if tail == "full" else most
    if not least <= len(blocks) <= most:
        raise record.error(
            f"hash_ids has {len(blocks)} ids, but input_length {prompt_tokens} is {most} blocks of "
            f"{block_tokens} tokens; see block_tokens and tail"
        )
    return blocks
