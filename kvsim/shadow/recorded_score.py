"""The score of a recorded stream of events, with what a client has recorded of the same requests or without it."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.kv_events.messages import EventBatch
from kvsim.plans.plan import Plan
from kvsim.plans.policy_errors import policies_named
from kvsim.replaying.moments import Moments
from kvsim.replaying.replay import Replay
from kvsim.results.observed import NOT_TOLD, ObservedRun
from kvsim.run.assembly import build_tiers
from kvsim.run.observed_order import open_observed
from kvsim.run.play import open_replay, simulate, with_known_answers
from kvsim.shadow.answers import StoredPaths, with_answers
from kvsim.shadow.engine import LiveEngine
from kvsim.shadow.live import ChainKeys, LiveRequest
from kvsim.shadow.page_ids import LivePageIndex
from kvsim.shadow.prompts import Prompts
from kvsim.shadow.score import STORED, Happened, Scorer, scored
from kvsim.shadow.snapshot import ScoreView

WITHIN_S = 5.0


class Streams(NamedTuple):
    """What an engine and kvsim's cache have done with the same requests, on the engine's clock."""

    requests: list[LiveRequest]
    """With the pages of their answers."""
    engine: list[Happened]
    own: list[Happened]


def score_recorded(
    batches: Iterable[EventBatch],
    requests: Sequence[LiveRequest] | None,
    plan: Plan,
    *,
    keys: ChainKeys,
    moments: Moments | None = None,
    within_s: float = WITHIN_S,
) -> ScoreView:
    """Return how much of one engine's events kvsim's cache predicts, given its requests: the score of ``streams_of``."""
    streams = streams_of(batches, requests, plan, keys=keys, moments=moments)
    return scored(streams.engine, streams.own, within_s)


def streams_of(
    batches: Iterable[EventBatch],
    requests: Sequence[LiveRequest] | None,
    plan: Plan,
    *,
    keys: ChainKeys,
    moments: Moments | None = None,
) -> Streams:
    """Return one engine's events, and what kvsim's cache does with its requests.

    ``requests`` are what a client has recorded (``requests_of``), with keys of ``keys``, or None for those that the events tell
    of. Pages of their answers that the client does not know are taken from the events. With ``moments``
    (``kvsim.report.servers.seen.moments_of``), requests overlap as they did there; without, they are served one after another
    by ``plan.replay``. Both clocks begin with the first block stored, so of a client's requests the stream has all and nothing
    before them. Raises UsageError for a plan that cannot be replayed.
    """
    engine, made = _told(batches, plan.page_tokens, keys)
    lives = made
    if requests is not None:
        lives = with_answers(requests, StoredPaths(engine, made), plan.page_tokens, _due_s(requests, moments))
    own = _predicted(plan, lives, moments)
    shift_s = _first_s(engine) - _first_s(own)
    return Streams(lives, engine, [event._replace(at_s=event.at_s + shift_s) for event in own])


def score_simulated(
    batches: Iterable[EventBatch],
    requests: Sequence[LiveRequest],
    plan: Plan,
    *,
    keys: ChainKeys,
    within_s: float = WITHIN_S,
) -> ScoreView:
    """Return how much of one engine's events kvsim's own engine predicts, which serves the same requests in simulated time.

    Nothing of the run is given but when requests arrived and what they were, answers included. So requests wait, overlap and are
    preempted as the simulation has it, and blocks that a preempted request stores again are predicted, too. Both clocks begin
    with the first block stored. Raises UsageError for a plan that cannot be simulated.
    """
    engine, _ = _told(batches, plan.page_tokens, keys)
    prompts, own = Prompts(plan.page_tokens, 1), list[Happened]()
    asked = [prompts.request(live, number, live.arrival_s, (-1, 0)) for number, live in enumerate(requests)]
    simulate(plan.with_own_policies(), asked, watching=lambda now_s: _kept(prompts, own, now_s))
    shift_s = _first_s(engine) - _first_s(own)
    return scored(engine, [event._replace(at_s=event.at_s + shift_s) for event in own], within_s)


def requests_of(run: ObservedRun, prompts: Sequence[Sequence[int]], page_tokens: int, keys: ChainKeys) -> list[LiveRequest]:
    """Return the requests of a client's record, whose prompts had these tokens; what failed is among them."""
    return [
        LiveRequest(
            arrival_s=float(np.nan_to_num(run.sent_s[number])),
            keys=keys.of_prompt(prompt, page_tokens),
            prompt_tokens=len(prompt),
            output_tokens=int(run.output_tokens[number]),
            cached_tokens=None if run.cached_tokens[number] == NOT_TOLD else int(run.cached_tokens[number]),
        )
        for number, prompt in enumerate(prompts)
    ]


