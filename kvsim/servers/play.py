"""Plays requests against a server: what it says of itself, its empty cache, the requests, its counters."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan

import msgspec
import numpy as np

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.results.observed import NOT_TOLD, ObservedRun, ServerFacts
from kvsim.servers.answer import Answer, Failed
from kvsim.servers.counters import counters, read_samples, risen
from kvsim.servers.dialects.base import Dialect, Known
from kvsim.servers.dialects.table import dialect_of
from kvsim.servers.http import Http
from kvsim.servers.prompts import PromptTokens, check_playable
from kvsim.servers.sender import Sender, ask
from kvsim.servers.settings import ServerSettings

Advance = Callable[[int], None]
"""Called now and then with the number of finished requests."""
WARM_TOKENS = 16
"""Tokens of an answer in the warm-up."""
MOST_STALL_S = 0.25
"""A client whose event loop stood still for longer is too slow: whatever arrived meanwhile has wrong times."""


def play_server(
    requests: Sequence[Request], page_tokens: int, settings: ServerSettings, advance: Advance | None = None
) -> ObservedRun:
    """Play requests, cut into pages of ``page_tokens`` tokens, against a server, once.

    What a later prompt has of an earlier answer, it has from the trace: the server generates other tokens, so it never finds an
    answer again. Simulate ``kvsim.servers.prompts.as_sent(requests, page_tokens)`` for the same.

    Raises UsageError if the server cannot be used or the requests cannot be sent to one. Once the run has begun, failures are
    the run's ``errors``: also those of all requests after the server has died.
    """
    return asyncio.run(play(requests, page_tokens, settings, advance))


def read_facts(settings: ServerSettings) -> ServerFacts:
    """Return what a server says of itself. Raises UsageError if it does not answer, or lacks the model."""
    return asyncio.run(_read_facts(settings))


async def _read_facts(settings: ServerSettings) -> ServerFacts:
    async with Http(settings.url, settings.timeout_s) as http:
        _, known = await get_to_know(http, settings)
        return known.facts


async def play(
    requests: Sequence[Request], page_tokens: int, settings: ServerSettings, advance: Advance | None = None
) -> ObservedRun:
    """``play_server`` for programs that have an event loop."""
    for request in requests:
        check_playable(request)
    prompts = PromptTokens(requests, page_tokens, settings.first_token_id, settings.token_ids)
    async with Http(settings.url, settings.timeout_s) as http:
        dialect, known = await get_to_know(http, settings)
        model = str(known.facts.model)
        await _warm_up(http, dialect, model, prompts, requests, settings)
        doubt = await dialect.reset(http) if settings.reset else ""
        before = counters(await read_samples(http))
        limit = known.longest_tokens
        sender = Sender(http, dialect, model, requests, prompts, settings, longest_tokens=limit, advance=advance)
        await sender.run()
        rises, lost = await _rises(http, before)
    played = Played(requests, sender.answers, known, dialect, prompts, sender.stall_s)
    return played.run(settings, rises, [line for line in (doubt, lost) if line])


async def get_to_know(http: Http, settings: ServerSettings) -> tuple[Dialect, Known]:
    """Return the dialect of a server and what is known of it, with the model that is to be asked.

    Raises UsageError if it does not answer, is not ready or lacks that model.
    """
    if (await http.get("/health")).status == 503:
        raise UsageError(f"{http.url} is not ready (HTTP 503): wait until it has loaded its model")
    dialect = await dialect_of(http, settings.engine)
    known = await dialect.know(http)
    model = settings.model or known.facts.model
    if model is None:
        raise UsageError(f"{http.url} does not list its models: set model")
    if known.models and model not in known.models:
        raise UsageError(f"{http.url} has no model {model}, but {', '.join(known.models)}")
    return dialect, replace(known, facts=replace(known.facts, model=model))


async def _warm_up(
    http: Http, dialect: Dialect, model: str, prompts: PromptTokens, requests: Sequence[Request], settings: ServerSettings
) -> None:
    """Send prompts as long as the first ones of the trace, one after another. Raises UsageError if one fails."""
    for number in range(settings.warmup_requests if requests else 0):
        tokens = requests[number % len(requests)].prompt_tokens
        body = dialect.body(model, prompts.other(number, tokens).tolist(), WARM_TOKENS)
        try:
            await ask(http, dialect, msgspec.json.encode(body), Answer(tokens), settings.timeout_s, 0.0)
        except Failed as error:
            raise UsageError(f"the warm-up failed: {error}") from None


async def _rises(http: Http, before: dict[str, float]) -> tuple[dict[str, float], str]:
    """Return what the counters rose by, and a line if that cannot be known."""
    try:
        rises, fallen = risen(before, counters(await read_samples(http)))
    except UsageError as error:
        return {}, f"the counters are lost: {error}"
    return rises, f"{len(fallen)} counters have fallen: the server was started anew during the run" if fallen else ""


@dataclass(frozen=True)
class Played:
    """A run that has ended."""

    requests: Sequence[Request]
    answers: Sequence[Answer]
    known: Known
    dialect: Dialect
    prompts: PromptTokens
    stall_s: float

    def run(self, settings: ServerSettings, rises: dict[str, float], notes: list[str]) -> ObservedRun:
        """Return it as an observed run."""
        answers = self.answers
        self._fill_in_zeros()
        tiers = dict.fromkeys([tier for answer in answers for tier in answer.tier_tokens])
        chunks = [np.array(answer.chunk_times_s, dtype=np.float64) for answer in answers]
        run = ObservedRun(
            source=settings.url,
            client="kvsim",
            due_s=np.array([answer.due_s for answer in answers], dtype=np.float64),
            sent_s=np.array([answer.sent_s for answer in answers], dtype=np.float64),
            first_token_s=np.array([times[0] if len(times) else nan for times in chunks], dtype=np.float64),
            end_s=np.array([answer.end_s for answer in answers], dtype=np.float64),
            token_gaps_s=[np.diff(times) for times in chunks],
            prompt_tokens=np.array([answer.prompt_tokens for answer in answers], dtype=np.int64),
            output_tokens=np.array([answer.output_tokens for answer in answers], dtype=np.int64),
            cached_tokens=np.array([answer.cached_tokens for answer in answers], dtype=np.int64),
            tier_tokens={tier: np.array([tier_tokens(one, tier) for one in answers], dtype=np.int64) for tier in tiers},
            queued_s=np.array([answer.queued_s for answer in answers], dtype=np.float64),
            prefill_s=np.array([answer.prefill_s for answer in answers], dtype=np.float64),
            errors=[answer.error for answer in answers],
            facts=self.known.facts,
            counters=rises,
            speed=settings.speed,
            concurrency=settings.concurrency,
            stall_s=self.stall_s,
        )
        slow = client_notes(run, settings.max_late_s)
        return replace(run, is_client_bound=bool(slow), notes=[*slow, *self._notes(), *notes])

    def _fill_in_zeros(self) -> None:
        """Where the server says how much of other prompts was cached, take its silence as none, if that is its way."""
        if self.dialect.omits_zero and any(answer.cached_tokens != NOT_TOLD for answer in self.answers):
            for answer in self.answers:
                if answer.error is None and answer.cached_tokens == NOT_TOLD:
                    answer.cached_tokens = 0

    def _notes(self) -> list[str]:
        """Return what the server did otherwise than asked."""
        good = [(request, answer) for request, answer in zip(self.requests, self.answers, strict=True) if answer.error is None]
        untold = sum(answer.cached_tokens == NOT_TOLD for _, answer in good)
        longer = sum(answer.prompt_tokens != request.prompt_tokens for request, answer in good)
        other = sum(answer.output_tokens != max(1, request.output_tokens) for request, answer in good)
        ambiguous = self.prompts.ambiguous_pages if self.known.facts.page_tokens == 1 else 0
        others = self.known.engines - 1
        return [
            line
            for count, line in (
                (untold, f"the server does not say how many tokens of {untold} prompts were cached: {self.dialect.tells_cached}"),
                (longer, f"the server counts other tokens than {longer} prompts were sent with: does it add special tokens?"),
                (other, f"{other} answers are not as long as asked"),
                (others, f"the server has {others + 1} engines with a cache each, and does not say which of them had a request"),
                (ambiguous, f"{ambiguous} pages may seem to be cached for one token more: set token_ids to more than that"),
            )
            if count
        ]


def tier_tokens(answer: Answer, tier: str) -> int:
    """Return the cached tokens of a request from one tier: none, where none was cached."""
    return answer.tier_tokens.get(tier, 0 if answer.cached_tokens == 0 else NOT_TOLD)


def client_notes(run: ObservedRun, max_late_s: float) -> list[str]:
    """Return lines on how the client was too slow; none if it was not."""
    notes = []
    if (late_s := run.late_s()) > max_late_s:
        notes.append(f"the client was too slow: 1 of 100 requests was sent {late_s * 1000:.0f} ms late or more")
    if run.stall_s > MOST_STALL_S:
        notes.append(f"the client was too slow: it stood still for {run.stall_s * 1000:.0f} ms")
    return notes
