"""``kvsim train``: records decisions on the first part of a trace, fits a model to them, and tests it on the rest."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from kvsim.core.request import Request
from kvsim.engine.columns import hit_tokens
from kvsim.engine.outcome import FINISHED, Outcome
from kvsim.errors import UsageError
from kvsim.files.writing import FileSet
from kvsim.plans.combinations import check_bypass
from kvsim.plans.plan import Plan
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.belady import Belady
from kvsim.policies.eviction.leaf_model import LeafModel
from kvsim.policies.eviction.learned import Learned
from kvsim.policies.eviction.lru import LRU
from kvsim.results.fields import SCHEMA
from kvsim.results.rates import ratio
from kvsim.results.result import RunRecord, installed_versions, plain, to_json, warmup_requests
from kvsim.run import play
from kvsim.trace.base import Trace
from kvsim.trace.memory import content_of
from kvsim.training.decisions import Decision, Recording, Reservoir
from kvsim.training.fit import Fitted, check_torch, fit
from kvsim.training.settings import TrainSettings

LEAST_DECISIONS = 20
MODEL = "model.json"
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Tested:
    """A policy on the requests that the model has never seen, after the cache was filled by those that it was trained on."""

    policy: str
    hit_rate: float
    us_per_request: float


class Round(NamedTuple):
    """A model, and its hit rate on the requests that it was trained on."""

    fitted: Fitted
    hit_rate: float


def train(plan: Plan, trace: Trace, settings: TrainSettings, command_line: str | None, say: Say = lambda line: None) -> RunRecord:
    """Train a model, test it, write ``model.json`` and ``train.json`` into the plan's folder. Raises UsageError.

    Each round records a replay of the first part of the trace, in which victims are chosen by the model of the round before, in
    the first by recency; a round learns from all that was recorded so far (Ross et al.: A reduction of imitation learning and
    structured prediction to no-regret online learning, 2011), and the model that hits most there is kept. Requests after that
    part are in no array that a model is fitted to, and what they use again counts as never used.
    """
    check_torch()
    requests = trace.requests
    count = len(requests) if settings.part == 1 else warmup_requests(settings.part, len(requests))
    if not count:
        raise UsageError(f"train.part={settings.part} leaves none of {len(requests)} requests: increase it")
    known = list(requests[:count])
    decisions: list[Decision] = []
    rounds: list[Round] = []
    for number in range(settings.rounds):
        say(f"round {number + 1} of {settings.rounds}")
        reservoir = Reservoir(settings.decisions // settings.rounds, np.random.default_rng([plan.seed, number]))
        last = rounds[-1].fitted.model if rounds else None
        rate = _recorded(plan, known, Recording(last, reservoir, settings.candidates))
        if rounds:
            rounds[-1] = rounds[-1]._replace(hit_rate=rate)
        decisions += reservoir.in_order()
        if len(decisions) < LEAST_DECISIONS:
            raise UsageError(
                f"tiers.gpu.capacity: only {len(decisions)} victims were chosen among several leaves, too few to learn from: "
                "decrease it, or train on a longer trace"
            )
        rounds.append(Round(fit(sorted(decisions, key=lambda one: one.request), settings, plan.seed), 0.0))
    last = rounds[-1].fitted.model
    unrecorded = Reservoir(1, np.random.default_rng(plan.seed))
    rounds[-1] = rounds[-1]._replace(hit_rate=_recorded(plan, known, Recording(last, unrecorded, settings.candidates)))
    fitted = max(rounds, key=lambda one: one.hit_rate).fitted
    say("testing")
    tested = _tested(plan, requests, count, fitted.model, settings.candidates)
    record = _record(plan, trace, known, settings, rounds, tested, command_line)
    _write(plan.output, fitted.model, record)
    return record


def _recorded(plan: Plan, known: Sequence[Request], policy: Recording) -> float:
    """Replay what a model may learn from; return the hit rate after the first quarter, in which the tier fills."""
    outcome = play.replay(with_eviction(plan, policy), list(known))
    return _rate(outcome, known, known[len(known) // 4].index)


def _rate(outcome: Outcome, requests: Sequence[Request], first: int) -> float:
    """Return the hit rate of the requests from an index on."""
    counted = np.array([request.index >= first for request in requests]) & (outcome.status == FINISHED)
    prompts = np.array([request.prompt_tokens for request in requests])
    return ratio(int(hit_tokens(outcome)[counted].sum()), int(prompts[counted].sum())) or 0.0


def with_eviction(plan: Plan, policy: EvictionPolicy) -> Plan:
    """Return a plan whose GPU tier has this policy; the others keep copies of theirs."""
    own = plan.with_own_policies()
    return replace(own, tiers=[replace(own.tiers[0], eviction=policy), *own.tiers[1:]])


def _tested(plan: Plan, requests: Sequence[Request], first: int, model: LeafModel, samples: int) -> list[Tested]:
    """Replay the whole trace and count the requests from ``first`` on: under LRU, the model and, where it is a bound, Belady."""
    if first == len(requests):
        return []
    learned = Learned(samples=samples)
    learned.use_model(model)
    tested = [_test(plan, requests, first, "lru", LRU()), _test(plan, requests, first, "learned", learned)]
    return tested + _bound(plan, requests, first)


def _bound(plan: Plan, requests: Sequence[Request], first: int) -> list[Tested]:
    """Return Belady's hits; nothing where he is no bound, such as with several tiers or resets."""
    try:
        check_bypass(with_eviction(plan, Belady()), "replay")
        return [_test(plan, requests, first, "belady", Belady())]
    except UsageError:
        return []


def _test(plan: Plan, requests: Sequence[Request], first: int, name: str, policy: EvictionPolicy) -> Tested:
    began = perf_counter()
    outcome = play.replay(with_eviction(plan, policy), list(requests))
    took_s = perf_counter() - began
    rate = _rate(outcome, requests, requests[first].index)
    return Tested(policy=name, hit_rate=rate, us_per_request=1e6 * took_s / len(requests))


def _record(
    plan: Plan,
    trace: Trace,
    known: Sequence[Request],
    settings: TrainSettings,
    rounds: Sequence[Round],
    tested: Sequence[Tested],
    command_line: str | None,
) -> RunRecord:
    """Return the content of ``train.json``."""
    fitted = max(rounds, key=lambda one: one.hit_rate).fitted
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "command": "train",
        "command_line": command_line,
        "versions": installed_versions(),
        "seed": plan.seed,
        "settings": asdict(settings),
        "trace": trace.name,
        "page_tokens": trace.page_tokens,
        "capacity_pages": plan.tiers[0].capacity_pages,
        "trained_requests": len(known),
        "tested_requests": len(trace.requests) - len(known),
        "trained_content": content_of(replace(trace, requests=list(known))),
        "hit_rates_of_rounds": [one.hit_rate for one in rounds],
        "losses": fitted.losses,
        "agreement": fitted.agreement,
        "lru_agreement": fitted.lru_agreement,
        "tested": [asdict(one) for one in tested],
    }
    return {name: plain(value) for name, value in record.items()}


def _write(folder: Path, model: LeafModel, record: RunRecord) -> None:
    with_training = replace(model, training={key: value for key, value in record.items() if key not in OF_THE_TEST})
    with FileSet(folder) as files:
        files.write(MODEL, with_training.text())
        files.write("train.json", to_json(record))


OF_THE_TEST = ("tested", "tested_requests", "command_line", "command", "schema")
"""What a model's file does not say, so that it is the same whatever follows in the trace."""