def _due_s(requests: Sequence[LiveRequest], moments: Moments | None) -> list[float]:
    """Return when each request was at its answer: its first token, or else its arrival, in seconds since the run began."""
    arrived_s = np.array([request.arrival_s for request in requests])
    due_s = arrived_s - arrived_s.min(initial=np.inf)
    if moments is not None:
        first_s = np.array([times_s[0] for times_s in moments.tokens_s]) - np.nanmin(moments.admitted_s)
        due_s = np.where(np.isnan(first_s), due_s, first_s)
    return list(due_s.tolist())


class _Recorder(Scorer):
    """Keeps what an engine tells."""

    def __init__(self) -> None:
        super().__init__(LivePageIndex(), 0.0)
        self.events: list[Happened] = []

    def told(self, at_s: float, kind: str, tier: str, keys: Sequence[bytes | None]) -> None:
        if not self.is_paused:
            self.events += [Happened(at_s, kind, tier, key) for key in keys]


def _told(batches: Iterable[EventBatch], page_tokens: int, keys: ChainKeys) -> tuple[list[Happened], list[LiveRequest]]:
    """Return what an engine has stored and removed, and the requests that tells of. Raises UsageError for several engines."""
    made: list[LiveRequest] = []
    engine, recorder = LiveEngine("engine", None, page_tokens, keys, made.append), _Recorder()
    engine.scorer = recorder
    ranks = set()
    for batch in batches:
        ranks.add(batch.rank)
        if len(ranks) > 1:
            raise UsageError("score_recorded: the stream has events of several ranks: give it those of one")
        engine.take(batch)
    engine.requests.end_all()
    return recorder.events, made


@policies_named
def _predicted(plan: Plan, lives: Sequence[LiveRequest], moments: Moments | None) -> list[Happened]:
    """Return what kvsim's cache stores and drops."""
    prompts, own = Prompts(plan.page_tokens, 1), list[Happened]()
    requests = [prompts.request(live, number, live.arrival_s, (-1, 0)) for number, live in enumerate(lives)]
    if moments is None:
        watch = _kept(prompts, own, lambda: watch.now_s)
        for first, last in _between_resets(lives):
            _play(plan, requests[first:last], watch)
    else:
        observed = open_observed(plan, requests)
        _watch(observed, _kept(prompts, own, lambda: observed.now_s))
        observed.run_observed(requests, moments)
    return own


def _kept(prompts: Prompts, own: list[Happened], now_s: Callable[[], float]) -> Scorer:
    """Return a watch that appends what a cache does to ``own``."""

    def take(kind: str, tier: str, keys: Sequence[bytes | None]) -> None:
        own.extend([Happened(now_s(), kind, tier, key) for key in keys])

    return Scorer(prompts.index, 0.0, take)


def _between_resets(lives: Sequence[LiveRequest]) -> list[tuple[int, int]]:
    """Return the stretches of requests, first and end, before each of which the engine's cache was emptied."""
    starts = [number for number, live in enumerate(lives) if live.after_reset or not number]
    return list(zip(starts, [*starts[1:], len(lives)], strict=True))


def _play(plan: Plan, requests: list[Request], watch: Scorer) -> None:
    """Serve requests one after another from an empty cache, and end them all."""
    plan = with_known_answers(plan.with_own_policies(), requests)
    replay = open_replay(plan, build_tiers(plan, requests), requests)
    _watch(replay, watch)
    for request in requests:
        watch.now_s = max(watch.now_s, request.arrival_s)
        replay.play([request])
    while replay.live:
        replay.server.finish_request(replay.live.pop(0))


def _watch(replay: Replay, watch: Scorer) -> None:
    for tier in replay.server.tiers:
        tier.watches.append(watch)


def _first_s(events: Sequence[Happened]) -> float:
    """Return when the first block was stored."""
    return next((event.at_s for event in events if event.kind == STORED), 0.0)
