"""Asks the admission policy, and keeps what it may know of each engine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvsim.cluster.hand_over import HandOver
from kvsim.cluster.observed_load import free_pages, kv_use
from kvsim.cluster.router import Router
from kvsim.core.answers import refused, truth
from kvsim.core.lease import LOOK
from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.engine.engine import Engine
from kvsim.engine.job import CLAIMING, DECODING, LOST, NEW, QUEUED, Job
from kvsim.policies.admission.base import CLUSTER, GOES_BY

if TYPE_CHECKING:
    from kvsim.policies.admission.base import AdmissionPolicy

Key = tuple[int, int]
"""The index of a request, and the number of one of its samples."""


class Ledger:
    """What an engine has been given and has not done: prompts to compute, and answers to generate."""

    def __init__(self) -> None:
        self.prefilling: dict[Key, tuple[Job, int]] = {}
        """With the first token that had to be computed when the request came."""
        self.decoding: dict[Key, tuple[int, int, Job]] = {}
        """Answers that each generates, the tokens of its prompt for all of them, and who computed that."""
        self.decoding_requests = self.decoding_tokens = 0

    def decodes(self, key: Key, job: Job) -> None:
        """A prompt has been computed."""
        request = job.request
        answers = max(1, request.samples)
        self.decoding[key] = answers, answers * request.prompt_tokens, job
        self.decoding_requests += answers
        self.decoding_tokens += answers * request.prompt_tokens

    def remove(self, key: Key) -> None:
        """A request is not here any more, in whatever state it was."""
        self.prefilling.pop(key, None)
        if key not in self.decoding:
            return
        answers, tokens, _ = self.decoding.pop(key)
        self.decoding_requests -= answers
        self.decoding_tokens -= tokens


class SeenEngine:
    """The ``EngineLoad`` of an engine."""

    def __init__(self, engine: Engine, ledger: Ledger, hand_over: HandOver | None) -> None:
        self._engine = engine
        self._ledger = ledger
        self._hand_over = hand_over

    @property
    def engine(self) -> int:
        return self._engine.number

    @property
    def waiting_requests(self) -> int:
        waiting = len(self._engine.waiting.queue) + len(self._engine.waiting.fetching)
        return waiting if self._hand_over is None else waiting + self._hand_over.waiting_for(self._engine)

    @property
    def running_requests(self) -> int:
        return len(self._engine.schedule)

    @property
    def kv_use(self) -> float:
        return kv_use(self._engine)

    @property
    def prefills(self) -> tuple[tuple[int, int], ...]:
        return self._prefills_in(NEW, LOST)

    @property
    def begun_prefills(self) -> tuple[tuple[int, int], ...]:
        return self._prefills_in(CLAIMING, LOST)

    @property
    def queued_prefills(self) -> tuple[tuple[int, int], ...]:
        return self._prefills_in(NEW, QUEUED)

    def _prefills_in(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Return the prompts to compute of requests in these phases."""
        given = [(job, start) for job, start in self._ledger.prefilling.values() if first <= job.phase <= last]
        found = [(max(start, job.computed), job.request.prompt_tokens) for job, start in given]
        return tuple([(start, tokens) for start, tokens in found if start < tokens])

    @property
    def prefill_tokens(self) -> int:
        return sum([tokens - start for start, tokens in self.prefills])

    @property
    def computing_s(self) -> float:
        return self._engine.computing_s

    @property
    def decoding_requests(self) -> int:
        return self._ledger.decoding_requests

    @property
    def decoding_tokens(self) -> int:
        return self._ledger.decoding_tokens

    @property
    def answers(self) -> tuple[tuple[int, int], ...]:
        schedule, steps = self._engine.schedule, self._engine.leap_steps
        jobs = [job for _, _, job in self._ledger.decoding.values() if job.phase == DECODING]
        return tuple([(job.request.prompt_tokens, schedule.generated(job) + steps) for job in jobs])

    @property
    def free_tokens(self) -> int:
        return free_pages(self._engine) * self._engine.cache.page_tokens

    def uncached_tokens(self, request: Request) -> int:
        return uncached_tokens(self._engine, request)


class SeenLoad:
    """The ``ClusterLoad`` of one question."""

    def __init__(
        self, now: float, waited_s: float, engines: Sequence[SeenEngine], decoders: Sequence[SeenEngine], kept: int
    ) -> None:
        self._now = now
        self._waited_s = waited_s
        self._engines = tuple(engines)
        self._decoders = tuple(decoders)
        self._kept = kept

    @property
    def now(self) -> float:
        return self._now

    @property
    def waited_s(self) -> float:
        return self._waited_s

    @property
    def engines(self) -> tuple[SeenEngine, ...]:
        return self._engines

    @property
    def decoders(self) -> tuple[SeenEngine, ...]:
        return self._decoders

    @property
    def kept_requests(self) -> int:
        return self._kept


