"""Traces in Mooncake's format: one request a line, its prompt named by the ids of its blocks.

Qin et al., Mooncake: Trading More Storage for Less Computation (FAST 2025), and the traces released with it.
"""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.trace.base import Trace
from kvsim.trace.blocks import BlockPages
from kvsim.trace.hashed import HashedTrace
from kvsim.trace.records import Record, read_records
from kvsim.trace.timetable import Timetable


@dataclass(kw_only=True)
class Mooncake(HashedTrace):
    """Reads ``{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}``, plain or gzipped.

    A line holds its whole prompt, also in a session. The last block id may stand for a partial block, or be absent with
    ``tail=full``. Ids that do not name what precedes them are re-keyed. ``session_id`` and ``delay`` are optional, see
    Timetable; so is ``priority``, an integer, 0 if absent. ``limit`` counts lines. ``answers=inferred``: see answers.py.
    """

    block_tokens: int = 512

    def load(self, page_tokens: int) -> Trace:
        pages, times = self.block_pages(page_tokens), Timetable(self.rate)
        return self.trace([self._request(record, times, pages) for record in read_records(self.path, self.limit)], page_tokens)

    def _request(self, record: Record, times: Timetable, pages: BlockPages) -> Request:
        place = times.place(record)
        prompt_tokens, runs, prompt_pages = self.read_prompt(record, pages)
        return Request(
            index=0,
            prompt_tokens=prompt_tokens,
            output_tokens=record.integer("output_length"),
            runs=runs,
            prompt_pages=prompt_pages,
            priority=record.integer("priority", minimum=None) if record.has("priority") else 0,
            **place._asdict(),
        )
