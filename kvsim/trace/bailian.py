"""Traces in the format of Qwen-Bailian: one request per line, linked to the previous turn.

Wang et al., KVCache Cache in the Wild (USENIX ATC 2025), and the traces released with it.
"""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.request import Request
from kvsim.trace.base import Trace
from kvsim.trace.blocks import BlockPages
from kvsim.trace.dates import stamp
from kvsim.trace.hashed import HashedTrace
from kvsim.trace.records import AT_LEAST_ONE, Record, shown
from kvsim.trace.stored import from_first_arrival, gathered


@dataclass(kw_only=True)
class Bailian(HashedTrace):
    """Reads ``{"chat_id", "parent_chat_id", "timestamp": s, "type", "turn", "input_length", "output_length", "hash_ids"}``.

    A line belongs to the session of the earlier line whose ``chat_id`` equals its ``parent_chat_id``; if there is no such line
    (for example -1), it starts a session. ``type`` becomes the request's kind, and ``turn``, which counts from 1, its turn,
    which counts from 0. The earliest timestamp is time 0; lines need not be sorted by time. The last block id may stand for a
    partial block; with ``tail=full`` it may also be absent. ``limit`` counts lines. ``answers``: see answers.py.
    Plain or gzipped.
    """

    STAMP_S: ClassVar[float] = 1.0

    block_tokens: int = 16

    def load(self, page_tokens: int) -> Trace:
        pages = self.block_pages(page_tokens)
        sessions: dict[str | int, int] = {}
        requests = gathered(self._request(record, sessions, pages) for record in self.read(self.limit))
        return self.trace(from_first_arrival(requests, self.rate), page_tokens)

    def _request(self, record: Record, sessions: dict[str | int, int], pages: BlockPages) -> Request:
        """Return the request of a line; ``sessions`` are the sessions of earlier lines, by ``chat_id``."""
        chat, parent = record.name("chat_id"), record.name("parent_chat_id")
        if chat in sessions:
            raise record.error(f"chat_id {shown(chat)} already belongs to an earlier line")
        session = sessions[chat] = sessions.get(parent, len(sessions))
        prompt_tokens, extents, prompt_pages = self.read_prompt(record, pages)
        request = Request(
            index=0,
            arrival_s=stamp(record, "timestamp", self.STAMP_S),
            prompt_tokens=prompt_tokens,
            output_tokens=record.tokens("output_length", self.max_tokens),
            runs=extents,
            prompt_pages=prompt_pages,
            session=session,
            turn=record.integer("turn", AT_LEAST_ONE) - 1,
            kind=str(record.name("type")),
        )
        return self.with_answer(request, pages)
