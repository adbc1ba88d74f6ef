"""Measures the overhead of steps with prefill, and how much faster these are on a rested GPU, while the serving engine runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvsim.calibration.engine_overhead import LONG_TOKENS, expected_s, pages_of, play
from kvsim.calibration.machine_noise import FIRST
from kvsim.calibration.warming import TimedStep, warming
from kvsim.core.request import Request
from kvsim.engine.engine import EngineSettings
from kvsim.engine.recorder import Batch
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

LAUNCHES = 1.5
"""A step counts if the GPU needs at least this many times as long as the host needs to launch its kernels."""


@dataclass(frozen=True, kw_only=True)
class Rests:
    """Prompts, each after the answer before: in turn a row of them without a rest, and several that follow rests.

    All lengths are drawn. Steps, rests and answers are as in serving, because no model with one time constant fits everything
    that a GPU does: on an H200, the first of equal steps of 50 ms takes 10 % less after any rest than on a busy GPU, while steps
    of all lengths in a serving engine take 3 to 7 % less.
    """

    turns: int = 3
    row: int = 12
    rested: int = 14
    prompt_tokens: tuple[int, int] = (LONG_TOKENS, EngineSettings().max_batch_tokens)
    """Shortest and longest prompt, drawn evenly by their logarithms; each is a step."""
    rests_s: tuple[float, float] = (0.01, 1.0)
    """Shortest and longest rest, drawn in the same way."""
    answers: tuple[int, ...] = (1, 2, 10, 40)
    """Lengths of the answers after prompts that follow a rest, in tokens. Decoding is a rest, too."""
    seed: int = 0

    @property
    def batch_tokens(self) -> int:
        return self.prompt_tokens[1]

    @property
    def is_written_through(self) -> bool:
        return False

    def requests(self, page_tokens: int, *, shares_prefix: bool = True) -> list[Request]:
        """Build the requests, which have no pages in common."""
        random, requests, first = np.random.default_rng(self.seed), list[Request](), 0
        for index in range(self.turns * (self.row + self.rested)):
            is_rested = index % (self.row + self.rested) >= self.row
            tokens = round(between(*self.prompt_tokens, random.random()))
            rest_s, answer = between(*self.rests_s, random.random()), int(random.choice(self.answers))
            pages = tokens // page_tokens
            requests.append(
                Request(
                    index=index,
                    arrival_s=0.0,
                    prompt_tokens=tokens,
                    output_tokens=answer if is_rested else 1,
                    runs=((first, pages),) if pages else (),
                    prompt_pages=pages,
                    after=index - 1,
                    delay_s=rest_s if is_rested else 0.0,
                )
            )
            first += pages
        return requests

    def memory_pages(self, requests: Sequence[Request], page_tokens: int) -> int:
        """Return room for a request and the one before, whose pages may still be there."""
        return 2 * max(pages_of(request, page_tokens) for request in requests)


INTERPRETED = Rests(turns=1, row=2, rested=2, prompt_tokens=(8, 32), rests_s=(0.0, 0.0), answers=(2,))
"""For Triton's interpreter."""


def with_warming(model: ModelSpec, hardware: HardwareSpec, page_tokens: int, device: "torch.device") -> HardwareSpec:
    """Return ``hardware``, whose other overheads and launches are known, with what a short run of the engine shows of prefill.

    The overhead that is found was a part of the measured launch, so that becomes shorter by it. Raises UsageError if model and
    pages do not fit the machine.
    """
    rests = Rests() if device.type == "cuda" else INTERPRETED
    return warmed(hardware, timed_steps(play(rests, model, hardware, page_tokens, device).batches, model, hardware))


def warmed(hardware: HardwareSpec, steps: Sequence[TimedStep]) -> HardwareSpec:
    """Return ``hardware``, which has no overhead of prefill yet, with what these steps show.

    If too few of them count, the overhead stays a part of the launch.
    """
    found = warming(steps)
    assert hardware.compute_curves is not None and not hardware.prefill_overhead_s
    return replace(
        hardware,
        prefill_overhead_s=found.overhead_s,
        prefill_launch_s=max(0.0, hardware.prefill_launch_s - found.overhead_s),
        compute_curves=replace(hardware.compute_curves, rested_prefill_share=found.rested_share, warming_s=found.time_s),
    )


def timed_steps(batches: Sequence[Batch], model: ModelSpec, hardware: HardwareSpec) -> list[TimedStep]:
    """Return the steps with a prompt. Those count that have nothing else and take the GPU clearly longer than their launch."""
    steps = list[TimedStep]()
    for batch in batches:
        if batch.prefill_requests == 1:
            busy_s = expected_s(batch, model, hardware) - hardware.step_overhead_s
            counts = not batch.decode_requests and len(steps) >= FIRST and busy_s >= LAUNCHES * hardware.prefill_launch_s
            steps.append(TimedStep(batch.start_s, batch.end_s - batch.start_s - hardware.step_overhead_s, busy_s, counts))
    return steps


def between(low: float, high: float, share: float) -> float:
    """Return the number at this share of the way from ``low`` to ``high``, by their logarithms; ``low`` if that is 0."""
    return low * (high / low) ** share if low else low
