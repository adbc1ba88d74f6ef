"""Models that a rested GPU is faster than a busy one, because a GPU lowers its clock under load."""

from math import exp

from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec
from kvsim.substrate.simulated.compute import Steps


class Coldness:
    """How rested a GPU is: 1 after a long rest, 0 when it is always busy.

    Work warms it, and everything else lets it cool, both exponentially with time constant ``time_s``.
    """

    def __init__(self, time_s: float) -> None:
        self.time_s = time_s
        self._cold, self._at_s = 1.0, 0.0

    def over(self, begin_s: float, seconds: float) -> float:
        """Return the integral of the coldness over work that begins at ``begin_s``, in seconds."""
        return self._at(begin_s) * self.time_s * (1.0 - exp(-seconds / self.time_s))

    def work(self, begin_s: float, seconds: float) -> None:
        """Let the GPU work. Call in order of ``begin_s``."""
        self._cold, self._at_s = self._at(begin_s) * exp(-seconds / self.time_s), begin_s + seconds

    def _at(self, at_s: float) -> float:
        return 1.0 - (1.0 - self._cold) * exp(-max(0.0, at_s - self._at_s) / self.time_s)


class Warmth:
    """Durations of steps with prefill on a GPU that these warm, with time constant ``compute_curves.warming_s``.

    At each moment of a step, the time it takes on a busy GPU is reduced by ``1 - compute_curves.rested_prefill_share`` times the
    coldness. The overheads of a step, its last part, are the host's: they take as long on any GPU.
    """

    def __init__(self, hardware: HardwareSpec) -> None:
        curves = hardware.compute_curves
        self.gain = 1.0 - curves.rested_prefill_share if curves else 0.0
        self.overhead_s = hardware.prefill_overhead_s + hardware.step_overhead_s
        self._coldness = Coldness(curves.warming_s if curves else 1.0)

    def prefill_s(self, begin_s: float, warm_s: float, launch_s: float = 0.0) -> float:
        """Return the seconds of a step with prefill that begins at ``begin_s`` and takes ``warm_s`` on a warm GPU.

        The step takes at least ``launch_s`` and its overheads, or ``warm_s`` if that is less. Call in order of ``begin_s``.
        """
        if not self.gain:
            return warm_s
        saved_s = self.gain * self._coldness.over(begin_s, max(0.0, warm_s - self.overhead_s))
        took_s = max(warm_s - saved_s, min(warm_s, launch_s + self.overhead_s))
        self._coldness.work(begin_s, took_s)
        return took_s


class WarmSteps:
    """The durations of steps, on GPUs that warm and rest meanwhile: one for each engine."""

    def __init__(self, steps: Steps, hardware: HardwareSpec, *, engines: int = 1) -> None:
        self.steps = steps
        """Durations on warm GPUs."""
        self.hardware = hardware
        self._warmth = [Warmth(hardware) for _ in range(engines)]

    def leap_s(self, work: Work, steps: int, begin_s: float) -> float:
        """Return the seconds of the first ``steps`` steps of work that begins at ``begin_s``. Of each engine, call in order."""
        seconds, warmth = self.steps.leap_s(work, steps), self._warmth[work.engine]
        if not (work.chunks and warmth.gain):
            return seconds
        launch_s = self.hardware.launch_s(len(work.chunks), work.decode_requests, has_copies=work.has_copies)
        return warmth.prefill_s(begin_s, seconds, launch_s)
