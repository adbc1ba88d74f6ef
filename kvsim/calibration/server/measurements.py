"""What a server's batches took: written to a file, read back, and reduced to one number for each batch."""

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import inf, nan, sqrt
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvsim.calibration.server.batches import BURST, DECODE, PROMPT, Batch, Count
from kvsim.errors import UsageError
from kvsim.results.observed import Seconds
from kvsim.trace.files import open_file

SCHEMA = 1
AboveZero = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
AFTERWARDS = 2
"""Tokens after a mixed step until steps are plain again."""
LEAST_LEAD_S = 0.01
"""By how much the first prompt of a burst must be sent before the others."""
SAME_STEP_S = 0.005
"""First tokens of a step reach a client within this time, which is busy with all of them."""
NEAR = 4
"""Plain steps before a mixed one, and after it, that it is compared with."""


class Seen(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One request. Times count from the first request of its batch; absent if it failed."""

    sent_s: Seconds
    prompt_tokens: Count
    first_token_s: Seconds | None = None
    end_s: Seconds | None = None
    output_tokens: Count = 0
    cached_tokens: Count | None = None
    """None: the server does not say."""
    gaps_s: list[Seconds] = []
    """From each part of the answer to the next."""
    error: str | None = None

    @property
    def times_s(self) -> list[float]:
        """When the parts of the answer came."""
        times = [nan if self.first_token_s is None else self.first_token_s]
        for gap in self.gaps_s:
            times.append(times[-1] + gap)
        return times


class Played(msgspec.Struct, kw_only=True):
    """A batch, played once."""

    batch: int
    """Its number in ``Measurements.batches``."""
    round: int
    requests: list[Seen]
    is_disturbed: bool = False
    """Whether a request of another batch was there at the same time."""


class Measurements(msgspec.Struct, kw_only=True):
    """All that a calibration has measured, so that it can be fitted without the server."""

    kvsim_server_steps: int = SCHEMA
    """The version of this schema."""
    source: str
    engine: str
    version: str | None
    served_model: str | None
    step_tokens: AboveZero
    """Tokens that a step computes at most."""
    joins_prompts: bool
    """Whether a step computes prompts and decodes at the same time. False: decode steps wait meanwhile."""
    page_tokens: AboveZero
    seconds: Seconds
    """How long it took."""
    batches: list[Batch]
    played: list[Played]
    notes: list[str] = []


def write_measurements(measured: Measurements) -> bytes:
    return msgspec.json.encode(measured)


def read_measurements(path: Path) -> Measurements:
    """Read a file, decompressed if its name ends in ``.gz`` or ``.zst``. Raises UsageError if it is none of a server's steps."""
    try:
        found = msgspec.json.decode(content_of(path), type=Measurements)
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise UsageError(f"measured: {path} has no measurements of a server: {error}") from error
    if found.kvsim_server_steps != SCHEMA:
        raise UsageError(f"measured: {path} is of another version of kvsim")
    if problem := misfit(found):
        raise UsageError(f"measured: {path} has no measurements of a server: {problem}")
    return found


def content_of(path: Path) -> bytes:
    try:
        with open_file(str(path)) as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"measured: {path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise UsageError(f"measured: {path}: the gzip file is truncated or damaged") from error


def misfit(measured: Measurements) -> str | None:
    """Say what does not belong together in measurements; None if all does."""
    for at, batch in enumerate(measured.batches):
        if not (batch.decoding or batch.prompts) or bool(batch.prompts) != bool(batch.tokens):
            return f"batches[{at}] computes nothing"
    for at, one in enumerate(measured.played):
        if not 0 <= one.batch < len(measured.batches):
            return f"played[{at}] is of batch {one.batch}, of {len(measured.batches)}"
        batch = measured.batches[one.batch]
        if len(one.requests) != batch.prompts + batch.decoding:
            return f"played[{at}] has {len(one.requests)} requests, its batch {batch.prompts + batch.decoding}"
        if any((seen.cached_tokens or 0) > seen.prompt_tokens for seen in one.requests):
            return f"played[{at}] has a request with more cached tokens than its prompt has"
    return None


class Steps(NamedTuple):
    """Steps of one request."""

    begin_s: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]

    def near(self, begin_s: float, end_s: float) -> float:
        """Return the mean time of those around a stretch of time: as many before it as after it."""
        at, until = np.searchsorted(self.begin_s, (begin_s, end_s))
        before, after = self.seconds[:at], self.seconds[until:]
        count = min(NEAR, len(before), len(after))
        if not count:
            return float(np.mean((before if len(before) else after)[:NEAR])) if len(self.seconds) else nan
        return float(np.mean([*before[-count:], *after[:count]]))


