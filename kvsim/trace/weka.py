"""Agent sessions in WEKA's format: one session per line, including its sub-agents (C. Fox, kv-cache-tester)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

from kvsim.core.request import Request, after_and_joins
from kvsim.numbers import Whole, check_settings
from kvsim.pages.extents import count_pages
from kvsim.trace.answers import infer_answers
from kvsim.trace.base import Trace, check_choice, refuse_bigram
from kvsim.trace.blocks import BlockPages
from kvsim.trace.file_trace import FileTrace
from kvsim.trace.records import AT_LEAST_ONE, Record

ARRIVALS = ("recorded", "closed_loop")


class End(NamedTuple):
    """The end of a request in the recording: seconds since the start of the session, and the request's position."""

    at_s: float
    position: int


NO_END = End(0.0, -1)


@dataclass(eq=False)
class Agent:
    """The agent of a session or one of its sub-agents, and what it has done so far."""

    kind: str
    latest: End
    """The request of its own that ended last before the one looked at."""
    parent: "Agent | None" = None
    begin_s: float = 0.0
    last: End = NO_END
    """The request that ended last, those of its sub-agents included."""
    left: int = 0
    """Requests that are still to come, those of its sub-agents included."""
    running: list[End] = field(default_factory=list)
    """A heap."""
    subagents: "list[Agent]" = field(default_factory=list)
    """Those that no request has waited for yet."""

    def line(self) -> "Iterator[Agent]":
        """Yield this agent and those that it works for."""
        agent: Agent | None = self
        while agent is not None:
            yield agent
            agent = agent.parent

    def asks(self, end: End) -> None:
        """Note a request of its own, which ends then."""
        heappush(self.running, end)
        for agent in self.line():
            agent.left -= 1
            agent.last = max(agent.last, end)

    def awaited(self, now_s: float) -> list[End]:
        """Return what a request that begins now has waited for, the latest end first; none if it begins the first session.

        That is its agent's request that ended last or, for the first one of a sub-agent, that of the agent above, and those
        sub-agents of its own that have ended since, which wait for that request themselves if they began after it.
        """
        own = next((end for agent in self.line() if (end := agent.latest_end(now_s)).position >= 0), None)
        ended = [agent for agent in self.subagents if not agent.left and agent.last.at_s <= now_s]
        self.subagents = [agent for agent in self.subagents if agent not in ended]
        if own is not None and all(agent.begin_s < own.at_s for agent in ended):
            return sorted([own, *(agent.last for agent in ended)], reverse=True)
        return sorted((agent.last for agent in ended), reverse=True)

    def latest_end(self, now_s: float) -> End:
        """Return its own request that has ended last by now."""
        while self.running and self.running[0].at_s <= now_s:
            self.latest = heappop(self.running)
        return self.latest


class Call(NamedTuple):
    """One request of a session. Times are seconds since the start of the session."""

    start_s: float
    end_s: float
    agent: Agent
    record: Record


@dataclass(order=True)
class Lane:
    """One of several concurrent users, each of whom works through one session after another."""

    free_s: float
    """End of the lane's previous session."""
    number: int
    last: int = field(default=-1, compare=False)
    """The request of that session that ended last; -1 before the first session."""


