"""NVIDIA Dynamo's SLA planner, by throughput, for engines that prefill and decode (``planner/core``, mode agg, 2026)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Real, Whole, check_settings
from kvsim.policies.autoscaling.base import ClusterStatus, RegularAutoscaling, current, within
from kvsim.policies.autoscaling.context import AutoscalingContext
from kvsim.policies.autoscaling.forecasts import forecast_of


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class DynamoPlanner(RegularAutoscaling):
    """Predicts the load of the next interval, and serves it with engines that each take what meets both objectives.

    predicted     requests, prompt and answer tokens per request, and hit rate of the next interval, each by its own forecast
    engines       ceil(predicted requests per second / requests per second of an engine); without a load yet, as many as there are
    of an engine  batch / (steps of an answer * step), for the largest batch whose step takes at most tpot_s for each token that
                  it yields of an answer, and whose prefill ends within ttft_s; with none, that of a batch of 1
    step          a step with ``batch`` decoding requests, each in the middle of its answer, and the prompt tokens that come with
                  them: batch * tokens to compute / steps of an answer
    prefill       steps of at most engine.max_batch_tokens, beside that batch, for these tokens and one more whole prompt
    batch         at most what KV memory and engine.max_running_requests hold, and prompts keep up with: at most steps *
                  max_batch_tokens / (prompt tokens + steps * tokens that a decoding request takes of one)
    steps         answer tokens / tokens that a step yields of it: 1, or more with drafts (engine.speculation), up to all
    predictor     constant: the last interval again; moving_average over ``values`` intervals; kalman: a level and its trend

    Dynamo fits steps to measurements; here, steps are those of the simulated engine, prompts without context of their own. Its
    load-based scaling, its predictors ARIMA and Prophet, and engines that only prefill or only decode are left out.
    """

    interval_s: float = 180.0
    ttft_s: float = 0.5
    tpot_s: float = 0.05
    predictor: str = "constant"
    values: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Real(above=0), "ttft_s", "tpot_s")
        check_settings(self, Whole(1), "values")
        self._requests, self._prompts, self._answers, self._hits = [forecast_of(self.predictor, self.values) for _ in range(4)]

    def without_effect(self) -> Sequence[str]:
        return () if self.predictor == "moving_average" else ("values",)

    def bind(self, context: AutoscalingContext) -> None:
        if context.step_s is None:
            raise ValueError("needs a model and a machine")
        self._step_s = context.step_s
        self._taken_tokens = context.taken_tokens
        self._tokens_per_step = context.tokens_per_step
        self._step_tokens = context.step_tokens
        self._kv_tokens = context.kv_tokens
        self._most_tokens = context.max_batch_tokens
        self._most_requests = context.max_running_requests

    def engines(self, status: ClusterStatus) -> int:
        self._requests.add(float(status.arrived_requests))
        self._prompts.add(_mean(status.arrived_tokens, status.arrived_requests))
        self._answers.add(_mean(status.ended_tokens, status.ended_requests))
        self._hits.add(_mean(status.hit_tokens, status.begun_tokens))
        prompt, answer = self._prompts.next(), self._answers.next()
        if prompt <= 0.0 or answer <= 0.0:
            return current(status)
        rate = self._requests.next() / status.interval_s
        per_engine = self.engine_requests_per_s(prompt, answer, min(1.0, self._hits.next()))
        most = float(status.most_engines)
        return within(status, max(1, ceil(min(most, rate / per_engine) if per_engine > 0.0 else most)))

    def engine_requests_per_s(self, prompt: float, answer: float, hit_rate: float) -> float:
        """Return the requests per second that an engine serves, given tokens per request and the share that is reused."""
        context = prompt + answer / 2.0
        yielded = max(1.0, min(answer, self._tokens_per_step))
        steps = max(1.0, answer / yielded)
        most_s = self.tpot_s * yielded
        best = 0.0
        for batch in range(1, self._largest_batch(prompt, steps, context) + 1):
            tokens = min(batch * prompt * (1.0 - hit_rate) / steps, float(self._most_tokens))
            step_s = max(1e-6, self._step_s(round(tokens), batch, round(batch * context)))
            ttft_s = self._prefill_s(int(tokens) + prompt, batch, round(batch * context))
            if batch > 1 and (step_s > most_s or ttft_s > self.ttft_s):
                break
            best = batch / (steps * step_s)
            if step_s > most_s or ttft_s > self.ttft_s:
                break
        return best

    def _largest_batch(self, prompt: float, steps: float, context: float) -> int:
        fits = self._most_requests
        if self._kv_tokens is not None:
            taken = context if self._taken_tokens is None else self._taken_tokens(context)
            fits = min(fits, int(self._kv_tokens / max(1.0, taken)))
        keeps_up = int(steps * self._most_tokens / (prompt + steps * self._step_tokens))
        return max(1, min(fits, keeps_up, (self._most_tokens - 1) // self._step_tokens))

    def _prefill_s(self, tokens: float, batch: int, context: int) -> float:
        """Return the seconds of the steps that compute so many prompt tokens beside a batch."""
        full, rest = divmod(tokens, float(self._most_tokens))
        seconds = full * self._step_s(self._most_tokens, batch, context) if full else 0.0
        return seconds + (self._step_s(round(rest), batch, context) if rest else 0.0)


def _mean(total: int, count: int) -> float:
    return total / count if count else 0.0
