"""Traces in Mooncake's format: one request per line, with its prompt given by block ids.

Qin et al., Mooncake: Trading More Storage for Less Computation (FAST 2025), and the traces released with it.
"""

from dataclasses import dataclass
from functools import partial
from itertools import chain

from kvsim.core.request import Request
from kvsim.pages.extents import Extent, count_pages, split_extents
from kvsim.trace.base import Trace, check_choice, check_page_tokens
from kvsim.trace.blocks import BlockPages
from kvsim.trace.deltas import Deltas
from kvsim.trace.hashed import HashedTrace
from kvsim.trace.records import AT_LEAST_ONE, SIGNED, Record, extents_of, shown
from kvsim.trace.resets import read_requests
from kvsim.trace.retention import retention_of
from kvsim.trace.timetable import Place, TimedTrace, Timetable

ANSWER = "output_hash_ids"
CONTEXT_MODES = {"whole": "message_array_with_responses", "deltas": "deltas_without_responses"}
"""What a later line of a session contains, and what AIPerf calls that."""


@dataclass(kw_only=True)
class Mooncake(HashedTrace, TimedTrace):
    """Reads ``{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}``, plain or compressed.

    Besides Mooncake's own, these are traces of NVIDIA Dynamo (``MooncakeRow``, with its names ``input_tokens``,
    ``output_tokens``, ``created_time`` and ``delay_ms``), of AIPerf (``mooncake_trace``), and of kvcache-simulator, where a line
    is at least ``{"block_size", "hash_ids", "input_length"}``. An answer without a length has one token.

    A line contains its whole prompt, even within a session; with ``turns=deltas``, a later line of a session contains what is new
    after the answer before it (see ``Deltas``). Lines may then lack ``hash_ids``: what they add is their own. The last block id
    may stand for a partial block; with ``tail=full`` it may also be absent. Ids are re-keyed, so they need not identify their
    prefix. ``limit`` counts lines. ``answers``: see answers.py. Optional fields:

        timestamp, session_id, delay    see Timetable, also for request_id and after, which make graphs of calls
        priority                        an integer; 0 if absent
        retention, decode_retention     how important tokens are and for how long (see ``retention_of``)
        n                               the number of answers to the prompt; 1 if absent. ``answers=inferred`` infers the first
        turn                            the position in the session, from 1; the lines of a session are counted if absent
        lora                            a string or an integer; prompts with different ones share no pages
        type, tenant                    a string or an integer; the request's kind, and whose it is
        persistent                      true: the prompt's pages are never evicted from the GPU
        output_hash_ids                 ids of the blocks that the answer completes (its last token has no KV); with ``n``, a list
                                        of answers. ``kvsim trace convert`` writes them where it knows the answers
        note                            in the first line: what part of the trace is synthetic, shown with every result
        hash_ids_rle                    instead of ``hash_ids``: a first id and a length for each run of consecutive ids
        images                          a list of [begin, end]: no hit ends inside these tokens

    A line ``{"reset": "drain"}`` or ``{"reset": "now"}``, optionally with a ``timestamp``, resets the cache (see ``Reset``).
    """

    block_tokens: int = 512
    turns: str = "whole"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("turns", self.turns, tuple(CONTEXT_MODES))
        if self.turns == "deltas" and self.answers != "none":
            raise ValueError(
                f"answers={self.answers} has no effect with turns=deltas, where prompts contain the answers: leave it out"
            )

    def load(self, page_tokens: int) -> Trace:
        times = self.timetable()
        records = self.read(self.limit)
        if self.turns == "deltas":
            check_page_tokens(page_tokens)
            deltas = Deltas(self.block_tokens, page_tokens, partial_tail=self.tail == "all")
            read = partial(self._delta, times=times, deltas=deltas)
        else:
            read = partial(self._request, times=times, pages=self.block_pages(page_tokens))
        first = next(records)
        trace = self.trace(read_requests(chain([first], records), times, read, is_limited=self.limit is not None), page_tokens)
        trace.note = str(first.name("note")) if first.has("note") else ""
        return trace

    def _delta(self, record: Record, times: Timetable, deltas: Deltas) -> Request:
        """Return the request of a line that lists only what its prompt adds to the session."""
        for name in (ANSWER, "images", "n"):
            if record.has(name):
                raise record.error(f"{name} is not supported with turns=deltas")
        blocks = self.blocks(record) if record.has(self.IDS) or record.has(f"{self.IDS}_rle") else ()
        added_tokens = self.check_length(record, count_pages(blocks)) if blocks else self.length(record)
        place = times.place(record)
        prompt = deltas.prompt(place.session, blocks, added_tokens, self._output_tokens(record))
        if prompt.tokens > self.max_tokens:
            raise record.too_long("the prompt, with the turns before it,", prompt.tokens, self.max_tokens)
        request = self._described(record, place, prompt.tokens, prompt.extents, prompt.pages)
        request.output_runs = prompt.output_runs
        return request

    def _request(self, record: Record, times: Timetable, pages: BlockPages) -> Request:
        if not record.fields.keys() & {self.IDS, f"{self.IDS}_rle"}:
            raise record.error(
                f"{self.IDS} is missing; it must be a list of non-negative integers, unless lines list what a turn adds to its "
                "session (trace.turns=deltas)"
            )
        place = times.place(record)
        adapter = str(record.name("lora")) if record.has("lora") else ""
        request = self._described(record, place, *self.read_prompt(record, pages, pages.scope_of(adapter)))
        request.adapter = adapter
        if record.has(ANSWER):
            self._set_answers(record, request, pages)
        if self.answers == "unique" and request.samples > 1:
            raise record.error(f"n is {request.samples}, but answers=unique knows one answer to each prompt: set answers=none")
        return self.with_answer(request, pages)

    def _described(
        self, record: Record, place: Place, prompt_tokens: int, extents: tuple[Extent, ...], prompt_pages: int
    ) -> Request:
        """Return a request with this prompt and the other fields of its line."""
        if record.has("context_mode") and record.fields["context_mode"] != CONTEXT_MODES[self.turns]:
            mode = record.fields["context_mode"]
            raise record.error(
                f"context_mode is {shown(mode)}, but turns={self.turns} is for {CONTEXT_MODES[self.turns]}: set trace.turns"
            )
        output_tokens = self._output_tokens(record)
        place = place._replace(turn=record.integer("turn", AT_LEAST_ONE) - 1) if record.has("turn") else place
        return Request(
            index=0,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            runs=extents,
            prompt_pages=prompt_pages,
            priority=record.integer("priority", SIGNED) if record.has("priority") else 0,
            retention=retention_of(record, prompt_tokens),
            samples=record.samples(self.max_tokens, output_tokens),
            images=record.stretches("images", prompt_tokens),
            kind=str(record.name("type")) if record.has("type") else "",
            tenant=str(record.name("tenant")) if record.has("tenant") else "",
            persistent=record.flag("persistent"),
            **place._asdict(),
        )

    def _set_answers(self, record: Record, request: Request, pages: BlockPages) -> None:
        """Set the pages of the answers that the line contains. Raises TraceError unless they fit their length."""
        if self.answers != "none":
            raise record.error(f"{ANSWER} is the answer, so it cannot be {self.answers}: set answers=none")
        answers = [record.integers(ANSWER)] if request.samples == 1 else record.integer_lists(ANSWER)
        if len(answers) != request.samples:
            raise record.error(f"{ANSWER} has {len(answers)} answers, but n is {request.samples}")
        full = request.prompt_tokens // self.block_tokens
        most = (request.prompt_tokens + max(request.output_tokens, 1) - 1) // self.block_tokens - full
        paths = []
        for answer in answers:
            if len(answer) > most:
                raise record.error(f"{ANSWER} has {len(answer)} ids, but the answer completes {most} blocks")
            path = (*split_extents(record.id_extents(self.IDS), full)[0], *extents_of(answer))
            tokens = count_pages(path) * self.block_tokens
            whole, _ = pages.lookup(path, tokens - tokens % pages.page_tokens, pages.scope_of(request.adapter))
            paths.append(split_extents(whole, request.prompt_tokens // pages.page_tokens)[1])
        request.output_runs, request.sample_output_runs = paths[0], tuple(paths[1:])

    def _output_tokens(self, record: Record) -> int:
        name = record.either("output_length", "output_tokens")
        return record.tokens(name, self.max_tokens) if record.has(name) else 1
