"""Early rejection by objectives: Mooncake's Conductor (Qin et al., arXiv 2407.00079, sections 6.1 and 7)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Real, check_settings
from kvsim.policies.admission.base import AdmissionPolicy, ClusterLoad, EngineLoad
from kvsim.policies.admission.context import AdmissionContext
from kvsim.policies.admission.room import GOLDEN_RATIO, AnswerLengths, Forecast, Memory
from kvsim.policies.fields import keep_types

Limit = Callable[[Request], float]


def _limit(own: float | None, of_request: Limit) -> Limit:
    """Return what returns the objective of a request: its own, unless the policy has one for all."""
    if own is None:
        return of_request
    limit: float = own
    return lambda _: limit


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class PredictedTtft(AdmissionPolicy):
    """Refuses a request that would miss its objective for the time to first token, before any of it is computed.

    predicted     seconds waited + those of the steps that compute what the chosen engine has yet to compute of the prompts
                  before this one, then what neither its GPU nor the tier below has of this one; each step has as many tokens as
                  fit, and the engine's decoding requests; less the time since the step under way has begun
    refused       predicted > factor * objective; a request without an objective is admitted
    objective     ttft_s or, if that is null, slo.ttft_s or that of the request's class (slo.classes)
    decode_load   also refused if the mean step of the engines that decode, with this request in one of them, takes longer than
                  factor * objective for the time per output token (tpot_s, slo.tpot_s, or that of the class) for each token
                  that it yields: one, or more with drafts (engine.speculation)

    The load on decode is that of now (Mooncake's early rejection); its prediction for the time when the prompt is computed is
    left out, and so are copies between tiers and engines. The order is first come, first served.

    As Mooncake's, which is that of the queue and of the prefill (its algorithm 1), the prediction has no wait for free pages: its
    engines for prefill keep none for answers. Where prompts wait for memory, times are longer than predicted: a factor below 1
    leaves room for that. Or ``waits_for_room`` predicts that wait, too, on engines that compute and decode:

    memory        a prompt is computed when its uncached tokens fit into the memory that no request uses, and fewer requests run
                  than may at a time (engine.max_running_requests); a running request takes a token in each step, and gives back
                  all that it has when its answer ends
    answers       end as the latest 1,000 complete ones of the engine did that had got as far: each running request at another
                  quantile of what was left of those, and prompts that wait after the mean. Until one is complete, nobody waits

    Mooncake assumes one time to decode for all requests (section 7.4); with that, the first of many running requests to end does
    so far too late.
    """

    factor: float = 1.0
    ttft_s: float | None = None
    decode_load: bool = False
    tpot_s: float | None = None
    waits_for_room: bool = False

    def __post_init__(self) -> None:
        check_settings(self, Real(above=0), "factor")
        check_settings(self, Real(above=0), "ttft_s", "tpot_s", or_null=True)

    def without_effect(self) -> Sequence[str]:
        return () if self.decode_load else ("tpot_s",)

    def bind(self, context: AdmissionContext) -> None:
        if context.prefill_s is None or context.decode_step_s is None:
            raise ValueError("needs a model and a machine")
        self._prefill_s, self._decode_step_s = context.prefill_s, context.decode_step_s
        if self.waits_for_room and not context.decodes:
            raise ValueError("waits_for_room needs engines that compute prompts and decode: set admission.waits_for_room=false")
        self._tokens_per_step, self._batch_tokens = context.tokens_per_step, context.max_batch_tokens
        self._most_requests = context.max_running_requests
        self._lengths = AnswerLengths()
        self._ttft_s = _limit(self.ttft_s, context.ttft_s)
        self._tpot_s = _limit(self.tpot_s, context.tpot_s)
        self._require(context, "time to first token", self._ttft_s, "ttft_s")
        if self.decode_load:
            self._require(context, "time per output token with decode_load=true", self._tpot_s, "tpot_s")

    def _require(self, context: AdmissionContext, what: str, limit_s: Limit, setting: str) -> None:
        """Raise ValueError if no request has an objective: of those in the trace or, where nobody knows them, of any."""
        requests = context.requests
        if getattr(self, setting) is None and all(limit_s(request) == inf for request in requests):
            of_all = f"slo.{setting}, or " if requests else ""
            raise ValueError(f"needs an objective for the {what}: set {of_all}admission.{setting}")

    def admits(self, request: Request, load: ClusterLoad) -> bool:
        objective_s = self._ttft_s(request)
        if objective_s < inf and self.predicted_s(request, load) > self.factor * objective_s:
            return False
        if not self.decode_load:
            return True
        return self._mean_step_s(request, load) <= self.factor * self._tpot_s(request) * self._tokens_per_step

    def predicted_s(self, request: Request, load: ClusterLoad) -> float:
        """Return the time to first token that a request will have on the chosen engine, in seconds."""
        engine, tokens = load.engines[0], request.prompt_tokens
        own = tokens - engine.uncached_tokens(request), tokens
        if self.waits_for_room and len(self._lengths):
            return load.waited_s + self._with_room_s(engine, own)
        prefills: Sequence[tuple[int, int]] = [*engine.prefills, own]
        seconds = self._prefill_s(prefills, engine.decoding_requests, engine.decoding_tokens)
        return load.waited_s + max(0.0, seconds - engine.computing_s)

    def _with_room_s(self, engine: EngineLoad, own: tuple[int, int]) -> float:
        """Return the seconds until a prompt is computed, with the time until it and those before it may run."""
        lengths, per_step, held = self._lengths, self._tokens_per_step, engine.answers
        left = [lengths.left(done, at * GOLDEN_RATIO % 1.0) / per_step for at, (_, done) in enumerate(held, 1)]
        decoding = engine.decoding_requests, engine.decoding_tokens
        memory = Memory(engine.free_tokens, decoding, self._decode_step_s, self._most_requests)
        memory.hold(held, left)
        forecast = Forecast(memory, self._prefill_s, self._batch_tokens, lengths.mean / per_step)
        return forecast.seconds(engine.begun_prefills, [*engine.queued_prefills, own], engine.computing_s)

    def on_answered(self, request: Request, now: float) -> None:
        if self.waits_for_room:
            self._lengths.add(request.output_tokens)

    def _mean_step_s(self, request: Request, load: ClusterLoad) -> float:
        """Return the mean seconds of a decode step, with this request's share on each engine."""
        decoders = load.decoders
        if not decoders:
            return 0.0
        answers = max(1, request.samples)
        requests = sum([engine.decoding_requests for engine in decoders]) + answers
        tokens = sum([engine.decoding_tokens for engine in decoders]) + answers * request.prompt_tokens
        return self._decode_step_s(-(-requests // len(decoders)), -(-tokens // len(decoders)))


keep_types(PredictedTtft, ttft_s=float | None, tpot_s=float | None)
