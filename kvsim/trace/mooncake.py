"""Traces in Mooncake's format: one request per line, with its prompt given by block ids.

Qin et al., Mooncake: Trading More Storage for Less Computation (FAST 2025), and the traces released with it.
"""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.trace.base import Trace
from kvsim.trace.blocks import BlockPages
from kvsim.trace.hashed import HashedTrace
from kvsim.trace.records import Record, read_records
from kvsim.trace.resets import read_requests
from kvsim.trace.timetable import Timetable


@dataclass(kw_only=True)
class Mooncake(HashedTrace):
    """Reads ``{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}``, plain or gzipped.

    A line contains its whole prompt, even within a session. The last block id may stand for a partial block; with ``tail=full``
    it may also be absent. Ids are re-keyed, so they need not identify their prefix. ``limit`` counts lines. ``answers``: see
    answers.py. Optional fields:

        session_id, delay    see Timetable
        priority             an integer; 0 if absent
        n                    the number of answers to the prompt; 1 if absent. ``answers=inferred`` infers the first
        images               a list of [begin, end]: no hit ends inside these tokens

    A line ``{"reset": "drain"}`` or ``{"reset": "now"}``, optionally with a ``timestamp``, resets the cache (see ``Reset``).
    """

    block_tokens: int = 512

    def load(self, page_tokens: int) -> Trace:
        pages, times = self.block_pages(page_tokens), Timetable(self.rate)
        records = read_records(self.path, self.limit)
        requests = read_requests(
            records, times, lambda record: self._request(record, times, pages), is_limited=self.limit is not None
        )
        return self.trace(requests, page_tokens)

    def _request(self, record: Record, times: Timetable, pages: BlockPages) -> Request:
        place = times.place(record)
        prompt_tokens, runs, prompt_pages = self.read_prompt(record, pages)
        request = Request(
            index=0,
            prompt_tokens=prompt_tokens,
            output_tokens=record.integer("output_length"),
            runs=runs,
            prompt_pages=prompt_pages,
            priority=record.integer("priority", minimum=None) if record.has("priority") else 0,
            samples=record.integer("n", minimum=1) if record.has("n") else 1,
            images=record.stretches("images", prompt_tokens),
            **place._asdict(),
        )
        if self.answers == "unique" and request.samples > 1:
            raise record.error(f"n is {request.samples}, but answers=unique knows one answer to each prompt: set answers=none")
        return self.with_answer(request, pages)