class Reading(msgspec.Struct, kw_only=True):
    """A batch's seconds: the median of its samples."""

    batch: Batch
    seconds: float
    samples: int
    error: float
    """Standard error of the median, relative; infinite with a single sample."""
    cached_tokens: int
    """Of each timed prompt."""
    decoding_tokens: int
    """What all decoding requests together attend over while the timed steps run."""


def readings(measured: Measurements) -> list[Reading]:
    """Return what was read of each batch; without those of which nothing was."""
    found = [reading(batch, [one for one in measured.played if one.batch == at]) for at, batch in enumerate(measured.batches)]
    return [one for one in found if one is not None]


def reading(batch: Batch, played: Sequence[Played]) -> Reading | None:
    """Return a batch's reading from all times that it was played undisturbed; None without any."""
    found = [(one.requests, samples(batch, one.requests)) for one in played if not one.is_disturbed]
    known = [requests for requests, some in found if some]
    values = [value for _, some in found for value in some]
    if not values:
        return None
    told = [seen.cached_tokens for requests in known for seen in requests[: batch.prompts] if seen.cached_tokens is not None]
    expected = batch.context if batch.kind == PROMPT else 0
    return Reading(
        batch=batch,
        seconds=median(values),
        samples=len(values),
        error=relative_error(values),
        cached_tokens=round(median(told)) if told else expected,
        decoding_tokens=round(median([attended(batch, requests) for requests in known])),
    )


def attended(batch: Batch, requests: Sequence[Seen]) -> float:
    """Return the tokens that all decoding requests together attend over: their prompts, and what they have generated when a timed
    prompt arrives or, without any, half of their answers."""
    prompts, decoding = requests[: batch.prompts], requests[batch.prompts :]
    begins_s = [seen.sent_s for seen in timed(prompts, decoding)] if prompts and decoding else []
    found = 0.0
    for seen in decoding:
        times = seen.times_s
        generated: list[float] = [bisect_right(times, begin_s) for begin_s in begins_s] or [seen.output_tokens / 2]
        found += seen.prompt_tokens + sum(generated) / len(generated)
    return found


def relative_error(values: Sequence[float]) -> float:
    """Return the standard error of the median, relative to it, by the median deviation: for normal samples."""
    if len(values) < 2:
        return inf
    middle = median(values)
    return 1.253 * 1.4826 * median([abs(value - middle) for value in values]) / sqrt(len(values)) / middle


def samples(batch: Batch, requests: Sequence[Seen]) -> list[float]:
    """Return the seconds that a batch, played once, shows: nothing if a request failed.

    prompt   from sending it to its first token
    burst    from the first token of the first prompt to that of the last one, if the first one was sent ahead of the others and
             computed alone: what it takes a server to take them all in at once is no part of its steps
    decode   the time of a step while all requests decode: the mean within each request, the median of these
    mixed    the step that computes a prompt, of each prompt that is there alone: the median over the decoding requests
    """
    if any(seen.error is not None or seen.first_token_s is None or seen.end_s is None for seen in requests):
        return []
    prompts, decoding = requests[: batch.prompts], requests[batch.prompts :]
    if batch.kind == PROMPT:
        values = [seen.times_s[0] - seen.sent_s for seen in prompts]
    elif batch.kind == BURST:
        values = burst_s(prompts)
    elif batch.kind == DECODE:
        values = [step_s(decoding)]
    else:
        plain = [plain_steps(seen, prompts) for seen in decoding]
        values = [mixed_step_s(decoding, plain, prompt) for prompt in timed(prompts, decoding)]
    return [value for value in values if value > 0]


def burst_s(prompts: Sequence[Seen]) -> list[float]:
    """Return the time from the first prompt's first token to the last one's, if the first prompt was sent and computed alone."""
    sent_s, first_s = (sorted(values) for values in zip(*[(seen.sent_s, seen.times_s[0]) for seen in prompts], strict=True))
    is_alone = len(prompts) > 1 and sent_s[1] >= sent_s[0] + LEAST_LEAD_S and first_s[1] > first_s[0] + SAME_STEP_S
    return [first_s[-1] - first_s[0]] if is_alone else []


