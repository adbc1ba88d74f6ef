"""Which requests of a running vLLM have stored blocks again that they had lost, as a preempted request does."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kvsim.replaying.observed import Moments
from kvsim.shadow.recorded_score import Streams
from kvsim.shadow.score import STORED, Happened

SAME_S = 0.2
"""By how much the clocks of the server and its client may differ."""


class Again(NamedTuple):
    """A request that has stored blocks again."""

    request: int
    blocks: int
    steps: int
    pause: float
    """Its longest pause at those times, in times of what lies between two of its tokens (the median); 0: before its first."""


def stored_again(streams: Streams, moments: Moments, within_s: float) -> tuple[list[Again], int]:
    """Return the requests that have stored again what kvsim has not within ``within_s``, and how many other blocks it has not.

    A request stores a block again if it has it, is under way, and has either a token of its answer already or seen the block
    stored before in its time.
    """
    having, stored_s = defaultdict[bytes, list[int]](list), defaultdict[bytes, list[float]](list)
    for number, request in enumerate(streams.requests):
        for key in request.keys + request.output_keys:
            having[key].append(number)
    shift_s = float(np.nanmin(moments.admitted_s)) - streams.engine[0].at_s
    for event in streams.engine:
        if event.kind == STORED and event.key is not None:
            stored_s[event.key].append(event.at_s + shift_s)

    def had(number: int, key: bytes, at_s: float) -> bool:
        admitted_s, tokens_s = moments.admitted_s[number] - SAME_S, moments.tokens_s[number]
        was_stored = any(admitted_s <= before_s < at_s for before_s in stored_s[key])
        return stored_s[key][0] < at_s <= tokens_s[-1] + SAME_S and (at_s >= tokens_s[0] or was_stored)

    times_s, pauses, others = defaultdict[int, list[float]](list), defaultdict[int, float](float), 0
    for event in missed(streams, within_s):
        at_s, key = event.at_s + shift_s, event.key or b""
        under_way = [(pause_at(moments.tokens_s[number], at_s), number) for number in having[key] if had(number, key, at_s)]
        if not under_way:
            others += 1
            continue
        pause, number = max(under_way)
        times_s[number].append(at_s)
        pauses[number] = max(pauses[number], pause)
    again = [Again(number, len(times_s[number]), len({*times_s[number]}), pauses[number]) for number in sorted(times_s)]
    return again, others


def missed(streams: Streams, within_s: float) -> Iterator[Happened]:
    """Yield what the server has stored and kvsim has not so closely."""
    own_s = defaultdict[bytes | None, list[float]](list)
    for event in streams.own:
        if event.kind == STORED:
            own_s[event.key].append(event.at_s)
    for event in streams.engine:
        if event.kind == STORED:
            near = [at_s for at_s in own_s[event.key] if abs(at_s - event.at_s) <= within_s]
            if near:
                own_s[event.key].remove(near[0])
            else:
                yield event


def pause_at(tokens_s: Any, at_s: float) -> float:
    """Return the longest pause between tokens at that time, in times of the median one."""
    gaps_s = np.diff(tokens_s)
    here = gaps_s[(tokens_s[:-1] - SAME_S <= at_s) & (at_s <= tokens_s[1:] + SAME_S)]
    return float(here.max() / np.median(gaps_s)) if len(here) else 0.0
