"""What a step costs: a roofline over FLOPs and bytes of memory read."""

from kvsim.engine.substrate import Work
from kvsim.hardware import HardwareSpec
from kvsim.model import ModelSpec


class Roofline:
    """Each step takes as long as its FLOPs or its memory traffic, whichever is longer, plus a fixed overhead.

    Weights are read once a step, the KV of a chunk's prefix and of every decoding request once; a recurrent state is read and
    written once for each chunk and decoding request (Williams, Waterman and Patterson: Roofline, CACM 52(4), 2009).
    """

    def __init__(self, model: ModelSpec, hardware: HardwareSpec) -> None:
        self.model = model
        self.overhead_s = hardware.step_overhead_s
        self._flops_per_s = hardware.effective_flops_per_s
        self._bytes_per_s = hardware.effective_memory_bytes_per_s
        self._attention_flops = model.decode_attention_flops_per_pair
        self._kv_bytes = model.kv_bytes_per_token
        self._state_bytes = 2 * model.state_bytes

    def first_step(self, work: Work) -> tuple[float, float]:
        """FLOPs and bytes of a leap's first step."""
        model, decoding = self.model, work.decode_requests
        tokens, flops, prefix = decoding, decoding * model.linear_flops_per_token, 0
        for count, start in work.chunks:
            tokens += count
            prefix += start
            flops += model.prefill_flops(count, start)
        flops += self._attention_flops * work.decode_context_tokens
        flops += model.sampling_flops_per_token * (decoding + work.sampled_tokens)
        kv_bytes = self._kv_bytes * (prefix + tokens + work.decode_context_tokens)
        return flops, model.weight_bytes(tokens) + kv_bytes + self._state_bytes * (decoding + len(work.chunks))

    def leap_s(self, work: Work, steps: int) -> float:
        """Seconds of the first ``steps`` steps. Both sides of the roofline grow by the same amount from step to step."""
        flops, n_bytes = self.first_step(work)
        compute_s, memory_s = flops / self._flops_per_s, n_bytes / self._bytes_per_s
        if steps == 1:
            return max(compute_s, memory_s) + self.overhead_s
        compute_more_s = work.decode_requests * self._attention_flops / self._flops_per_s
        memory_more_s = work.decode_requests * self._kv_bytes / self._bytes_per_s
        return _sum_of_larger(compute_s, compute_more_s, memory_s, memory_more_s, steps) + steps * self.overhead_s

    def steps_by(self, work: Work, elapsed_s: float, steps: int) -> int:
        """The number of steps, of at most ``steps``, after which ``elapsed_s`` have passed: the next boundary."""
        low, high = 1, steps
        while low < high:
            middle = (low + high) // 2
            if self.leap_s(work, middle) >= elapsed_s:
                high = middle
            else:
                low = middle + 1
        return low


def _sum_of_larger(a: float, a_more: float, b: float, b_more: float, count: int) -> float:
    """Sum over j = 0 ... count - 1 of max(a + j * a_more, b + j * b_more)."""
    if a < b or a == b and a_more < b_more:
        a, a_more, b, b_more = b, b_more, a, a_more
    ahead = count
    if b_more > a_more:
        ahead = min(count, int((a - b) / (b_more - a_more)) + 1)
    behind = count - ahead
    first = ahead * a + a_more * ahead * (ahead - 1) / 2
    return first + behind * b + b_more * (count * (count - 1) - ahead * (ahead - 1)) / 2
