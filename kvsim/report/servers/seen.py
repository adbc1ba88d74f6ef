"""Simulations and replays as a client would have seen them, and what a client saw as a replay needs it."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kvsim.engine.columns import hit_tokens, of_requests, prompt_tokens
from kvsim.engine.outcome import REJECTED as IS_REJECTED
from kvsim.engine.outcome import SHED as IS_SHED
from kvsim.engine.outcome import Outcome
from kvsim.hardware.tier_kinds import GPU_MEMORY, HOST_MEMORY, kind_of
from kvsim.replaying.moments import Moments
from kvsim.report.servers.measures import preemptions
from kvsim.report.servers.passes import in_passes, taken_later_s, takes_between_steps
from kvsim.report.servers.pauses import Steps, brief_pauses, pauses, steps_of
from kvsim.results.observed import ObservedRun

REJECTED, SHED = "rejected", "shed"
"""Why a request of a simulation has failed."""
ERRORS: Mapping[int, str] = {IS_REJECTED: REJECTED, IS_SHED: SHED}
"""The same by its status."""
SAME_STEP_S = 0.002
"""Admissions that follow one another within this time belong to one step: steps take longer, and clocks are no better."""
NEARLY_S = 0.006
"""By how much an admission may seem earlier or later than when its step was formed: by the ways of tokens to the client."""
UNSURE_S = 0.02
"""How much later a request may seem to be admitted than one that was sent after it, because more of its time passed before the
server's queue: long prompts take some milliseconds to be read."""
AHEAD: Mapping[str, bool] = {"scheduler_config.async_scheduling": True, "disable_overlap_schedule": False}
"""Flags, and their values with which a server forms a step while one runs."""
POLICIES = ("scheduler_config.policy", "schedule_policy")
"""Flags that name the order of a queue."""
MOST_TOGETHER = 0.1
"""The largest share of an answer's tokens that may come together with others before their times count as unknown."""
MEDIA: Mapping[str, str] = {GPU_MEMORY: "device", HOST_MEMORY: "host"}
"""What servers call the medium of a tier; every other one is ``storage``."""


def as_observed(outcome: Outcome, source: str) -> ObservedRun:
    """Return a run of kvsim's as a client would have seen it. A request that was rejected or shed has failed."""
    tokens = hit_tokens(outcome)
    outputs = np.maximum(of_requests(outcome, "output_tokens"), 1)
    first_s = outcome.arrival_s + outcome.ttft_s
    return ObservedRun(
        source=source,
        client="kvsim simulate",
        due_s=outcome.arrival_s,
        sent_s=outcome.arrival_s,
        first_token_s=first_s,
        end_s=outcome.arrival_s + outcome.e2e_s,
        token_gaps_s=[np.empty(0)] * len(outputs),
        prompt_tokens=prompt_tokens(outcome),
        output_tokens=outputs,
        cached_tokens=tokens.sum(axis=1),
        tier_tokens=_by_medium(outcome, tokens),
        queued_s=outcome.columns["queue_s"],
        prefill_s=np.full(len(outputs), np.nan),
        errors=[ERRORS.get(status) for status in outcome.status.tolist()],
    )


def among_all(run: ObservedRun, was_played: np.ndarray) -> ObservedRun:
    """Return a run of some of the requests as one of all: the others have failed, and nothing is known of them."""
    places = np.flatnonzero(was_played).tolist()

    def whole(values: np.ndarray, missing: float = 0) -> np.ndarray:
        found = np.full(len(was_played), missing, dtype=values.dtype)
        found[places] = values
        return found

    gaps_s: list[np.ndarray] = [np.empty(0)] * len(was_played)
    errors: list[str | None] = ["not played"] * len(was_played)
    for place, gap_s, error in zip(places, run.token_gaps_s, run.errors, strict=True):
        gaps_s[place], errors[place] = gap_s, error
    return replace(
        run,
        due_s=whole(run.due_s, np.nan),
        sent_s=whole(run.sent_s, np.nan),
        first_token_s=whole(run.first_token_s, np.nan),
        end_s=whole(run.end_s, np.nan),
        token_gaps_s=gaps_s,
        prompt_tokens=whole(run.prompt_tokens),
        output_tokens=whole(run.output_tokens),
        cached_tokens=whole(run.cached_tokens),
        tier_tokens={medium: whole(tokens) for medium, tokens in run.tier_tokens.items()},
        queued_s=whole(run.queued_s, np.nan),
        prefill_s=whole(run.prefill_s, np.nan),
        errors=errors,
    )


