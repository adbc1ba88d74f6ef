"""An emulated engine for tests: its events, and what a client sees of the same requests."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from kvsim.emulation.emulator import Emulator
from kvsim.emulation.events import EventFeed
from kvsim.emulation.served import Extras, Served, ServedWatch
from kvsim.emulation.tellers import TELLERS
from kvsim.kv_events.messages import EventBatch
from kvsim.plans.plan import Plan
from kvsim.results.observed import ObservedRun


class Stepped(Emulator):
    """Its clock stands still until it is set."""

    now_s = 0.0

    def _now_s(self) -> float:
        return self.now_s


class TokenTimes(ServedWatch):
    """When each token of each answer came."""

    def __init__(self) -> None:
        self.tokens_s: dict[int, list[float]] = {}

    def first_token(self, served: Served) -> None:
        self.tokens_s[served.number] = [served.first_token_s]

    def token(self, served: Served, after_s: float) -> None:
        self.tokens_s[served.number].append(served.last_token_s)


class Seen(NamedTuple):
    """What a run of an emulated engine has left."""

    batches: list[EventBatch]
    prompts: list[list[int]]
    served: list[Served]
    run: ObservedRun


def conversation_prompts(requests: int, seed: int = 3) -> list[tuple[float, int, list[int], int]]:
    """Arrival, number of the request whose prompt and answer come first (-1: none), tokens after that, and tokens to answer."""
    random, at_s, made = Random(seed), 0.0, []
    for number in range(requests):
        at_s += random.expovariate(2.0)
        before = random.randrange(max(0, number - 15), number) if number and random.random() < 0.5 else -1
        own = [random.randrange(1000) for _ in range(random.randrange(1, 400))]
        made.append(
            (at_s, before, own if before >= 0 or random.random() < 0.5 else list(range(200)) + own, random.randrange(1, 90))
        )
    return made


def emulated(plan: Plan, teller: str, requests: int, extras: Extras | None = None, *, rush: float = 1.0) -> Seen:
    """Serve requests, some of them turns of the same conversation, and keep what the engine tells of its cache.

    They come ``rush`` times as fast as two in a second; the next turn of a conversation still knows the answer of the last one.
    """
    emulator, times, batches = Stepped(plan.with_own_policies()), TokenTimes(), list[EventBatch]()
    EventFeed(emulator, TELLERS[teller], batches.append, lambda: 1e9 + float(emulator.cluster.env.now))
    emulator.watches.append(times)
    prompts, served, arrivals_s = list[list[int]](), list[Served](), list[float]()
    for at_s, before, own, tokens in conversation_prompts(requests):
        emulator.now_s = at_s = at_s / rush
        prompts.append((prompts[before] + served[before].answer + own if before >= 0 else own)[-4000:])
        served.append(emulator.submit(prompts[-1], tokens, extras=extras or Extras()))
        arrivals_s.append(at_s)
    emulator.now_s = 1e6
    emulator.catch_up()
    return Seen(batches, prompts, served, _observed(served, arrivals_s, prompts, times))


def _observed(
    served: Sequence[Served], arrivals_s: Sequence[float], prompts: Sequence[Sequence[int]], times: TokenTimes
) -> ObservedRun:
    arrived_s = np.array(arrivals_s)
    return ObservedRun(
        source="emulated",
        client="kvsim",
        due_s=arrived_s,
        sent_s=arrived_s,
        first_token_s=np.array([one.first_token_s for one in served]),
        end_s=np.array([one.end_s for one in served]),
        token_gaps_s=[np.diff(times.tokens_s[number]) for number in range(len(served))],
        prompt_tokens=np.array([len(prompt) for prompt in prompts]),
        output_tokens=np.array([len(one.answer) for one in served]),
        cached_tokens=np.array([sum(one.cached_tokens) for one in served]),
        tier_tokens={},
        queued_s=np.array([one.queued_s for one in served]),
        prefill_s=np.full(len(served), np.nan),
        errors=[None] * len(served),
    )
