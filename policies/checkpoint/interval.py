"""Checkpoints at regular distances."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill


@dataclass(kw_only=True, eq=False)
class Interval(CheckpointPolicy):
    """Bounds what a request computes anew after its last known token by one interval, at a price that falls with its length.

    prompt   after every ``tokens`` tokens (the last full page before), and after the last full page
    answer   after every ``tokens`` tokens
    """

    tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, not {self.tokens}")

    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        return [*self.multiples(self.tokens, prefill.start, prefill.full), prefill.full]

    def after_answer(self, prompt_pages: int, pages: int) -> Sequence[int]:
        return self.multiples(self.tokens, prompt_pages, pages)
