"""Logs of LMCache's look-ups: one request per line, with its prompt given by the hashes of its chunks.

LMCache's server writes them to ``lookup_hashes_*.jsonl`` (``lmcache/v1/mp_observability/subscribers/logging/lookup_hash.py``,
LookupHashLoggingSubscriber) if it has a folder for them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from kvsim.core.request import Request
from kvsim.numbers import Whole, check_settings
from kvsim.pages.extents import Extent
from kvsim.trace.base import OF_MAX_TOKENS, Trace
from kvsim.trace.blocks import BlockPages
from kvsim.trace.dates import stamp
from kvsim.trace.hashed import HashedTrace
from kvsim.trace.records import Record, extents_of
from kvsim.trace.stored import from_first_arrival, gathered

HASH = re.compile(r"-?(?:0[xX])?[0-9a-fA-F]{1,128}")
"""A hash as ``hex`` writes it; Python's own ``hash`` is negative at times."""


@dataclass(kw_only=True)
class LMCache(HashedTrace):
    """Reads ``{"timestamp": s, "request_id", "model_name", "chunk_size", "seq_len", "chunk_hashes": ["0x...", ...]}``.

    The log does not contain answers: they have ``output_tokens`` tokens each. Prompts for different models (``model_name``, which
    becomes the request's kind) share no pages. A request that is looked up again, such as after it was preempted, counts once:
    lines with the ``request_id`` of an earlier one are left out. The earliest timestamp is time 0; lines need not be sorted by
    time. ``limit`` counts requests.
    """

    STAMP_S: ClassVar[float] = 1.0
    LENGTH: ClassVar[tuple[str, str]] = ("seq_len", "seq_len")
    IDS: ClassVar[str] = "chunk_hashes"
    BLOCK_SIZE: ClassVar[str] = "chunk_size"

    block_tokens: int = 256
    output_tokens: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Whole(0, self.max_tokens), "output_tokens", hint=OF_MAX_TOKENS)

    def load(self, page_tokens: int) -> Trace:
        pages = self.block_pages(page_tokens)
        models: dict[str | int, int] = {}
        requests = gathered(self._request(record, models, pages) for record in islice(self._records(), self.limit))
        return self.trace(from_first_arrival(requests, self.rate), page_tokens)

    def _records(self) -> Iterator[Record]:
        """Yield the first record of each request."""
        seen: set[str | int] = set()
        for record in self.read():
            name = record.name("request_id") if record.has("request_id") else ""
            if name == "" or name not in seen:
                seen.add(name)
                yield record

    def _request(self, record: Record, models: dict[str | int, int], pages: BlockPages) -> Request:
        """Return the request of a line; ``models`` are the numbers of the models seen so far."""
        model = record.name("model_name") if record.has("model_name") else ""
        scope = models.setdefault(model, len(models))
        prompt_tokens, extents, prompt_pages = self.read_prompt(record, pages, scope)
        request = Request(
            index=0,
            arrival_s=stamp(record, "timestamp", self.STAMP_S),
            prompt_tokens=prompt_tokens,
            output_tokens=self.output_tokens,
            runs=extents,
            prompt_pages=prompt_pages,
            kind=str(model),
        )
        return self.with_answer(request, pages)

    def blocks(self, record: Record) -> tuple[Extent, ...]:
        hashes = record.items(self.IDS)
        if not all(isinstance(value, str) and HASH.fullmatch(value) for value in hashes):
            raise record.error(f"{self.IDS} must be a list of hexadecimal texts, such as 0x1f")
        return extents_of([int(value, 16) for value in hashes])
