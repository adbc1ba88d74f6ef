"""What a profile of one engine would tell of its steps, as they are simulated."""

from collections.abc import Sequence

from kvsim.engine.adapters import AdapterWork
from kvsim.engine.substrate import Work
from kvsim.plans.plan import Plan
from kvsim.substrate.simulated.compute import step_times
from kvsim.substrate.simulated.engine_steps import engine_steps


class Profile:
    """What an engine needs for steps, with drafts and adapters, but without copies and communication with other engines.

    A step with adapters is one of requests that all have one, as many different ones as the engine has places for.
    """

    def __init__(self, plan: Plan) -> None:
        engine = plan.engine
        self._lora = engine.lora
        self._steps = engine_steps(step_times(plan.model, plan.hardware), plan.hardware, engine.speculation, engine.lora)
        self._most_tokens = engine.max_batch_tokens
        self._decodes = not plan.layout.pairs
        self.step_tokens = engine.speculation.tokens_per_request
        """Tokens that a step computes of each decoding request: one, and those of a draft."""
        self.tokens_per_step = engine.speculation.expected_tokens()
        """Tokens that a step yields of each answer, on average."""

    def step_s(self, chunks: Sequence[tuple[int, int]], ended: int, requests: int, context_tokens: int) -> float:
        """Return the seconds of a step: (tokens, first token) of each prompt that it computes, how many of these end, and the
        decoding requests with the tokens of their contexts together."""
        work = Work(
            chunks=list(chunks),
            sampled_tokens=ended,
            decode_requests=requests,
            decode_context_tokens=context_tokens,
            tokens_per_decode=self.step_tokens,
        )
        if self._lora.is_on:
            computed = sum([tokens for tokens, _ in chunks]) + requests * self.step_tokens
            work.adapters = AdapterWork(computed, min(self._lora.max_loras, requests + len(chunks)), 0)
        return self._steps.leap_s(work, 1)

    def prefill_s(self, prefills: Sequence[tuple[int, int]], decoding_requests: int, decoding_tokens: int) -> float:
        """Return the seconds of the steps that compute prompts, (first token, tokens) each, one after another.

        A step has at most ``engine.max_batch_tokens`` tokens, among them those of each decoding request, also of those whose
        prompts the steps before have computed, if the engine decodes.
        """
        seconds, at, start = 0.0, 0, prefills[0][0] if prefills else 0
        while at < len(prefills):
            room = max(1, self._most_tokens - decoding_requests * self.step_tokens)
            chunks, ended = list[tuple[int, int]](), list[int]()
            while room and at < len(prefills):
                tokens = min(room, prefills[at][1] - start)
                if tokens:
                    chunks.append((tokens, start))
                room, start = room - tokens, start + tokens
                if start == prefills[at][1]:
                    ended.append(start)
                    at += 1
                    start = prefills[at][0] if at < len(prefills) else 0
            seconds += self.step_s(chunks, len(ended), decoding_requests, decoding_tokens)
            if self._decodes:
                decoding_requests += len(ended)
                decoding_tokens += sum(ended)
        return seconds

    def decode_step_s(self, requests: int, tokens: int) -> float:
        """Return the seconds of a step in which so many requests decode, with contexts of so many tokens together."""
        return self.step_s((), 0, requests, tokens)
