"""The duration of steps whose requests have LoRA adapters."""

from kvsim.engine.adapters import AdapterSettings
from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec
from kvsim.substrate.simulated.compute import Steps

BYTES_PER_PARAMETER = 2
FLOPS_PER_PARAMETER = 2


class AdapterSteps(Steps):
    """Adds the time of adapters: their products, which read each adapter once for all its tokens and run beside those of the
    model's own weights, not at the same time; and before the first step, the copies of adapters that are not on the GPU."""

    def __init__(self, steps: Steps, settings: AdapterSettings, hardware: HardwareSpec) -> None:
        self._steps = steps
        n_bytes = settings.adapter_bytes
        self._token_s = n_bytes / BYTES_PER_PARAMETER * FLOPS_PER_PARAMETER / hardware.effective_flops_per_s
        self._read_s = n_bytes / hardware.effective_memory_bytes_per_s
        self._load_s = n_bytes / hardware.total_host_to_device_bytes_per_s + hardware.host_latency_s
        self._overhead_s = settings.step_overhead_s

    def leap_s(self, work: Work, steps: int) -> float:
        seconds, adapters = self._steps.leap_s(work, steps), work.adapters
        if adapters is None:
            return seconds
        each_s = max(adapters.tokens * self._token_s, adapters.adapters * self._read_s) + self._overhead_s
        return seconds + steps * each_s + adapters.loads * self._load_s
