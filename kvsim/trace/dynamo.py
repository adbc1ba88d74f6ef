"""NVIDIA Dynamo's request trace: a row for each request that has ended, with its prompt as hashes of blocks.

Dynamo's frontend writes it with ``DYN_REQUEST_TRACE=1`` (ai-dynamo/dynamo, "Request Replay Tracing").
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple

from kvsim.core.request import Request
from kvsim.errors import TraceError
from kvsim.trace.base import Trace, check_choice
from kvsim.trace.blocks import BlockPages
from kvsim.trace.hashed import HashedTrace
from kvsim.trace.records import MILLISECONDS, Record, shown

SCHEMA = "dynamo.request.trace.v1"
REQUEST = "request_end"
OTHERS = ("request_payload", "tool_start", "tool_end", "tool_error")
"""Rows that are no requests."""
ARRIVALS = ("recorded", "closed_loop")


class Call(NamedTuple):
    """A request as recorded."""

    start_ms: float
    end_ms: float
    """Since 1970."""
    session: str | int | None
    request: Request


@dataclass(eq=False)
class Session:
    """The requests of one session so far."""

    number: int
    turns: int = 0
    latest: tuple[float, int] = (0.0, -1)
    """End and position of the request that has ended last."""
    running: list[tuple[float, int]] = field(default_factory=list)
    """A heap of ends and positions."""


@dataclass(kw_only=True)
class Dynamo(HashedTrace):
    """Reads rows ``{"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": {...}}``, plain or compressed.

    Of ``request`` are read ``request_received_ms``, ``total_time_ms``, ``output_tokens``, ``model`` and ``replay`` with
    ``trace_block_size``, ``input_length`` and ``input_sequence_hashes``; of the row, ``event_time_unix_ms`` and
    ``agent_context`` with the ``session_id``. A row may lie in an ``event``, as some sinks write it. Rows of tools and of
    payloads are left out.

    The earliest request arrives at time 0; rows come in the order in which requests ended. Prompts for different models, which
    become the request's kind, share no pages. With ``arrivals=closed_loop``, a request waits for the answer to the one that
    ended last in its session before it began, and then as long as recorded. ``limit`` counts requests in the order of the file.
    """

    LENGTH: ClassVar[tuple[str, str]] = ("input_length", "input_length")
    IDS: ClassVar[str] = "input_sequence_hashes"
    BLOCK_SIZE: ClassVar[str] = "trace_block_size"
    IS_LINE: ClassVar[bool] = False
    OF_ARRIVALS: ClassVar[tuple[str, ...]] = ("arrivals",)

    block_tokens: int = 64
    arrivals: str = "recorded"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("arrivals", self.arrivals, ARRIVALS)

    def load(self, page_tokens: int) -> Trace:
        pages = self.block_pages(page_tokens)
        models: dict[str | int, int] = {}
        calls: list[Call] = []
        for row in self._rows():
            calls.append(self._call(row, models, pages))
            if len(calls) == self.limit:
                break
        if not calls:
            raise TraceError(self.path, None, f"no row is a {REQUEST}: it contains no requests")
        return self.trace(self._placed(calls), page_tokens)

    def _rows(self) -> Iterator[Record]:
        """Yield the rows of requests."""
        for record in self.read():
            row = record.part("event") if record.has("event") else record
            if row.fields.get("schema") != SCHEMA:
                raise row.error(f"schema must be {SCHEMA}, not {shown(row.fields.get('schema'))}")
            kind = row.fields.get("event_type")
            if kind == REQUEST:
                yield row
            elif kind not in OTHERS:
                raise row.error(f"event_type must be one of {', '.join((REQUEST, *OTHERS))}, not {shown(kind)}")

    def _call(self, row: Record, models: dict[str | int, int], pages: BlockPages) -> Call:
        """Return the request of a row; ``models`` are the numbers of the models seen so far."""
        about = row.part("request")
        model = about.name("model") if about.has("model") else ""
        scope = models.setdefault(model, len(models))
        start_ms = about.number("request_received_ms", MILLISECONDS)
        prompt_tokens, extents, prompt_pages = self.read_prompt(about.part("replay"), pages, scope)
        request = Request(
            index=0,
            arrival_s=0.0,
            prompt_tokens=prompt_tokens,
            output_tokens=about.tokens("output_tokens", self.max_tokens),
            runs=extents,
            prompt_pages=prompt_pages,
            kind=str(model),
        )
        context = row.part("agent_context") if row.has("agent_context") else None
        session = context.name("session_id") if context else None
        return Call(start_ms, _end_ms(row, about, start_ms), session, self.with_answer(request, pages))

    def _placed(self, calls: Sequence[Call]) -> list[Request]:
        """Return the requests in order of arrival, with their sessions; ``after`` is a position among them."""
        calls = sorted(calls, key=lambda call: (call.start_ms, call.end_ms))
        is_closed = self.arrivals == "closed_loop"
        sessions: dict[str | int, Session] = {}
        for position, call in enumerate(calls):
            call.request.arrival_s = (call.start_ms - calls[0].start_ms) / 1000 / self.rate
            if call.session is not None:
                session = sessions.setdefault(call.session, Session(len(sessions)))
                _place(call, position, session, is_closed=is_closed)
        if is_closed and not sessions:
            raise TraceError(
                self.path, None, "arrivals=closed_loop has no effect: no request has an agent_context; leave out trace.arrivals"
            )
        return [call.request for call in calls]


def _place(call: Call, position: int, session: Session, *, is_closed: bool) -> None:
    """Make a request the next one of its session; in a closed loop, it waits for the one that has ended last."""
    request = call.request
    request.session, request.turn = session.number, session.turns
    session.turns += 1
    while session.running and session.running[0][0] <= call.start_ms:
        session.latest = heappop(session.running)
    end_ms, before = session.latest
    if is_closed and before >= 0:
        request.after, request.delay_s = before, (call.start_ms - end_ms) / 1000
    heappush(session.running, (call.end_ms, position))


def _end_ms(row: Record, about: Record, start_ms: float) -> float:
    """Return when the answer was complete."""
    if about.has("total_time_ms"):
        return start_ms + about.number("total_time_ms", MILLISECONDS)
    return max(start_ms, row.number("event_time_unix_ms", MILLISECONDS))
