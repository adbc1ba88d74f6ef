"""A GPU that has rested is faster than one that is busy: it lowers its clock under load."""

from math import exp

from kvsim.hardware import HardwareSpec


class Warmth:
    """How warm prefill has made the GPU: 0 after a rest, 1 when it is busy all the time.

    Prefill warms it, anything else lets it cool, both exponentially with ``compute_curves.warming_s``. At each moment of a step,
    what it takes on a warm GPU is shortened by ``1 - compute_curves.rested_prefill_share``, times how cold the GPU is.
    """

    def __init__(self, hardware: HardwareSpec) -> None:
        curves = hardware.compute_curves
        self.gain = 1.0 - curves.rested_prefill_share if curves else 0.0
        self.warming_s = curves.warming_s if curves else 1.0
        self.least_s = hardware.prefill_launch_s + hardware.prefill_overhead_s + hardware.step_overhead_s
        self._cold, self._at_s = 1.0, 0.0

    def prefill_s(self, begin_s: float, warm_s: float) -> float:
        """What a step with prefill takes that begins now and takes ``warm_s`` on a warm GPU; its launch at least.

        Steps come in the order of their beginning.
        """
        if not self.gain:
            return warm_s
        cold = 1.0 - (1.0 - self._cold) * exp(-max(0.0, begin_s - self._at_s) / self.warming_s)
        saved_s = self.gain * cold * self.warming_s * (1.0 - exp(-warm_s / self.warming_s))
        took_s = max(warm_s - saved_s, min(warm_s, self.least_s))
        self._cold, self._at_s = cold * exp(-took_s / self.warming_s), begin_s + took_s
        return took_s
