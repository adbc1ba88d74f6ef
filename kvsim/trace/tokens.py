"""Traces that contain the tokens themselves: one request per line, with pages identified by chained hashes."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from kvsim.core.request import Request
from kvsim.pages.extents import Extent, split_extents
from kvsim.trace.base import TAILS, Trace, check_choice, check_page_tokens, name_pages
from kvsim.trace.file_trace import FileTrace
from kvsim.trace.page_hasher import PageHasher, Span
from kvsim.trace.page_index import PageIndex
from kvsim.trace.records import SIGNED, Record
from kvsim.trace.resets import read_requests
from kvsim.trace.retention import retention_of
from kvsim.trace.timetable import TimedTrace, Timetable


@dataclass(kw_only=True)
class Tokens(FileTrace, TimedTrace):
    """Reads lines ``{"token_ids": [...], "output_length": n}``, plain or compressed, with these optional fields:

        timestamp, session_id, delay    see Timetable; without timestamps, sessions begin at time 0 or at ``sessions_per_s``
        request_id, after               a name, and the names of the lines that the request waits for; see Timetable
        priority                        an integer; 0 if absent
        retention, decode_retention     how important tokens are and for how long (see ``retention_of``)
        tenant, lora                    a string or an integer; prompts that differ in either share no pages
        output_token_ids                the ``output_length`` tokens of the answer; with ``n``, a list of answers
        n                               the number of answers to the prompt, 1 if absent; each has ``output_length`` tokens
        persistent                      true: the prompt's pages are never evicted from the GPU
        multimodal                      a list of [start, stop, hash]: these tokens stand for content with this hash (a
                                        string or an integer), which becomes part of the key of every page they touch.
                                        They must not overlap
        images                          a list of [begin, end]: no hit ends inside these tokens

    A line ``{"reset": "drain"}`` or ``{"reset": "now"}``, optionally with a ``timestamp``, resets the cache (see ``Reset``).

    ``limit`` counts lines. With ``bigram``, a page is known by its tokens and the one after it: SGLang's keys with EAGLE
    (``convert_to_bigram_key``). Hashing each page of each prompt is the only cost that grows with the number of pages.
    """

    IS_LINE: ClassVar[bool] = True

    tail: str = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("tail", self.tail, TAILS)

    def load(self, page_tokens: int) -> Trace:
        return Trace(
            name=Path(self.path).name,
            requests=self.in_order(self._requests(page_tokens, PageIndex())),
            page_tokens=page_tokens,
            block_tokens=None,
        )

    def records(self) -> Iterator[Record]:
        """Yield the lines of the file."""
        return self.read(self.limit)

    def page_keys(self, page_tokens: int) -> Callable[[int], bytes]:
        """Return the keys of ``PageHasher`` instead: they depend on tokens only, so equal prompts of any file share them."""
        index = PageIndex()
        deque(self._requests(page_tokens, index), maxlen=0)
        keys = index.keys()
        return lambda page: keys[page].to_bytes(16, "big")

    def page_names(self, page_tokens: int) -> dict[int, str]:
        hasher, index = PageHasher(page_tokens, bigram=self.bigram), PageIndex()
        prompts = ((record.integers("token_ids"), record) for record in self.records() if "reset" not in record.fields)
        return name_pages(
            ((tokens, index.lookup(self.keys_of(record, tokens, hasher))) for tokens, record in prompts), page_tokens
        )

    def _requests(self, page_tokens: int, index: PageIndex) -> Iterator[Request]:
        """Yield the requests in file order, with page ids from ``index``."""
        check_page_tokens(page_tokens)
        hasher, times = PageHasher(page_tokens, bigram=self.bigram), self.timetable()
        return read_requests(
            self.records(), times, lambda record: self._request(record, times, hasher, index), is_limited=self.limit is not None
        )

    def _request(self, record: Record, times: Timetable, hasher: PageHasher, index: PageIndex) -> Request:
        place = times.place(record)
        tokens = record.integers("token_ids")
        if not tokens:
            raise record.error("token_ids is empty; a request must have a prompt")
        if len(tokens) > self.max_tokens:
            raise record.too_long("token_ids", len(tokens), self.max_tokens)
        output_tokens = record.tokens("output_length", self.max_tokens)
        keys = self.keys_of(record, tokens, hasher)
        samples = record.samples(self.max_tokens, output_tokens)
        output_runs = self._output_extents(record, samples, tokens, output_tokens, hasher, index)
        return Request(
            index=0,
            prompt_tokens=len(tokens),
            output_tokens=output_tokens,
            runs=index.lookup(keys),
            prompt_pages=len(keys),
            priority=record.integer("priority", SIGNED) if record.has("priority") else 0,
            retention=retention_of(record, len(tokens)),
            output_runs=output_runs[0] if output_runs else None,
            sample_output_runs=output_runs[1:],
            samples=samples,
            images=record.stretches("images", len(tokens)),
            tenant=str(record.name("tenant")) if record.has("tenant") else "",
            adapter=str(record.name("lora")) if record.has("lora") else "",
            persistent=record.flag("persistent"),
            bigram=self.bigram,
            **place._asdict(),
        )

    def _output_extents(
        self, record: Record, samples: int, tokens: list[int], output_tokens: int, hasher: PageHasher, index: PageIndex
    ) -> tuple[tuple[Extent, ...], ...]:
        """Return, for each sample, the pages that its answer completes; () if the file lacks the answers.

        The last token of an answer has no KV.
        """
        if not record.has("output_token_ids"):
            return ()
        answers = [record.integers("output_token_ids")] if samples == 1 else record.integer_lists("output_token_ids")
        if len(answers) != samples:
            raise record.error(f"output_token_ids has {len(answers)} answers, but n is {samples}")
        paths = []
        for answer in answers:
            if len(answer) != output_tokens:
                raise record.error(f"output_token_ids has {len(answer)} tokens, but output_length is {output_tokens}")
            keys = self.keys_of(record, tokens + answer[:-1], hasher, tail="full")
            paths.append(split_extents(index.lookup(keys), (len(tokens) - self.bigram) // hasher.page_tokens)[1])
        return tuple(paths)

    def keys_of(self, record: Record, tokens: list[int], hasher: PageHasher, tail: str | None = None) -> list[int]:
        """Return the keys of the pages of these tokens, which a line has. Raises TraceError."""
        try:
            return hasher.keys(
                tokens,
                spans=_spans(record),
                lora=record.name("lora") if record.has("lora") else None,
                tenant=record.name("tenant") if record.has("tenant") else None,
                partial_tail=(tail or self.tail) == "all",
            )
        except ValueError as error:
            raise record.error(str(error)) from None


def _spans(record: Record) -> list[Span]:
    """Return the spans of a prompt, in order. Overlaps are refused: a few lines could make any number of keys of each page."""
    spans = record.items("multimodal") if record.has("multimodal") else []
    for span in spans:
        if not isinstance(span, list) or [type(part) for part in span] not in ([int, int, int], [int, int, str]):
            raise record.error("multimodal must be a list of [start, stop, hash]; the hash is a string or an integer")
    found = sorted(((start, stop, content) for start, stop, content in spans), key=lambda span: span[:2])
    for (_, stop, _), (start, _, _) in pairwise(found):
        if start < stop:
            raise record.error(f"multimodal must not overlap: one begins at token {start}, before another ends at {stop}")
    return found