def timed(prompts: Sequence[Seen], decoding: Sequence[Seen]) -> list[Seen]:
    """Return the prompts that were computed one by one while all others decoded."""
    begin_s, end_s = together(decoding)
    return [seen for seen in alone(prompts) if begin_s < seen.sent_s and seen.times_s[0] < end_s]


def alone(prompts: Sequence[Seen]) -> list[Seen]:
    """Return the prompts that were not computed while another one waited or was computed."""
    spans = [(seen.sent_s, seen.times_s[0]) for seen in prompts]
    return [
        seen
        for seen, (begin_s, end_s) in zip(prompts, spans, strict=True)
        if sum(begin_s < other_end_s and other_begin_s < end_s for other_begin_s, other_end_s in spans) == 1
    ]


def together(decoding: Sequence[Seen]) -> tuple[float, float]:
    """Return from when to when all requests decode."""
    return max(seen.times_s[0] for seen in decoding), min(seen.times_s[-1] for seen in decoding)


def step_s(decoding: Sequence[Seen]) -> float:
    """Return the time of a step while all requests decode; NaN if that is for less than five parts of an answer."""
    begin_s, end_s = together(decoding)
    found = []
    for seen in decoding:
        inside = [at for at in seen.times_s if begin_s <= at <= end_s]
        if len(inside) > 4:
            parts = len(seen.gaps_s) + 1
            found.append((inside[-1] - inside[0]) / (len(inside) - 1) * parts / max(parts, seen.output_tokens))
    return median(found) if found else nan


def plain_steps(seen: Seen, prompts: Sequence[Seen]) -> Steps:
    """Return the steps of a decoding request in which no prompt was there, nor shortly before."""
    times = np.array(seen.times_s)
    before, after = times[:-1], times[1:]
    earlier = times[np.maximum(np.arange(len(before)) - AFTERWARDS, 0)]
    is_plain = np.ones(len(before), dtype=bool)
    for prompt in prompts:
        is_plain &= (after <= prompt.sent_s) | (earlier >= prompt.times_s[0])
    return Steps(before[is_plain], (after - before)[is_plain])


def mixed_step_s(decoding: Sequence[Seen], plain: Sequence[Steps], prompt: Seen) -> float:
    """Return the time of the step that computes a prompt.

    An engine that launches it before it hands on the tokens of the step before makes two times between tokens longer, and the
    next shorter. So all of them count, from the last token before the prompt was sent to some tokens after its own first, less as
    many plain steps of about that time, but for one.
    """
    found = []
    for seen, steps in zip(decoding, plain, strict=True):
        times = seen.times_s
        begin, end = bisect_right(times, prompt.sent_s) - 1, bisect_left(times, prompt.times_s[0]) + AFTERWARDS
        if begin >= 0 and end < len(times) and len(steps.seconds):
            found.append(times[end] - times[begin] - (end - begin - 1) * steps.near(times[begin], times[end]))
    return median(found) if found else nan


class Quality(NamedTuple):
    """How much of what was sent could be read."""

    batches: int
    lost_batches: int
    """Of which nothing could be read."""
    single: int
    """Batches that could be read once, so that nobody knows how far off that is."""
    plays: int
    lost_plays: int
    """Of which nothing could be read: a request failed, another batch was there, or the answers were no time together."""

    @classmethod
    def of(cls, measured: Measurements) -> "Quality":
        counts = [one.samples for one in readings(measured)]
        lost = [one.is_disturbed or not samples(measured.batches[one.batch], one.requests) for one in measured.played]
        whole = len(measured.batches)
        return cls(whole, whole - len(counts), counts.count(1), len(lost), sum(lost))

    def __str__(self) -> str:
        return (
            f"{self.lost_batches} of {self.batches} batches lost, {self.single} with a single sample; "
            f"{self.lost_plays} of {self.plays} plays of a batch lost"
        )


def needs_more(measured: Measurements, most_error: float) -> list[int]:
    """Return the numbers of the batches whose readings are not that good."""
    by_batch = [[one for one in measured.played if one.batch == at] for at in range(len(measured.batches))]
    known = [reading(batch, played) for batch, played in zip(measured.batches, by_batch, strict=True)]
    return [at for at, one in enumerate(known) if one is None or one.error > most_error]
