"""The FreeInference agentic trace: sessions of agents with their tool calls and sub-agents, prompts as chained block ids.

Nixon et al., From Requests to Sessions: A Large-Scale Characterization of Human-Driven Agentic Workloads (2026), and the trace
released with it (HarvardMadSys/freeinference_agentic_trace, release format 1).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from kvsim.core.request import Request, after_and_joins
from kvsim.trace.base import Trace, check_choice
from kvsim.trace.blocks import BlockPages
from kvsim.trace.hashed import HashedTrace
from kvsim.trace.records import MILLISECONDS, Record
from kvsim.trace.stored import from_first_arrival, gathered

ARRIVALS = ("recorded", "closed_loop")
MOST_DEEP = 100
"""The most sub-agents between an agent and one that works for it."""


@dataclass(eq=False)
class Call:
    """A request as recorded, and its position among those of the file."""

    start_ms: float
    end_ms: float
    position: int
    request: Request


@dataclass(eq=False)
class Session:
    """What all agents of a line have in common, and their requests so far."""

    number: int
    week: str
    first: int
    """The position of its first request."""
    calls: list[Call] = field(default_factory=list)


@dataclass(kw_only=True)
class FreeInference(HashedTrace):
    """Reads a session a line, ``{"week", "session_id", "user_id", "harness", "requests": [...]}``, plain or compressed.

    Of a request are read ``start_ms``, ``end_ms``, ``model``, ``role_tokens``, whose sum is the length of the prompt,
    ``provider_tokens`` with ``completion``, the length of the answer (null counts as 0), ``block_ids`` and ``tool_calls``, each
    of which may have a ``subagent``: a session that it started, with requests of its own.

        recorded       a request arrives at its recorded time; the earliest of the file arrives at time 0
        closed_loop    a request waits for the one before it in its session, the first one of a sub-agent for the one that made
                       the tool call, and both then as long as in the recording: the time of tools, or of the user. It also waits
                       for the sub-agents of earlier tool calls that had ended when it began; whoever was still at work is waited
                       for later, or not at all. Nobody waits for a request that began later. Sessions begin as recorded

    Sub-agents belong to the session of the line; the kind of a request tells them. ``user_id`` becomes the tenant. Ids stand for
    tokens of one tokenizer, whatever the model, and count from 1 in each week: prompts for different models, or of different
    weeks, share no pages here. Only full blocks have ids. ``limit`` counts sessions.
    ``answers``: see answers.py.
    """

    LENGTH: ClassVar[tuple[str, str]] = ("role_tokens", "role_tokens")
    IDS: ClassVar[str] = "block_ids"
    IS_LINE: ClassVar[bool] = False
    OF_ARRIVALS: ClassVar[tuple[str, ...]] = ("arrivals",)

    block_tokens: int = 16
    arrivals: str = "recorded"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("arrivals", self.arrivals, ARRIVALS)

    def load(self, page_tokens: int) -> Trace:
        requests = gathered(self._requests(self.block_pages(page_tokens)))
        return self.trace(from_first_arrival(requests, 1000 * self.rate), page_tokens)

    def length(self, record: Record) -> int:
        roles = record.part("role_tokens")
        tokens = sum(roles.integer(role) for role in roles.fields)
        if not tokens:
            raise record.error("role_tokens has no tokens: a prompt has at least one")
        if tokens > self.max_tokens:
            raise record.too_long("the sum of role_tokens", tokens, self.max_tokens)
        return tokens

    def _requests(self, pages: BlockPages) -> Iterator[Request]:
        """Yield the requests of all lines; ``after`` and ``joins`` are positions among them, and arrivals milliseconds."""
        first = 0
        for number, line in enumerate(self.read(self.limit)):
            session = Session(number, str(line.name("week")) if line.has("week") else "", first)
            self._play(session, line, None, 0, pages)
            for turn, call in enumerate(sorted(session.calls, key=lambda call: call.start_ms)):
                call.request.turn = turn
            first += len(session.calls)
            yield from (call.request for call in session.calls)

    def _play(self, session: Session, agent: Record, spawner: Call | None, depth: int, pages: BlockPages) -> Call:
        """Append the requests of an agent and of its sub-agents, and return the one of its own that ended last."""
        parts = agent.items("requests")
        if not parts or depth > MOST_DEEP:
            problem = "requests is empty" if not parts else f"more than {MOST_DEEP} agents wait for each other"
            raise agent.error(f"{problem}: this {'subagent' if depth else 'session'} cannot be played")
        tenant = str(agent.name("user_id")) if agent.has("user_id") else ""
        own: list[Call] = []
        at_work: list[Call] = []
        for fields in parts:
            part = Record(agent.path, agent.line, fields)
            call = self._call(session, part, pages)
            call.request.kind, call.request.tenant = "subagent" if depth else "agent", tenant
            if self.arrivals == "closed_loop":
                _wait(call, own[-1] if own else spawner, at_work)
            own.append(call)
            for subagent in _subagents(part):
                at_work.append(self._play(session, subagent, call, depth + 1, pages))
        return max(own, key=lambda call: (call.end_ms, call.position))

    def _call(self, session: Session, part: Record, pages: BlockPages) -> Call:
        """Append the next request of a session."""
        model = str(part.name("model")) if part.has("model") else ""
        prompt_tokens, extents, prompt_pages = self.read_prompt(part, pages, pages.scope_of(f"{session.week} {model}"))
        counts = part.part("provider_tokens")
        start_ms = part.number("start_ms", MILLISECONDS)
        request = Request(
            index=0,
            arrival_s=start_ms,
            prompt_tokens=prompt_tokens,
            output_tokens=counts.tokens("completion", self.max_tokens) if counts.has("completion") else 0,
            runs=extents,
            prompt_pages=prompt_pages,
            session=session.number,
        )
        end_ms = max(start_ms, part.number("end_ms", MILLISECONDS))
        call = Call(start_ms, end_ms, session.first + len(session.calls), self.with_answer(request, pages))
        session.calls.append(call)
        return call


def _subagents(part: Record) -> Iterator[Record]:
    """Yield the sessions that the tool calls of a request started."""
    for fields in part.items("tool_calls") if part.has("tool_calls") else ():
        tool = Record(part.path, part.line, fields)
        if tool.has("subagent"):
            yield tool.part("subagent")


def _wait(call: Call, before: Call | None, at_work: list[Call]) -> None:
    """Let a request wait for the one before it and for sub-agents, whose last requests these are, and then as long as recorded.

    Sub-agents that have ended are taken out of ``at_work``.
    """
    awaited = [other for other in at_work if other.end_ms <= call.start_ms]
    at_work[:] = [other for other in at_work if other.end_ms > call.start_ms]
    if before is not None and before.start_ms <= call.start_ms:
        awaited.append(before)
    awaited.sort(key=lambda other: other.end_ms, reverse=True)
    call.request.after, call.request.joins = after_and_joins(other.position for other in awaited)
    if awaited:
        call.request.delay_s = max(0.0, call.start_ms - awaited[0].end_ms) / 1000