@mypyc_attr(allow_interpreted_subclasses=True)
class Gate:
    """Asks the policy about each request that comes, and notes which engine has what to compute."""

    def __init__(
        self,
        policies: "Sequence[AdmissionPolicy]",
        engines: Sequence[Engine],
        router: Router | None = None,
        hand_over: HandOver | None = None,
    ) -> None:
        """``policies`` are one for each engine if they go by the engine, otherwise a single one. ``router`` is before the engines
        that compute prompts, if there are several; ``hand_over`` has those that decode."""
        self.policies = policies
        self.engines = engines
        self._env = engines[0].env
        self._router = router
        self._hand_over = hand_over
        self._ledgers = [Ledger() for _ in engines]
        self._seen = [SeenEngine(engine, ledger, hand_over) for engine, ledger in zip(engines, self._ledgers, strict=True)]
        self._where: dict[Key, Ledger] = {}
        self._refused: dict[int, int] = {}
        """How many samples of a refused request are still on their way to an engine, by its index."""
        self._asks: list[Any] = [policy.admits for policy in policies]
        """Typed so that their answers may be anything."""
        self._name = name_of(policies[0])
        self.is_before_router = goes_by(policies[0]) == CLUSTER
        """Whether requests are refused before the router chooses for them."""

    # --- the policy is asked ----------------------------------------------------------------------------------------------

    def admits(self, job: Job, chosen: Engine | None, kept: int) -> bool:
        """Whether the policy admits a request: of one that goes by the engine, on the ``chosen`` one. ``kept`` requests wait
        before the router. One that could not run even alone is admitted, and will be rejected."""
        request, now = job.request, float(self._env.now)
        engines = self._up() if chosen is None else [self._seen[chosen.number]]
        if not (self.engines[0] if chosen is None else chosen).schedule.takes(request):
            return True
        decoders = engines if self._hand_over is None else self._up_to_decode(self._hand_over)
        ask = self._asks[0 if chosen is None else chosen.number]
        load = SeenLoad(now, now - job.arrival_s, engines, decoders, kept)
        return truth(self._name, "admits()", ask(request, load))

    def refuses(self, index: int, samples: int) -> None:
        """A request has been refused, of which so many other samples are still on their way."""
        if samples:
            self._refused[index] = samples

    def stops(self, index: int) -> bool:
        """Whether this is another sample of a refused request."""
        if index not in self._refused:
            return False
        self._refused[index] -= 1
        if not self._refused[index]:
            del self._refused[index]
        return True

    def _up(self) -> list[SeenEngine]:
        """Return the engines that requests may be sent to."""
        router = self._router
        if router is None:
            return [seen for seen in self._seen if self.engines[seen.engine].is_up]
        return [self._seen[number] for number in router.engines if router.is_offered(number)]

    def _up_to_decode(self, hand_over: HandOver) -> list[SeenEngine]:
        return [self._seen[number] for number in hand_over.receivers if hand_over.router.is_offered(number)]

    # --- the cluster tells ------------------------------------------------------------------------------------------------

    def given(self, job: Job, engine: Engine) -> None:
        """An engine is about to get a request."""
        request = job.request
        key = (request.index, request.sample)
        self._remove(key)
        start = max(0, request.prompt_tokens - uncached_tokens(engine, request))
        self._ledgers[engine.number].prefilling[key] = job, start
        self._where[key] = self._ledgers[engine.number]

    def computed(self, job: Job, engine: int) -> None:
        """The prompt of a request has been computed: the same engine, or the one that it has chosen for that, decodes."""
        request = job.request
        key = (request.index, request.sample)
        self._remove(key)
        ledger = self._ledgers[job.decoder if job.decoder >= 0 else engine]
        ledger.decodes(key, job)
        self._where[key] = ledger

    def ended(self, request: Request) -> None:
        """A request, or one of its samples, has ended, or its engine has lost it."""
        self._remove((request.index, request.sample))

    def answered(self, request: Request, engine: int) -> None:
        """An answer is complete."""
        policy = self.policies[0 if self.is_before_router else engine]
        policy.on_answered(request, float(self._env.now))

    def _remove(self, key: Key) -> None:
        ledger = self._where.pop(key, None)
        if ledger is not None:
            ledger.remove(key)

    def check(self) -> None:
        """Recount what decodes, of a run that is under way or over."""
        for ledger in self._ledgers:
            assert ledger.decoding_requests == sum([answers for answers, _, _ in ledger.decoding.values()])
            assert ledger.decoding_tokens == sum([tokens for _, tokens, _ in ledger.decoding.values()])
            assert not ledger.decoding.keys() & ledger.prefilling.keys()
        assert len(self._where) == sum([len(ledger.decoding) + len(ledger.prefilling) for ledger in self._ledgers])


def name_of(policy: object) -> str:
    """Return the policy's name for an error message."""
    return f"the admission policy {type(policy).__name__}"


def goes_by(policy: Any) -> str:
    """Return what a policy goes by, which may answer anything. Raises PolicyError."""
    answer: Any = policy.goes_by
    if not isinstance(answer, str) or answer not in GOES_BY:
        raise refused(name_of(policy), "goes_by", answer, " or ".join(GOES_BY))
    return answer


def uncached_tokens(engine: Engine, request: Request) -> int:
    """Return the prompt tokens of a request that are neither on an engine's GPU nor, after those, in the tier below, at least 1.
    Changes nothing."""
    found = engine.cache.match(request, engine.gpu, LOOK)
    cached = (found.gpu_pages + found.leading_pages) * engine.cache.page_tokens
    return max(1, request.prompt_tokens - cached)
