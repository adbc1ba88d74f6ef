"""What a configuration attains without load: every request of a trace runs alone, one after another."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import nan

import numpy as np

from kvsim.core.request import Request
from kvsim.engine.outcome import REJECTED, Outcome
from kvsim.plans.plan import Plan
from kvsim.results.slo import Slo
from kvsim.run.execute import Result, Watch, execute, load_trace, unwatched
from kvsim.trace.spreading import shared_times

PAUSE_S = 10.0
"""Seconds between the end of a request and the next one, in which copies to lower tiers come to an end."""


def run_alone(plan: Plan, watch: Watch = unwatched) -> Result:
    """Simulate the requests of a plan's trace in their order, each after the one before it has ended. Raises UsageError.

    That is in one process, whatever ``cluster.workers`` says, since a request waits for one that any engine serves, and every
    request is admitted.
    """
    trace, _ = load_trace(plan)
    plan = replace(plan, cluster=replace(plan.cluster, workers=1), admission=None)
    return execute("simulate", plan, replace(trace, requests=one_by_one(trace.requests)), watch=watch)


def one_by_one(requests: Sequence[Request]) -> list[Request]:
    """Return the requests such that each waits for the one before it and for ``PAUSE_S``."""
    return [
        replace(
            request,
            after=request.index - 1,
            joins=(),
            delay_s=PAUSE_S if request.index else 0.0,
            resets=tuple(reset._replace(at_s=nan) for reset in request.resets),
        )
        for request in requests
    ]


def reasons(plan: Plan, alone: Result) -> list[str]:
    """Say why no rate holds, from what the requests attain alone and from how they arrive."""
    attainment = alone.record["slo"]["attainment"]
    shared = shared_times(load_trace(plan)[0].requests)
    found = [] if shared is None else [shared.warning()]
    if attainment >= plan.saturate.attainment:
        burst = "which rates do not change" if shared else "so lower rates than these may hold"
        met = f"run alone, {attainment:.2%} of the requests meet the objectives"
        return [*found, f"{met}: the others wait for each other, {burst}"]
    return [*found, f"even without load, {'; '.join(_missed(alone.outcome, plan.slo))}. Best attainable: {attainment:.2%}"]


def _missed(outcome: Outcome, slo: Slo) -> Iterator[str]:
    """Say which requests miss an objective alone, by objective."""
    rejected = outcome.status == REJECTED
    if rejected.any():
        yield f"{rejected.mean():.1%} of the requests are rejected, because they never fit into GPU memory"
    if slo.ttft_s is not None and (late := ~rejected & (outcome.ttft_s > slo.ttft_s)).any():
        shortest = np.array([request.prompt_tokens for request in outcome.requests])[late].min()
        yield (
            f"{late.mean():.1%} of the prompts, all of {shortest:,} tokens or more, take longer than {slo.ttft_s:g} s to the "
            "first token"
        )
    if slo.tpot_s is not None and (slow := ~rejected & (outcome.tpot_s > slo.tpot_s)).any():
        yield f"{slow.mean():.1%} of the answers take longer than {slo.tpot_s:g} s per token"