def _by_medium(outcome: Outcome, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Return hit tokens by medium, of the media that the run has."""
    found: dict[str, np.ndarray] = {}
    for column, name in enumerate(outcome.tier_names):
        if name in outcome.tiers:
            medium = MEDIA.get(kind_of(name).medium, "storage")
            found[medium] = found.get(medium, 0) + tokens[:, column]
    return found


def moments_of(run: ObservedRun) -> Moments:
    """Return when what happened to the requests that succeeded, as far as it is known.

    Where the server says neither how long a request was queued nor how long its prompt took, the request counts as admitted when
    its first token came: its order is then known, but not that other requests were looked up while its prompt was computed.
    Without the time of each token, they came evenly; without that of the first one, from the admission on. A request of which
    neither is known has no time of admission. Steps and preemptions are known only with the time of every token.
    """
    has_failed = np.array([error is not None for error in run.errors], dtype=bool)
    admitted_s = run.admitted_s()
    joined_s = admitted_s - run.queued_s if _is_fcfs(run) else np.full(len(admitted_s), np.nan)
    first_s = np.where(np.isnan(run.first_token_s), admitted_s, run.first_token_s)
    end_s = np.fmax(run.end_s, first_s)
    came_s = [_tokens_s(run, number, first) for number, first in enumerate(first_s.tolist())]
    admitted_s = np.fmin(_in_turn(_together(admitted_s + taken_later_s(run, came_s)), run.sent_s), run.first_token_s)
    tokens_s = [
        np.linspace(first_s[number], end_s[number], max(1, int(run.output_tokens[number]))) if one is None else one
        for number, one in enumerate(came_s)
    ]
    admitted_s = np.where(has_failed, np.nan, admitted_s)
    played = [one for number, one in enumerate(came_s) if admitted_s[number] == admitted_s[number]]
    if any(one is None for one in played):
        return Moments(admitted_s=admitted_s, tokens_s=tokens_s, preemptions=preemptions(run))
    steps = steps_of([one for one in played if one is not None], _steps_ahead(run))
    admitted_s, formed_s = in_passes(_in_steps(admitted_s, first_s, steps), run, first_s, steps)
    paused_s = pauses(tokens_s, admitted_s, steps, preemptions(run), goes_last=takes_between_steps(run))
    return Moments(
        admitted_s=admitted_s,
        tokens_s=tokens_s,
        pauses_s=paused_s,
        brief_s=brief_pauses(tokens_s, steps, paused_s),
        preemptions=preemptions(run),
        formed_s=formed_s,
        steps_ahead=steps.ahead,
        joined_s=joined_s,
    )


def _is_fcfs(run: ObservedRun) -> bool:
    """Return whether a server admits its requests first come, first served."""
    settings = run.facts.settings if run.facts is not None else {}
    return any(settings.get(name) == "fcfs" for name in POLICIES)


def _steps_ahead(run: ObservedRun) -> int:
    """Return how many steps run while the server forms one."""
    settings = run.facts.settings if run.facts is not None else {}
    return int(any(settings.get(name) is value for name, value in AHEAD.items()))


def _together(admitted_s: np.ndarray) -> np.ndarray:
    """Return times of admission that are the same for requests of the same step, which then count in the order of the trace.

    Times in the queue count from when the server had a request, a little after it was sent, and not equally much for all.
    """
    order = np.argsort(admitted_s, kind="stable")
    sorted_s = admitted_s[order]
    begins = np.concatenate(([True], ~(np.diff(sorted_s) <= SAME_STEP_S)))
    same = np.empty_like(sorted_s)
    same[order] = sorted_s[begins][np.cumsum(begins) - 1]
    return same


def _in_turn(admitted_s: np.ndarray, sent_s: np.ndarray) -> np.ndarray:
    """Return times of admission by which no request is a little later than one sent after it: a queue keeps its order."""
    found, latest_s = admitted_s.copy(), -np.inf
    for number in np.argsort(sent_s, kind="stable").tolist():
        if latest_s - UNSURE_S < found[number] < latest_s:
            found[number] = latest_s
        elif found[number] > latest_s:
            latest_s = float(found[number])
    return found


def _in_steps(admitted_s: np.ndarray, first_s: np.ndarray, steps: Steps) -> np.ndarray:
    """Return times of admission that are when steps were formed, where one was nearly then. That of a first token is the last."""
    if not len(steps.end_s):
        return admitted_s
    latest, after = np.searchsorted(steps.end_s, steps.formed_s(first_s)), np.searchsorted(steps.begin_s, admitted_s)
    nearest = np.array([np.minimum(np.clip(after + at, 0, None), latest) for at in (-1, 0)]).clip(0, len(steps.end_s) - 1)
    away_s = np.maximum(np.maximum(steps.begin_s[nearest] - admitted_s, admitted_s - steps.end_s[nearest]), 0.0)
    best = np.argmin(away_s, axis=0), np.arange(len(admitted_s))
    return np.where(away_s[best] <= NEARLY_S, steps.end_s[nearest][best], admitted_s)


def _tokens_s(run: ObservedRun, number: int, first_s: float) -> np.ndarray | None:
    """Return when each token of an answer came; None if that is not known.

    Where a few came together, as after a client that was late, those are the ones after the longest pause.
    """
    tokens, gaps_s = max(1, int(run.output_tokens[number])), run.token_gaps_s[number]
    together = tokens - 1 - len(gaps_s)
    if not 0 <= together <= MOST_TOGETHER * (tokens - 1):
        return None
    came_s = np.concatenate(([first_s], first_s + np.cumsum(gaps_s)))
    place = int(np.argmax(gaps_s)) + 1 if together else 0
    return np.insert(came_s, place, np.full(together, came_s[place]))
