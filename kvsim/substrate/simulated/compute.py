"""The duration of a step: a roofline over FLOPs and memory traffic, or the sum of its measured parts."""

from abc import ABCMeta, abstractmethod
from bisect import bisect_right
from itertools import pairwise
from math import ceil, inf

from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec, LinearHardware
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.communication import Communication, ExpertLoad


class Steps(metaclass=ABCMeta):
    """Computes the duration of steps."""

    @abstractmethod
    def leap_s(self, work: Work, steps: int) -> float:
        """Return the seconds of the first ``steps`` steps, at a cost that does not grow with their number."""

    def steps_by(self, work: Work, elapsed_s: float, steps: int) -> tuple[int, float]:
        """Return how many steps, at most ``steps``, reach the first boundary at or after ``elapsed_s``, and their seconds."""
        low, high, seconds = 1, steps, self.leap_s(work, steps)
        tried = int(steps * elapsed_s / seconds) if seconds else 0  # close, since the steps of a leap differ little
        while low < high:
            tried = min(max(tried, low), high - 1)
            tried_s = self.leap_s(work, tried)
            if tried_s >= elapsed_s:
                high, seconds = tried, tried_s
                tried -= 1
            else:
                low = tried + 1
                tried += 1
        return low, seconds


def step_times(model: ModelSpec, hardware: HardwareSpec) -> Steps:
    """Choose the model of step times: the machine's formula, measured parts if it has compute curves, otherwise the roofline."""
    if isinstance(hardware, LinearHardware):
        return Formula(hardware)
    return Roofline(model, hardware) if hardware.compute_curves is None else MeasuredParts(model, hardware)


def counts_repeated(hardware: HardwareSpec) -> bool:
    """Return whether steps depend on ``Work.repeated_context_tokens``, which takes time to count."""
    curves = hardware.compute_curves
    return curves is not None and curves.repeated_context_share < 1


def kv_bytes_of_gpu(model: ModelSpec, hardware: HardwareSpec) -> float:
    """Return the bytes of keys and values that each GPU reads of a token in an attention layer: its part, or its copy."""
    part = hardware.gpus / model.kv_copies(hardware.attention_gpus)
    return model.kv_bytes_per_token / model.attention_layers / part


