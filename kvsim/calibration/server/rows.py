"""The rows of ``ComputeCurves`` that are fitted to a server: times of a roofline, each times a factor, as far as a GPU can."""

from collections.abc import Sequence
from itertools import pairwise, product
from math import exp, log, sqrt

from kvsim.calibration.server.least_squares import Vector
from kvsim.engine.substrate import Work
from kvsim.hardware.curves import ComputeCurves
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.communication import ExpertLoad
from kvsim.substrate.simulated.compute import kv_bytes_of_gpu

FEW_TOKENS = (1, 16, 64, 128)
MANY_TOKENS = (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
"""Tokens of the steps whose matrix products have rows of their own: all are sampled, or one is."""
CHUNK_TOKENS = (64, 256, 1024, 4096, 16384)
CONTEXT_TOKENS = (256, 1024, 4096, 16384, 65536)
"""Chunks whose attention has rows of its own."""
DECODE_TOKENS = (128, 1024, 4096, 16384, 65536, 262144)
"""Tokens that all decoding requests attend over."""
UNMEASURED_TOKENS = 1 << 22
"""More than were measured: from there on, memory is as fast as described."""
LONG_TOKENS = 16384
"""Contexts from here on are so long that they are read at most ``FASTER`` times as fast as memory is described."""
FASTER = 1.1

Chunk = tuple[int, int]
"""Tokens of a chunk, and its context, which includes them."""


class Rows:
    """The rows of ``ComputeCurves`` near the steps that were measured, with the times of a roofline, each times a factor.

    Whatever the factors are, no part is faster than the roofline's peaks, and more tokens never take less time.
    """

    def __init__(self, start: HardwareSpec, roofline: HardwareSpec, model: ModelSpec, works: Sequence[Work]) -> None:
        self.start, self.roofline, self.model = start, roofline, model
        steps = [work.decode_requests + sum(tokens for tokens, _ in work.chunks) for work in works]
        chunks = [(tokens, tokens + start) for work in works for tokens, start in work.chunks]
        decodes = [work.decode_context_tokens for work in works if work.decode_requests]
        self.tokens = near((*FEW_TOKENS, *MANY_TOKENS), steps)
        contexts = near(CONTEXT_TOKENS, [context for _, context in chunks])
        grid = product(near(CHUNK_TOKENS, [tokens for tokens, _ in chunks]), contexts)
        self.chunks: list[Chunk] = [(tokens, context) for tokens, context in grid if context >= tokens]
        self.decodes = near(DECODE_TOKENS, decodes)
        self.sizes = (len(self.tokens), len(self.chunks), len(self.decodes))

    @property
    def count(self) -> int:
        return sum(self.sizes)

    def neighbours(self) -> list[tuple[int, int]]:
        """Return the places of the factors of rows next to each other."""
        products, chunks, decodes = self.sizes
        beside = [(self.chunks.index(before), at) for at in range(chunks) for before, _ in self.smaller(self.chunks[at])]
        return [
            *pairwise(range(products)),
            *((products + one, products + other) for one, other in beside),
            *pairwise(range(products + chunks, products + chunks + decodes)),
        ]

    def smaller(self, chunk: Chunk) -> list[tuple[Chunk, float]]:
        """Return the next smaller chunks with the same tokens or the same context, and how many times as large this one is."""
        tokens, context = chunk
        fewer = [(other, tokens / other[0]) for other in self.chunks if other[0] < tokens and other[1] == context]
        shorter = [(other, context / other[1]) for other in self.chunks if other[0] == tokens and other[1] < context]
        return [*fewer[-1:], *shorter[-1:]]

    def curves(self, logs: Vector) -> ComputeCurves:
        """Return curves whose parts take so many times as long as those of the roofline."""
        factors = [exp(value) for value in logs]
        products, chunks = self.sizes[:2]
        return ComputeCurves(
            linear=self.linear(factors[:products]),
            prefill_attention=self.prefill(factors[products : products + chunks]),
            decode_attention=self.decode(factors[products + chunks :]),
        )

    def linear(self, factors: Sequence[float]) -> list[list[float]]:
        model, machine = self.model, self.roofline
        peak_flops, peak_bytes = (machine.flops_per_s * machine.gpus, machine.memory_bytes_per_s * machine.gpus)
        rows, seconds, experts = [], 0.0, ExpertLoad(model, machine)
        for tokens, factor in zip(self.tokens, factors, strict=True):
            sampled = tokens if tokens in FEW_TOKENS else 1
            flops = tokens * model.linear_flops_per_token + sampled * model.sampling_flops_per_token
            n_bytes = experts.weight_bytes(tokens)
            usual_s = max(flops / machine.effective_flops_per_s, n_bytes / machine.effective_memory_bytes_per_s)
            seconds = max(usual_s * factor, flops / peak_flops, n_bytes / peak_bytes, seconds)
            rows.append([flops / n_bytes, flops / seconds / machine.gpus])
        return rows

    def prefill(self, factors: Sequence[float]) -> list[list[float]]:
        """Return rows whose rate grows at most like the root of the tokens and of the context: their product, the time, grows."""
        machine = self.roofline
        usual, rows_per_token = machine.effective_flops_per_s / machine.gpus, self.model.heads / machine.gpus
        rates: dict[Chunk, float] = {}
        for chunk, factor in zip(self.chunks, factors, strict=True):
            most = [rates[other] * sqrt(times) for other, times in self.smaller(chunk)]
            rates[chunk] = min(usual / factor, machine.flops_per_s, *most)
        return [[tokens * rows_per_token, context, rate] for (tokens, context), rate in rates.items()]

    def decode(self, factors: Sequence[float]) -> list[list[float]]:
        """Return rows whose times grow: a factor is that of the time since the row before.

        Beyond what was measured, memory is as fast as described: short contexts take little longer than none, which is no rate.
        """
        layer_bytes = kv_bytes_of_gpu(self.model, self.roofline)
        rate = self.roofline.effective_memory_bytes_per_s / self.roofline.gpus
        fastest = FASTER * self.start.memory_bytes_per_s
        rows, before, seconds = [], 0, 0.0
        for tokens, factor in zip(self.decodes, factors, strict=True):
            least_s = max(0, tokens - max(before, LONG_TOKENS)) * layer_bytes / fastest
            seconds += max((tokens - before) * layer_bytes / rate * factor, least_s)
            before = tokens
            rows.append([tokens * layer_bytes, tokens * layer_bytes / seconds])
        seconds += (UNMEASURED_TOKENS - before) * layer_bytes / (self.start.effective_memory_bytes_per_s / self.start.gpus)
        n_bytes = UNMEASURED_TOKENS * layer_bytes
        return [*rows, [n_bytes, n_bytes / seconds]]


def near(sizes: Sequence[int], measured: Sequence[int]) -> list[int]:
    """Return the first size, and each that is the nearest one, in logarithms, to one that was measured."""
    kept = {min(sizes, key=lambda size: abs(log(size / max(one, 1)))) for one in set(measured)}
    return [size for size in sizes if size in kept or size == sizes[0]]
