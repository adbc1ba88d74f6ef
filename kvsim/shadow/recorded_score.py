"""The score of a recorded stream of events, with what a client has recorded of the same requests or without it."""

from collections.abc import Iterable, Sequence
from math import nan

import numpy as np

from kvsim.core.request import Request, Reset
from kvsim.errors import UsageError
from kvsim.kv_events.messages import EventBatch
from kvsim.plans.plan import Plan
from kvsim.plans.policy_errors import policies_named
from kvsim.replaying.observed import Moments
from kvsim.replaying.replay import Replay
from kvsim.results.observed import NOT_TOLD, ObservedRun
from kvsim.run.assembly import build_tiers
from kvsim.run.observed_order import open_observed
from kvsim.run.play import open_replay, with_known_answers
from kvsim.shadow.engine import LiveEngine
from kvsim.shadow.live import ChainKeys, LiveRequest
from kvsim.shadow.page_ids import LivePageIndex
from kvsim.shadow.prompts import Prompts
from kvsim.shadow.score import STORED, Happened, Scorer, scored
from kvsim.shadow.snapshot import ScoreView

WITHIN_S = 5.0


def score_recorded(
    batches: Iterable[EventBatch],
    requests: Sequence[LiveRequest] | None,
    plan: Plan,
    *,
    keys: ChainKeys,
    moments: Moments | None = None,
    within_s: float = WITHIN_S,
) -> ScoreView:
    """Return how much of one engine's events kvsim's cache predicts, given its requests.

    ``requests`` are what a client has recorded (``requests_of``), with keys of ``keys``, or None for those that the events tell
    of. Pages of their answers that the client does not know are taken from the events. With ``moments``
    (``kvsim.report.servers.seen.moments_of``), requests overlap as they did there; without, they are served one after another
    by ``plan.replay``. Both clocks begin with the first block stored. Raises UsageError for a plan that cannot be replayed.
    """
    engine, made = _told(batches, plan.page_tokens, keys)
    lives = made if requests is None else with_answers(requests, made, plan.page_tokens)
    own = _predicted(plan, lives, moments)
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


def with_answers(requests: Sequence[LiveRequest], made: Sequence[LiveRequest], page_tokens: int) -> list[LiveRequest]:
    """Return requests with the pages of their answers, from the requests that events tell of.

    Each takes the one that begins with its whole prompt, goes on, and began at the time that is closest to its arrival; both
    clocks begin with the first request. Where answers are the engine's own, only requests with a prompt in common up to its last
    whole page can be confused.
    """
    wanted = {request.keys[-1] for request in requests if request.keys}
    found: dict[bytes, list[tuple[float, tuple[bytes, ...]]]] = {}
    for one in made:
        path = one.keys + one.output_keys
        for at, key in enumerate(path[:-1], 1):
            if key in wanted:
                found.setdefault(key, []).append((one.arrival_s - made[0].arrival_s, path[at:]))
    answered = []
    for request in requests:
        most = (request.prompt_tokens + max(request.output_tokens, 1) - 1) // page_tokens - len(request.keys)
        others = found.get(request.keys[-1], ()) if request.keys and most and not request.output_keys else ()
        began_s = request.arrival_s - requests[0].arrival_s
        closest = min(others, key=lambda other: abs(other[0] - began_s), default=None)
        answered.append(request if closest is None else request._replace(output_keys=closest[1][:most]))
    return answered


class _Recorder(Scorer):
    """Keeps what an engine tells."""

    def __init__(self) -> None:
        super().__init__(LivePageIndex(), 0.0)
        self.events: list[Happened] = []

    def told(self, event: Happened) -> None:
        if not self.is_paused:
            self.events.append(event)


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
        plan = with_known_answers(plan.with_own_policies(), requests)
        replay = open_replay(plan, build_tiers(plan, requests), requests)
        watch = _watched(replay, Scorer(prompts.index, 0.0, own.append))
        _play(replay, requests, lives, watch)
    else:
        observed = open_observed(plan, requests)
        _watched(observed, Scorer(prompts.index, 0.0, lambda event: own.append(event._replace(at_s=observed.now_s))))
        observed.run_observed(requests, moments)
    return own


def _watched(replay: Replay, watch: Scorer) -> Scorer:
    for tier in replay.server.tiers:
        tier.watches.append(watch)
    return watch


def _play(replay: Replay, requests: Sequence[Request], lives: Sequence[LiveRequest], watch: Scorer) -> None:
    for request, live in zip(requests, lives, strict=True):
        watch.now_s = max(watch.now_s, request.arrival_s)
        if live.after_reset:
            replay.reset((Reset("drain", nan),))
        replay.play([request])
    while replay.live:
        replay.server.finish_request(replay.live.popleft())


def _first_s(events: Sequence[Happened]) -> float:
    """Return when the first block was stored."""
    return next((event.at_s for event in events if event.kind == STORED), 0.0)