class Formula(Steps):
    """A step takes the sum of the terms of ``LinearHardware``."""

    def __init__(self, hardware: LinearHardware) -> None:
        self.hardware = hardware

    def leap_s(self, work: Work, steps: int) -> float:
        """Return the seconds of the first ``steps`` steps, each of which attends over one more token per request."""
        hardware, decoding = self.hardware, work.decode_requests
        tokens = sum([count for count, _ in work.chunks])
        pairs = sum([count * start for count, start in work.chunks])
        context = steps * work.decode_context_tokens + decoding * (steps * (steps - 1) // 2)
        return (
            steps * (hardware.fixed_s + hardware.decode_request_s * decoding * work.tokens_per_decode)
            + hardware.prefill_token_s * tokens
            + hardware.chunk_context_s * pairs
            + hardware.decode_context_s * context
        )


class Roofline(Steps):
    """A step takes as long as its FLOPs, its memory traffic or the launch of its prefill, whichever is longest, plus fixed
    overheads (Williams, Waterman and Patterson: Roofline, CACM 52(4), 2009). ``Communication`` adds to FLOPs and memory traffic.

    Per step, weights are read once, the KV of each chunk's prefix and of each decoding request is read once, as far as it is in
    a layer's window, and a recurrent state is read and written once for each chunk and decoding request. GPUs with copies of the
    same KV each read their own.
    """

    def __init__(self, model: ModelSpec, hardware: HardwareSpec) -> None:
        self.model, self.hardware = model, hardware
        self.overhead_s = hardware.step_overhead_s
        self.communication = Communication(model, hardware)
        self.experts = ExpertLoad(model, hardware)
        self._flops_per_s = hardware.effective_flops_per_s
        self._bytes_per_s = hardware.effective_memory_bytes_per_s
        self._attention_flops = model.decode_attention_flops_per_pair
        self._kv_bytes = model.kv_bytes_per_token * model.kv_copies(hardware.attention_gpus)
        self._has_windows = model.sliding_window_layers > 0
        self._state_bytes = 2 * model.state_bytes
        self._linear_flops = model.linear_flops_per_token
        self._prefills = model.prefills()
        self._sampling_flops = model.sampling_flops_per_token
        self._prefill_overhead_s = hardware.prefill_overhead_s
        self._extra_s = [hardware.leap_extra_s(has_copies=has_copies) for has_copies in (False, True)]
        """What a leap that is formed once takes beyond its steps, by whether there are copies."""

    def first_step(self, work: Work) -> tuple[float, float]:
        """Return FLOPs and bytes of a leap's first step."""
        model, decoding, each = self.model, work.decode_requests, work.tokens_per_decode
        decoded = decoding * each
        tokens, flops, prefix = decoded, decoded * self._linear_flops, 0
        for count, start in work.chunks:
            tokens += count
            prefix += start
            flops += self._prefills.of(count, start)
        context = float(work.decode_context_tokens)
        read = prefix + context
        if self._has_windows:
            context = model.read_tokens(context, decoding)
            read = context + sum([model.read_tokens(start) for _, start in work.chunks])
        pairs = context if each == 1 else each * context + decoded * (each - 1) // 2
        flops += self._attention_flops * pairs
        flops += self._sampling_flops * (decoded + work.sampled_tokens) + self.experts.more_flops(tokens)
        kv_bytes = self._kv_bytes * (read + tokens)
        return flops, self.experts.weight_bytes(tokens) + kv_bytes + self._state_bytes * (decoding + len(work.chunks))

    def leap_s(self, work: Work, steps: int) -> float:
        """Return the seconds of the first ``steps`` steps. Each side of the roofline grows by a constant amount per step."""
        flops, n_bytes = self.first_step(work)
        compute_s, memory_s = flops / self._flops_per_s, n_bytes / self._bytes_per_s
        communication_s = self.communication.step_s(work)
        if work.chunks:
            launch_s = self.hardware.launch_s(len(work.chunks), work.decode_requests, has_copies=work.has_copies)
            return max(max(compute_s, memory_s) + communication_s, launch_s) + self._prefill_overhead_s + self.overhead_s
        if self._has_windows:
            seconds = self._with_windows(compute_s, memory_s, work, steps)
        else:
            seconds = self._growing(compute_s, memory_s, work.decode_requests, steps)
        if work.forms_each_step:
            extra_s = self.hardware.leap_extra_s(work.times_formed(steps), has_copies=work.has_copies)
        else:
            extra_s = self._extra_s[1 if work.has_copies else 0]
        return seconds + steps * (communication_s + self.overhead_s) + extra_s

    def _growing(self, compute_s: float, memory_s: float, tokens: float, steps: int) -> float:
        """Return the seconds of steps of which the first takes so long, and each reads ``tokens`` tokens more than the last."""
        compute_more_s = tokens * self._attention_flops / self._flops_per_s
        memory_more_s = tokens * self._kv_bytes / self._bytes_per_s
        return _sum_of_larger(compute_s, compute_more_s, memory_s, memory_more_s, steps)

    def _with_windows(self, compute_s: float, memory_s: float, work: Work, steps: int) -> float:
        """The same for a model with windows: once the mean context fills them, only the other layers read more."""
        model, decoding = self.model, work.decode_requests
        before = steps_to_full(model, work.decode_context_tokens, decoding, steps)
        seconds = self._growing(compute_s, memory_s, decoding, before)
        context = work.decode_context_tokens
        tokens = model.read_tokens(context + before * decoding, decoding) - model.read_tokens(context, decoding)
        compute_s += tokens * self._attention_flops / self._flops_per_s
        memory_s += tokens * self._kv_bytes / self._bytes_per_s
        return seconds + self._growing(compute_s, memory_s, decoding * (1.0 - model.window_share), steps - before)


def steps_to_full(model: ModelSpec, context_tokens: float, requests: int, steps: int) -> int:
    """Return how many of ``steps`` decode steps come before the mean context of ``requests`` requests fills the windows."""
    missing = requests * model.sliding_window_tokens - context_tokens
    return min(steps, max(0, ceil(missing / requests))) if requests else 0


class MeasuredParts(Steps):
    """A step takes the sum of its parts, by the machine's ``compute_curves``, and of ``Communication``, or at least the launch
    of its prefill, plus overheads.

    matrix products    FLOPs of all weight matrices, at the rate for the step's FLOPs per byte of weights
    prefill attention  FLOPs of each chunk, at the rate for its query rows and context; with ``pads_chunks``, as many queries for
                       each as the longest has
                       (if a step has prefill, both count tokens rounded up to multiples of ``prefill_tile_tokens``)
    decode attention   seconds per layer by bytes of keys and values, linear between the measured points, times the attention
                       layers; at least the time of the smallest measured point, and at least the time of the FLOPs. Context
                       that several requests have in common counts once, and ``repeated_context_share`` each further time,
                       as far as the GPU's cache holds the different contexts (``repeated_context_bytes``)
    recurrences        elements of each chunk's states times its tokens, and bytes of states that decoding requests read and
                       write, at the rates for their numbers; without curves for them, states are read and written once for each
                       chunk and decoding request, at the rate of GPU memory, and FLOPs count as matrix products
    """

    def __init__(self, model: ModelSpec, hardware: HardwareSpec) -> None:
        assert hardware.compute_curves is not None
        self.model, self.hardware, self.curves = model, hardware, hardware.compute_curves
        self.communication = Communication(model, hardware)
        self.experts = ExpertLoad(model, hardware)
        self._has_scan = model.is_hybrid and self.curves.scan is not None
        self._state_s = 2 * model.state_bytes / hardware.effective_memory_bytes_per_s
        self._product_flops = model.linear_flops_per_token - (model.recurrence_flops_per_token if self._has_scan else 0.0)
        self._layer_bytes = layer_bytes = kv_bytes_of_gpu(model, hardware)
        flops_s = model.decode_attention_flops_per_pair / hardware.effective_flops_per_s
        self._pair_s = flops_s
        measured = [
            (n_bytes / layer_bytes, model.attention_layers * n_bytes / rate) for n_bytes, rate in self.curves.decode_attention
        ]
        self._decode_attention = Ramps([(tokens, max(seconds, flops_s * tokens)) for tokens, seconds in measured])

    def leap_s(self, work: Work, steps: int) -> float:
        seconds = steps * self._constant_s(work)
        if work.decode_requests:
            seconds += self._decode_attention_s(work, steps)
        hardware = self.hardware
        if work.chunks:
            launch_s = hardware.launch_s(len(work.chunks), work.decode_requests, has_copies=work.has_copies)
            seconds = max(seconds, launch_s) + hardware.prefill_overhead_s
        else:
            seconds += hardware.leap_extra_s(work.times_formed(steps), has_copies=work.has_copies)
        return seconds + steps * hardware.step_overhead_s

    def _decode_attention_s(self, work: Work, steps: int) -> float:
        """Return the seconds of decode attention, which reads keys and values; in windows, up to their size. Where a draft is
        checked, it takes at least the time of its FLOPs."""
        tokens, requests = self._read_tokens(work), work.decode_requests
        seconds, share = self._decode_attention.total(tokens, requests, steps), self.model.window_share
        if share:
            before = steps_to_full(self.model, tokens, requests, steps)
            full_s = self._decode_attention.total(requests * self.model.sliding_window_tokens, 1, 1)
            in_windows_s = self._decode_attention.total(tokens, requests, before) + (steps - before) * full_s
            seconds = (1.0 - share) * seconds + share * in_windows_s
        if work.tokens_per_decode == 1:
            return seconds
        pairs = work.tokens_per_decode * self.model.read_tokens(work.decode_context_tokens, requests)
        return max(seconds, self._pair_s * pairs)

    def _read_tokens(self, work: Work) -> float:
        """Return the tokens of context that take as long to read, without repetitions, as those of the first step."""
        tokens, repeated = work.decode_context_tokens, work.repeated_context_tokens
        return tokens - repeated * self.curves.repeated_saving((tokens - repeated) * self._layer_bytes) if repeated else tokens

    def _constant_s(self, work: Work) -> float:
        """Return the seconds of the parts that are equal in every step of a leap."""
        longest = max([tokens for tokens, _ in work.chunks], default=0) if self.curves.pads_chunks else 0
        attention_s = sum(self._attention_s(tokens, start, longest) for tokens, start in work.chunks)
        return self._products_s(work) + attention_s + self._recurrences_s(work) + self.communication.step_s(work)

    def _recurrences_s(self, work: Work) -> float:
        if not self._has_scan:
            return (work.decode_requests + len(work.chunks)) * self._state_s
        model, gpus = self.model, self.hardware.gpus
        seconds = sum(model.state_elements * tokens / self.curves.scan_elements_per_s(tokens) for tokens, _ in work.chunks) / gpus
        if work.decode_requests:
            n_bytes = 2 * work.decode_requests * model.state_bytes / model.recurrent_layers / gpus
            seconds += model.recurrent_layers * n_bytes / self.curves.state_bytes_per_s(n_bytes)
        return seconds

    def _products_s(self, work: Work) -> float:
        model = self.model
        tokens = decoded = work.decode_requests * work.tokens_per_decode
        if work.chunks:
            tokens = self.curves.tiled(tokens + sum(count for count, _ in work.chunks))
        prefix = sum(start for _, start in work.chunks)
        sampled = decoded + work.sampled_tokens
        flops = tokens * self._product_flops + prefix * model.prefix_flops_per_token
        flops += sampled * model.sampling_flops_per_token + self.experts.more_flops(tokens)
        rate = self.curves.linear_flops_per_s(flops / self.experts.weight_bytes(tokens))
        return flops / (rate * self.hardware.gpus)

    def _attention_s(self, tokens: int, start: int, padded: int = 0) -> float:
        """Return the seconds of a chunk's attention, where queries beyond its own, up to ``padded``, attend over all of it."""
        model, gpus, tiled = self.model, self.hardware.gpus, self.curves.tiled(tokens)
        queries = max(tiled, self.curves.tiled(padded))
        pairs = model.attention_pairs(tiled, start) + (queries - tiled) * model.read_tokens(start + tiled)
        rate = self.curves.prefill_attention_flops_per_s(queries * model.heads / gpus, start + tiled)
        return model.attention_flops_per_pair * pairs / (rate * gpus)


class Ramps:
    """A piecewise linear function: constant before the first point (x, y), proportional to x after the last."""

    def __init__(self, points: list[tuple[float, float]]) -> None:
        self._starts = [0.0, *(x for x, _ in points)]
        self._values = [points[0][1], *(y for _, y in points)]
        between = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]
        self._slopes = [0.0, *between, points[-1][1] / points[-1][0]]

    def total(self, first: float, step: float, count: int) -> float:
        """Return the sum over x = first, first + step, ... (``count`` values). The cost grows with the points passed."""
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
    """Return the sum over j = 0 ... count - 1 of max(a + j * a_more, b + j * b_more)."""
    if a < b or a == b and a_more < b_more:
        a, a_more, b, b_more = b, b_more, a, a_more
    ahead = count
    if b_more > a_more:
        ahead = min(count, int((a - b) / (b_more - a_more)) + 1)
    behind = count - ahead
    first = ahead * a + a_more * ahead * (ahead - 1) / 2
    return first + behind * b + b_more * (count * (count - 1) - ahead * (ahead - 1)) / 2
