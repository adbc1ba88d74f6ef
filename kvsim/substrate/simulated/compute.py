"""What a step costs: a roofline over FLOPs and bytes of memory read, or the sum of its measured parts."""

from abc import ABCMeta, abstractmethod
from bisect import bisect_right
from itertools import pairwise
from math import ceil, inf

from kvsim.engine.substrate import Work
from kvsim.hardware import HardwareSpec
from kvsim.model import ModelSpec


class Steps(metaclass=ABCMeta):
    """The time that steps take."""

    @abstractmethod
    def leap_s(self, work: Work, steps: int) -> float:
        """Seconds of the first ``steps`` steps, at a cost that does not grow with their number."""

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


def step_times(model: ModelSpec, hardware: HardwareSpec) -> Steps:
    """By the machine's curves where it has some, else by its peaks."""
    return Roofline(model, hardware) if hardware.compute_curves is None else MeasuredParts(model, hardware)


class Roofline(Steps):
    """Each step takes as long as its FLOPs, its memory traffic or the launch of its prefill, whichever is longest, plus a fixed
    overhead.

    Weights are read once a step, the KV of a chunk's prefix and of every decoding request once; a recurrent state is read and
    written once for each chunk and decoding request (Williams, Waterman and Patterson: Roofline, CACM 52(4), 2009).
    """

    def __init__(self, model: ModelSpec, hardware: HardwareSpec) -> None:
        self.model = model
        self.overhead_s = hardware.step_overhead_s
        self.prefill_overhead_s, self.launch_s = hardware.prefill_overhead_s, hardware.prefill_launch_s
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
        """As in the contract. Both sides of the roofline grow by the same amount from step to step."""
        flops, n_bytes = self.first_step(work)
        compute_s, memory_s = flops / self._flops_per_s, n_bytes / self._bytes_per_s
        if steps == 1:
            seconds = max(compute_s, memory_s)
            if work.chunks:
                seconds = max(seconds, self.launch_s) + self.prefill_overhead_s
            return seconds + self.overhead_s
        compute_more_s = work.decode_requests * self._attention_flops / self._flops_per_s
        memory_more_s = work.decode_requests * self._kv_bytes / self._bytes_per_s
        return _sum_of_larger(compute_s, compute_more_s, memory_s, memory_more_s, steps) + steps * self.overhead_s


class MeasuredParts(Steps):
    """Each step takes the sum of its parts, by the machine's ``compute_curves``, or the launch of its prefill, plus an overhead.

    products           FLOPs of all weight matrices, at the rate for so many FLOPs a byte of weights
    prefill attention  FLOPs of each chunk, at the rate for its rows and its context
                       (both of the next multiple of ``prefill_tile_tokens``, if a step has prefill)
    decode attention   seconds a layer by bytes of keys and values, straight between the measured points, for all attention
                       layers; at least what the fewest measured bytes take, and at least the time of its FLOPs
    recurrent states   read and written once for each chunk and decoding request, at the memory's rate
    """

    def __init__(self, model: ModelSpec, hardware: HardwareSpec) -> None:
        assert hardware.compute_curves is not None
        self.model, self.hardware, self.curves = model, hardware, hardware.compute_curves
        self._state_s = 2 * model.state_bytes / hardware.effective_memory_bytes_per_s
        layer_bytes = model.kv_bytes_per_token / model.attention_layers / hardware.gpus
        flops_s = model.decode_attention_flops_per_pair / hardware.effective_flops_per_s
        measured = [
            (n_bytes / layer_bytes, model.attention_layers * n_bytes / rate) for n_bytes, rate in self.curves.decode_attention
        ]
        self._decode_attention = Ramps([(tokens, max(seconds, flops_s * tokens)) for tokens, seconds in measured])

    def leap_s(self, work: Work, steps: int) -> float:
        seconds = steps * self._constant_s(work)
        if work.decode_requests:
            seconds += self._decode_attention.total(work.decode_context_tokens, work.decode_requests, steps)
        if work.chunks:
            seconds = max(seconds, self.hardware.prefill_launch_s) + self.hardware.prefill_overhead_s
        return seconds + steps * self.hardware.step_overhead_s

    def _constant_s(self, work: Work) -> float:
        """Seconds of the parts that are the same in every step of a leap."""
        sequences = work.decode_requests + len(work.chunks)
        attention_s = sum(self._attention_s(tokens, start) for tokens, start in work.chunks)
        return self._products_s(work) + attention_s + sequences * self._state_s

    def _products_s(self, work: Work) -> float:
        model = self.model
        tokens = work.decode_requests
        if work.chunks:
            tokens = self.curves.tiled(tokens + sum(count for count, _ in work.chunks))
        prefix = sum(start for _, start in work.chunks)
        sampled = work.decode_requests + work.sampled_tokens
        flops = tokens * model.linear_flops_per_token + prefix * model.prefix_flops_per_token
        flops += sampled * model.sampling_flops_per_token
        rate = self.curves.linear_flops_per_s(flops / model.weight_bytes(tokens))
        return flops / (rate * self.hardware.gpus)

    def _attention_s(self, tokens: int, start: int) -> float:
        model, gpus, tiled = self.model, self.hardware.gpus, self.curves.tiled(tokens)
        pairs = tiled * start + tiled * (tiled + 1) / 2
        rate = self.curves.prefill_attention_flops_per_s(tiled * model.heads / gpus, start + tiled)
        return model.attention_flops_per_pair * pairs / (rate * gpus)


class Ramps:
    """A function that is straight between points (x, y), constant before the first and, after the last, on a line through 0."""

    def __init__(self, points: list[tuple[float, float]]) -> None:
        self._starts = [0.0, *(x for x, _ in points)]
        self._values = [points[0][1], *(y for _, y in points)]
        between = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]
        self._slopes = [0.0, *between, points[-1][1] / points[-1][0]]

    def total(self, first: float, step: float, count: int) -> float:
        """The sum over x = first, first + step, ...: ``count`` values. It costs as much as the points that are passed."""
        total, done = 0.0, 0
        while done < count:
            x = first + done * step
            index = bisect_right(self._starts, x) - 1
            end = self._starts[index + 1] if index + 1 < len(self._starts) else inf
            until = count if end == inf else min(count, max(done + 1, ceil((end - first) / step)))
            terms = until - done
            slope = self._slopes[index]
            total += terms * (self._values[index] + slope * (x - self._starts[index])) + slope * step * terms * (terms - 1) / 2
            done = until
        return total


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
