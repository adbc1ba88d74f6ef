"""Measures a server's steps: rounds of batches in random order, until each batch's time is known well enough."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from secrets import randbelow
from statistics import median

import numpy as np

from kvsim.calibration.server.batches import BURST, DECODE, MIXED, PROMPT, Batch, Limits, contexts, design, grain_of
from kvsim.calibration.server.measurements import Measurements, Played, Seen, needs_more
from kvsim.calibration.server.rounds import Pace, RoundMaker
from kvsim.calibration.server.step_times import batch_s, expected_s, points
from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.results.observed import NOT_TOLD, ObservedRun, ServerFacts

LEAST_ROUNDS = 2
MOST_ROUNDS = 8
REPEATS = {PROMPT: 3, BURST: 2, DECODE: 1, MIXED: 1}
"""How often a round plays a batch of each kind: what is timed once is lost if the client is late at that time."""
GOOD_ENOUGH = 0.01
"""Relative standard error at which a batch needs no further round."""
STEP_TOKENS = ("scheduler_config.max_num_batched_tokens", "chunked_prefill_size")
RUNNING = ("scheduler_config.max_num_seqs", "max_running_requests")
LONGEST = ("model_config.max_model_len", "context_length")
JOINS = {"sglang": "enable_mixed_chunk"}
"""Engines that compute prompts in steps of their own unless this setting is on."""
CONTEXT_SHARE, ROUND_TOKENS = 0.5, 350_000
"""Contexts may take this share of the server's cache, or all but the tokens of a round beside them, which would push them out."""
ASSUMED_CAPACITY = 400_000
"""Tokens of a server's cache that says nothing of it."""

LATE_S, LATE_SHARE = 0.1, 0.2
"""How much later than a batch's last request another one may end: so late was it sent, and this share of the decoding."""
UNKNOWN_PACE = 1.5
"""How many times slower than expected a server is taken to be before anything was read."""
MOST_PAGES = 1 << 40
"""Where page ids begin is drawn below this, so that a server has nothing of an earlier measurement in its cache."""

Play = Callable[[Sequence[Request], int], ObservedRun]
"""Sends requests, made of pages of so many tokens, to the server."""


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """How a server is measured."""

    seed: int
    seconds: float
    """No round begins that would end later; the first rounds are played in any case."""
    step_tokens: int | None
    """Tokens that a step computes at most; None: as the server says."""
    longest_tokens: int | None
    """The most tokens of a prompt and its answer; None: as the server says."""


def measure(
    facts: ServerFacts,
    play: Play,
    model: ModelSpec,
    expected: HardwareSpec,
    settings: MeasureSettings,
    say: Callable[[str], None],
) -> Measurements:
    """Measure a server whose machine is about as fast as ``expected``. Raises UsageError if it cannot be measured."""
    began, grain = time.monotonic(), grain_of(facts.page_tokens or 1)
    measured = Measurements(
        source="",
        engine=facts.engine,
        version=facts.version,
        served_model=facts.model,
        step_tokens=settings.step_tokens or step_tokens_of(facts),
        joins_prompts=bool(facts.settings.get(JOINS.get(facts.engine, ""), facts.engine not in JOINS)),
        page_tokens=grain,
        seconds=0.0,
        batches=[],
        played=[],
    )
    measured.batches = design(limits_of(facts, measured.step_tokens, settings.longest_tokens), grain, settings.seed)
    maker = RoundMaker(contexts(measured.batches, grain), grain, 1 + randbelow(MOST_PAGES))
    rng = np.random.default_rng(settings.seed)
    everything = left = list(range(len(measured.batches)))
    took_s = 0.0
    for number in range(MOST_ROUNDS):
        begin = time.monotonic()
        if number >= LEAST_ROUNDS and (not left or begin - began + took_s > settings.seconds):
            break
        chosen = [at for at in (everything if number < LEAST_ROUNDS else left) for _ in range(REPEATS[measured.batches[at].kind])]
        say(f"round {number + 1}: {len(chosen)} batches")
        pace = partial(pace_of, slower=slower_than(measured, model, expected), measured=measured, model=model, expected=expected)
        play_round(measured, maker, [int(at) for at in rng.permutation(chosen)], pace, play)
        left, took_s = needs_more(measured, GOOD_ENOUGH), time.monotonic() - begin
    measured.seconds = round(time.monotonic() - began, 3)
    return measured


