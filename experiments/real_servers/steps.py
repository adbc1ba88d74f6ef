"""The steps of recorded runs that are known without the server's log: those in which all running requests decode.

A client sees the times of all tokens. If the same requests had a token of a step, of the one before and of the one after, and
none their first, then the step computed these and no prompt.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from comparing import Compared, Group

from kvsim.core.request import Request
from kvsim.engine.substrate import Work
from kvsim.hardware import HardwareSpec
from kvsim.model import ModelSpec
from kvsim.plans.build import build_run
from kvsim.plans.construct import construct
from kvsim.report.servers.seen import moments_of
from kvsim.results.observed import ObservedRun
from kvsim.results.observed_file import read_observed
from kvsim.run.execute import load_trace
from kvsim.servers.prompts import as_sent
from kvsim.settings.configuration import compose_with_choices
from kvsim.substrate.simulated.compute import MeasuredParts

BATCHES = ((1, 4), (5, 9), (10, 14), (15, 19), (20, 29), (30, 1_000))
"""Numbers of requests that decode together, in rows of the table."""
CLOCK_S = 1e-9


class DecodingStep(NamedTuple):
    """A step as the server took it, and as the machine says."""

    requests: int
    seconds: float
    machine_s: float


class Steps(NamedTuple):
    """What the first run of a group shows of its steps."""

    label: str
    workload: str
    decoding: Sequence[DecodingStep]
    readmissions: Sequence[tuple[int, float]]
    """Of each pass that preempted several requests at once: how many came back with the next one, and by how many seconds the two
    steps from their last token on took longer than two of those before."""


def steps_of_group(group: Group, one: Compared, trace: Sequence[str]) -> Steps:
    """Return the steps of the first run of a group, whose requests are those of ``trace``, as kvsim takes it."""
    run = read_observed(group.files[0])
    config, choices = compose_with_choices(["preset=vllm", f"page_tokens={one.record['server']['page_tokens']}", *trace])
    plan = build_run(config, command="simulate", overrides=[], choices=choices)
    requests = as_sent(load_trace(plan)[0].requests, plan.page_tokens)
    decoding = decoding_steps(machine_of(one.record), run, requests, plan.page_tokens)
    return Steps(one.label, one.workload, list(decoding), list(readmissions(run)))


def machine_of(record: dict[str, Any]) -> MeasuredParts:
    """Return what says how long steps take in the simulations of a validation."""
    config = record["config"]
    return MeasuredParts(construct(ModelSpec, config["model"], "model"), construct(HardwareSpec, config["hardware"], "hardware"))


def decoding_steps(
    machine: MeasuredParts, run: ObservedRun, requests: Sequence[Request], page_tokens: int
) -> Iterator[DecodingStep]:
    """Yield the steps of a run that only decode, with the time that the machine says."""
    moments = moments_of(run)
    ends_s = moments.formed_s
    tokens_of: list[dict[int, int]] = [{} for _ in ends_s]
    for number, came_s in enumerate(moments.tokens_s):
        for token, at in enumerate(np.searchsorted(ends_s, came_s - CLOCK_S).tolist()):
            tokens_of[at][number] = token
    pages = [{page for start, count in one.runs for page in range(start, start + count)} for one in requests]
    repeated: dict[frozenset[int], int] = {}
    for at in range(1, len(ends_s) - 1):
        before, here, after = tokens_of[at - 1 : at + 2]
        if not here or not before.keys() == here.keys() == after.keys() or 0 in (*before.values(), *here.values()):
            continue
        batch = frozenset(here)
        if batch not in repeated:
            repeated[batch] = sum(len(pages[one]) for one in batch) - len(set().union(*(pages[one] for one in batch)))
        work = Work(engine=0)
        work.decode_requests = len(here)
        work.decode_context_tokens = int(sum(run.prompt_tokens[number] + token for number, token in here.items()))
        work.repeated_context_tokens = repeated[batch] * page_tokens
        yield DecodingStep(len(here), float(ends_s[at] - ends_s[at - 1]), machine.leap_s(work, 1))


def readmissions(run: ObservedRun) -> Iterator[tuple[int, float]]:
    """Yield the passes that preempted several requests at once, as ``Steps`` has them."""
    moments = moments_of(run)
    longer_s: dict[float, list[float]] = {}
    for number, briefs_s in moments.brief_s.items():
        came_s = moments.tokens_s[number]
        for begin_s, _ in briefs_s:
            last = int(np.searchsorted(came_s, begin_s, side="right"))
            usual_s = float(np.median(np.diff(came_s[max(0, last - 20) : last + 1]))) if last else np.nan
            longer_s.setdefault(begin_s, []).append(float(came_s[last + 1] - came_s[last]) - 2 * usual_s)
    yield from ((len(extra_s), float(np.nanmedian(extra_s))) for extra_s in longer_s.values())
