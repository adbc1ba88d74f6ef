"""When requests were admitted by a server that takes them into its queue only when it forms a step, as SGLang does."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvsim.report.servers.chunks import Prompts, passes_of
from kvsim.report.servers.pauses import SAME_STEP_S, Steps
from kvsim.results.observed import NOT_TOLD, ObservedRun

Times = npt.NDArray[np.float64]
TAKES_BETWEEN_STEPS = ("disable_overlap_schedule",)
"""Flags that only such servers have. Their time in the queue counts from then on, not from when a request was sent."""
LAUNCH_S = 0.03
"""How long such a server takes to launch a step of prompts, after the tokens of the step before, and takes no requests."""


def takes_between_steps(run: ObservedRun) -> bool:
    """Return whether a run's server takes requests only between steps."""
    return run.facts is not None and any(name in run.facts.settings for name in TAKES_BETWEEN_STEPS)


def taken_later_s(run: ObservedRun, came_s: Sequence[Times | None]) -> Times:
    """Return how much later than it was sent each request's time in the queue began, as far as that has been seen; 0 for others.

    ``came_s`` has when each request's tokens came. A request is taken when the next tokens come; if these are its own, the server
    was idle.
    """
    later_s = np.zeros(len(run.sent_s))
    known = [one for one in came_s if one is not None]
    if not known or not takes_between_steps(run):
        return later_s
    times_s = np.sort(np.concatenate(known))
    next_s = times_s[np.searchsorted(times_s, run.sent_s).clip(max=len(times_s) - 1)]
    is_seen = np.isnan(run.prefill_s) & (next_s > run.sent_s) & (next_s < run.first_token_s - SAME_STEP_S)
    later_s[is_seen] = (next_s - run.sent_s)[is_seen]
    return later_s


def in_passes(admitted_s: Times, run: ObservedRun, first_s: Times, steps: Steps) -> tuple[Times, Times]:
    """Return times of admission as the queue and first tokens allow, and when steps were formed: with tokens or an admission.

    Steps without a token, in which a prompt's chunk is all, are not seen otherwise. No request is admitted before it has been in
    the queue for as long as the server says, nor after the step of its first token was formed; first come, first served, none
    before one that was sent earlier. Where the server says what each prompt was computed for, its chunks tell the steps
    (``chunks.py``). Other servers' times stay.
    """
    if not takes_between_steps(run) or not len(steps.end_s):
        return admitted_s, steps.end_s
    if _tells_chunks(run, admitted_s):
        return _by_chunks(admitted_s, run, first_s, steps)
    is_played = ~np.isnan(admitted_s)
    last = np.searchsorted(steps.end_s, admitted_s + LAUNCH_S, side="right") - 1
    launched_s = np.where(last >= 0, steps.end_s[last.clip(min=0)], admitted_s)
    least_s = np.where(is_played, np.fmin(run.sent_s + run.queued_s, first_s), -np.inf)
    most_s = np.where(is_played, steps.formed_s(first_s), np.inf)
    if run.facts is not None and run.facts.settings.get("schedule_policy") == "fcfs":
        order = np.argsort(run.sent_s, kind="stable")
        least_s[order] = np.fmax.accumulate(least_s[order])
        most_s[order] = np.fmin.accumulate(most_s[order][::-1])[::-1]
    found = np.where(is_played, np.fmax(np.fmin(np.fmax(admitted_s, launched_s), most_s), least_s), np.nan)
    return found, np.unique(np.concatenate((steps.end_s, found[is_played])))


def _tells_chunks(run: ObservedRun, admitted_s: Times) -> bool:
    """Return whether it is known how many tokens each prompt was computed for, and how many a step computes of prompts alone."""
    assert run.facts is not None
    settings, is_played = run.facts.settings, ~np.isnan(admitted_s)
    chunk, page = settings.get("chunked_prefill_size"), run.facts.page_tokens
    is_cut = isinstance(chunk, int) and page is not None and chunk >= page and not settings.get("enable_mixed_chunk")
    return is_cut and bool((run.cached_tokens[is_played] != NOT_TOLD).all())


def _by_chunks(admitted_s: Times, run: ObservedRun, first_s: Times, steps: Steps) -> tuple[Times, Times]:
    """Return when requests were admitted and steps formed, by the chunks of their prompts."""
    assert run.facts is not None and run.facts.page_tokens is not None
    chunk, page = run.facts.settings["chunked_prefill_size"], run.facts.page_tokens
    assert isinstance(chunk, int)
    is_fcfs = run.facts.settings.get("schedule_policy") == "fcfs"
    prompts = Prompts(run.sent_s, run.queued_s, run.prompt_tokens - run.cached_tokens)
    groups: list[list[int]] = [[] for _ in steps.end_s]
    for number in np.argsort(run.sent_s if is_fcfs else admitted_s, kind="stable").tolist():
        if not np.isnan(admitted_s[number]):
            groups[int(np.searchsorted(steps.end_s, first_s[number]))].append(number)
    made = passes_of(groups, prompts, steps, chunk // page * page, page)
    found = np.full(len(admitted_s), np.nan)
    for one in made:
        found[one.admitted] = one.formed_s
    return found, np.array([one.formed_s for one in made])
