"""AIPerf's ``dag_jsonl``: conversations that branch into sub-agents and continuations, and wait for them.

The format is that of AIPerf's guide "DAG Benchmarks: Branching Conversations" (ai-dynamo/aiperf).
"""

import re
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, ClassVar, NamedTuple

from kvsim.errors import TraceError
from kvsim.numbers import Whole
from kvsim.trace.base import Trace
from kvsim.trace.openai import read_messages
from kvsim.trace.records import AT_LEAST_ONE, MILLISECONDS, Record, shown
from kvsim.trace.text import TextTrace, Turn
from kvsim.trace.tokenizer import TemplateError, Tokenizer

NOTE = "answers are not in the file: each has as many tokens as its turn's max_tokens, in later prompts, too"
ANSWERED, TOLD, ALONE = "deltas_without_responses", "deltas_with_responses", "message_array_with_responses"
"""What a conversation's turns contain: what is new after the answer before, answers too, or the whole prompt."""
MARK = "\ue0a1"
ANSWER = re.compile(f"{MARK}([0-9]+){MARK}")
"""Stands for an answer in the text of a conversation."""
FIRST_TOKEN = 1 << 40
"""The first token of answers, above those of all vocabularies."""
MOST_CALLS, MOST_DEEP = 1 << 20, 100
"""The most requests of a session, and the most conversations between a root and one that branches off it."""
Messages = list[dict[str, Any]]
Calls = Generator[Turn, None, list[int]]
"""Yields requests, and returns the numbers of those whose end is the end of all of them."""


class Ask(NamedTuple):
    """A turn of a conversation."""

    part: Record
    messages: Messages
    tools: Any
    output_tokens: int
    delay_ms: float
    forks: list[str]
    spawns: list[tuple[list[str], int]]
    """Conversations, and the turn that waits for them."""


@dataclass(eq=False)
class Session:
    """One run of a root and of all that branches off it."""

    name: str
    calls: int = 0
    path: list[str] = field(default_factory=list)
    """The conversations that are being read, from the root."""


