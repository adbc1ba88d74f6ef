"""TraceLab's rounds of coding agents (uw-syfi/TraceLab, ``csv_export``): what of a prompt was cached, and what was new."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvsim.core.request import Request
from kvsim.trace.base import TAILS, Trace, check_choice, check_page_tokens, refuse_bigram
from kvsim.trace.deltas import Deltas
from kvsim.trace.file_trace import FileTrace
from kvsim.trace.records import AT_LEAST_ONE, MILLISECONDS, Record

NOTE = "a prompt continues the one before it in its session as far as its provider's cache had it; sessions share nothing"


class Round(NamedTuple):
    """The round of a session that came last."""

    session: int
    turn: int
    number: int
    """Its round_idx."""
    position: int
    """Among the requests of the file."""
    arrival_s: float
    wait_s: float
    """The time of its tools."""


@dataclass(kw_only=True)
class TraceLab(FileTrace):
    """Reads rows ``id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len``, plain or compressed.

    ``id`` may be ``session_id``, and ``arrival_time`` (ms) absent, for 0. The file has lengths only. Prompts are put together as
    TraceLab's own replay does: the first ``prefix_len`` tokens of the prompt and the answer before it in the session, and then
    ``input_len`` tokens that nothing else has; what a prefix has beyond that prompt and answer is new, too. A round waits for the
    answer to the one before it and then for ``tool_wait_after_ms`` of that one; sessions begin at ``arrival_time``, divided by
    ``rate``.

    ``prefix_len`` is what the provider's cache had of the prompt when the trace was recorded. So a context that it had dropped by
    then counts as new, and what sessions share, such as a system prompt, is not in the file: the trace has a note
    (``Trace.note``). The rounds of a session come in order. ``limit`` counts rows.
    """

    tail: str = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_bigram(self.bigram)
        check_choice("tail", self.tail, TAILS)

    def load(self, page_tokens: int) -> Trace:
        check_page_tokens(page_tokens)
        deltas = Deltas(1, page_tokens, partial_tail=self.tail == "all")
        return Trace(
            name=Path(self.path).name,
            requests=self.in_order(self._requests(deltas)),
            page_tokens=page_tokens,
            block_tokens=None,
            note=NOTE,
        )

    def _requests(self, deltas: Deltas) -> Iterator[Request]:
        latest: dict[str | int, Round] = {}
        for position, record in enumerate(self.read(self.limit)):
            name = record.name(record.either("id", "session_id"))
            before = latest.get(name)
            this = latest[name] = self._placed(record, before, len(latest) if before is None else before.session, position)
            request = self._request(record, this, deltas)
            if before is not None:
                request.after, request.delay_s = before.position, before.wait_s
            yield request

    def _placed(self, record: Record, before: Round | None, session: int, position: int) -> Round:
        """Return the place of the next round of a session."""
        number = record.integer("round_idx")
        wait_s = record.number("tool_wait_after_ms", MILLISECONDS) / 1000
        if before is None:
            arrival_ms = record.number("arrival_time", MILLISECONDS) if record.has("arrival_time") else 0.0
            return Round(session, 0, number, position, arrival_ms / 1000 / self.rate, wait_s)
        if number <= before.number:
            raise record.error(f"round_idx must increase within a session: {number} after {before.number}; sort the file")
        return Round(session, before.turn + 1, number, position, before.arrival_s + before.wait_s, wait_s)

    def _request(self, record: Record, this: Round, deltas: Deltas) -> Request:
        kept_tokens = record.tokens("prefix_len", self.max_tokens)
        added_tokens = record.tokens("input_len", self.max_tokens, AT_LEAST_ONE)
        output_tokens = record.tokens("output_len", self.max_tokens)
        if kept_tokens + added_tokens > self.max_tokens:
            raise record.too_long("a prompt, prefix_len and input_len together,", kept_tokens + added_tokens, self.max_tokens)
        prompt = deltas.prompt(this.session, (), added_tokens, output_tokens, kept_tokens=kept_tokens)
        return Request(
            index=0,
            arrival_s=this.arrival_s,
            prompt_tokens=prompt.tokens,
            output_tokens=output_tokens,
            runs=prompt.extents,
            prompt_pages=prompt.pages,
            output_runs=prompt.output_runs,
            session=this.session,
            turn=this.turn,
        )
