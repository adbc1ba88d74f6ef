"""The duration of steps on a machine with noise."""

from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.compute import Steps, step_times
from kvsim.substrate.simulated.noise import NoiseSource


def steps_of_run(model: ModelSpec, hardware: HardwareSpec, *, seed: int, engines: int) -> Steps:
    """Return the step times of a run: with noise if the machine has any."""
    return step_times(model, hardware) if hardware.noise is None else NoisySteps(model, hardware, seed=seed, engines=engines)


class NoisySteps(Steps):
    """Multiplies the expected durations by the machine's factors, found by the number of the engine's step.

    decode steps  the sum over the leap; each step differs from the expected one by its factor times the leap's first step, whose
                  factor is also that of what a leap takes beyond its steps. If each step is formed, each has its part of that
    prefill       computation times its factor, or launch times its own, whichever is longer, both with their overheads
    """

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, *, seed: int, engines: int) -> None:
        assert hardware.noise is not None
        source = NoiseSource(hardware.noise, seed)
        self._expected = step_times(model, hardware.without_launches())
        self.hardware = hardware
        self._decode = [source.factors("decode_steps", engine) for engine in range(engines)]
        self._prefill = [source.factors("prefill_steps", engine) for engine in range(engines)]
        self._launch = [source.factors("launches", engine) for engine in range(engines)]

    def leap_s(self, work: Work, steps: int) -> float:
        """Return the seconds of the first ``steps`` steps. A step keeps its factors, however often it is asked for."""
        expected_s, number = self._expected.leap_s(work, steps), work.decode_step
        if work.chunks:
            computed_s = expected_s * (1.0 + self._prefill[work.engine].excess(number, 1))
            launch_s = self.hardware.launch_s(len(work.chunks), work.decode_requests, has_copies=work.has_copies)
            if not launch_s:
                return computed_s
            launch_s += self.hardware.prefill_overhead_s + self.hardware.step_overhead_s
            return max(computed_s, launch_s * (1.0 + self._launch[work.engine].excess(number, 1)))
        noise, once_s = self._decode[work.engine], self.hardware.leap_extra_s(has_copies=work.has_copies)
        step_s = (expected_s if steps == 1 else self._expected.leap_s(work, 1)) - once_s
        later_s = self.hardware.leap_extra_s(has_copies=False) * noise.excess(number + 1, work.times_formed(steps) - 1)
        return expected_s + step_s * noise.excess(number, steps) + once_s * noise.excess(number, 1) + later_s
