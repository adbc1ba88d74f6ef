"""Traces in libCacheSim's binary format of prompts as paths of blocks, whose files end in ``.lcp`` or ``.lcsllm``.

Liu, Yu and Yang: When fancy eviction fails: rethinking cache replacement for LLM prefix reuse (arXiv:2609.28870), and the traces
released with it. The layout is that of version 1 in the authors' repository (github.com/LauYeeYu/libCacheSim,
``doc/lcsllm_format.md``), where the format has its earlier name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, Final

import numpy as np

from kvsim.core.request import Request
from kvsim.errors import TraceError
from kvsim.pages.extents import Extent
from kvsim.trace.base import Trace
from kvsim.trace.blocks import BlockPages
from kvsim.trace.dates import stamp
from kvsim.trace.files import TraceFile, open_trace
from kvsim.trace.hashed import HashedTrace
from kvsim.trace.records import Record
from kvsim.trace.stored import from_first_arrival, gathered

HEADER: Final = Struct("<QQqqqqqqiBBBx128s7984xQ")
"""Magic number, version, requests, blocks, distinct blocks, most blocks of a request, first and last time (us), tokens per block,
what ids stand for, whether next accesses are there, types, their names, and the magic number again."""
REQUEST: Final = Struct("<QqqIIIIB7x")
"""Chat, parent chat, time (us), blocks, prompt tokens, answer tokens, turn, type."""
BLOCK: Final = np.dtype([("id", "<u8"), ("next_access", "<i8")])
BEGINNING: Final = 0x6C63
"""The first two bytes of a magic number, "lc". That of the published files, which carry the format's later name, is in no
description, so any that begins like this is taken if it is at both ends of the header."""
VERSION: Final = 1
IDS_OF_PREFIXES: Final = 1
"""What ids stand for: a block and all before it. The format has no other."""
TYPE_BYTES: Final = 16
TYPES: Final = 8
UNKNOWN: Final = (
    "has no header of libCacheSim's binary format of prefixes, version 1: convert it to lines "
    '{"timestamp": ms, "input_length", "hash_ids_rle": [first id, length, ...]} and set trace.block_tokens'
)


@dataclass(frozen=True)
class Header:
    """What the header of a file says of it."""

    requests: int
    blocks: int
    block_tokens: int
    types: tuple[str, ...]


def is_lcp(content: bytes) -> bool:
    """Whether a file that begins with these 8 bytes may be in this format."""
    return len(content) >= 8 and int.from_bytes(content[:8], "little") >> 48 == BEGINNING


def header_of(path: str, content: bytes) -> Header:
    """Return what the first 8,192 bytes of a file say. Raises TraceError unless they are a header of this layout."""
    if len(content) != HEADER.size or not is_lcp(content):
        raise TraceError(path, None, UNKNOWN)
    magic, version, requests, blocks, _, _, _, _, tokens, ids, _, types, names, end = HEADER.unpack(content)
    if magic != end or version != VERSION or requests < 0 or blocks < 0 or tokens < 1 or types > TYPES:
        raise TraceError(path, None, UNKNOWN)
    if ids != IDS_OF_PREFIXES:
        raise TraceError(path, None, f"its block ids do not stand for prefixes: block_id_kind is {ids}, not {IDS_OF_PREFIXES}")
    texts = (names[at : at + TYPE_BYTES].rstrip(b"\0").decode(errors="replace") for at in range(0, len(names), TYPE_BYTES))
    return Header(requests, blocks, tokens, tuple(texts)[:types])


def read_header(path: str, max_line_bytes: int) -> Header:
    """Return the header of a file. Raises TraceError."""
    with open_trace(path, max_line_bytes) as file:
        return header_of(path, file.part(HEADER.size))


@dataclass(kw_only=True)
class Lcp(HashedTrace):
    """Reads requests of 48 bytes, each followed by the ids of its prompt's blocks, behind a header of 8,192 bytes.

    A request belongs to the session of the earlier one with the same chat or, if there is none, of its parent chat; otherwise it
    starts a session. Its turn is its place in the session, and its type becomes its kind. The earliest time is time 0; requests
    need not be sorted by time. When next accesses come is not read: kvsim works that out itself. ``limit`` counts requests; a
    file that is read to its end must have as many requests and blocks as its header says.
    """

    IS_LINE: ClassVar[bool] = False
    IDS: ClassVar[str] = "the path"

    block_tokens: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns:
            raise ValueError("columns has no effect on a binary file, whose fields have no names: leave it out")

    def load(self, page_tokens: int) -> Trace:
        pages = self.block_pages(page_tokens)
        sessions: dict[int, int] = {}
        turns: list[int] = []
        """Requests of each session so far."""
        requests = gathered(self._request(record, sessions, turns, pages) for record in self._records())
        return self.trace(from_first_arrival(requests, self.rate), page_tokens)

    def blocks(self, record: Record) -> tuple[Extent, ...]:
        ids: np.ndarray = record.fields["ids"]
        if not len(ids):
            return ()
        firsts = np.concatenate(([0], np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1))
        lengths = np.diff(firsts, append=len(ids))
        return tuple(zip(ids[firsts].tolist(), lengths.tolist(), strict=True))

    def _records(self) -> Iterator[Record]:
        """Yield the requests of the file, whose fields have the names of other formats."""
        with open_trace(self.path, self.max_line_bytes) as file:
            header = header_of(self.path, file.part(HEADER.size))
            if header.block_tokens != self.block_tokens:
                size = header.block_tokens
                problem = f"its blocks have {size} tokens, but block_tokens is {self.block_tokens}: set trace.block_tokens={size}"
                raise TraceError(self.path, None, problem)
            if not header.requests:
                raise TraceError(self.path, None, "has no requests")
            number = blocks = 0
            while (self.limit is None or number < self.limit) and (content := file.part(REQUEST.size)):
                number += 1
                record = self._record(file, content, header, number)
                blocks += len(record.fields["ids"])
                yield record
            if (self.limit is None or number < self.limit) and (number, blocks) != (header.requests, header.blocks):
                raise TraceError(
                    self.path,
                    None,
                    f"has {number} requests with {blocks} blocks, but its header says {header.requests} with {header.blocks}: "
                    "download it again",
                )

    def _record(self, file: TraceFile, content: bytes, header: Header, number: int) -> Record:
        where = f"{self.path}: request {number}"
        if len(content) < REQUEST.size:
            raise TraceError(where, None, "the file ends within it: download it again")
        chat, parent, time_us, blocks, prompt_tokens, output_tokens, _, kind = REQUEST.unpack(content)
        file.check(blocks * BLOCK.itemsize, "has too many blocks", None, where)
        path = file.part(blocks * BLOCK.itemsize)
        if len(path) < blocks * BLOCK.itemsize:
            raise TraceError(where, None, "the file ends within it: download it again")
        if kind >= len(header.types) and (kind or header.types):
            raise TraceError(where, None, f"its type is number {kind}, but the header names {len(header.types)}, from 0")
        fields = {
            "chat": chat, "parent": parent, "timestamp": time_us / 1e6, "input_length": prompt_tokens,
            "output_length": output_tokens, "type": header.types[kind] if header.types else "",
            "ids": np.frombuffer(path, BLOCK)["id"],
        }  # fmt: skip
        return Record(where, None, fields)

    def _request(self, record: Record, sessions: dict[int, int], turns: list[int], pages: BlockPages) -> Request:
        """Return a request; ``sessions`` are the sessions of earlier chats, and ``turns`` the number of requests of each."""
        chat, parent = record.fields["chat"], record.fields["parent"]
        session = sessions[chat] = sessions.get(chat, sessions.get(parent, len(turns)))
        if session == len(turns):
            turns.append(0)
        turns[session] += 1
        prompt_tokens, extents, prompt_pages = self.read_prompt(record, pages)
        request = Request(
            index=0,
            arrival_s=stamp(record, "timestamp", 1.0),
            prompt_tokens=prompt_tokens,
            output_tokens=record.tokens("output_length", self.max_tokens),
            runs=extents,
            prompt_pages=prompt_pages,
            session=session,
            turn=turns[session] - 1,
            kind=record.fields["type"],
        )
        return self.with_answer(request, pages)