@dataclass(kw_only=True)
class Dag(TextTrace):
    """Reads conversations ``{"session_id", "turns": [{"messages", "max_tokens", "delay", "forks", "spawns"}, ...]}``.

        messages        what the turn adds to the conversation; with ``context_mode=message_array_with_responses``, all of it
        delay           milliseconds from the end of what the turn waits for: the turn before, and sub-agents
        forks           conversations that continue this one, after this turn
        spawns          conversations with a history of their own, such as sub-agents, which begin after this turn. The next turn
                        waits for them, or the one at ``join_at`` of ``{"children": [...], "join_at"}``; none after the last turn
        tools           written into this turn's prompt

    ``pre_session_spawns`` begin with the conversation. An ``orchestrator`` has no turns: it begins its ``spawns``, or one round
    of ``rounds`` after another, each after the end of the one before and ``think_time_ms``.

    Conversations that no other one names are the roots. Each is played once and is a session, with all that branches off it;
    ``limit`` counts them. Answers, which are not in the file, have ``max_tokens`` tokens (``output_tokens`` without) that occur
    in no other answer, and are part of later prompts as AIPerf sends them (``Trace.note``).
    """

    IS_LINE: ClassVar[bool] = False

    def load(self, page_tokens: int) -> Trace:
        trace = super().load(page_tokens)
        trace.note = "; ".join(note for note in (trace.note, NOTE) if note)
        return trace

    def _all_turns(self, tokenizer: Tokenizer) -> Iterator[Turn]:
        self._conversations: dict[str, Record] = {}
        self._answers: dict[int, range] = {}
        self._used = FIRST_TOKEN
        for record in self.read():
            name = _name(record, "session_id", record.fields.get("session_id"))
            if name in self._conversations:
                raise record.error(f"session_id {shown(name)} is there twice")
            self._conversations[name] = record
        named = {name for record in self._conversations.values() for name in self._named_in(record)}
        roots = [name for name in self._conversations if name not in named]
        if not roots:
            raise TraceError(self.path, None, "all conversations branch off others: there is none to begin with")
        for name in islice(roots, self.limit):
            record = self._conversations[name]
            try:
                yield from self.turns(record, tokenizer)
            except TemplateError as error:
                raise record.error(str(error)) from None

    def turns(self, record: Record, tokenizer: Tokenizer) -> Iterator[Turn]:
        name = str(record.fields["session_id"])
        return self._conversation(Session(name), name, tokenizer, [], 0.0, [])

    # --- how calls follow each other -----------------------------------------------------------------------------------------

    def _conversation(
        self, session: Session, name: str, tokenizer: Tokenizer, awaited: list[int], delay_ms: float, history: Messages
    ) -> Calls:
        """Play a conversation after these requests and a delay. It ends with its last turn."""
        record = self._conversations[name]
        if name in session.path or len(session.path) == MOST_DEEP:
            problem = "branches off itself" if name in session.path else f"is more than {MOST_DEEP} conversations below its root"
            raise record.error(f"session_id {shown(name)} {problem}")
        session.path.append(name)
        if record.flag("orchestrator"):
            ends = yield from self._rounds(session, record, tokenizer, awaited, delay_ms)
        else:
            ends = yield from self._asks(session, record, tokenizer, awaited, delay_ms, history)
        session.path.pop()
        return ends

    def _asks(
        self, session: Session, record: Record, tokenizer: Tokenizer, awaited: list[int], delay_ms: float, history: Messages
    ) -> Calls:
        yield from self._branches(session, _names(record, "pre_session_spawns"), tokenizer, awaited, 0.0, [])
        mode = _mode(record)
        joined: dict[int, list[int]] = defaultdict(list)
        for number, ask in enumerate(self._read_asks(record)):
            messages = [*([] if mode == ALONE else history), *ask.messages]
            call = self._call(session, ask, messages, tokenizer, [*awaited, *joined[number]], delay_ms + ask.delay_ms)
            yield call
            awaited, delay_ms = [call.fields["request_id"]], 0.0
            answer = {"role": "assistant", "content": f"{MARK}{len(self._answers) - 1}{MARK}"}
            history = [*messages, *([] if mode == TOLD else [answer])]
            yield from self._branches(session, ask.forks, tokenizer, awaited, 0.0, history)
            for children, joins_at in ask.spawns:
                joined[joins_at] += yield from self._branches(session, children, tokenizer, awaited, 0.0, [])
        return awaited

    def _branches(
        self,
        session: Session,
        names: Sequence[str],
        tokenizer: Tokenizer,
        awaited: list[int],
        delay_ms: float,
        history: Messages,
    ) -> Calls:
        """Play conversations at the same time."""
        ends: list[int] = []
        for name in names:
            ends += yield from self._conversation(session, name, tokenizer, awaited, delay_ms, history)
        return ends

    def _rounds(self, session: Session, record: Record, tokenizer: Tokenizer, awaited: list[int], delay_ms: float) -> Calls:
        """Play what an orchestrator begins; without rounds, it waits for none of it."""
        rounds = _rounds_of(record)
        for names, pause_ms in rounds:
            ends = yield from self._branches(session, names, tokenizer, awaited, delay_ms + pause_ms, [])
            if record.has("rounds"):
                awaited, delay_ms = ends, 0.0
        return awaited

    def _call(
        self, session: Session, ask: Ask, messages: Messages, tokenizer: Tokenizer, awaited: list[int], delay_ms: float
    ) -> Turn:
        """Return a request; its number is that of its answer."""
        session.calls += 1
        if session.calls > MOST_CALLS:
            raise ask.part.error(f"the session {shown(session.name)} has more than {MOST_CALLS:,} requests")
        prompt = self._tokens(tokenizer.render(messages, ask.tools), tokenizer)
        answer = range(self._used, self._used + max(ask.output_tokens - 1, 0))
        self._used = answer.stop + 1
        self._answers[len(self._answers)] = answer
        fields = {
            "session_id": session.name,
            "request_id": len(self._answers) - 1,
            "after": awaited,
            "output_token_ids": [*answer, 0][: ask.output_tokens],
            **({"delay": delay_ms} if delay_ms else {}),
        }
        return Turn(ask.part, prompt, None, ask.output_tokens, False, fields)

    def _tokens(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens of a conversation, with those of the answers in it."""
        parts = ANSWER.split(text)
        tokenizer.encode_all(parts[::2])
        of_parts = (self._answers[int(part)] if at % 2 else tokenizer.encode(part) for at, part in enumerate(parts))
        return list(chain.from_iterable(of_parts))

    # --- what a line says ----------------------------------------------------------------------------------------------------

    def _read_asks(self, record: Record) -> list[Ask]:
        parts = [Record(record.path, record.line, fields) for fields in record.items("turns")]
        if not parts:
            raise record.error("turns is empty: a conversation has at least one, unless it is an orchestrator")
        return [self._ask(part, number, len(parts)) for number, part in enumerate(parts)]

    def _ask(self, part: Record, number: int, turns: int) -> Ask:
        messages = read_messages(part)
        if any(MARK in (message["content"] or "") for message in messages):
            raise part.error("messages have the character U+E0A1, which stands for answers here: take it out")
        most = self.max_tokens
        return Ask(
            part=part,
            messages=messages,
            tools=part.fields.get("tools"),
            output_tokens=part.tokens("max_tokens", most, AT_LEAST_ONE) if part.has("max_tokens") else self.output_tokens,
            delay_ms=part.number("delay", MILLISECONDS) if part.has("delay") else 0.0,
            forks=_forks(part, is_last=number == turns - 1),
            spawns=list(_spawns(part, number, turns)),
        )

    def _named_in(self, record: Record) -> Iterator[str]:
        """Yield the conversations that branch off one. Raises TraceError for one that is not there."""
        named = _names(record, "pre_session_spawns")
        if record.flag("orchestrator"):
            lists = {id(names): names for names, _ in _rounds_of(record)}
            named += chain.from_iterable(lists.values())
        else:
            for ask in self._read_asks(record):
                named += [*ask.forks, *chain.from_iterable(children for children, _ in ask.spawns)]
        for name in named:
            if name not in self._conversations:
                raise record.error(f"{shown(name)} branches off, but no line has that session_id")
            yield name


def _name(record: Record, key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise record.error(f"{key} must name a conversation, not {shown(value)}")
    return value


def _names(record: Record, key: str) -> list[str]:
    """Return a field that is a list of conversations, each once; none if it is absent."""
    names = [_name(record, key, value) for value in record.items(key)] if record.has(key) else []
    if len(set(names)) < len(names):
        raise record.error(f"{key} names a conversation twice")
    return names


def _mode(record: Record) -> str:
    mode = record.fields.get("context_mode") or ANSWERED
    if mode not in (ANSWERED, TOLD, ALONE):
        raise record.error(f"context_mode must be {ANSWERED}, {TOLD} or {ALONE}, not {shown(mode)}")
    return str(mode)


def _forks(part: Record, *, is_last: bool) -> list[str]:
    """Return the conversations that continue one after a turn. Unless in the background, they come after its last turn."""
    found = []
    for value in part.items("forks") if part.has("forks") else ():
        entry = Record(part.path, part.line, value if isinstance(value, dict) else {"child": value})
        found.append(_name(entry, "forks", entry.fields.get("child")))
        if not is_last and not entry.flag("background"):
            raise part.error(f"forks ends a conversation, but turns follow: set background for {shown(found[-1])}")
    return found


def _spawns(part: Record, number: int, turns: int) -> Iterator[tuple[list[str], int]]:
    """Yield the sub-agents that begin after a turn, and the turn that waits for them; after the last turn, none does."""
    for value in part.items("spawns") if part.has("spawns") else ():
        entry = Record(part.path, part.line, value if isinstance(value, dict) else {"children": [value]})
        joins_at = number + 1
        if entry.has("join_at"):
            joins_at = entry.integer("join_at", Whole(number + 1))
            if joins_at >= turns:
                raise entry.error(f"join_at is {joins_at}, but the conversation has {turns} turns, counted from 0")
        yield _names(entry, "children"), joins_at


def _rounds_of(record: Record) -> list[tuple[list[str], float]]:
    """Return the conversations of each round of an orchestrator, and the pause before it in milliseconds."""
    if record.has("think_time_sigma"):
        raise record.error("think_time_sigma draws pauses at random, which is not read: leave it out, and think_time_ms holds")
    pause_ms = record.number("think_time_ms", MILLISECONDS) if record.has("think_time_ms") else 0.0
    shared = _names(record, "spawns")
    if not isinstance(record.fields.get("rounds"), list):
        rounds = record.integer("rounds", Whole(1, MOST_CALLS)) if record.has("rounds") else 1
        if not shared:
            raise record.error("spawns is empty: an orchestrator begins at least one conversation")
        return [(shared, pause_ms)] * rounds
    parts = [Record(record.path, record.line, fields) for fields in record.items("rounds")]
    own_ms = [part.number("think_time_ms", MILLISECONDS) if part.has("think_time_ms") else pause_ms for part in parts]
    return [(_names(part, "spawns"), own) for part, own in zip(parts, own_ms, strict=True)]