def play_round(
    measured: Measurements, maker: RoundMaker, order: Sequence[int], pace: Callable[[Batch], Pace], play: Play
) -> None:
    """Play batches, and add what was seen. Raises UsageError if every request failed."""
    number = 1 + max([one.round for one in measured.played], default=-1)
    made = maker.make([measured.batches[at] for at in order], pace)
    run = play(made.requests, maker.page_tokens)
    if all(error is not None for error in run.errors):
        raise UsageError(f"server: {run.failures()}")
    measured.source = run.source
    measured.notes += [f"round {number + 1}: {note}" for note in run.notes]
    if failures := run.failures():
        measured.notes.append(f"round {number + 1}: {failures}")
    disturbed = [is_disturbed(run, members, len(made.requests)) for members in made.members]
    measured.played += [
        Played(batch=at, round=number, requests=seen_of(run, members), is_disturbed=other)
        for at, members, other in zip(order, made.members, disturbed, strict=True)
    ]


def is_disturbed(run: ObservedRun, members: range, requests: int) -> bool:
    """Return whether a request of another batch was under way before all of a batch had ended, or after it had begun."""
    inside = np.arange(members.start, members.stop)
    begin_s, end_s = np.nanmin(run.sent_s[inside], initial=np.inf), np.nanmax(run.end_s[inside], initial=-np.inf)
    others = np.setdiff1d(np.arange(requests), inside)
    overlap = (run.sent_s[others] < end_s) & (run.end_s[others] > begin_s)
    return bool(overlap.any())


def seen_of(run: ObservedRun, members: range) -> list[Seen]:
    """Return what was seen of a batch's requests, with times from the first of them, in whole microseconds."""
    zero_s = float(np.nanmin(run.sent_s[members.start : members.stop], initial=np.inf))

    def after(value: float) -> float | None:
        return None if isnan(value) else round(float(value) - zero_s, 6)

    return [
        Seen(
            sent_s=after(run.sent_s[at]) or 0.0,
            first_token_s=after(run.first_token_s[at]),
            end_s=after(run.end_s[at]),
            prompt_tokens=int(run.prompt_tokens[at]),
            output_tokens=int(run.output_tokens[at]),
            cached_tokens=None if run.cached_tokens[at] == NOT_TOLD else int(run.cached_tokens[at]),
            gaps_s=[round(float(gap), 6) for gap in run.token_gaps_s[at]],
            error=run.errors[at],
        )
        for at in members
    ]


def step_tokens_of(facts: ServerFacts) -> int:
    """Return the tokens that a step computes at most. Raises UsageError if the server does not say."""
    told = number_of(facts, STEP_TOKENS)
    if told is None:
        raise UsageError(
            "step_tokens: the server does not say how many tokens a step computes at most: set step_tokens to its "
            "--max-num-batched-tokens (vLLM) or --chunked-prefill-size (SGLang)"
        )
    return told


def limits_of(facts: ServerFacts, step_tokens: int, longest_tokens: int | None) -> Limits:
    """Return what the server can take, as far as it says."""
    longest = [tokens for tokens in (longest_tokens, number_of(facts, LONGEST)) if tokens]
    capacity = facts.capacity_tokens or ASSUMED_CAPACITY
    return Limits(
        step_tokens=step_tokens,
        longest_tokens=min([*longest, capacity]),
        requests=number_of(facts, RUNNING) or 256,
        context_tokens=max(int(capacity * CONTEXT_SHARE), capacity - ROUND_TOKENS),
    )


def number_of(facts: ServerFacts, names: Sequence[str]) -> int | None:
    """Return the first of a server's settings that is a number above 0."""
    told = [facts.settings.get(name) for name in names]
    return next((value for value in told if isinstance(value, int) and value > 0), None)


def slower_than(measured: Measurements, model: ModelSpec, expected: HardwareSpec) -> float:
    """Return how many times as long as on a machine, at least once, a server's batches have taken so far."""
    known = points(measured)
    took = [one.reading.seconds / seconds for one, seconds in zip(known, expected_s(known, model, expected), strict=True)]
    return max(1.0, median(took)) if took else UNKNOWN_PACE


def pace_of(batch: Batch, slower: float, measured: Measurements, model: ModelSpec, expected: HardwareSpec) -> Pace:
    """Return about how long the parts of a batch take: so many times as long as on a machine.

    Any prompt of a burst may be the last one, or the first. Decoding requests end in about the order in which they were sent.
    """
    begin = Batch(kind=PROMPT, tokens=measured.page_tokens * max(batch.requests, 1))
    decode = Batch(kind=DECODE, requests=batch.requests, context=batch.context)
    begin_s, decode_s, whole_s = [slower * batch_s(one, measured, model, expected) for one in (begin, decode, batch)]
    decoding_s = begin_s + batch.answer_tokens * decode_s
    others_s = LATE_S + (whole_s if batch.kind == BURST else LATE_SHARE * decoding_s)
    return Pace(begin_s, decode_s, whole_s, others_s)
