"""What a machine would take for a batch, by the step times of a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.calibration.server.batches import BURST, DECODE, PROMPT, Batch, grain_of
from kvsim.calibration.server.measurements import Measurements, Reading, readings
from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.compute import step_times
from kvsim.substrate.simulated.warmth import WarmSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A reading, and the steps that it is the sum of, of a burst after those of its first prompt."""

    reading: Reading
    works: Sequence[Work]

    @property
    def is_request(self) -> bool:
        """Whether it is the time of a request, not of steps alone."""
        return self.reading.batch.kind == PROMPT

    @property
    def untimed(self) -> int:
        """How many of the steps come before what is timed."""
        if self.reading.batch.kind != BURST:
            return 0
        return 1 + next(at for at, work in enumerate(self.works) if work.sampled_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the request's prompt."""
        return self.reading.batch.tokens + self.reading.batch.context


def points(measured: Measurements) -> list[Point]:
    """Return all that was read, with its steps."""
    return [Point(reading=one, works=works(one, measured)) for one in readings(measured)]


def works(reading: Reading, measured: Measurements) -> list[Work]:
    """Return the steps of a reading."""
    batch, cached = reading.batch, reading.cached_tokens
    end = batch.tokens + (batch.context if batch.kind == PROMPT else 0)
    if batch.kind == PROMPT:
        return chunks(cached, end, measured.step_tokens)
    if batch.kind == BURST:
        return burst(batch.tokens, batch.requests, measured.step_tokens)
    step = Work(
        decode_requests=batch.requests,
        decode_context_tokens=reading.decoding_tokens,
        repeated_context_tokens=batch.repeated_tokens(grain_of(measured.page_tokens)),
    )
    if batch.kind == DECODE:
        return [step]
    begin = min(cached, end - 1)
    prompt = Work(chunks=[(end - begin, begin)], sampled_tokens=1)
    if not measured.joins_prompts:
        return [prompt, step]
    step.chunks, step.sampled_tokens = prompt.chunks, 1
    return [step]


def chunks(cached: int, end: int, step_tokens: int) -> list[Work]:
    """Return the steps that compute a prompt from its first token that is not cached, which the last token never is."""
    begin = min(cached, end - 1)
    starts = range(begin, end, step_tokens)
    steps = [Work(chunks=[(min(step_tokens, end - start), start)]) for start in starts]
    steps[-1].sampled_tokens = 1
    return steps


def burst(tokens: int, prompts: int, step_tokens: int) -> list[Work]:
    """Return the steps that compute prompts sent together: the first one alone, then as many as there is room for."""
    steps = chunks(0, tokens, step_tokens)
    current, room = Work(), step_tokens
    for _ in range(prompts - 1):
        done = 0
        while done < tokens:
            if not room:
                steps.append(current)
                current, room = Work(), step_tokens
            count = min(room, tokens - done)
            current.chunks.append((count, done))
            done, room = done + count, room - count
        current.sampled_tokens += 1
    return [*steps, current]


def expected_s(point_list: Sequence[Point], model: ModelSpec, hardware: HardwareSpec) -> list[float]:
    """Return the seconds of each point on a machine that has rested before."""
    steps = step_times(model, hardware)
    return [
        steps_s(WarmSteps(steps, hardware), point.works, point.untimed)
        + (hardware.request_s(point.prompt_tokens) if point.is_request else 0.0)
        for point in point_list
    ]


def steps_s(steps: WarmSteps, works: Sequence[Work], untimed: int = 0) -> float:
    """Return the seconds of steps one after another, without those of the first ``untimed``."""
    ends_s = [0.0]
    for work in works:
        ends_s.append(ends_s[-1] + steps.leap_s(work, 1, ends_s[-1]))
    return ends_s[-1] - ends_s[untimed]


def batch_s(batch: Batch, measured: Measurements, model: ModelSpec, hardware: HardwareSpec) -> float:
    """Return the seconds that a machine would take for a whole batch, before anything was measured."""
    cached = batch.context if batch.kind == PROMPT else 0
    guess = Reading(
        batch=batch,
        seconds=1.0,
        samples=0,
        error=1.0,
        cached_tokens=cached,
        decoding_tokens=batch.decoding * (batch.context + measured.page_tokens + batch.answer_tokens // 2),
    )
    whole = steps_s(WarmSteps(step_times(model, hardware), hardware), works(guess, measured))
    return whole + (0.0 if batch.decoding else hardware.request_s(batch.tokens + cached))
