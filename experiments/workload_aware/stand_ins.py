"""The traces that the study plays: those at hand, stand-ins for trace A, and the published files."""

from argparse import Namespace
from collections import Counter
from functools import cache, partial

import kvsim
from kvsim.report.study import with_conversations
from kvsim.trace.base import Trace
from kvsim.trace.synthetic import Kind, Synthetic

PRIVATE, SHARED, ONE_CLASS = "stand-in, private", "stand-in, shared", "stand-in, one class"
WEKA_REQUESTS = 4_000
HOURS = 2
Beginning = tuple[int, int]
"""System prompts of a type, and their tokens."""
BEGINNINGS: dict[str, Beginning] = {PRIVATE: (40, 250), SHARED: (12, 480)}
MESSAGES = {PRIVATE: (520, 1_300), SHARED: (380, 1_000)}
"""Tokens of a message of type text, and of type search."""


def mix(beginning: Beginning, text_tokens: int, search_tokens: int) -> dict[str, Kind]:
    """Kinds of sessions whose names begin with a type. A type has sessions of one turn and longer ones, as in trace A."""
    systems, tokens = beginning
    kind = partial(Kind, systems=systems, system_tokens=tokens, answer_tokens=430)
    text, search = partial(kind, message_tokens=text_tokens), partial(kind, message_tokens=search_tokens)
    few = min(systems, 3)
    image = Kind(weight=2.5, systems=few, system_tokens=tokens, message_tokens=700, answer_tokens=300, turns=2.8, pause_s=30)
    file = Kind(weight=3, systems=few, system_tokens=tokens, message_tokens=4_000, answer_tokens=430, turns=2.2, pause_s=480)
    return {
        "text once": text(weight=42, turns=1, pause_s=1),
        "text quick": text(weight=13, turns=4, pause_s=60),
        "text slow": text(weight=14, turns=4, pause_s=480),
        "search once": search(weight=13, turns=1, pause_s=1),
        "search slow": search(weight=7, turns=3, pause_s=480),
        "image": image,
        "file": file,
    }


def stand_in(name: str, page_tokens: int) -> Trace:
    """Two hours of generated sessions with about the totals that are known of trace A, as a server that only computes prompts
    sees them."""
    kinds = SHARED if name == SHARED else PRIVATE
    sessions = Synthetic(
        seed=0, sessions=round(13_000 * HOURS), sessions_per_s=3.15, arrivals="open_loop", max_prompt_tokens=32_768,
        mix=mix(BEGINNINGS[kinds], *MESSAGES[kinds]),
    )  # fmt: skip
    trace = sessions.load(page_tokens)
    trace.requests = [request for request in trace.requests if request.arrival_s < 3_600 * HOURS]
    for request in trace.requests:
        request.kind = request.kind.split()[0]
        if name == ONE_CLASS:
            request.kind, request.turn, request.session = "api", 1, request.index
    return as_prefill(trace)


def as_prefill(trace: Trace) -> Trace:
    """The same prompts, each answered by one token."""
    for request in trace.requests:
        request.output_tokens, request.output_runs = 1, None
    return trace


def with_turns(trace: Trace) -> Trace:
    """A trace whose requests are of one type, each of the turn that it is in its session."""
    turns = Counter[int]()
    for request in trace.requests:
        request.kind, request.turn = "text", turns[request.session]
        turns[request.session] += 1
    return trace


@cache
def load(name: str, path: str, limit: int, page_tokens: int) -> Trace:
    if name.startswith("stand-in"):
        trace = stand_in(name, page_tokens)
        trace.requests = trace.requests[:limit]
        return trace
    if name == "conversation":
        return with_turns(with_conversations(kvsim.load_trace("mooncake", path=path, page_tokens=page_tokens, limit=limit)))
    if name == "weka":
        return kvsim.load_trace("weka", path=path, page_tokens=page_tokens, limit=min(limit, WEKA_REQUESTS))
    if name == "synthetic":
        return kvsim.load_trace("synthetic", page_tokens=page_tokens, limit=limit)
    return as_prefill(kvsim.load_trace("bailian", path=path, page_tokens=page_tokens, limit=limit))


def loaded(options: Namespace, name: str, page_tokens: int, *, limit: int) -> Trace:
    """The trace of this name, read once in each process."""
    return load(name, getattr(options, name, None) or "", min(limit, options.limit), page_tokens)
