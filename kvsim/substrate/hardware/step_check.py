"""Compares the durations of real steps with those that the machine's description expects."""

from bisect import bisect_right
from dataclasses import asdict, dataclass
from typing import Any

from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.compute import counts_repeated, step_times
from kvsim.substrate.simulated.warmth import WarmSteps

LEAST_TOKENS: tuple[int, ...] = (1, 129, 257, 513, 1025, 2049, 4097)
"""Prompt tokens from which on steps with prefill are counted together."""
LEAST_STEPS: tuple[int, ...] = (1, 2, 10, 50)
"""The same of decode steps in a row."""


@dataclass(slots=True, kw_only=True)
class StepSum:
    """Steps of one kind and size, together."""

    kind: str
    """``prefill``, ``decode``, or ``both`` for steps with prefill and decoding requests."""
    least: int
    """Smallest size that is counted here: prompt tokens of a step or, without prefill, steps in a row."""
    leaps: int = 0
    """Single steps, or rows of decode steps."""
    steps: int = 0
    measured_s: float = 0.0
    expected_s: float = 0.0


class StepCheck:
    """Sums up the steps of a run, by kind and size."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, engines: int) -> None:
        self._expected = WarmSteps(step_times(model, hardware), hardware, engines=engines)
        self.counts_repeated = counts_repeated(hardware)
        """Whether ``Work.repeated_context_tokens`` must be set."""
        self._sums: dict[tuple[str, int], StepSum] = {}

    def add(self, work: Work, steps: int, start_s: float, end_s: float) -> None:
        """Count work that did not wait for loads. Of each engine, call in order of time."""
        expected_s = self._expected.leap_s(work, steps, start_s)
        if work.chunks:
            kind, size, bounds = "both" if work.decode_requests else "prefill", sum([n for n, _ in work.chunks]), LEAST_TOKENS
        else:
            kind, size, bounds = "decode", steps, LEAST_STEPS
        least = bounds[bisect_right(bounds, size) - 1]
        total = self._sums.setdefault((kind, least), StepSum(kind=kind, least=least))
        total.leaps += 1
        total.steps += steps
        total.measured_s += end_s - start_s
        total.expected_s += expected_s

    def rows(self) -> list[dict[str, Any]]:
        """Return the sums, by kind and size."""
        return [asdict(self._sums[key]) for key in sorted(self._sums)]
