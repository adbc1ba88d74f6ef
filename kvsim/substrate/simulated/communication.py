"""The time in which the GPUs that share a layer exchange activations."""

from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec

ACTIVATION_BYTES = 2
"""Of an element of the activations, bf16, whatever the weights are quantized to."""


class Communication:
    """What the GPUs exchange in a step: one row of ``hidden_size`` elements in bf16 for each of its tokens, at a time.

    tensor parallel   ``ModelSpec.allreduces`` sums of all rows, after each mixer and each MLP
    all2all           in layers with experts, the second sum gives way to two all-to-alls, there and back: each GPU has a part of
                      the tokens, rounded up, and sends a row for each expert of a token; the busiest group gets
                      ``expert_imbalance`` times as many (GShard, arXiv:2006.16668; DeepSeek-V3, arXiv:2412.19437, section 3.2)

    Nothing is computed meanwhile. The embeddings' all-reduce, and gathering the logits of sampled tokens, are not counted.
    """

    def __init__(self, model: ModelSpec, hardware: HardwareSpec) -> None:
        self.hardware = hardware
        self._exchanges = model.moe_layers if hardware.exchanges_tokens else 0
        self._sums = model.allreduces - self._exchanges if hardware.communicates else 0
        self._row_bytes = ACTIVATION_BYTES * model.hidden_size
        self._dispatch_bytes = hardware.all2all_dispatch_bytes * model.hidden_size
        self._copies = model.experts_per_token * hardware.expert_imbalance
        self._known: dict[int, float] = {}
        """Seconds by tokens: those of a step are few."""

    def step_s(self, work: Work) -> float:
        """Return the seconds of one step; all steps of a leap take as long."""
        if not (self._sums or self._exchanges):
            return 0.0
        tokens = tokens_of(work)
        seconds = self._known.get(tokens)
        if seconds is None:
            seconds = self._known[tokens] = self._seconds(tokens)
        return seconds

    def _seconds(self, tokens: int) -> float:
        """Return the seconds of a step of so many tokens."""
        hardware = self.hardware
        seconds = self._sums * hardware.allreduce_s(self._row_bytes * tokens)
        if self._exchanges:
            rows = -(-tokens // hardware.expert_parallel) * self._copies
            there_s, back_s = hardware.all2all_s(rows * self._dispatch_bytes), hardware.all2all_s(rows * self._row_bytes)
            seconds += self._exchanges * (there_s + back_s)
        return seconds


class ExpertLoad:
    """What the busiest GPU has to do for the routed experts, as if all GPUs had as much.

    Without expert parallelism, or with an imbalance of 1, that is a part of each expert, or as many experts as others have.
    If tokens are exchanged, every GPU has the shared experts and uses them for its own part of the tokens; if it has requests of
    its own, it has all weights of the attention.
    """

    def __init__(self, model: ModelSpec, hardware: HardwareSpec) -> None:
        self.model = model
        self._imbalance = hardware.expert_imbalance if hardware.expert_parallel > 1 else 1.0
        self._more_flops = (self._imbalance - 1.0) * model.routed_flops_per_token
        copied = model.shared_expert_bytes if hardware.exchanges_tokens else 0.0
        copied += model.mixer_bytes if hardware.attention_data_parallel else 0.0
        self._more_bytes = (hardware.stage_gpus - 1) * copied
        self._known: dict[int, float] = {}

    def more_flops(self, tokens: int) -> float:
        """Return the FLOPs of a step beyond those of the model."""
        return self._more_flops * tokens

    def weight_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that a step over so many tokens reads."""
        n_bytes = self._known.get(tokens)
        if n_bytes is None:
            n_bytes = self._known[tokens] = self.model.weight_bytes(tokens, self._imbalance) + self._more_bytes
        return n_bytes


def tokens_of(work: Work) -> int:
    """Return the tokens that a step computes."""
    tokens = work.decode_requests * work.tokens_per_decode
    for count, _ in work.chunks:
        tokens += count
    return tokens
