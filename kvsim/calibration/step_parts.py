"""Measures the parts of a step, by their sizes."""

import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvsim.hardware.curves import Rows
from kvsim.substrate.hardware.model.decode_graph import recorded
from kvsim.substrate.hardware.model.layer import ChunkSlots, DecodeSlots
from kvsim.substrate.hardware.model.transformer import Transformer
from kvsim.substrate.hardware.stopwatch import Stopwatch

DECODE_TOKENS = 256
"""A step of up to this many tokens counts as decoding: all tokens are sampled. In a larger step only one is."""


class StepParts:
    """Measures each part of a step as the difference between whole steps and steps without that part.

    GPU times are measured with steps replayed as CUDA graphs, which excludes kernel launches. ``decode_watch`` times steps with
    attention or recurrences of decoding requests alone, and ``watch`` all others.
    """

    def __init__(
        self,
        watch: Stopwatch,
        decode_watch: Stopwatch,
        transformer: Transformer,
        *,
        flops_per_s: float,
        memory_bytes_per_s: float,
        seed: int,
    ) -> None:
        self.watch, self.decode_watch = watch, decode_watch
        self.transformer, self.model = transformer, transformer.model
        self.flops_per_s, self.memory_bytes_per_s = flops_per_s, memory_bytes_per_s
        self.layers = self.model.attention_layers
        self.rng = np.random.default_rng(seed)
        self._products: dict[tuple[int, int], float] = {}
        self._recurrences: dict[tuple[int, int, int], float] = {}
        self.overhead_s = self._overhead_s()

    def linear_row(self, tokens: int) -> list[float]:
        """Return FLOPs per byte of weights, and rate, of a step without attention and recurrences."""
        model, sampled = self.model, tokens if tokens <= DECODE_TOKENS else 1
        flops = tokens * (model.linear_flops_per_token - model.recurrence_flops_per_token)
        flops += sampled * model.sampling_flops_per_token
        return [flops / model.weight_bytes(tokens), flops / max(self._products_s(tokens, sampled) - self.overhead_s, 1e-9)]

    def prefill_row(self, tokens: int, context: int, chunks: int) -> list[float]:
        """Return query rows, context and rate of a chunk's attention; latents of its prefix are expanded at the peak rate.

        The step has several such ``chunks``, because the attention of a short one takes no longer than steps vary. Each layer
        gathers the pages of all of them at once, so each has only its part of that launch.
        """
        prompts = [ChunkSlots(tokens, context - tokens, self._slots(context), state) for state in range(chunks)]
        step_s = self._replayed_s(lambda: self.transformer.step(prompts, [], sampled_tokens=1))
        pairs = tokens * (context - tokens) + tokens * (tokens + 1) / 2
        flops = self.model.attention_flops_per_pair * pairs
        prefix_s = self.model.prefix_flops_per_token * (context - tokens) / self.flops_per_s
        attention_s = (step_s - self._without_attention_s(tokens, 0, chunks)) / chunks
        return [tokens * self.model.heads, context, flops / max(attention_s - prefix_s, flops / self.flops_per_s)]

    def scan_row(self, tokens: int) -> list[float]:
        """Return tokens and state elements per second of a chunk's recurrence."""
        seconds = max(self._without_attention_s(tokens, 0) - self._products_s(tokens, 1), 1e-9)
        return [tokens, tokens * self.model.state_elements / seconds]

    def state_row(self, batch: int) -> list[float]:
        """Return bytes per layer, read and written, and rate of the recurrence of a decoding batch."""
        layers = self.model.recurrent_layers
        n_bytes = 2 * batch * self.model.state_bytes / layers
        layer_s = (self._without_attention_s(0, batch) - self._products_s(batch, batch)) / layers
        return [round(n_bytes), n_bytes / max(layer_s, n_bytes / self.memory_bytes_per_s)]

    def decode_rows(self, totals: Sequence[int], batches: Sequence[int]) -> tuple[Rows, float]:
        """Return rows of bytes per layer and rate, one per total number of context tokens, and the spread between batches.

        Each row is the geometric mean over batch sizes; the spread is the largest ratio between their times.
        """
        token_bytes = self.model.kv_bytes_per_token / self.layers
        rows: Rows = []
        spread, least_s = 1.0, 0.0
        for tokens in totals:
            fitting = [batch for batch in batches if tokens // batch >= self.transformer.page_tokens] or [1]
            n_bytes = tokens * token_bytes
            layer_s = [max(self._decode_s(tokens // batch, batch), n_bytes / self.memory_bytes_per_s) for batch in fitting]
            spread = max(spread, max(layer_s) / min(layer_s))
            least_s = max(1.001 * least_s, statistics.geometric_mean(layer_s))
            rows.append([round(n_bytes), n_bytes / least_s])
        return rows, spread

    def repeated_share(self, context: int, batch: int) -> float:
        """Return ``ComputeCurves.repeated_context_share``, measured with requests that have their whole context in common."""
        once_s, own_s = self._decode_s(context // batch, batch), self._decode_s(context, batch)
        return repeated_share(once_s, own_s, self._attention_s([self._slots(context)] * batch, context))

    def _decode_s(self, context: int, batch: int) -> float:
        """Return the seconds that the attention of a batch takes in one layer."""
        return self._attention_s([self._slots(context) for _ in range(batch)], context)

    def _attention_s(self, slots: Sequence[torch.Tensor], context: int) -> float:
        decodes = [DecodeSlots(context, own, state) for state, own in enumerate(slots)]
        step_s = self.decode_watch.seconds(lambda: self.transformer.step([], decodes))
        return (step_s - self._without_attention_s(0, len(slots))) / self.layers

    def _without_attention_s(self, tokens: int, batch: int, chunks: int = 1) -> float:
        """Return the time of the products and recurrences of ``chunks`` of ``tokens`` each, or of a decoding ``batch``."""
        if not self.model.is_hybrid:
            return self._products_s(tokens * chunks, 1) if tokens else self._products_s(batch, batch)
        if (tokens, batch, chunks) not in self._recurrences:
            prompts = [ChunkSlots(tokens, tokens, self._slots(tokens), state) for state in range(chunks)] if tokens else []
            decodes = [DecodeSlots(1, self._slots(1), state) for state in range(batch)]
            step = lambda: self.transformer.step_without_attention(prompts, decodes, sampled_tokens=min(1, len(prompts)))  # noqa: E731
            self._recurrences[tokens, batch, chunks] = self._replayed_s(step, decodes=not prompts)
        return self._recurrences[tokens, batch, chunks]

    def _products_s(self, tokens: int, sampled: int) -> float:
        if (tokens, sampled) not in self._products:
            step = lambda: self.transformer.products(tokens, sampled_tokens=sampled)  # noqa: E731
            self._products[tokens, sampled] = self._replayed_s(step)
        return self._products[tokens, sampled]

    def _replayed_s(self, step: Callable[[], torch.Tensor], *, decodes: bool = False) -> float:
        return (self.decode_watch if decodes else self.watch).seconds(self._replayable(step))

    def _replayable(self, step: Callable[[], torch.Tensor]) -> Callable[[], object]:
        """Return the step as a CUDA graph; without a GPU, the step itself."""
        if self.watch.device.type != "cuda":
            return step
        graph, _ = recorded(step)
        return graph.replay

    def _overhead_s(self) -> float:
        """Return the time of a step of one token during which the GPU is idle: its launch and the notification of its end."""
        if self.watch.device.type != "cuda":
            return 0.0
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph, _ = recorded(lambda: self.transformer.products(1, sampled_tokens=1))

        def step() -> None:
            begin.record()
            graph.replay()
            end.record()

        wall_s = self.decode_watch.seconds(step)
        return max(0.0, wall_s - float(begin.elapsed_time(end)) / 1e3)

    def _slots(self, tokens: int) -> torch.Tensor:
        """Return random pages of the pool for ``tokens`` tokens, possibly with duplicates."""
        page_tokens, pages = self.transformer.page_tokens, self.transformer.kv.shape[1]
        chosen = self.rng.integers(0, pages, -(-tokens // page_tokens), dtype=np.int32)
        return torch.from_numpy(chosen).to(self.transformer.device)


def repeated_share(once_s: float, own_s: float, common_s: float) -> float:
    """Return the time that repeated context takes as a fraction of that of context of its own, from 0 to 1.

    ``own_s`` is the time of requests with contexts of their own, ``common_s`` that of requests with one context in common, and
    ``once_s`` that of requests which have as much in all. 1 if a larger context does not take longer.
    """
    return min(1.0, max(0.0, (common_s - once_s) / (own_s - once_s))) if own_s > once_s else 1.0
