"""Checkpoints at regular intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.numbers import Whole, check_settings
from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill


@dataclass(kw_only=True, eq=False)
class Interval(CheckpointPolicy):
    """Limits what is recomputed after a prompt's last known token to one interval; longer intervals need fewer states.

    prompt   after every ``tokens`` tokens (rounded down to full pages), and after the last full page
    answer   after every ``tokens`` tokens
    """

    tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Whole(1), "tokens")

    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        return [*self.multiples(self.tokens, prefill.start, prefill.full), prefill.full]

    def after_answer(self, prompt_pages: int, pages: int) -> Sequence[int]:
        return self.multiples(self.tokens, prompt_pages, pages)