@dataclass(kw_only=True)
class Weka(FileTrace):
    """Reads sessions of requests ``{"t": s, "in", "out", "api_time": s, "hash_ids_rle" or "hash_ids"}``, plain or compressed.

    The recorded sessions have no common clock, so they are played on ``concurrent_sessions`` lanes: all lanes start at time 0,
    and a lane takes the next session of the file when its current one ends. A request without ``api_time`` counts as answered
    immediately.

        recorded       a request arrives at its recorded time within the session
        closed_loop    a request waits for the request of its agent that had most recently ended when it began, and for the
                       sub-agents that had ended since, and then as long as in the recording. A sub-agent's first request
                       waits for its parent's, and a session's first request for the end of its lane's previous session

    Block ids are local to a line, whatever the line's id: a repeated line is a new session. Sub-agents share their session's
    block ids and count time from their own ``t``. Only full blocks have ids, so the tail of a prompt has no page. ``limit``
    keeps the requests that arrive first. ``answers=inferred``: see answers.py.
    """

    block_tokens: int = 64
    arrivals: str = "recorded"
    answers: str = "none"
    concurrent_sessions: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_bigram(self.bigram)
        check_choice("arrivals", self.arrivals, ARRIVALS)
        check_choice("answers", self.answers, ("none", "inferred"))
        check_settings(self, Whole(1), "block_tokens", "concurrent_sessions")
        if self.arrivals == "closed_loop" and self.rate != 1:
            raise ValueError(f"rate={self.rate} has no effect in a closed loop; set concurrent_sessions instead")

    def load(self, page_tokens: int) -> Trace:
        pages = BlockPages(self.block_tokens, page_tokens, partial_tail=False)
        lanes: list[Lane] = []
        requests: list[Request] = []
        for session, record in enumerate(self.read()):
            self._check_block_size(record)
            lane = self._next_lane(lanes)
            agent = Agent("agent", End(0.0, lane.last))
            calls = sorted(_calls(record, agent), key=lambda call: call.start_s)
            self._play(session, calls, lane, pages, requests)
            lane.free_s, lane.last = lane.free_s + agent.last.at_s, agent.last.position
            heappush(lanes, lane)
        ordered: Sequence[Request] = self.in_order(requests)
        if self.limit is not None:
            ordered = ordered[: self.limit]
        if self.answers == "inferred":
            ordered = list(ordered)
            infer_answers(ordered, page_tokens)
        return Trace(
            name=Path(self.path).name,
            requests=ordered,
            page_tokens=page_tokens,
            block_tokens=self.block_tokens,
        )

    def _next_lane(self, lanes: list[Lane]) -> Lane:
        """Take the lane that is free first out of a heap of those that were used. All lanes are free at time 0."""
        unused = Lane(0.0, len(lanes))
        return unused if len(lanes) < self.concurrent_sessions and (not lanes or unused < lanes[0]) else heappop(lanes)

    def _check_block_size(self, record: Record) -> None:
        if record.has("block_size") and record.integer("block_size") != self.block_tokens:
            raise record.error(f"block_size is {record.integer('block_size')}, but block_tokens is {self.block_tokens}")

    def _play(self, session: int, calls: list[Call], lane: Lane, pages: BlockPages, requests: list[Request]) -> None:
        """Append a session's requests, starting when the lane is free; ``after`` and ``joins`` are positions in ``requests``."""
        for turn, call in enumerate(calls):
            request = self._request(call, pages, session, turn)
            request.arrival_s = (lane.free_s + call.start_s) / self.rate
            if self.arrivals == "closed_loop" and (awaited := call.agent.awaited(call.start_s)):
                request.after, request.joins = after_and_joins(end.position for end in awaited)
                request.delay_s = call.start_s - awaited[0].at_s
            call.agent.asks(End(call.end_s, len(requests)))
            requests.append(request)

    def _request(self, call: Call, pages: BlockPages, session: int, turn: int) -> Request:
        prompt_tokens = call.record.tokens("in", self.max_tokens, AT_LEAST_ONE)
        blocks = call.record.id_extents("hash_ids")
        full = prompt_tokens // self.block_tokens
        if count_pages(blocks) != full:
            raise call.record.error(
                f"a request has {count_pages(blocks)} block ids, but in={prompt_tokens} takes {full} full blocks of "
                f"{self.block_tokens} tokens"
            )
        extents, prompt_pages = pages.lookup(blocks, full * self.block_tokens, scope=session)
        return Request(
            index=0,
            arrival_s=0.0,
            prompt_tokens=prompt_tokens,
            output_tokens=call.record.tokens("out", self.max_tokens),
            runs=extents,
            prompt_pages=prompt_pages,
            session=session,
            turn=turn,
            kind=call.agent.kind,
        )


def _calls(record: Record, agent: Agent) -> Iterator[Call]:
    """Yield the requests of a session or sub-agent, and count them."""
    previous_s = 0.0
    if not record.items("requests"):
        raise record.error(f"requests is empty: this {agent.kind} has no requests")
    for fields in record.items("requests"):
        part = Record(record.path, record.line, fields)
        t = part.number("t")
        if t < previous_s:
            raise record.error(f"t must not decrease: {t:g} s after {previous_s:g} s")
        previous_s = t
        if fields.get("type") == "subagent":
            subagent = Agent("subagent", NO_END, parent=agent, begin_s=agent.begin_s + t)
            agent.subagents.append(subagent)
            yield from _calls(part, subagent)
        else:
            answer_s = part.number("api_time") if part.has("api_time") else 0.0
            for each in agent.line():
                each.left += 1
            yield Call(agent.begin_s + t, agent.begin_s + t + answer_s, agent, part)
